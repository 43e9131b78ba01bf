"""A preset in one number of microbatches, as far as it is known: with the layouts of its stages, and simulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..plan import Plan
from ..program.staged import StagedProgram
from ..search.inter.problem import PlacedStage
from ..search.inter.submeshes import Submeshes
from ..search.intra.parameters import parameter_infos
from ..search.pipelines.assembly import assemble
from ..search.pipelines.timing import Scheduled, StagedTiming
from ..search.restrictions.pins import Pins
from ..search.stages.costs import StageCosts
from .preset import Preset
from .solved import PresetStages, free_transfers_seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedPreset:
    """A preset whose stages have layouts, but are not yet simulated together.

    Args:
      source: what they were solved from.
      remat: as it was asked for.
      limit_bytes: that may be counted on a device of each rank.
      work_seconds: that the work of some rank takes at least.
      held_bytes: on a device of each rank, as the search counts it.
      stages: solved, in program order; None where a step takes too long in any layout.
    """

    source: PresetStages
    remat: str | None
    limit_bytes: tuple[float, ...]
    work_seconds: float
    held_bytes: tuple[float, ...] = ()
    stages: tuple[PlacedStage, ...] | None = None

    @cached_property
    def least_seconds(self) -> float:
        """What a step takes at least. Of stages that are not all cut yet it is worth a simulation of those there are:
        to cut and simulate all of them takes many times as long."""
        if self.stages is None or len(self.source.cut.staged.layers) == len(self.stages):
            return self.work_seconds
        return free_transfers_seconds(self.source, [stage.option.tag for stage in self.stages])


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedPreset:
    """A preset with its layouts.

    Args:
      preset: with all sizes.
      microbatches: in a step.
      remat: as it was asked for.
      step_seconds: predicted.
      counted_bytes: on a device of each rank, as the search counts it.
      program: cut into its stages.
      pins: what the preset fixes.
      stages: solved, in program order.
      timing: of the stages.
      scheduled: the schedule and its simulation.
    """

    preset: Preset
    microbatches: int
    remat: str | None
    step_seconds: float
    counted_bytes: tuple[float, ...]
    program: StagedProgram
    pins: Pins
    stages: tuple[PlacedStage, ...]
    timing: StagedTiming
    scheduled: Scheduled

    def plan(self, submeshes: Submeshes) -> Plan:
        """The plan.

        Args:
          submeshes: of the cluster.
        """
        costs = StageCosts(
            self.program, parameters=parameter_infos(self.program.source), submeshes=submeshes, pins=self.pins,
            remat=self.remat, meshes=[self.preset.mesh],
        )  # fmt: skip
        return assemble(costs, self.stages, self.timing, self.scheduled, submeshes.cluster)
