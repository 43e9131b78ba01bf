"""What a timeline says besides its length: who works when, what is exposed, what is held, what is critical."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from meshwright.errors import PlanError
from meshwright.schedule import (
    Direction,
    Edge,
    adaptive,
    eager_one_f_one_b,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    one_f_one_b,
    pipedream,
    zero_bubble,
)
from meshwright.simulate import EdgeTiming, Event, StageTiming, Timing, TransferEvent, simulate, steady_period_seconds

INSTANT: Any = "instant"
TWO = Timing.uniform(stages=2, forward_seconds=1.0, backward_seconds=2.0, transfer_seconds=0.5)


def with_stages(timing: Timing, **changes: Any) -> Timing:
    return replace(timing, stages=tuple(replace(stage, **changes) for stage in timing.stages))


def with_edges(timing: Timing, **changes: Any) -> Timing:
    return replace(timing, edges=tuple(replace(edge, **changes) for edge in timing.edges))


def test_events_and_transfers() -> None:
    timeline = simulate(one_f_one_b(2, 1), with_stages(TWO, synchronise_seconds=0.25, update_seconds=0.75))
    assert [(e.rank, e.kind, e.stage, e.microbatch, e.start_seconds, e.end_seconds) for e in timeline.events] == [
        (0, "forward", 0, 0, 0.0, 1.0),
        (0, "backward", 0, 0, 5.0, 7.0),
        (0, "synchronise", 0, None, 7.0, 7.25),
        (0, "update", 0, None, 7.25, 8.0),
        (1, "forward", 1, 0, 1.5, 2.5),
        (1, "backward", 1, 0, 2.5, 4.5),
        (1, "synchronise", 1, None, 4.5, 4.75),
        (1, "update", 1, None, 4.75, 5.5),
    ]
    forward, backward = timeline.transfers
    assert forward == TransferEvent(
        edge=Edge(0, 1),
        direction=Direction.FORWARD,
        microbatch=0,
        sender=0,
        receiver=1,
        start_seconds=1.0,
        end_seconds=1.5,
    )
    assert (backward.direction, backward.sender, backward.receiver) == (Direction.BACKWARD, 1, 0)
    assert (backward.start_seconds, backward.end_seconds) == (4.5, 5.0)
    assert timeline.step_seconds == 8.0
    assert timeline.busy_seconds == (4.0, 4.0)
    assert timeline.bubble_fraction == 0.5
    assert timeline.exposed_communication_seconds == 1.25


def test_a_channel_carries_one_value_at_a_time_and_each_direction_has_its_own() -> None:
    slow = with_edges(TWO, forward_seconds=4.0, backward_seconds=4.0)
    forward = [t for t in simulate(gpipe(2, 3), slow).transfers if t.direction is Direction.FORWARD]
    assert [(t.start_seconds, t.end_seconds) for t in forward] == [(1.0, 5.0), (5.0, 9.0), (9.0, 13.0)]
    # 4 s forward and 4 s back at the same time: with one channel for both, a microbatch would take 8 s.
    both = simulate(adaptive(2, 64, warm_up=[6]), slow)
    assert both.step_seconds < 64 * 4.0 + 20


def test_blocking_transfers_take_the_time_of_both_ranks() -> None:
    # f0, send, f1, send, then the cotangents; rank 1 computes between its transfers.
    timeline = simulate(inference(2, 2), TWO, transfers="blocking")
    assert [(t.start_seconds, t.end_seconds) for t in timeline.transfers] == [(1.0, 1.5), (2.5, 3.0)]
    assert timeline.step_seconds == 4.0
    assert simulate(inference(2, 2), TWO).step_seconds == 3.5
    # An inner rank sends and receives twice a microbatch at 0.5 s: its period is 3 + 2.
    four = Timing.uniform(stages=4, forward_seconds=1.0, backward_seconds=2.0, transfer_seconds=0.5)
    steps = [simulate(one_f_one_b(4, b), four, transfers="blocking").step_seconds for b in (40, 60)]
    assert steps[1] - steps[0] == 20 * 5.0


def test_neighbouring_pairs_take_turns_when_transfers_block() -> None:
    # A chain of eight: no rank waits for a wave of transfers through all the others.
    for stages in (4, 8, 16):
        timing = Timing.uniform(stages=stages, forward_seconds=1.0, backward_seconds=2.0, transfer_seconds=0.5)
        steps = [simulate(one_f_one_b(stages, b), timing, transfers="blocking").step_seconds for b in (64, 84)]
        assert steps[1] - steps[0] == 20 * 5.0
    # In rank order GPipe takes 404 s, with even pairs before cotangents ZB-H1 takes 401.5 s.
    sixteen = Timing.uniform(
        stages=16, forward_seconds=1.0, backward_seconds=2.0, weight_seconds=1.0, transfer_seconds=0.5
    )
    assert simulate(gpipe(16, 64), sixteen, transfers="blocking").step_seconds == 391.0
    assert simulate(zero_bubble(16, 64), sixteen, transfers="blocking").step_seconds == 354.0


def test_updates_that_wait_for_all_stages() -> None:
    timing = Timing(
        stages=tuple(
            StageTiming(forward_seconds=1.0, backward_seconds=2.0, synchronise_seconds=sync, update_seconds=update)
            for sync, update in ((0.5, 1.0), (0.25, 3.0))
        ),
        edges=TWO.edges,
        updates_wait_for_all=True,
    )
    timeline = simulate(one_f_one_b(2, 1), timing)
    found = {(e.kind, e.rank): (e.start_seconds, e.end_seconds) for e in timeline.events}
    assert found["synchronise", 0] == (7.0, 7.5)
    assert found["synchronise", 1] == (4.5, 4.75)
    assert found["update", 0] == (7.5, 8.5)
    assert found["update", 1] == (7.5, 10.5)
    assert timeline.step_seconds == 10.5
    assert timeline.busy_seconds == (4.5, 6.25)
    assert [(e.kind, e.rank) for e in timeline.critical_path if isinstance(e, Event)][-2:] == [
        ("synchronise", 0),
        ("update", 1),
    ]
    # Two stages of one rank: both synchronise, then both step.
    chunked = simulate(interleaved_one_f_one_b(2, 1, chunks=2), timing)
    assert [e.kind for e in chunked.events][-4:] == ["synchronise", "update", "synchronise", "update"]
    assert chunked.step_seconds == 6.0 + 0.75 + 4.0
    with pytest.raises(PlanError, match="asynchronous schedule pipedream; needed False"):
        simulate(pipedream(2, 2), timing)


def test_asynchronous_updates_are_in_the_way_of_every_microbatch() -> None:
    timing = with_stages(TWO, update_seconds=0.5, synchronise_seconds=0.5)
    timing = with_edges(timing, forward_seconds=0.0, backward_seconds=0.0)
    timeline = simulate(pipedream(2, 8), timing)
    assert sum(e.kind == "update" for e in timeline.events) == 16
    assert steady_period_seconds(pipedream(2, 8), timing) == 4.0
    assert timeline.step_seconds == pytest.approx(8 * 4.0 + 3.0)


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [
        (gpipe(2, 4), (4, 4)),
        (one_f_one_b(2, 4), (2, 1)),
        (eager_one_f_one_b(2, 4), (3, 1)),
        (zero_bubble(2, 4), (2, 2)),
        (inference(2, 4), (1, 1)),
    ],
    ids=str,
)
def test_memory_follows_the_microbatches_in_flight(schedule: Any, peak: tuple[int, ...]) -> None:
    timing = Timing.uniform(stages=2, forward_seconds=1.0, backward_seconds=2.0, weight_seconds=1.0)
    held = with_stages(timing, constant_bytes=1000.0, in_flight_bytes=10.0, workspace_bytes=3.0)
    timeline = simulate(schedule, held)
    assert timeline.peak_bytes == tuple(1000.0 + 10.0 * most + 3.0 for most in peak)
    for curve in timeline.memory:
        assert curve[0][0] == 0.0
        assert curve[-1][1] == 1000.0
        assert all(before[0] <= after[0] for before, after in pairwise(curve))


def test_memory_curve_of_one_microbatch() -> None:
    timing = with_stages(TWO, constant_bytes=100.0, in_flight_bytes=10.0, workspace_bytes=1.0)
    timing = with_edges(timing, source_bytes=1000.0, target_bytes=2000.0)
    first, second = simulate(one_f_one_b(2, 1), timing).memory
    assert first == (
        (0.0, 100.0),
        (0.0, 1111.0),  # the forward: kept, workspace, its result
        (1.0, 1110.0),
        (1.5, 110.0),  # sent
        (4.5, 1110.0),  # the cotangent starts to arrive
        (5.0, 1111.0),
        (7.0, 100.0),
        (7.0, 101.0),  # an update of no time has its workspace all the same
        (7.0, 100.0),
    )
    assert second == (
        (0.0, 100.0),
        (1.0, 2100.0),
        (1.5, 2111.0),
        (2.5, 110.0),  # the forward's input goes
        (2.5, 2111.0),  # the backward's result comes
        (4.5, 2100.0),
        (4.5, 2101.0),
        (4.5, 2100.0),
        (5.0, 100.0),
    )


def test_memory_between_input_and_weight_gradient() -> None:
    timing = Timing.uniform(stages=1, forward_seconds=1.0, backward_seconds=3.0, weight_seconds=1.0)
    timing = with_stages(timing, in_flight_bytes=10.0, delayed_bytes=4.0)
    (curve,) = simulate(zero_bubble(1, 1), timing).memory
    assert curve == ((0.0, 0.0), (0.0, 10.0), (3.0, 4.0), (4.0, 0.0))


def test_memory_of_weight_versions() -> None:
    timing = Timing.uniform(stages=3, forward_seconds=1.0, backward_seconds=2.0)
    timing = with_stages(timing, constant_bytes=100.0, version_bytes=7.0)
    assert simulate(pipedream(3, 8), timing).peak_bytes == (114.0, 107.0, 100.0)
    assert simulate(one_f_one_b(3, 8), timing).peak_bytes == (100.0, 100.0, 100.0)


def test_memory_peaks_do_not_depend_on_times() -> None:
    # Instructions that take no time still hold what they hold.
    timing = Timing.uniform(stages=3, forward_seconds=0.0, backward_seconds=0.0)
    timing = with_stages(timing, in_flight_bytes=10.0, workspace_bytes=1.0)
    timeline = simulate(one_f_one_b(3, 8), timing)
    assert timeline.peak_bytes == (31.0, 21.0, 11.0)
    assert timeline.step_seconds == timeline.bubble_fraction == 0.0


def test_ranks_of_several_stages_hold_the_sum() -> None:
    timing = Timing.uniform(stages=4, forward_seconds=1.0, backward_seconds=2.0)
    timing = with_stages(timing, constant_bytes=100.0, in_flight_bytes=1.0)
    schedule = interleaved_one_f_one_b(4, 4, chunks=2)
    assert simulate(schedule, timing).peak_bytes == tuple(200.0 + held for held in schedule.in_flight_limit)


def test_the_critical_path_goes_through_the_slow_stage() -> None:
    slow = replace(TWO, stages=(TWO.stages[0], replace(TWO.stages[1], forward_seconds=5.0, backward_seconds=5.0)))
    path = simulate(one_f_one_b(2, 3), slow).critical_path
    names = [f"{e.kind[0]}{e.stage}.{e.microbatch}" if isinstance(e, Event) else str(e.edge) for e in path]
    assert " ".join(names) == "f0.0 0->1 f1.0 b1.0 f1.1 b1.1 f1.2 b1.2 0->1 b0.2"


def test_transfers_inside_a_rank_are_free_and_need_no_timing() -> None:
    timing = Timing.uniform(stages=2, forward_seconds=1.0, backward_seconds=2.0, transfer_seconds=9.0)
    timeline = simulate(interleaved_one_f_one_b(2, 1, chunks=2), replace(timing, edges=()))
    assert timeline.step_seconds == 6.0
    assert timeline.transfers == ()


def test_skip_connections_travel_beside_the_neighbours() -> None:
    edges = (Edge(0, 1), Edge(0, 2), Edge(1, 2))
    timing = Timing(
        stages=TWO.stages * 1 + TWO.stages[:1],
        edges=tuple(
            EdgeTiming(edge=edge, forward_seconds=c, backward_seconds=c)
            for edge, c in zip(edges, (0.5, 8.0, 0.5), strict=True)
        ),
    )
    timeline = simulate(one_f_one_b(3, 1, edges=edges), timing)
    # The skip takes longer than the way over stage 1, in both directions.
    assert timeline.step_seconds == (1 + 8.0 + 1) + (2 + 8.0 + 2)


def test_period_of_a_stage_and_of_a_transfer() -> None:
    stages = tuple(StageTiming(forward_seconds=f, backward_seconds=b) for f, b in ((1.0, 1.0), (2.0, 5.0), (1.0, 2.0)))
    chain = Timing.uniform(stages=3, forward_seconds=1.0, backward_seconds=1.0).edges
    assert steady_period_seconds(one_f_one_b(3, 8), Timing(stages=stages, edges=chain)) == 7.0
    slow = tuple(replace(edge, forward_seconds=10.0) for edge in chain)
    assert steady_period_seconds(adaptive(3, 64, warm_up=[9, 9]), Timing(stages=stages, edges=slow)) == 10.0


@pytest.mark.parametrize(
    "schedule",
    [
        gpipe(2, 4),
        one_f_one_b(2, 2),
        interleaved_one_f_one_b(2, 2, chunks=2),
        inference(2, 4),
        one_f_one_b(2, 8, edges=[]),
    ],
    ids=str,
)
def test_no_period_in_closed_form(schedule: Any) -> None:
    with pytest.raises(PlanError, match="a period in closed form"):
        steady_period_seconds(schedule, TWO)


STAGE = {"forward_seconds": 1.0, "backward_seconds": 1.0}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StageTiming(forward_seconds=-1.0), "got -1.0 seconds.*where: StageTiming.forward_seconds"),
        (lambda: StageTiming(forward_seconds=math.nan), "got nan seconds"),
        (lambda: StageTiming(forward_seconds=1.0, backward_seconds=math.inf), "got inf seconds"),
        (lambda: StageTiming(**STAGE, constant_bytes=-5.0), "got -5.0 bytes.*where: StageTiming.constant_bytes"),
        (lambda: StageTiming(**STAGE, backward_input_seconds=1.0), "one half of a split backward"),
        (
            lambda: StageTiming(**STAGE, in_flight_bytes=1.0, delayed_bytes=2.0),
            "got 2 bytes; needed at most the 1 bytes",
        ),
        (lambda: EdgeTiming(edge=Edge(0, 1), forward_seconds=0.0, backward_seconds=-0.5), "got -0.5 seconds"),
        (lambda: Timing(stages=()), "got no stage"),
        (lambda: replace(TWO, edges=TWO.edges * 2), "an edge twice"),
        (
            lambda: Timing.uniform(stages=4, forward_seconds=1, backward_seconds=1, transfer_seconds=[1.0]),
            "1 numbers of seconds; needed 3",
        ),
        (
            lambda: Timing.uniform(stages=1, forward_seconds=1, backward_seconds=1, weight_seconds=2),
            "backward_input_seconds",
        ),
        (lambda: simulate(gpipe(3, 2), TWO), "got 2 stages; needed 3, as the schedule gpipe has"),
        (lambda: simulate(gpipe(2, 2), replace(TWO, edges=())), "none for the edge 0->1"),
        (lambda: simulate(zero_bubble(2, 2), TWO), "stage 0 without the parts of its backward"),
        (lambda: simulate(gpipe(2, 2), TWO, transfers=INSTANT), "got transfers='instant'"),
    ],
)
def test_refusals(build: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build()
