"""Several stages a rank share its memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from meshwright.cluster import load_cluster
from meshwright.errors import PlanError
from meshwright.planning.checks import check_stages
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.schedule import interleaved_one_f_one_b
from meshwright.search.inter.problem import Option
from meshwright.search.inter.submeshes import Submesh, Submeshes
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.intra.workspace import held_together
from meshwright.search.pipelines import interleaving
from meshwright.search.pipelines.candidate import scheduled
from meshwright.search.pipelines.interleaving import Interleaving, _missed
from meshwright.search.pipelines.rank_sharing import SharedMemory, Sharing, in_flight_of, interleaved
from meshwright.search.pipelines.request import INTERLEAVED
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.stages.costs import StageCosts
from meshwright.search.stages.reserve import MemoryReserve
from meshwright.search.stages.shared_memory import between
from meshwright.zoo import registry

RANKS, CHUNKS, MICROBATCHES = 2, 2, 4


@cache
def costs(remat: str | None = None) -> StageCosts:
    target = registry.build("gpt-tiny", global_batch=8)
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=MICROBATCHES)
    return StageCosts(
        staged_program(program, layers=8), parameters=parameter_infos(program),
        submeshes=Submeshes(load_cluster("dgx-a100-80")), constraints=Constraints(), remat=remat,
    )  # fmt: skip


def test_what_ranks_hold_fits_and_more_memory_is_used() -> None:
    own = interleaved_one_f_one_b(RANKS * CHUNKS, MICROBATCHES, chunks=CHUNKS).in_flight
    usable = costs().submeshes.cluster.device.usable_memory_bytes

    def found(size: float) -> tuple[float, float]:
        """In so many bytes: step seconds of the stages of both ranks, and bytes of the rank that holds most."""
        costs().reserve(MemoryReserve(usable - size, usable - size))
        for stages in interleaved(costs(), RANKS, CHUNKS):
            options = [stage.option for stage in stages]
            # They run in turn: the largest workspace does for all.
            held = [
                (one.constant_bytes - one.workspace_bytes + n * one.in_flight_bytes, one.workspace_bytes)
                for one, n in zip(options, own, strict=True)
            ]
            most = max(held_together(held[rank::RANKS]) for rank in range(RANKS))
            assert most <= size * (1 + 1e-9)
            return sum(map(costs().estimates.step_seconds, options)), most
        return inf, 0.0

    free, most = found(usable)
    shares = [found(share * most)[0] for share in (0.5, 0.6, 0.7, 0.8, 0.9)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1] >= free * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(*[st.integers(1, 9)] * 4, st.sampled_from([24, 30])), min_size=1, max_size=4),
        min_size=1, max_size=3,
    )
)  # fmt: skip
def test_what_shares_a_device_fits_if_anything_does_and_is_nearly_as_fast_as_possible(
    stages: list[list[tuple[int, int, int, int, int]]],
) -> None:
    """Of each way: seconds, bytes throughout and in flight, workspace, and the limit."""
    options = [
        [
            Sharing(
                Option(
                    forward_seconds=seconds, backward_seconds=seconds, constant_bytes=constant + workspace,
                    workspace_bytes=workspace, in_flight_bytes=kept,
                ), in_flight=2, limit_bytes=limit,
            )
            for seconds, constant, kept, workspace, limit in each
        ]
        for each in stages
    ]  # fmt: skip

    def fits(chosen: Sequence[Sharing]) -> bool:
        held = held_together([(own, workspace) for _, _, own, workspace, _ in (one.numbers for one in chosen)])
        return held <= min(one.limit_bytes for one in chosen)

    fitting = [chosen for chosen in product(*options) if fits(chosen)]
    found = SharedMemory(options, periods=1.0).fastest(np.zeros(len(options)))
    assert (found is None) == (not fitting)
    if found is None:
        return
    assert fits([next(one for one in each if one.option is o) for each, o in zip(options, found, strict=True)])
    fastest = min(sum(one.option.seconds for one in chosen) for chosen in fitting)
    # One price leaves open what one stage could do with more memory.
    slack = max(max(o.option.seconds for o in each) - min(o.option.seconds for o in each) for each in options)
    assert fastest <= sum(option.seconds for option in found) <= fastest + slack


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_what_is_in_flight_is_that_of_the_schedule(ranks: int, chunks: int) -> None:
    for microbatches in (ranks, 2 * ranks, 5 * ranks, 12 * ranks):
        schedule = interleaved_one_f_one_b(ranks * chunks, microbatches, chunks=chunks)
        assert in_flight_of(microbatches, ranks, chunks).tolist() == list(schedule.in_flight)


def test_a_stage_that_would_have_to_wait_leaves_its_memory_to_others() -> None:
    def way(seconds: float, size: float) -> Sharing:
        return Sharing(Option(forward_seconds=seconds, backward_seconds=0.0, constant_bytes=size), 1, 10.0)

    rank = SharedMemory([[way(1.0, 8.0), way(4.0, 2.0)], [way(2.0, 8.0), way(4.0, 2.0)]], periods=1.0)

    def seconds(*least: float) -> list[float] | None:
        found = rank.fastest(np.array(least))
        return [option.seconds for option in found] if found is not None else None

    assert seconds(0.0, 0.0) == [1.0, 4.0]
    assert seconds(3.0, 0.0) == [4.0, 2.0]


def test_a_stage_computes_again_what_its_share_does_not_hold() -> None:
    """All of the device would hold it without that."""
    costs().reserve(MemoryReserve())

    def solved(remat: str | None, limit_bytes: float) -> Option | None:
        return costs(remat).solve_within(0, 2, Submesh(0, 2), 64, limit_bytes)

    limits = [costs().submeshes.cluster.device.usable_memory_bytes * 0.9**number for number in range(200)]
    too_little = next(limit for limit in limits if solved("none", limit) is None)
    again, found = solved("layer", too_little), solved(None, too_little)
    assert again is not None
    assert found is not None
    assert found.seconds <= again.seconds


def nothing(cut: Any, stages: Any, chunks: int) -> None:
    """The candidate of stages that never fit."""


def over(whole: StageCosts, *counts: int) -> Interleaving:
    """The search over these numbers of microbatches, of which all have the same costs."""
    request: Any = SimpleNamespace(
        cluster=whole.submeshes.cluster, schedules=(INTERLEAVED, "one_f_one_b"), submeshes=None, layers=None,
        alone=False, stages=None, mesh=(), by_microbatches=dict.fromkeys(counts),
    )  # fmt: skip
    return Interleaving(request, cast(Any, lambda count: whole), nothing)


def test_of_fewer_microbatches_than_anything_is_known_of_nothing_is_expected() -> None:
    """A step that cannot be cut into few microbatches, though into more."""
    whole = costs()
    interleaving = over(whole, MICROBATCHES // 2, MICROBATCHES)
    tries = interleaving._tries([MICROBATCHES // 2, MICROBATCHES], [MICROBATCHES], inf)
    assert tries
    assert {count for count, _, _ in tries} == {MICROBATCHES}


def test_all_ranks_are_tried_whatever_plans_have_been_found() -> None:
    whole = costs()
    interleaving = over(whole, MICROBATCHES)
    devices = whole.submeshes.cluster.num_devices
    ranks = {one for _, one, _ in interleaving._tries([MICROBATCHES], [MICROBATCHES], inf)}
    assert ranks == {n for n in range(2, devices + 1) if devices % n == 0 and MICROBATCHES % n == 0}
    assert not interleaving._tries([MICROBATCHES], [], inf)


@pytest.mark.parametrize("chunks", [CHUNKS, 8 // RANKS])
def test_what_a_step_takes_is_told_before_its_stages_are_solved(chunks: int) -> None:
    request: Any = SimpleNamespace(stages=None, schedules=(INTERLEAVED,))
    costs().reserve(MemoryReserve())
    made = Interleaving(request, cast(Any, None), partial(scheduled, schedules=(INTERLEAVED,)))
    least, candidate = made._least(costs(), RANKS, chunks), made.candidate(costs(), RANKS, chunks)
    assert candidate is not None
    assert 0.5 * candidate.seconds < least <= candidate.seconds * (1 + 1e-9)


def test_what_took_long_in_more_memory_is_tried_last() -> None:
    whole = costs()
    interleaving = over(whole, MICROBATCHES)
    (_, ranks, ways), *_ = interleaving._tries([MICROBATCHES], [MICROBATCHES], inf)
    first, *others = ways
    interleaving._before[MICROBATCHES, ranks, first] = 1000 * ways[first]
    interleaving.reset()
    *_, (_, last, _) = interleaving._tries([MICROBATCHES], [MICROBATCHES], inf)
    assert last == ranks
    assert all(interleaving._scaled((MICROBATCHES, ranks, n), ways[n]) == pytest.approx(1000 * ways[n]) for n in others)
    assert others, "it says the same of other numbers of stages a rank"


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 4), (4, 2)])
def test_an_estimate_is_a_lower_bound_also_where_memory_binds(ranks: int, chunks: int) -> None:
    """Each rank is estimated with its own microbatches in flight: the last one has the head, and the fewest."""
    request: Any = SimpleNamespace(stages=None, schedules=(INTERLEAVED,))
    made = Interleaving(request, cast(Any, lambda count: costs()), partial(scheduled, schedules=(INTERLEAVED,)))
    usable = costs().submeshes.cluster.device.usable_memory_bytes
    costs().reserve(MemoryReserve())
    found = made.candidate(costs(), ranks, chunks)
    assert found is not None
    staged, schedule = found.scheduled.staged, found.scheduled.schedule
    held = zip(staged.own_bytes(schedule), (one.workspace_bytes for one in staged.timing.stages), strict=True)
    each = [*held]
    most = max(held_together(each[rank::ranks]) for rank in range(ranks))
    fitting = 0
    for share in (1.0, 0.9, 0.8, 0.7):
        costs().reserve(MemoryReserve(usable - share * most, usable - share * most))
        found = made.candidate(costs(), ranks, chunks)
        fitting += found is not None and share < 1.0
        assert found is None or made._expected(MICROBATCHES, MICROBATCHES, ranks, chunks, inf) <= found.seconds
    assert fitting, "memory binds, and something fits"


def test_layers_without_a_layout_leave_those_before_them_alone() -> None:
    sums = np.array([1.0, 2.0, inf, inf])
    assert between(sums, np.array([0.0, 1.5, 2.0, 4.0])).tolist() == [1.5, 0.5, inf]


def test_what_was_tried_says_how_far_estimates_are_off_at_least() -> None:
    tried = {(8, 2, 4): 1.5, (4, 8, 6): 1.1, (4, 8, 12): 1.3}
    assert _missed({}, (16, 4, 4)) == 1.0
    assert _missed(tried, (8, 4, 12)) == 1.0, "of four ranks nothing is known, whatever else is four"
    assert _missed(tried, (8, None, 12)) == 1.1, "of all the least"
    assert _missed(tried, (32, 2, 4)) == 1.5, "as many ranks"
    assert _missed(tried, (4, 8, 12)) == 1.1, "the least of them"
    assert _missed(tried, (4, 2, 4)) == 1.0, "of larger microbatches nothing is known"
    assert _missed(tried, (32, 2, 2)) == 1.0, "of fewer stages nothing is known"


def test_interleavings_are_tried_as_long_as_they_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = {(4, 4, 6): 29.0, (4, 4, 8): 29.0, (8, 8, 6): 27.5, (8, 8, 12): 25.0, (16, 2, 2): 40.0, (16, 2, 4): 20.0}
    tries = [
        (4, 4, {6: 25.0, 8: 24.0}),
        (32, 8, {6: 22.0, 12: 21.0}),
        (8, 8, {6: 25.5, 12: 24.0}),
        (16, 2, {2: 25.0, 4: inf}),
    ]
    looked_at: list[tuple[int, int, int]] = []

    def stages(cut: Any, ranks: int, chunks: int) -> Any:
        looked_at.append((cut, ranks, chunks))
        return iter([looked_at[-1]])

    def program(count: int) -> Any:
        if count == 32:
            raise PlanError(refused="a step", got="32 parts", needed="fewer", where="here", try_="8")
        return SimpleNamespace(program=SimpleNamespace(alike=None), count=count)

    monkeypatch.setattr(interleaving, "main_scan", lambda source: ("scan", 96))
    monkeypatch.setattr(interleaving, "interleaved", stages)
    request: Any = SimpleNamespace(stages=None, schedules=(INTERLEAVED, "one_f_one_b"))
    made = Interleaving(
        request, cast(Any, program), lambda cut, stages, chunks: cast(Any, SimpleNamespace(seconds=takes[stages]))
    )
    monkeypatch.setattr(made, "_tries", lambda *given: tries)
    monkeypatch.setattr(made, "_least", lambda costs, ranks, chunks: 0.0)
    monkeypatch.setattr(made, "_in_stages", lambda costs, ranks, chunks: costs.count)

    def found() -> list[float]:
        candidates = made.candidates([4, 8, 16], [4, 8, 16], below_seconds=26.0, late=lambda: False)
        return [one.seconds for one in candidates]

    assert found() == [29.0, 25.0]
    # Of as many ranks the most promising first; another is expected to be as much slower than thought.
    assert looked_at == [(4, 4, 8), (8, 8, 12)]


def test_what_fits_nowhere_keeps_nothing_else_from_being_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of gpt3-2.6b in steps of 512 on 16 V100: 5 of 12 tries did not fit, and the fastest came after them."""
    counts = [2**number for number in range(1, 16)]
    request: Any = SimpleNamespace(stages=None, schedules=(INTERLEAVED, "one_f_one_b"))
    made = Interleaving(request, cast(Any, lambda count: SimpleNamespace(count=count)), nothing)
    monkeypatch.setattr(made, "_tries", lambda *given: [(count, 2, {2: 10.0}) for count in counts])
    monkeypatch.setattr(made, "_in_stages", lambda costs, ranks, chunks: costs.count)
    monkeypatch.setattr(made, "_least", lambda cut, ranks, chunks: inf if cut < counts[-1] else 10.0)
    monkeypatch.setattr(made, "candidate", lambda cut, ranks, chunks: SimpleNamespace(seconds=15.0))
    found = made.candidates(counts, counts, below_seconds=20.0, late=lambda: False)
    assert [one.seconds for one in found] == [15.0]


@pytest.mark.parametrize(
    ("stages", "devices", "able"),
    [(4, 8, True), (9, 9, True), (6, 8, True), (9, 8, False), (3, 3, False), (2, 8, False), (4, 1, False)],
)
def test_stages_can_be_interleaved_where_several_equal_ranks_can_share_them(
    stages: int, devices: int, able: bool
) -> None:
    with nullcontext() if able else pytest.raises(PlanError, match="several stages for each of several equal ranks"):
        check_stages(stages, INTERLEAVED, devices)
