"""What a stage search shares with a copy of its process: what parts of the program cost on each kind of submesh.

Most of a search's time goes into that, and each kind is priced by itself. What the copy finds out are the numbers that
this process would have found, so that plans are the same with a copy and without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .in_two import in_two
from .inter_op_problem import InterOpProblem
from .memory_reserve import MemoryReserve
from .part_row import KnownParts
from .stage_costs import StageCosts
from .submeshes import Submesh

if TYPE_CHECKING:
    from .pipeline import StageSearch

# Where no plan is known, it takes at most so many times what is expected of the fastest number of microbatches.
_EXPECTED_OF_OTHERS = 2.0


def least_found(problem: InterOpProblem, costs: StageCosts) -> None:
    """Find out what bounds say of all ranges: `inter_op_bounds.most_seconds` asks for that.

    Args:
      problem: of the costs.
      costs: of the stages.
    """
    if (least := problem.least) is not None:
        _on_each_kind(problem, costs, least)


def estimates_found(problem: InterOpProblem, costs: StageCosts) -> None:
    """Find out what estimates say of all ranges: `inter_op.solve_inter_op` asks for that.

    Args:
      problem: of the costs.
      costs: of the stages.
    """
    if (fastest := problem.fastest) is None:
        return
    in_flight = [problem.in_flight(place) for place in range(1, problem.most_places + 1)]
    _on_each_kind(problem, costs, lambda submesh: fastest(submesh, in_flight))


def of_base(search: StageSearch, count: int | None, reserve: Callable[[int], MemoryReserve]) -> list[KnownParts]:
    """What is found out of parts in the fewest microbatches before any plan is known.

    Args:
      search: of which nothing has been looked at.
      count: a number of microbatches to bound; None for the fastest way to run each part.
      reserve: as of `StageSearch.run`.
    """
    search.costs.reserve = reserve
    if (base := search.costs.base) is None:
        return []
    before = base.estimates.known_parts
    if count is None:
        for place in search.places:
            base.least(place)
    else:
        found = search.bounds.of(count, search.best_objective)
        search.best_objective = min(search.best_objective, _EXPECTED_OF_OTHERS * found)
    return base.estimates.known(since=before)


def learn_of_base(search: StageSearch, found: Sequence[list[KnownParts]]) -> None:
    """Take over what a copy of this process has found out in the fewest microbatches.

    Args:
      search: as of `of_base`, before its first run.
      found: by the copy.
    """
    base = search.costs.base if found else None
    if base is not None:
        for known in found:
            base.estimates.learn(known)


def _on_each_kind(problem: InterOpProblem, costs: StageCosts, find: Callable[[Submesh], object]) -> None:
    kinds = costs.solver.kind_of
    of_kind = {kinds[submesh]: submesh for submesh in reversed(problem.submeshes)}
    estimates = costs.estimates

    def work(kind: int) -> list[tuple[int, float, list[KnownParts]]]:
        before, begun = estimates.known_parts, time.perf_counter()
        find(of_kind[kind])
        if estimates.known_parts == before:
            return []
        return [(kind, took(kind, time.perf_counter() - begun), estimates.known(since=before))]

    def took(kind: int, seconds: float) -> float:
        kinds.took_seconds[kind] = max(seconds, kinds.took_seconds.get(kind, 0.0))
        return seconds

    def learn(found: list[tuple[int, float, list[KnownParts]]]) -> None:
        for kind, seconds, known in found:
            took(kind, seconds)
            estimates.learn(known)

    def expected(kind: int) -> tuple[float, int, int]:
        return kinds.took_seconds.get(kind, 0.0), len(kinds.meshes[kind]), kind

    in_two(sorted(of_kind, key=expected), work, learn)  # which process does what changes no number
