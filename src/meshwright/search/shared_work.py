"""What a stage search shares with a copy of its process (`search.ahead`): which pieces of work, and what each is.

All of it is what parts of the program cost, numbers that the search would find out itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from ..errors import PlanError
from .ahead import Ahead
from .inter_op import solve_inter_op
from .memory_reserve import MemoryReserve
from .stage_estimates import KnownParts

if TYPE_CHECKING:
    from .pipeline import StageSearch

# The search of a program that runs so many operators pays to be shared with a second process.
_LONG_PROGRAM = 1200

# Numbers of microbatches that are estimated ahead: later ones are often ruled out before their turn.
_MOST_AHEAD = 6

# Where no plan is known, it takes at most so many times what is expected of the fastest number of microbatches.
_EXPECTED_OF_OTHERS = 2.0


def begin(search: StageSearch, others: Ahead) -> None:
    """Find out what a first plan's number of microbatches takes while a copy finds out about the fewest."""
    if not others.is_at_work or search.late:
        return
    left = sorted(search.counts, reverse=True)
    first = search.bounds.promising(left, dict.fromkeys(left, 0.0), inf, search.taken, first=True)
    with suppress(PlanError):  # who looks at this number finds that out again
        costs = search.costs(first)
        for kind in sorted({costs.solver.kind_of[place] for place in search.places}):
            costs.estimates.free(kind)
        search.costs.learn_base(others.take(None, wait_seconds=search.left_seconds) or {})


def of_base(search: StageSearch, count: int | None, reserve: Callable[[int], MemoryReserve]) -> KnownParts:
    """What is found out of parts in the fewest microbatches before any plan is known.

    Args:
      search: that is ahead.
      count: a number of microbatches to bound; None for the fastest way to run each part.
      reserve: as of `run`.
    """
    search.costs.reserve = reserve
    if (base := search.costs.base) is None:
        return {}
    if count is None:
        for place in search.places:
            base.least(place)
    else:
        found = search.bounds.of(count, search.best_objective)
        search.best_objective = min(search.best_objective, _EXPECTED_OF_OTHERS * found)
    return base.estimates.known()


def every_second(search: StageSearch, left: Sequence[int], expected: Mapping[int, float]) -> list[int]:
    """Of the numbers of microbatches that may be looked at, in their order, every second of the first few; they are
    traced, as far as there is time. None of a search that is short."""
    base = search.costs.base
    if base is None or base.program.source.graph.runs <= _LONG_PROGRAM:
        return []
    order: list[int] = []
    rest = [count for count in left if expected[count] <= search.best_objective]
    while rest:
        near = search.near()
        order.append(search.bounds.promising(rest, expected, search.best_objective, near, first=not order))
        rest.remove(order[-1])
    found = []
    for count in order[1 : 2 * _MOST_AHEAD : 2]:
        if search.late:
            break
        try:
            search.request.by_microbatches[count]
            found.append(count)
        except PlanError:
            continue  # who needs it finds that out again
    return found


def estimated(search: StageSearch, count: int) -> KnownParts:
    """What is found out of parts where a number of microbatches is looked at for the first time."""
    if search.bounds.of(count, search.best_objective) > search.best_objective:
        return {}
    costs = search.costs(count)
    for problem in search.problems_of(count, costs):
        search.bound(costs, problem)
        solve_inter_op(problem, beam=search.beam, upper_bound=search.worth_a_look)
    return costs.estimates.known()
