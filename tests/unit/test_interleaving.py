"""Several stages a rank: they share its memory, and the one that needs more of it gets what the others leave."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.cluster import load_cluster
from meshwright.errors import PlanError
from meshwright.planning.stages import check_stages
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.schedule import interleaved_one_f_one_b
from meshwright.search.inter.problem import Option, PlacedStage
from meshwright.search.inter.submeshes import Submesh, Submeshes
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.intra.workspace import held_together
from meshwright.search.pipelines import interleaving
from meshwright.search.pipelines.interleaved_stages import give_what_is_left, interleaved
from meshwright.search.pipelines.interleaving import (
    Interleaving,
    TooSlow,
    _missed,
    _Tried,
)
from meshwright.search.pipelines.request import INTERLEAVED
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.stages.costs import StageCosts
from meshwright.search.stages.reserve import MemoryReserve
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


# The last is all of it: sums of bytes are rounded.
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0 + 1e-9)


def test_what_ranks_hold_fits_and_is_shared_by_need() -> None:
    own = interleaved_one_f_one_b(RANKS * CHUNKS, MICROBATCHES, chunks=CHUNKS).in_flight
    usable = costs().submeshes.cluster.device.usable_memory_bytes

    def slowest(size: float) -> tuple[float, float, float]:
        """Of the first way whose ranks fit in so many bytes: seconds of its slowest stage, those with equal shares of
        the memory, and bytes of the rank that holds most."""
        costs().reserve(MemoryReserve(usable - size, usable - size))
        for stages in interleaved(costs(), RANKS, CHUNKS):
            # They run in turn: the largest workspace does for all.
            held = [
                (one.constant_bytes - one.workspace_bytes + n * one.in_flight_bytes, one.workspace_bytes)
                for one, n in zip((stage.option for stage in stages), own, strict=True)
            ]
            most = max(held_together(held[rank::RANKS]) for rank in range(RANKS))
            if most <= size * (1 + 1e-9):
                equal = [
                    costs().solve_within(s.first, s.last, s.submesh, n, size / CHUNKS)
                    for s, n in zip(stages, own, strict=True)
                ]
                alike = max(inf if option is None else option.seconds for option in equal)
                return max(s.option.seconds for s in stages), alike, most
        return inf, inf, 0.0

    # Ways come in the order of a guess, so that more memory may find a slower one first: not on these devices, but on
    # virtual CPUs it does, by 5 %, at 0.7 of the memory beside 0.6.
    free, _, most = slowest(usable)
    found = [slowest(share * most) for share in SHARES]
    seconds = [one for one, _, _ in found]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == free
    assert all(one <= alike for one, alike, _ in found)
    assert any(one < alike < inf for one, alike, _ in found), found


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


def test_the_slowest_stage_of_a_rank_gets_what_the_others_leave() -> None:
    asked: list[tuple[int, int, float]] = []

    class Costs:
        def solve_within(self, first: int, last: int, submesh: Submesh, in_flight: int, limit_bytes: float) -> Option:
            asked.append((first, in_flight, limit_bytes))
            return Option(forward_seconds=1.0, backward_seconds=1.0, constant_bytes=limit_bytes)

    def placed(number: int, seconds: float, constant: float, kept: float) -> PlacedStage:
        option = Option(
            forward_seconds=seconds, backward_seconds=seconds, constant_bytes=constant, in_flight_bytes=kept
        )
        return PlacedStage(number, number + 1, Submesh(0, 1), option)

    stages = [placed(0, 1.5, 10.0, 2.0), placed(1, 9.0, 1.0, 1.0), placed(2, 2.0, 20.0, 1.0)]
    costs: Any = Costs()
    give_what_is_left(costs, stages, (0, 2), (3, 1, 2), 100.0)
    assert asked == [(2, 2, 100.0 - (10.0 + 3 * 2.0))]
    assert [stage.option.seconds for stage in stages] == [3.0, 18.0, 2.0]
    stages[2] = placed(2, 0.8, 20.0, 1.0)
    give_what_is_left(costs, stages, (0, 2), (3, 1, 2), 100.0)
    assert asked[-1] == (0, 3, 100.0 - (20.0 + 2 * 1.0))
    # What is no faster is not taken.
    stages = [placed(0, 0.9, 10.0, 2.0), placed(1, 9.0, 1.0, 1.0), placed(2, 0.8, 20.0, 1.0)]
    give_what_is_left(costs, stages, (0, 2), (3, 1, 2), 100.0)
    assert stages[0].option.constant_bytes == 10.0


def test_of_fewer_microbatches_than_anything_is_known_of_nothing_is_expected() -> None:
    """A step that cannot be cut into few microbatches, though into more."""
    whole = costs()
    request: Any = SimpleNamespace(
        cluster=whole.submeshes.cluster, schedules=(INTERLEAVED, "one_f_one_b"), submeshes=None, layers=None,
        stages=None, mesh=(), by_microbatches={MICROBATCHES // 2: None, MICROBATCHES: None},
    )  # fmt: skip
    tries = Interleaving(request, lambda program: whole)._tries([MICROBATCHES], inf, lambda count: whole)
    assert tries
    assert {count for count, _, _ in tries} == {MICROBATCHES}


def test_all_ranks_are_tried_whatever_plans_have_been_found() -> None:
    whole = costs()
    request: Any = SimpleNamespace(
        cluster=whole.submeshes.cluster, schedules=(INTERLEAVED, "one_f_one_b"), submeshes=None, layers=None,
        stages=None, mesh=(), by_microbatches={MICROBATCHES: None},
    )  # fmt: skip
    interleaving = Interleaving(request, lambda program: whole)
    devices = whole.submeshes.cluster.num_devices
    ranks = {one for _, one, _ in interleaving._tries([MICROBATCHES], inf, lambda count: whole)}
    assert ranks == {n for n in range(2, devices + 1) if devices % n == 0 and MICROBATCHES % n == 0}
    assert not interleaving._tries([], inf, lambda count: whole)


def test_the_busiest_rank_is_told_before_its_stages_are_solved() -> None:
    request: Any = None
    costs().reserve(MemoryReserve())
    least = Interleaving(request, lambda program: costs())._least(costs(), RANKS, CHUNKS)
    stages = next(interleaved(costs(), RANKS, CHUNKS))
    busiest = max(sum(stage.option.seconds for stage in stages[rank::RANKS]) for rank in range(RANKS))
    assert 0.5 * MICROBATCHES * busiest < least <= MICROBATCHES * busiest * (1 + 1e-9)
    assert Interleaving(request, lambda program: costs())._least(costs(), RANKS, 8 // RANKS) == 0.0, "a layer each"


def test_what_is_too_slow_where_all_ranks_are_alike_is_not_solved_for_each() -> None:
    costs().reserve(MemoryReserve())
    scheduled: list[tuple[PlacedStage, ...]] = []

    def seconds(stages: Sequence[PlacedStage]) -> float:
        return MICROBATCHES * max(sum(stage.option.seconds for stage in stages[rank::RANKS]) for rank in range(RANKS))

    def schedule(cut: StageCosts, stages: tuple[PlacedStage, ...], *, chunks: int) -> Any:
        scheduled.append(stages)
        return SimpleNamespace(seconds=seconds(stages))

    request: Any = None
    interleaving = Interleaving(request, lambda program: costs())
    (alike,) = interleaved(costs(), RANKS, CHUNKS, alike=True)
    each = next(interleaved(costs(), RANKS, CHUNKS))
    assert seconds(each) <= seconds(alike)
    with pytest.raises(TooSlow) as caught:
        interleaving.candidate(costs(), RANKS, CHUNKS, schedule, below_seconds=0.9 * seconds(alike))
    assert scheduled == [alike]
    assert 0.9 * seconds(alike) <= caught.value.least_seconds < seconds(alike)
    found = interleaving.candidate(costs(), RANKS, CHUNKS, schedule, below_seconds=seconds(alike))
    assert found is not None
    assert found.seconds == seconds(each)
    assert scheduled[1:] == [alike, each]


def test_what_was_tried_says_how_far_expectations_are_off() -> None:
    tried = [_Tried(8, 2, 4, 1.5), _Tried(4, 8, 6, 1.1), _Tried(4, 8, 12, 1.3)]
    assert _missed([], 16, 4, 2) == 1.0
    # Of four ranks nothing is known, whatever else is four.
    assert _missed(tried, 8, 4, 4) == 1.0
    assert _missed(tried, 32, 2, 2) == 1.5, "as many ranks"
    assert _missed(tried, 16, 8, 3) == 1.1, "as many ranks, the best of them"
    assert _missed(tried, 16, 8, 12) == 1.3, "as many stages"
    assert _missed(tried, 4, 8, 3) == 1.3, "as many microbatches: the worst of them"


def test_interleavings_are_tried_as_long_as_they_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = {(4, 4, 6): 29.0, (4, 4, 8): 29.0, (8, 8, 6): 28.0, (8, 8, 12): 25.0, (16, 2, 2): 40.0, (16, 2, 4): 20.0}
    tries = [
        (4, 4, {6: 25.0, 8: 24.0}),
        (32, 8, {6: 22.0, 12: 21.0}),
        (8, 8, {6: 25.5, 12: 24.0}),
        (16, 2, {2: 25.0, 4: inf}),
    ]
    looked_at: list[tuple[int, int, int]] = []

    def alike(cut: Any, ranks: int, chunks: int, scheduled: Any) -> Any:
        looked_at.append((cut, ranks, chunks))
        return SimpleNamespace(seconds=takes[looked_at[-1]])

    def program(count: int) -> Any:
        if count == 32:
            raise PlanError(refused="a step", got="32 parts", needed="fewer", where="here", try_="8")
        return SimpleNamespace(program=SimpleNamespace(alike=None), count=count)

    monkeypatch.setattr(interleaving, "main_scan", lambda source: ("scan", 96))
    monkeypatch.setattr(interleaving, "all_alike", alike)
    monkeypatch.setattr(interleaving, "interleaved", lambda cut, ranks, chunks: iter([(cut, ranks, chunks)]))
    request: Any = SimpleNamespace(stages=None, schedules=(INTERLEAVED, "one_f_one_b"))
    made = Interleaving(request, lambda staged: pytest.fail("stages were cut"))
    monkeypatch.setattr(made, "_tries", lambda *given: tries)
    monkeypatch.setattr(made, "_least", lambda costs, ranks, chunks: 0.0)
    monkeypatch.setattr(made, "_in_stages", lambda costs, ranks, chunks: costs.count)
    found = made.candidates(
        [4, 8, 16], below_seconds=26.0, costs_in=program, late=lambda: False,
        scheduled=lambda cut, stages, chunks: SimpleNamespace(seconds=takes[stages]),
    )  # fmt: skip
    assert [one.seconds for one in found] == [25.0]
    # The second of as many ranks is expected to be as much slower than thought as the first.
    assert looked_at == [(4, 4, 6), (8, 8, 6), (8, 8, 12)]


@pytest.mark.parametrize(
    ("stages", "devices", "able"),
    [(4, 8, True), (9, 9, True), (6, 8, True), (9, 8, False), (3, 3, False), (2, 8, False), (4, 1, False)],
)
def test_stages_can_be_interleaved_where_several_equal_ranks_can_share_them(
    stages: int, devices: int, able: bool
) -> None:
    with nullcontext() if able else pytest.raises(PlanError, match="several stages for each of several equal ranks"):
        check_stages(stages, INTERLEAVED, devices)
