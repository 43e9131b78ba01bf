"""A plan on devices, whatever it is: one program on one mesh, or stages on meshes of their own."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ..errors import PlanError
from ..plan import Plan
from ..program.trace import Program
from .pipeline.step import PipelinedStep
from .step import PlannedStep

# What both have: `program`, `plan`, `avals()`, `create(make_state, *args)`, and being called as the step.
Executable = PlannedStep | PipelinedStep


def executable(program: Program, plan: Plan, devices: Sequence[jax.Device]) -> Executable:
    """The step that a plan describes.

    Args:
      program: the traced step.
      plan: for this program.
      devices: those of the plan's cluster, in its order.

    Raises:
      PlanError: if the plan is for another program or for more devices.
    """
    needed = 1 + max(device for stage in plan.stages for device in stage.devices)
    if len(devices) < needed:
        raise PlanError(
            refused="to run the plan", got=f"{len(devices)} devices in {jax.process_count()} processes",
            needed=f"{needed}, as planned", where="jax.devices()",
            try_='planning again with cluster="local", or as many processes as the plan was made for',
        )  # fmt: skip
    if len(plan.stages) > 1:
        return PipelinedStep(program, plan, devices)
    return PlannedStep(program, plan, [devices[device] for device in plan.stages[0].devices])
