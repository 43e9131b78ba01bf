"""Solved ranges of layers, from which plans are assembled, and the bytes they hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ...cluster import LogicalMesh
from ...program.cut import Cut
from ...program.residuals import is_cheap
from ...program.segments import Segments
from ...sharding import Spec
from ..intra.problem import IntraOpSolution, trips_of
from .problem import StageProblem, StageSeconds


@dataclass(frozen=True, kw_only=True, eq=False)
class SolvedStage:
    """A solved range of layers.

    Args:
      cut: the range as solved; a range elsewhere with the same fingerprint shares it.
      problem: with its graph.
      chosen: its solution.
      mesh: logical mesh.
      remat: the way to rematerialise it (`program.ladder`).
      segments: what is rematerialised, by paths of the solved cut.
      seconds: of the solution.
    """

    cut: Cut
    problem: StageProblem
    chosen: IntraOpSolution
    mesh: LogicalMesh
    remat: int
    segments: Segments
    seconds: StageSeconds

    @property
    def certain_share(self) -> float:
        """The lower bound of its problem, as a share of its seconds."""
        solution = self.chosen.solution
        return solution.lower_bound / solution.objective if solution.objective > 0 else 1.0

    def certain(self, share: float) -> SolvedStage:
        """The same where this share of its seconds is certain to be needed: it may have been found first at another
        price of memory, where something else was."""
        solution = self.chosen.solution
        bounded = replace(solution, lower_bound=share * solution.objective)
        return replace(self, chosen=replace(self.chosen, solution=bounded))

    @cached_property
    def delayed_bytes(self) -> float:
        """On one device, what a microbatch keeps between its input gradient and its weight gradient: operands of the
        products with weights, and the cotangents of their results; rematerialised ones too, which are made by then."""
        graph, sizes, of_parameters = self.problem.graph, self.problem.sizes, self.problem.of_parameters
        held: dict[tuple[int, Spec], float] = {}
        for operator in graph.operators:
            choice = self.chosen.operators[operator.index]
            weights = [v for v in operator.operands if v in of_parameters and graph.values[v].differentiated]
            if choice is None or is_cheap(operator.name) or not weights:
                continue
            pairs = (*zip(operator.operands, choice.algorithm.operands, strict=True),
                     *zip(operator.results, choice.algorithm.results, strict=True))  # fmt: skip
            for value, spec in pairs:
                if value is not None and value not in of_parameters:
                    trips = trips_of(operator, value)
                    held[value, spec] = trips * graph.values[value].bytes / spec.shards(sizes)
        return sum(held.values())

    def own_bytes(self, in_flight: int, delayed: int = 0) -> float:
        """On one device, with so many microbatches in flight, so many of which wait for their weight gradient; without
        its workspace, which stages of one device share."""
        kept = self.seconds.in_flight_bytes
        later = self.delayed_bytes if delayed else kept
        return self.seconds.constant_bytes + kept_bytes(kept, later, in_flight, delayed)

    def held_bytes(self, in_flight: int) -> float:
        """On one device that it has to itself, workspace included, with a whole backward pass."""
        return self.own_bytes(in_flight) + self.seconds.workspace_bytes


def better_of(first: SolvedStage, second: SolvedStage) -> SolvedStage:
    """The faster of two solutions of one problem, with the closer of their bounds.

    Args:
      first: is taken of equals.
      second: the other.
    """
    found = min(first, second, key=lambda one: one.chosen.solution.objective)
    least = max(one.chosen.solution.lower_bound for one in (first, second))
    objective = found.chosen.solution.objective
    return found.certain(min(least / objective, 1.0)) if objective > 0 else found


def kept_bytes(kept: float, later: float, in_flight: int, delayed: int) -> float:
    """The most that microbatches of a stage keep on a device: those whose weight gradient is to come keep something
    else, and are as many as can be where that is more.

    >>> kept_bytes(1.0, 5.0, in_flight=3, delayed=2), kept_bytes(5.0, 1.0, in_flight=3, delayed=2)
    (11.0, 11.0)

    Args:
      kept: bytes from the forward to the input gradient of a microbatch.
      later: from there to its weight gradient.
      in_flight: the most that have either.
      delayed: the most that have the second.
    """
    waiting = delayed if later > kept else max(delayed - 1, 0)
    return (in_flight - waiting) * kept + waiting * later
