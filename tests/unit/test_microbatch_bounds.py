"""Which numbers of microbatches a search looks at: bounds that hold for every order, and where to begin."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.search.inter.dynamic_program import solve_inter_op
from meshwright.search.inter.problem import ORDERS, InterOpProblem, Option
from meshwright.search.inter.submeshes import Submesh
from meshwright.search.pipelines.microbatch_bounds import MicrobatchBounds
from meshwright.search.stages.reserve import MemoryReserve

STAGES = 8
COUNTS = [1, 2, 4, 8, 16, 32, 64, 128]

# What a split backward counts for.
SPLITS = 1.02


def pipeline(share: float) -> InterOpProblem:
    """A layer for each device, so as many stages, which take a second for the whole batch, one after the other: half of
    the backward pass, itself two thirds, is of weights."""
    places = [Submesh(n, n + 1) for n in range(STAGES)]
    one = np.full((STAGES + 1, STAGES + 1), inf)
    for layer in range(STAGES):
        one[layer, layer + 1] = share / STAGES

    def options(first: int, last: int, submesh: Submesh, in_flight: int) -> tuple[Option, ...]:
        del submesh, in_flight
        took = share / STAGES / 3
        taking = Option(forward_seconds=took, backward_seconds=2 * took, weight_seconds=took)
        return (taking,) if last == first + 1 else ()

    return InterOpProblem(
        layers=STAGES, devices=STAGES, submeshes=places, options=options, crossings=(),
        transfer_seconds=lambda source, target, size: 0.0, microbatches=round(1 / share),
        limit_bytes=lambda submesh, last: inf, least=lambda submesh: (one, one / 3),
    )  # fmt: skip


class Costs:
    """Of these numbers of microbatches, the fewest first."""

    def __init__(self, *made: Any) -> None:
        self.counts, self.base, self.num_devices = COUNTS, made[0], STAGES
        self.reserved = dict.fromkeys(COUNTS, MemoryReserve())
        self._made = {one.program.microbatches: one for one in made}
        self.searched: set[int] = set()

    def __call__(self, count: int) -> Any:
        return self._made[count]


def costs_of(*made: Any) -> Any:
    return Costs(*made)


def bounds_of(*, fills_ends: bool) -> tuple[MicrobatchBounds, Any]:
    base = SimpleNamespace(
        program=SimpleNamespace(microbatches=1, layers=range(STAGES)), reserve=lambda reserve: None,
        submeshes=SimpleNamespace(cluster=SimpleNamespace(num_devices=STAGES)), focus=lambda most: None,
        forget_estimates=lambda: None, check=lambda: None,
    )  # fmt: skip
    bounds = MicrobatchBounds(costs_of(base), lambda costs, share, order: replace(pipeline(share), order=order), ORDERS)
    bounds.fills_ends, bounds.splits = fills_ends, SPLITS if fills_ends else None
    return bounds, base


def takes(count: int, order: Any) -> float:
    found = solve_inter_op(replace(pipeline(1 / count), order=order, num_stages=STAGES))
    assert found is not None
    return found.seconds


@pytest.mark.parametrize("fills_ends", [False, True])
def test_bounds_hold_for_the_orders_that_are_asked_for(fills_ends: bool) -> None:
    bounds, _ = bounds_of(fills_ends=fills_ends)
    for count in COUNTS:
        least = takes(count, "one_f_one_b")
        if fills_ends:
            least = min(least, takes(count, "zero_bubble"))
        assert 0 < bounds.of(count, inf) <= least * (1 + 1e-9)


def test_the_search_begins_in_the_middle() -> None:
    bounds, _ = bounds_of(fills_ends=False)
    expected = dict.fromkeys(COUNTS, 1.0)
    assert bounds.promising(COUNTS, expected, inf, None) == 8
    assert bounds.promising([2, 4, 8], expected, inf, None) == 4
    # Where that has no plan, the next finer number is the next.
    assert bounds.promising([1, 2, 4, 16, 32, 64, 128], expected, inf, 8) == 16


def test_the_search_goes_on_around_the_best_plan() -> None:
    """Bounds do not see what finer microbatches lose, so that the finest always seem the fastest."""
    bounds, _ = bounds_of(fills_ends=True)
    best = takes(32, "one_f_one_b")
    expected = {count: bounds.of(count, best) for count in COUNTS}

    def promising(left: list[int]) -> int:
        return bounds.promising(left, expected, best, 32)

    assert promising(COUNTS) == 32
    assert promising([1, 2, 4, 64, 128]) == 64
    assert promising([1, 2, 16, 128]) == 128, "16 are slower but for a split backward"


def test_what_only_a_split_backward_makes_fast_is_bounded_by_itself() -> None:
    bounds, _ = bounds_of(fills_ends=True)
    best = takes(64, "one_f_one_b")
    expected = {count: bounds.of(count, best) for count in COUNTS}
    assert expected[1] < best, "a bound as loose as this rules nothing out"
    for count in (1, 2, 4, 8):
        # That it takes longer than the best is known, and no more.
        assert bounds.with_split(count, best) == pytest.approx(best)
        near, _ = bounds_of(fills_ends=True)
        known, least = 0.97 * takes(count, "one_f_one_b"), SPLITS * takes(count, "zero_bubble")
        near.of(count, known)
        assert least < known
        assert near.with_split(count, known) == pytest.approx(least)
        assert near.with_split(count, 0.99 * least) == pytest.approx(0.99 * least)
    # Of what 1F1B makes as fast there is nothing left to say, however little more a split backward counts for.
    assert bounds.with_split(128, best) == 0.0
    for share in (1.0, 1.001, 1.01, 1.03):
        bounds, _ = bounds_of(fills_ends=True)
        whole = takes(128, "one_f_one_b")
        bounds.of(128, share * whole)
        assert bounds.with_split(128, share * whole) == 0.0


def test_where_no_split_backward_is_asked_for_none_is_looked_at() -> None:
    bounds, _ = bounds_of(fills_ends=False)
    for count in COUNTS:
        bounds.of(count, 0.5)
    assert bounds.with_split(1, 0.05) == 0.0


def test_bounds_are_of_the_memory_that_there_was() -> None:
    bounds, _ = bounds_of(fills_ends=True)
    for count in COUNTS:
        bounds.of(count, 0.5)
    bounds.reset()
    assert bounds.with_split(1, 0.05) == 0.0
    assert bounds.promising([1, 128], dict.fromkeys(COUNTS, 1.0), 1.0, 4) == 1


def test_a_number_is_bounded_by_the_most_that_were_searched_and_are_no_more() -> None:
    """Of 8 microbatches it is known that each takes twice its share: 16 and more take as long, 4 do not."""
    bounds, base = bounds_of(fills_ends=False)
    eight = SimpleNamespace(**(vars(base) | {"program": SimpleNamespace(microbatches=8, layers=range(STAGES))}))
    known = costs_of(base, eight)

    def problem(costs: Any, share: float, order: Any) -> InterOpProblem:
        del order
        # The share is of the microbatch of the number that says so.
        whole = share / costs.program.microbatches
        slow = pipeline(2 * whole if costs is eight else whole)
        return replace(slow, microbatches=round(1 / whole))

    bounds = MicrobatchBounds(known, problem, ("one_f_one_b", "adaptive"))
    plain = {count: bounds.of(count, inf) for count in COUNTS}
    known.searched.add(8)
    for count in COUNTS:
        expected = 2 * plain[count] if count >= 8 else plain[count]
        assert bounds.of(count, inf) == pytest.approx(expected)


def test_what_a_guess_rules_out_may_yet_be_as_fast() -> None:
    """No more is known of it than that it takes longer than was asked for."""
    bounds, _ = bounds_of(fills_ends=False)
    least = takes(8, "one_f_one_b")
    assert bounds.of(8, 0.5 * least) == pytest.approx(1.25 * 0.5 * least)
    assert bounds._whole[8] == pytest.approx(1.25 * 0.5 * least)
    assert bounds.of(8, 2 * least) <= least


def test_bounds_are_of_the_memory_that_there_is_for_a_number() -> None:
    bounds, base = bounds_of(fills_ends=False)
    bounds._costs.reserved = {count: MemoryReserve(plain=float(count)) for count in COUNTS}
    reserved: list[MemoryReserve] = []
    base.reserve = reserved.append
    bounds.of(4, 1.0)
    assert reserved == [MemoryReserve(plain=4.0)]


def test_each_bound_is_of_its_own_interest() -> None:
    """What was left out under the bound of a whole backward is estimated again for a split one."""
    bounds, base = bounds_of(fills_ends=True)
    seen: list[str] = []
    base.focus, base.forget_estimates = lambda most: seen.append("focus"), lambda: seen.append("forget")
    bounds.of(4, 0.9 * takes(4, "one_f_one_b"))
    assert bounds.with_split(4, 0.9 * takes(4, "one_f_one_b")) > 0
    assert seen == ["forget", "focus", "focus", "forget", "forget", "focus", "forget"]
