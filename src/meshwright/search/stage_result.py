"""What the stage search finds."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan
from ..program.staged import StagedProgram
from .alternative import Alternative
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
    """

    plan: Plan
    program: StagedProgram
    solves: int
    considered: tuple[str, ...]
    scheduled: Scheduled
    alternatives: tuple[Alternative, ...]


class NothingFaster(Exception):
    """No staged plan is faster than the one that the request knows.

    Args:
      least_seconds: what those take at least that were not looked at to the end.
      considered: as of a result.
    """

    def __init__(self, least_seconds: float, considered: tuple[str, ...]) -> None:
        super().__init__("no staged plan is faster than the one that is known")
        self.least_seconds, self.considered = least_seconds, considered
