"""A plan that the stage search may take: solved stages, and the schedule with which a simulated step is shortest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .alternative import one_stage_words, stages_words
from .inter_op_problem import PlacedStage
from .stage_costs import StageCosts
from .stage_request import INTERLEAVED, SIMULATED
from .stage_solver import SolvedStage
from .staged_timing import WORTH_SPLITTING, Scheduled, StagedTiming, best_schedule, staged_timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Stages with a schedule.

    Args:
      seconds: of a simulated step.
      costs: that solved the stages.
      stages: in program order.
      staged: their timing.
      scheduled: the schedule and its simulation.
    """

    seconds: float
    costs: StageCosts
    stages: tuple[PlacedStage, ...]
    staged: StagedTiming
    scheduled: Scheduled

    @property
    def weight(self) -> float:
        """Its seconds, with what a split backward has to gain to be taken."""
        return self.seconds * (1 + (WORTH_SPLITTING if self.scheduled.schedule.splits_backward else 0.0))

    def words(self, schedule: str) -> str:
        """These stages under a schedule, in a few words."""
        count = self.costs.program.microbatches
        if len(self.stages) == 1:
            solved: SolvedStage = self.stages[0].option.tag
            mesh = [(axis.name, axis.size) for axis in solved.mesh.axes]
            return one_stage_words(count, mesh, rematerialised=bool(solved.segments))
        return stages_words(count, schedule, [(s.last - s.first, s.submesh.size) for s in self.stages])

    def all_schedules(self) -> Iterator[tuple[str, float]]:
        """Words and seconds of a step under every schedule that fits."""
        for name, seconds in ((self.scheduled.name, self.seconds), *self.scheduled.others):
            yield self.words(name), seconds


def scheduled(
    costs: StageCosts, stages: tuple[PlacedStage, ...], schedules: Sequence[str], *, chunks: int
) -> Candidate | None:
    """The candidate of these stages; None if they fit under no schedule.

    Args:
      costs: that solved the stages, with what may be counted on a device.
      stages: in program order.
      schedules: to choose from.
      chunks: stages on each rank.
    """
    ends = len(costs.program.layers)
    limits = [costs.limit_bytes(stage.submesh, stage.last == ends) for stage in stages]
    staged = staged_timing(costs.solver, stages, limit_bytes=limits)
    orders = [name for name in SIMULATED if name in schedules and name != INTERLEAVED]
    orders = orders if len(stages) > 1 else ["one_f_one_b"]
    found = best_schedule(staged, costs.program.microbatches, orders, chunks=chunks)
    if found is None:
        return None
    return Candidate(
        seconds=found.timeline.step_seconds, costs=costs, stages=stages, staged=staged, scheduled=found
    )  # fmt: skip
