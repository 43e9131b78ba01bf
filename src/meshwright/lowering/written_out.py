"""A plan written out: its local programs are lowered, and their peak of memory is counted."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import replace

from ..plan import Memory, Plan
from ..program.staged import StagedProgram
from ..program.trace import Program
from .local_step import LocalStep
from .pipeline.local_stages import LocalStages
from .pipeline.stage_memory import StageMemory


def written_out(
    plan: Plan, program: Program | StagedProgram, platform: str, *,
    counted: MutableMapping[Hashable, StageMemory] | None = None,
) -> Plan:  # fmt: skip
    """A plan with the memory that its programs need; nothing is compiled.

    Args:
      plan: of one stage or several.
      program: whole, or cut into its stages.
      platform: of the devices, as `Device.compiler`.
      counted: stages that were counted before, by their fingerprints; new ones are added.
    """
    if isinstance(program, StagedProgram) and len(plan.stages) > 1:
        return LocalStages(program, plan, platform=platform, counted=counted).plan_with_memory()
    (stage,) = plan.stages
    whole = program.source if isinstance(program, StagedProgram) else program
    peak = float(LocalStep(whole, plan).predicted_memory(platform).peak_bytes)
    known = stage.memory
    held = max(peak - known.parameters - known.gradients - known.optimizer, 0.0)
    activations = min(known.activations, held)
    memory = Memory(
        parameters=known.parameters, optimizer=known.optimizer, activations=activations, workspace=held - activations,
        gradients=min(known.gradients, max(peak - known.parameters - known.optimizer, 0.0)),
    )  # fmt: skip
    return replace(plan, stages=(replace(stage, memory=memory),))
