"""What a search finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from ..plan import Plan
from ..program.staged import StagedProgram
from ..program.trace import Program
from ..schedule import WORTH_SPLITTING
from ..simulate.of_plan import plan_schedule
from .alternative import Alternative, merged, one_stage_words, stages_words
from .best_known import gap_of
from .considered import Considered
from .inter.problem import PlacedStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan that a search has found, with its price."""

    plan: Plan

    @property
    def step_seconds(self) -> float:
        """Predicted, of one step."""
        assert self.plan.predicted is not None  # a search prices what it finds
        return self.plan.predicted.step_seconds

    @property
    def counted_seconds(self) -> float:
        """What the step counts for where plans are compared: a split backward has to be worth it."""
        return self.step_seconds * (1 + WORTH_SPLITTING * plan_schedule(self.plan).splits_backward)

    @property
    def least_seconds(self) -> float:
        """Lower bound of what other plans count for, by the gap of this one; 0 where nothing is known of them."""
        assert self.plan.predicted is not None
        return max(1 - self.plan.predicted.optimality_gap, 0.0) * self.counted_seconds

    def noted(self, *notes: str) -> Self:
        """The same plan with further notes."""
        return replace(self, plan=replace(self.plan, notes=(*self.plan.notes, *notes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Priced):
    """A plan, which is `plan`, and what finding it took.

    Args:
      considered: the candidates.
      program: what it is of: the whole step, or the core cut into stages, with scans split as the plan says; None where
        the search was given no more than its graph.
      alternatives: plans that were not taken, the fastest first.
      stages: of a plan that was searched in stages, by layers of the request's program in as many microbatches.
      part: of the space of plans, in words, which has learned by itself what memory its search misses.
    """

    considered: tuple[Considered, ...]
    program: Program | StagedProgram | None = None
    alternatives: tuple[Alternative, ...] = ()
    stages: tuple[PlacedStage, ...] = ()
    part: str = ""

    def bounded(self, least_seconds: float) -> SearchResult:
        """The same plan with its gap, where `least_seconds` is a lower bound of all others; 0 for nothing known."""
        predicted = self.plan.predicted
        assert predicted is not None
        predicted = replace(predicted, optimality_gap=gap_of(self.counted_seconds, least_seconds))
        return replace(self, plan=replace(self.plan, predicted=predicted))

    def beside(self, least_seconds: float) -> SearchResult:
        """The same plan, its gap extended to further plans of which `least_seconds` is a lower bound."""
        return self if least_seconds >= self.least_seconds else self.bounded(least_seconds)

    def beside_candidates(self, others: Iterable[Considered]) -> SearchResult:
        """The same plan, with what came of further candidates."""
        return replace(self, considered=(*self.considered, *others))

    def preferred_to(self, other: SearchResult) -> SearchResult:
        """This plan, with the other, and what that was preferred to, among its alternatives."""
        passed_over = Alternative(what=plan_words(other.plan), step_seconds=other.step_seconds)
        return replace(self, alternatives=merged(self.alternatives, other.alternatives, [passed_over]))


def plan_words(plan: Plan) -> str:
    """A plan in a few words: its microbatches, schedule and stages."""
    if plan.shares:
        kinds = " and ".join(f"{n} on {s.device_kind}" for n, s in zip(plan.shares, plan.stages, strict=True))
        return f"{plan.microbatches} microbatches, replicas, {kinds}"
    if len(plan.stages) == 1:
        (stage,) = plan.stages
        return one_stage_words(plan.microbatches, stage.mesh, rematerialised=bool(stage.rematerialised))
    sizes = [(stage.layers[1] - stage.layers[0], len(stage.devices)) for stage in plan.stages]
    return stages_words(plan.microbatches, plan.schedule, sizes)


class NothingFaster(Exception):
    """No plan of a search is faster than the one that is known before it; all take `least_seconds` at least, or the
    seconds of the known one where that is less."""

    def __init__(self, least_seconds: float, considered: tuple[Considered, ...]) -> None:
        super().__init__("no plan is faster than the one that is known")
        self.least_seconds, self.considered = least_seconds, considered
