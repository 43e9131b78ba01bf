"""Parts of the space of plans under one incumbent, one bound and one deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest

from meshwright import zoo
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.report.considered import considered_lines
from meshwright.search.considered import Considered
from meshwright.search.driver import Part, best_of_parts
from meshwright.search.result import NothingFaster, SearchResult

FLOOR = 1.0


@cache
def plan() -> Any:
    target = zoo.mlp(width=32, layers=2, batch=32)
    args = (target.example_state, target.example_batch)
    return plan_for(target.step, args, cluster="rtx4090-4", stages=1, microbatches=1).plan


def part(words: str, seconds: float, bound: float, asked: list[float] | None = None, **options: Any) -> Part:
    """A part whose best plan takes so many seconds, and whose search proves a bound."""

    def search(faster_than_seconds: float, time_limit_seconds: float) -> SearchResult:
        if asked is not None:
            asked.append(faster_than_seconds)
        if seconds >= faster_than_seconds:
            raise NothingFaster(min(bound, faster_than_seconds), ())
        predicted = replace(plan().predicted, step_seconds=seconds, optimality_gap=1 - bound / seconds)
        return SearchResult(plan=replace(plan(), predicted=predicted), considered=())

    return Part(words=words, search=search, **options)


def refused(words: str, least_seconds: float | None) -> Part:
    """A part in which nothing fits; with a bound of what may fit all the same, or refused for another reason."""
    kind: Callable[..., PlanError] = PlanError if least_seconds is None else MemoryExceeded
    error = kind(refused=words, got="1", needed="2", where="here", try_="more")
    if isinstance(error, MemoryExceeded) and least_seconds is not None:
        error.least_seconds = least_seconds

    def search(faster_than_seconds: float, time_limit_seconds: float) -> SearchResult:
        raise error

    return Part(words=words, search=search)


def best(*parts: Part, left: float = 9.0, **options: Any) -> SearchResult:
    return best_of_parts(parts, left_seconds=lambda: left, floor=lambda: FLOOR, **options)


def test_a_later_part_has_to_be_faster_by_what_is_worth_it() -> None:
    asked: list[float] = []
    found = best(part("a", 4.0, 3.0), part("b", 3.99, 3.9, asked), worth=0.01)
    assert found.step_seconds == 4.0
    assert asked == [pytest.approx(3.96)]
    found = best(part("a", 4.0, 3.0), part("b", 3.0, 2.9), worth=0.01)
    assert found.step_seconds == 3.0
    assert [one.step_seconds for one in found.alternatives] == [4.0]
    assert "a: 4 s" in map(str, found.considered)


@pytest.mark.parametrize("first", [True, False])
def test_the_gap_is_of_all_parts(first: bool) -> None:
    parts = [part("fast", 3.0, 2.9), part("slow", 5.0, 2.0)]
    assert best(*(parts if first else parts[::-1])).least_seconds == pytest.approx(2.0)


@pytest.mark.parametrize(("least", "bound"), [(inf, 2.9), (2.5, 2.5), (None, 2.9)])
def test_what_may_fit_all_the_same_is_in_the_gap(least: float | None, bound: float) -> None:
    for parts in ([refused("x", least), part("fast", 3.0, 2.9)], [part("fast", 3.0, 2.9), refused("x", least)]):
        assert best(*parts).least_seconds == pytest.approx(bound)


def test_parts_that_there_is_no_time_for_are_bounded_by_the_floor() -> None:
    found = best(part("a", 3.0, 2.9), part("b", 2.0, 2.0), left=-1.0)
    assert (found.step_seconds, found.least_seconds) == (3.0, pytest.approx(FLOOR))
    assert [one for one in found.considered if one.what == "b" and not one.searched]
    # But for those that have time of their own.
    assert best(part("a", 3.0, 2.9), part("b", 2.0, 2.0, least_seconds=1.0), left=-1.0).step_seconds == 2.0


def test_what_was_considered_in_parts_whose_plan_is_not_taken_is_told() -> None:
    def told(seconds: float, outcome: str) -> Part:
        search = part(outcome, seconds, seconds).search

        def telling(faster_than_seconds: float, time_limit_seconds: float) -> SearchResult:
            try:
                found = search(faster_than_seconds, time_limit_seconds)
            except NothingFaster as nothing:
                raise NothingFaster(nothing.least_seconds, (Considered(8, outcome),)) from None
            return found.beside_candidates([Considered(8, outcome)])

        return Part(words=outcome, search=telling)

    parts = [refused("x", inf), told(4.0, "a"), told(3.0, "b"), told(5.0, "c")]
    considered = [*map(str, best(*parts).considered)]
    assert considered[0] == "8 microbatches: b"
    assert {"a, 8 microbatches: a", "a: 4 s", "c, 8 microbatches: c"} < {*considered}
    assert any(line.startswith("x: refused x") for line in considered)
    assert "c: none that fits and is faster" in considered
    with pytest.raises(NothingFaster) as caught:
        best(*parts, faster_than_seconds=1.0)
    assert "a, 8 microbatches: a" in map(str, caught.value.considered)
    assert [line for line in considered_lines(best(*parts).considered) if line.startswith("a, ")]


def test_of_many_ways_that_were_not_searched_those_with_the_least_bounds_are_told() -> None:
    ways = [Considered(f"mesh {n}", searched=False, least_seconds=float(n)) for n in (7, 3, 9, 4, 6, 5)]
    (line,) = considered_lines(ways)
    assert line == "not searched, at least 3.0 s: mesh 3; mesh 4; mesh 5; mesh 6; 2 more"


def late(faster_than_seconds: float, time_limit_seconds: float) -> SearchResult:
    """A search that runs out of time."""
    raise NothingFaster(0.0, (Considered(8, "not written out, out of time"),))


def test_a_search_that_ran_out_of_time_is_not_said_to_have_none_that_is_faster() -> None:
    found = best(part("a", 4.0, 3.0), Part(words="b", search=late))
    assert any(str(one).startswith("b: broken off, out of time") for one in found.considered)
    assert found.least_seconds == pytest.approx(FLOOR), "where the part knows no bound"


def test_where_nothing_is_wanted_the_bound_is_of_all_parts() -> None:
    with pytest.raises(NothingFaster) as caught:
        best(refused("x", 1.5), part("a", 3.0, 1.9), faster_than_seconds=2.0)
    assert caught.value.least_seconds == 1.5
    with pytest.raises(NothingFaster) as caught:  # the second part is not searched
        best(part("a", 3.0, 1.9), left=-1.0, faster_than_seconds=2.0)
    assert caught.value.least_seconds == FLOOR


def test_where_nothing_fits_the_first_says_so() -> None:
    with pytest.raises(MemoryExceeded, match="first") as caught:
        best(refused("first", inf), refused("second", 5.0))
    assert caught.value.least_seconds == 5.0
    with pytest.raises(MemoryExceeded, match="second"):  # of a part that ran out of time nothing is known
        best(Part(words="late", search=late), refused("second", inf))


def test_numbers_that_are_refused_for_one_reason_are_told_together() -> None:
    refused = [
        Considered(n, f"refused microbatches={n}: got a loss whose examples meet", searched=True) for n in (2, 4)
    ]
    assert list(considered_lines(refused)) == ["2, 4 microbatches: refused: got a loss whose examples meet"]


def test_what_planning_found_is_shown_in_a_paragraph() -> None:
    """Not its traced program, which a dataclass would write out."""
    target = zoo.mlp(width=16, layers=1, batch=8)
    found = plan_for(
        target.step, (target.example_state, target.example_batch), cluster="dgx-h100:1", microbatches=1, stages=1
    )
    for text in (str(found), repr(found)):
        assert "Planned in" in text
        assert len(text) < 500
