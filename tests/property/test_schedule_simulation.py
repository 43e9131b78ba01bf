"""Random pipelines: the simulator against a second one that knows only the definition, and against closed forms.

Times are whole numbers (or halves), so that every comparison is exact.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any

from hypothesis import given, settings, strategies as st

from meshwright.schedule import (
    Direction,
    Edge,
    Kind,
    Schedule,
    adaptive,
    adaptive_warm_up,
    check_schedule,
    eager_one_f_one_b,
    global_order,
    gpipe,
    inference,
    interleaved_one_f_one_b,
    neighbours,
    one_f_one_b,
    pipedream,
    zero_bubble,
)
from meshwright.simulate import EdgeTiming, Event, StageTiming, Timing, simulate, steady_period_seconds

SECONDS = st.integers(0, 9)
WORK = st.integers(1, 9)
BYTES = st.integers(0, 50)


@st.composite
def timings(draw: Any, edges: tuple[Edge, ...], stages: int, *, bytes_too: bool = False) -> Timing:
    sizes = BYTES if bytes_too else st.just(0)
    found = []
    for _ in range(stages):
        kept = draw(sizes)
        found.append(
            StageTiming(
                forward_seconds=draw(WORK),
                backward_seconds=draw(WORK),
                backward_input_seconds=draw(WORK),
                backward_weight_seconds=draw(WORK),
                synchronise_seconds=draw(SECONDS),
                update_seconds=draw(SECONDS),
                constant_bytes=draw(sizes),
                version_bytes=draw(sizes),
                in_flight_bytes=kept,
                delayed_bytes=draw(st.none() | st.integers(0, kept)),
                workspace_bytes=draw(sizes),
            )
        )
    return Timing(
        stages=tuple(found),
        edges=tuple(
            EdgeTiming(
                edge=edge,
                forward_seconds=draw(SECONDS),
                backward_seconds=draw(SECONDS),
                source_bytes=draw(sizes),
                target_bytes=draw(sizes),
            )
            for edge in edges
        ),
    )


@st.composite
def schedules(draw: Any) -> Schedule:
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    near = neighbours(stages)
    far = [Edge(a, b) for a in range(stages) for b in range(a + 2, stages)]
    edges = tuple(sorted({*near, *(draw(st.sets(st.sampled_from(far), max_size=3)) if far else ())}))
    kind = draw(
        st.sampled_from(["gpipe", "1f1b", "eager", "adaptive", "zero", "pipedream", "inference", "interleaved"])
    )
    split = draw(st.booleans())
    if kind == "adaptive":
        warm_up = [draw(st.integers(1, 3)) for _ in edges]
        return adaptive(stages, microbatches, edges=edges, warm_up=warm_up, split_backward=split)
    if kind == "interleaved":
        ranks, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        return interleaved_one_f_one_b(ranks * chunks, ranks * draw(st.integers(1, 3)), chunks=chunks)
    if kind in ("1f1b", "eager"):
        make = one_f_one_b if kind == "1f1b" else eager_one_f_one_b
        return make(stages, microbatches, edges=edges, split_backward=split)
    simple = {"gpipe": gpipe, "zero": zero_bubble, "pipedream": pipedream, "inference": inference}
    return simple[kind](stages, microbatches, edges=edges)


@st.composite
def cases(draw: Any, *, bytes_too: bool = False) -> tuple[Schedule, Timing]:
    schedule = draw(schedules())
    return schedule, draw(timings(schedule.edges, schedule.stages, bytes_too=bytes_too))


def run_again(schedule: Schedule, timing: Timing) -> dict[Any, tuple[float, float]]:
    """Start and end of each (kind, stage, microbatch) from a queue of events, straight from the definition."""
    seconds = {
        e.edge: {Direction.FORWARD: e.forward_seconds, Direction.BACKWARD: e.backward_seconds} for e in timing.edges
    }
    programs = [deque(program) for program in schedule.ranks]
    idle = [True] * len(programs)
    arrived: set[Any] = set()  # (direction, edge or stage, microbatch)
    channels: dict[Any, deque[int]] = {(e, d): deque() for e in schedule.edges for d in Direction}
    moving: set[Any] = set()
    times: dict[Any, tuple[float, float]] = {}
    queue: list[tuple[float, int, str, Any]] = []
    count = 0

    def push(time: float, what: str, item: Any) -> None:
        nonlocal count
        heapq.heappush(queue, (time, count, what, item))
        count += 1

    def try_rank(rank: int, now: float) -> None:
        if not idle[rank] or not programs[rank]:
            return
        one = programs[rank][0]
        way = Direction.FORWARD if one.kind is Kind.FORWARD else Direction.BACKWARD
        if one.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
            for edge in schedule.edges:
                mine = edge.target if way is Direction.FORWARD else edge.source
                if mine == one.stage and (way, edge, one.microbatch) not in arrived:
                    return
        stage = timing.stages[one.stage]
        took = {
            Kind.FORWARD: stage.forward_seconds,
            Kind.BACKWARD: stage.backward_seconds,
            Kind.BACKWARD_INPUT: stage.backward_input_seconds,
            Kind.BACKWARD_WEIGHT: stage.backward_weight_seconds,
            Kind.UPDATE: stage.synchronise_seconds + stage.update_seconds,
        }[one.kind]
        assert took is not None
        programs[rank].popleft()
        idle[rank] = False
        times[one.kind, one.stage, one.microbatch] = (now, now + took)
        push(now + took, "done", (rank, one))

    def try_channel(channel: Any, now: float) -> None:
        if channel not in moving and channels[channel]:
            moving.add(channel)
            push(now + seconds[channel[0]][channel[1]], "here", (channel, channels[channel].popleft()))

    for rank in range(len(programs)):
        try_rank(rank, 0.0)
    while queue:
        now, _, what, item = heapq.heappop(queue)
        if what == "done":
            rank, one = item
            idle[rank] = True
            for edge in schedule.edges:
                for way in Direction:
                    sender = edge.source if way is Direction.FORWARD else edge.target
                    fits = (
                        one.kind is Kind.FORWARD
                        if way is Direction.FORWARD
                        else one.kind
                        in (
                            Kind.BACKWARD,
                            Kind.BACKWARD_INPUT,
                        )
                    )
                    if fits and sender == one.stage:
                        if schedule.stage_ranks[edge.source] == schedule.stage_ranks[edge.target]:
                            arrived.add((way, edge, one.microbatch))
                        else:
                            channels[edge, way].append(one.microbatch)
                            try_channel((edge, way), now)
        else:
            channel, microbatch = item
            moving.discard(channel)
            arrived.add((channel[1], channel[0], microbatch))
            try_channel(channel, now)
        for rank in range(len(programs)):
            try_rank(rank, now)
    assert not any(programs), "the second simulator stands still"
    return times


@given(cases())
def test_the_simulator_agrees_with_a_queue_of_events(case: tuple[Schedule, Timing]) -> None:
    schedule, timing = case
    timeline = simulate(schedule, timing)
    expected = run_again(schedule, timing)
    found: dict[Any, tuple[float, float]] = {}
    for event in timeline.events:
        if event.kind == "update":
            start = found[Kind.UPDATE, event.stage, event.microbatch][0]
            found[Kind.UPDATE, event.stage, event.microbatch] = (start, event.end_seconds)
        else:
            kind = Kind.UPDATE if event.kind == "synchronise" else Kind(event.kind)
            found[kind, event.stage, event.microbatch] = (event.start_seconds, event.end_seconds)
    assert found == expected


@given(schedules())
def test_every_schedule_is_sound_and_its_order_complete(schedule: Schedule) -> None:
    assert check_schedule(schedule) == ()
    order = global_order(schedule)
    assert len(set(order)) == len(order)


@given(cases(), st.booleans(), st.randoms(use_true_random=False))
def test_nothing_gets_faster_by_taking_longer(case: tuple[Schedule, Timing], blocking: bool, random: Any) -> None:
    schedule, timing = case
    mode: Any = "blocking" if blocking else "asynchronous"
    longer = [replace(e, forward_seconds=e.forward_seconds + random.randint(0, 2)) for e in timing.edges]
    slower = [replace(s, backward_seconds=s.backward_seconds + random.randint(0, 2)) for s in timing.stages]
    before = simulate(schedule, timing, transfers=mode).step_seconds
    after = simulate(schedule, replace(timing, stages=tuple(slower), edges=tuple(longer)), transfers=mode).step_seconds
    assert before <= after


@given(cases(), st.booleans())
def test_bounds_and_shares(case: tuple[Schedule, Timing], blocking: bool) -> None:
    schedule, timing = case
    timeline = simulate(schedule, timing, transfers="blocking" if blocking else "asynchronous")
    assert timeline.step_seconds >= simulate(schedule, timing).step_seconds
    assert timeline.step_seconds >= max(timeline.busy_seconds)
    assert 0 <= timeline.bubble_fraction < 1
    assert 0 <= timeline.exposed_communication_seconds <= timeline.step_seconds
    # Nobody does two things at once, and when transfers block they count as something done.
    for rank in range(len(schedule.ranks)):
        spans = [(e.start_seconds, e.end_seconds) for e in timeline.events if e.rank == rank]
        if blocking:
            spans += [(t.start_seconds, t.end_seconds) for t in timeline.transfers if rank in (t.sender, t.receiver)]
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))


@given(cases(), st.booleans(), st.booleans())
def test_the_critical_path_is_the_step(case: tuple[Schedule, Timing], blocking: bool, together: bool) -> None:
    schedule, timing = case
    if schedule.name != "pipedream":
        timing = replace(timing, updates_wait_for_all=together)
    timeline = simulate(schedule, timing, transfers="blocking" if blocking else "asynchronous")
    path = timeline.critical_path
    assert path[0].start_seconds == 0
    assert path[-1].end_seconds == timeline.step_seconds
    assert all(before.end_seconds == after.start_seconds for before, after in pairwise(path))
    assert len(set(path)) == len(path)
    known = {*timeline.events, *timeline.transfers}
    assert all(piece in known for piece in path)
    assert isinstance(path[0], Event)


@given(cases(bytes_too=True))
def test_memory_is_the_sum_of_what_is_alive(case: tuple[Schedule, Timing]) -> None:
    schedule, timing = case
    timeline = simulate(schedule, timing)
    given_edges = {e.edge: e for e in timing.edges}
    alive: list[tuple[int, float, float, float]] = []  # rank, from, to, bytes
    at = {(e.kind, e.stage, e.microbatch): e for e in timeline.events}
    split = "backward_input" if schedule.splits_backward else "backward"
    for event in timeline.events:
        stage = timing.stages[event.stage]
        alive.append((event.rank, event.start_seconds, event.end_seconds, stage.workspace_bytes))
        if event.kind != "forward":
            continue
        key = (event.stage, event.microbatch)
        if schedule.name == "inference":
            alive.append((event.rank, event.start_seconds, event.end_seconds, stage.in_flight_bytes))
            continue
        middle = at[split, *key].end_seconds
        end = at["backward_weight", *key].end_seconds if schedule.splits_backward else middle
        delayed = stage.in_flight_bytes if stage.delayed_bytes is None else stage.delayed_bytes
        alive.append((event.rank, event.start_seconds, end, delayed if schedule.splits_backward else 0))
        rest = stage.in_flight_bytes - (delayed if schedule.splits_backward else 0)
        alive.append((event.rank, event.start_seconds, middle, rest))
    for move in timeline.transfers:
        forward = move.direction is Direction.FORWARD
        edge = given_edges[move.edge]
        kind = "forward" if forward else split
        sender, receiver = (move.edge.source, move.edge.target)[:: 1 if forward else -1]
        sizes = (edge.source_bytes, edge.target_bytes)[:: 1 if forward else -1]
        made, read = at[kind, sender, move.microbatch], at[kind, receiver, move.microbatch]
        alive.append((move.sender, made.start_seconds, move.end_seconds, sizes[0]))
        alive.append((move.receiver, move.start_seconds, read.end_seconds, sizes[1]))
    for rank, curve in enumerate(timeline.memory):
        constant = 0.0
        for stage, versions in enumerate(schedule.weight_versions):
            if schedule.stage_ranks[stage] == rank:
                constant += timing.stages[stage].constant_bytes + (versions - 1) * timing.stages[stage].version_bytes
        moments = sorted({0.0, *(t for r, a, b, _ in alive if r == rank for t in (a, b))})
        # Between two moments nothing changes: look in the middle of each gap.
        for early, late in pairwise(moments):
            middle = (early + late) / 2
            expected = constant + sum(size for r, a, b, size in alive if r == rank and a < middle < b)
            assert [held for seconds, held in curve if seconds <= middle][-1] == expected
        assert timeline.peak_bytes[rank] == max(held for _, held in curve)


@given(st.data(), st.integers(1, 6), st.integers(1, 12))
def test_gpipe_in_closed_form(data: Any, stages: int, microbatches: int) -> None:
    timing = data.draw(timings(neighbours(stages), stages))
    timing = replace(
        timing, stages=tuple(replace(s, synchronise_seconds=0.0, update_seconds=0.0) for s in timing.stages)
    )
    forwards = [s.forward_seconds for s in timing.stages] + [e.forward_seconds for e in timing.edges]
    backwards = [s.backward_seconds for s in timing.stages] + [e.backward_seconds for e in timing.edges]
    expected = sum(forwards) + sum(backwards) + (microbatches - 1) * (max(forwards) + max(backwards))
    assert simulate(gpipe(stages, microbatches), timing).step_seconds == expected
    alone = sum(forwards) + (microbatches - 1) * max(forwards)
    assert simulate(inference(stages, microbatches), timing).step_seconds == alone


@given(st.data(), st.integers(1, 8), st.integers(1, 16))
def test_alpas_objective_bounds_one_f_one_b_when_backwards_are_proportional(
    data: Any, stages: int, microbatches: int
) -> None:
    # sum t_i + (B - 1) max t_i: never less than the step when each backward is the same multiple of its forward, and
    # never less than what the slowest stage alone needs.
    times = data.draw(st.lists(WORK, min_size=stages, max_size=stages))
    ratio = data.draw(st.integers(1, 3))
    timing = Timing(
        stages=tuple(StageTiming(forward_seconds=f, backward_seconds=ratio * f) for f in times),
        edges=tuple(EdgeTiming(edge=e, forward_seconds=0, backward_seconds=0) for e in neighbours(stages)),
    )
    step = simulate(one_f_one_b(stages, microbatches), timing).step_seconds
    both = [(1 + ratio) * f for f in times]
    assert step <= sum(both) + (microbatches - 1) * max(both)
    assert step >= max(sum(both[:i]) + microbatches * t for i, t in enumerate(both))


@settings(max_examples=40)
@given(st.data(), st.integers(1, 4), st.sampled_from(["adaptive", "split", "zero_bubble", "pipedream"]))
def test_the_steady_state_has_its_period_in_closed_form(data: Any, stages: int, kind: str) -> None:
    timing = data.draw(timings(neighbours(stages), stages))
    warm_up = data.draw(st.lists(st.integers(1, 2), min_size=stages - 1, max_size=stages - 1))

    def make(microbatches: int) -> Schedule:
        if kind == "zero_bubble":
            return zero_bubble(stages, microbatches)
        if kind == "pipedream":
            return pipedream(stages, microbatches)
        return adaptive(stages, microbatches, warm_up=warm_up, split_backward=kind == "split")

    # After the transient, time advances by the same amount over any number of microbatches that all circles divide.
    circle = lcm(*range(1, sum(warm_up) + 2), *range(1, stages + 1))
    first = simulate(make(120), timing).step_seconds
    second = simulate(make(120 + circle), timing).step_seconds
    period = steady_period_seconds(make(120), timing)
    assert Fraction(second - first) / circle == Fraction(period).limit_denominator(1000)


@given(st.data(), st.integers(2, 5))
def test_adaptive_hides_every_transfer_of_equal_stages(data: Any, stages: int) -> None:
    forward, given_in, weight = data.draw(WORK), data.draw(WORK), data.draw(WORK)
    split = data.draw(st.booleans())
    # A transfer may take longer than a period only if a channel can still carry one value in each.
    period = forward + given_in + weight
    transfers = data.draw(st.lists(st.integers(0, period), min_size=stages - 1, max_size=stages - 1))
    timing = Timing.uniform(
        stages=stages,
        forward_seconds=forward,
        backward_seconds=given_in + weight,
        weight_seconds=weight,
        transfer_seconds=transfers,
    )
    warm_up = adaptive_warm_up(transfers, period_seconds=period, weight_gradient_seconds=weight if split else 0)
    schedule = adaptive(stages, 64, warm_up=warm_up, split_backward=split)
    assert steady_period_seconds(schedule, timing) == period
    # One less on any edge that has more than one is too little.
    for edge, ahead in enumerate(warm_up):
        if ahead > 1:
            fewer = [d - (e == edge) for e, d in enumerate(warm_up)]
            assert steady_period_seconds(adaptive(stages, 64, warm_up=fewer, split_backward=split), timing) > period
