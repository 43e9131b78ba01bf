"""What a search finds."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan
from ..program.staged import StagedProgram
from ..program.trace import Program
from .alternative import Alternative
from .considered import Considered
from .inter.problem import PlacedStage


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A plan and what finding it took.

    Args:
      plan: the plan.
      considered: the candidates.
      program: what it is of: the whole step, or the core cut into stages, with scans split as the plan says; None where
        the search was given no more than its graph.
      alternatives: plans that were not taken, the fastest first.
      stages: of a plan that was searched in stages, by layers of the request's program in as many microbatches.
    """

    plan: Plan
    considered: tuple[Considered, ...]
    program: Program | StagedProgram | None = None
    alternatives: tuple[Alternative, ...] = ()
    stages: tuple[PlacedStage, ...] = ()


class NothingFaster(Exception):
    """No plan of a search is faster than the one that is known before it.

    Args:
      least_seconds: what all its plans take at least, or the seconds of the known one where that is less.
      considered: as of a result.
    """

    def __init__(self, least_seconds: float, considered: tuple[Considered, ...]) -> None:
        super().__init__("no plan is faster than the one that is known")
        self.least_seconds, self.considered = least_seconds, considered
