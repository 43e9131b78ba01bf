"""A preset in one number of microbatches, as far as it is known: with the layouts of its stages, and simulated."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan
from ..program.staged import StagedProgram
from ..search.inter_op_problem import PlacedStage
from ..search.parameters import parameter_infos
from ..search.pins import Pins
from ..search.stage_costs import StageCosts
from ..search.staged_plan import assemble
from ..search.staged_timing import Scheduled, StagedTiming
from ..search.submeshes import Submeshes
from .preset import Preset
from .solved import PresetStages


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedPreset:
    """A preset whose stages have layouts, but are not yet simulated together.

    Args:
      least_seconds: that a step takes at least.
      remat: as it was asked for.
      stages: of the program in which they were solved.
      limit_bytes: that may be counted on a device of each rank.
      held_bytes: on a device of each rank, as the search counts it.
      placed: solved, in program order; None where a step takes too long in any layout.
    """

    least_seconds: float
    remat: str | None
    stages: PresetStages
    limit_bytes: tuple[float, ...]
    held_bytes: tuple[float, ...] = ()
    placed: tuple[PlacedStage, ...] | None = None


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
