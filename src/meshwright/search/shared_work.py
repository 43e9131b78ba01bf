"""What a stage search shares with a copy of its process: what parts of the program cost on each kind of submesh.

Most of a search's time goes into that, and each kind is priced by itself. What the copy finds out are the numbers that
this process would have found, so that plans are the same with a copy and without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..ahead import in_two, is_copy
from .inter_op_problem import InterOpProblem
from .part_rows import KnownParts
from .stage_costs import StageCosts
from .submeshes import Submesh


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


def _on_each_kind(problem: InterOpProblem, costs: StageCosts, find: Callable[[Submesh], object]) -> None:
    kinds = costs.solver.kind_of
    of_kind = {kinds[submesh]: submesh for submesh in reversed(problem.submeshes)}
    estimates = costs.estimates

    def work(kind: int) -> tuple[int, float, Mapping[int, KnownParts]] | None:
        costs.hear()
        before, begun = estimates.known_parts, time.perf_counter()
        find(of_kind[kind])
        if estimates.known_parts == before:
            return None
        return kind, took(kind, time.perf_counter() - begun), estimates.known(since=before)

    def took(kind: int, seconds: float) -> float:
        kinds.took_seconds[kind] = max(seconds, kinds.took_seconds.get(kind, 0.0))
        return seconds

    def learn(found: tuple[int, float, Mapping[int, KnownParts]]) -> None:
        kind, seconds, parts = found
        took(kind, seconds)
        estimates.learn(parts)

    def expected(kind: int) -> tuple[float, int, int]:
        return kinds.took_seconds.get(kind, 0.0), len(kinds.meshes[kind]), kind

    # Short ones first, but a scout begins where this process ends: which process does what changes no number.
    left = sorted(of_kind, key=expected, reverse=is_copy())
    # As soon as there is something to find out of one, a second process is worth it.
    while left and work(left.pop(0)) is None:
        pass
    in_two(left, work, learn)
