"""What the stage search finds."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan
from ..program.staged import StagedProgram
from .alternative import Alternative
from .inter_op_problem import PlacedStage
from .staged_timing import Scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSearchResult:
    """A plan and what finding it took.

    Args:
      plan: the plan.
      program: the program its equations count in: the core with scans split as the plan says.
      solves: integer programs solved.
      considered: the best plan of each number of microbatches and order, a line each.
      scheduled: the schedule and its simulation.
      alternatives: plans that were not taken, the fastest first.
      stages: of the plan, by layers of the request's program in as many microbatches.
    """

    plan: Plan
    program: StagedProgram
    solves: int
    considered: tuple[str, ...]
    scheduled: Scheduled
    alternatives: tuple[Alternative, ...]
    stages: tuple[PlacedStage, ...]


class NothingFaster(Exception):
    """No plan of a search is faster than the one that is known before it.

    Args:
      least_seconds: what all its plans take at least, or the seconds of the known one where that is less.
      considered: as of a result.
    """

    def __init__(self, least_seconds: float, considered: tuple[str, ...]) -> None:
        super().__init__("no plan is faster than the one that is known")
        self.least_seconds, self.considered = least_seconds, considered
