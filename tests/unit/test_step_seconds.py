"""The end of a step alone against the whole simulation: the same sums, so the same number to the last bit."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from meshwright.errors import PlanError
from meshwright.schedule import Edge, Instruction, Kind, Schedule, ScheduleError, make_schedule, one_f_one_b
from meshwright.simulate import EdgeTiming, StageTiming, Timing, simulate, step_seconds

SECONDS = st.floats(min_value=0.0, max_value=10.0)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(
        st.sampled_from(
            ["gpipe", "one_f_one_b", "eager_one_f_one_b", "adaptive", "zero_bubble", "pipedream", "inference",
             "interleaved_one_f_one_b"]
        )
    )  # fmt: skip
    stages, options = draw(st.integers(1, 6)), {}
    microbatches = draw(st.integers(1, 12))
    if name == "interleaved_one_f_one_b":
        options["chunks"] = chunks = draw(st.integers(1, 3))
        stages, microbatches = stages * chunks, stages * draw(st.integers(1, 3))
    neighbours = {Edge(stage, stage + 1) for stage in range(stages - 1)}
    skips = st.integers(0, stages - 1).flatmap(lambda a: st.integers(0, stages - 1).map(lambda b: (a, b)))
    edges = neighbours | {Edge(a, b) for a, b in draw(st.lists(skips, max_size=3)) if a < b}
    if name == "adaptive":
        options["warm_up"] = tuple(draw(st.integers(1, 4)) for _ in edges)
    return make_schedule(name, stages, microbatches, edges=tuple(sorted(edges)), **options)


@given(st.data())
def test_the_same_as_all_of_the_simulation(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    stages = []
    for _ in range(schedule.stages):
        inputs, weights = data.draw(SECONDS), data.draw(SECONDS)
        stages.append(
            StageTiming(
                forward_seconds=data.draw(SECONDS), backward_seconds=inputs + weights, backward_input_seconds=inputs,
                backward_weight_seconds=weights, synchronise_seconds=data.draw(SECONDS),
                update_seconds=data.draw(SECONDS),
            )
        )  # fmt: skip
    edges = [
        EdgeTiming(edge=edge, forward_seconds=data.draw(SECONDS), backward_seconds=data.draw(SECONDS))
        for edge in schedule.edges
    ]
    together = schedule.mode == "synchronous" and data.draw(st.booleans())
    timing = Timing(stages=tuple(stages), edges=tuple(edges), updates_wait_for_all=together)
    assert step_seconds(schedule, timing) == simulate(schedule, timing).step_seconds


def _in_turn(one: Instruction) -> tuple[bool, int, bool]:
    return one.kind is Kind.UPDATE, one.microbatch or 0, one.kind is not Kind.FORWARD


def _forwards(one: Instruction) -> tuple[bool, bool, int]:
    return one.kind is Kind.UPDATE, one.kind is not Kind.FORWARD, one.microbatch or 0


def test_a_deadlock_and_a_timing_of_other_stages_are_refused_as_by_simulate() -> None:
    timing = Timing.uniform(stages=2, forward_seconds=1.0, backward_seconds=2.0)
    with pytest.raises(PlanError, match="a StageTiming for each stage"):
        step_seconds(one_f_one_b(3, 2), timing)
    sound = one_f_one_b(2, 2)
    # The first rank waits for a cotangent before its second forward, which the second rank waits for before it.
    first, second = (tuple(sorted(rank, key=key)) for rank, key in zip(sound.ranks, (_in_turn, _forwards), strict=True))
    stuck = Schedule(
        name="by hand", stages=2, microbatches=2, mode=sound.mode, ranks=(first, second), stage_ranks=(0, 1),
        edges=sound.edges, in_flight_limit=(2, 2),
    )  # fmt: skip
    with pytest.raises(ScheduleError):
        step_seconds(stuck, timing)
