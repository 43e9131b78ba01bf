"""What a plan holds once it is written out: the search counts by specs, the traced programs are the truth."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import replace

from ..plan import Memory, Plan
from ..program.staged import StagedProgram
from ..runtime.local_step import LocalStep
from ..runtime.pipeline.local_stages import LocalStages
from ..runtime.pipeline.stage_memory import StageMemory


def written_out(
    plan: Plan, program: StagedProgram, platform: str, *, known: MutableMapping[Hashable, StageMemory] | None = None
) -> Plan:
    """A plan with the memory that its programs need; nothing is compiled.

    Args:
      plan: of one stage or several.
      program: cut into its stages.
      platform: of the devices.
      known: what stages hold that were counted before; it learns new ones.
    """
    if len(plan.stages) > 1:
        return LocalStages(program, plan, platform=platform, counted=known).plan_with_memory()
    (stage,) = plan.stages
    peak = float(LocalStep(program.source, plan).predicted_memory(platform).peak_bytes)
    counted = stage.memory
    rest = max(peak - counted.parameters - counted.gradients - counted.optimizer, 0.0)
    activations = min(counted.activations, rest)
    memory = Memory(
        parameters=counted.parameters, gradients=counted.gradients, optimizer=counted.optimizer,
        activations=activations, workspace=rest - activations,
    )  # fmt: skip
    return replace(plan, stages=(replace(stage, memory=memory),))


def usable_bytes(plan: Plan) -> tuple[float, ...]:
    """What a device of each rank can hold.

    Args:
      plan: any.
    """
    return tuple({stage.devices: stage.memory_limit_bytes for stage in plan.stages}.values())


def held_bytes(plan: Plan) -> tuple[float, ...]:
    """What a device of each rank holds, all of its stages together.

    Args:
      plan: written out.
    """
    held: dict[tuple[int, ...], float] = {}
    for stage in plan.stages:
        held[stage.devices] = held.get(stage.devices, 0.0) + stage.memory.total
    return tuple(held.values())
