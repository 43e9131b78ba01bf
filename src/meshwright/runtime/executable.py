"""A plan on devices, whatever it is: one program on one mesh, or stages on meshes of their own."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ..errors import PlanError
from ..plan import Plan
from ..program.effects import without_effects
from ..program.trace import Program
from .pipeline.step import PipelinedStep
from .step import PlannedStep

# What both have: `program`, `plan`, `avals()`, `create(make_state, *args)`, and being called as the step.
Executable = PlannedStep | PipelinedStep


def executable(
    program: Program, plan: Plan, devices: Sequence[jax.Device], *, effects: bool = True
) -> Executable:  # fmt: skip
    """The step that a plan describes.

    Args:
      program: the traced step.
      plan: for this program.
      devices: those of the plan's cluster, in its order.
      effects: whether what the step prints and calls is run; not where it runs to be timed.

    Raises:
      PlanError: if the plan is for another program or for more devices.
    """
    check_devices(plan, devices)
    if not effects:
        program = without_effects(program)
    if len(plan.stages) > 1:
        return PipelinedStep(program, plan, devices)
    return PlannedStep(program, plan, [devices[device] for device in plan.stages[0].devices])


def needed_devices(plan: Plan) -> int:
    """How many devices there have to be for a plan."""
    return 1 + max(device for stage in plan.stages for device in stage.devices)


def check_devices(plan: Plan, devices: Sequence[jax.Device]) -> None:
    """Refuse devices that are too few for a plan, or processes of which it has no device.

    Raises:
      PlanError: if so.
    """
    needed = needed_devices(plan)
    if len(devices) < needed:
        raise PlanError(
            refused="to run the plan", got=f"{len(devices)} devices in {jax.process_count()} processes",
            needed=f"{needed}, as planned", where="jax.devices()",
            try_='planning again with cluster="local", or as many processes as the plan was made for',
        )  # fmt: skip
    idle = set(range(jax.process_count())) - {devices[d].process_index for s in plan.stages for d in s.devices}
    if idle:
        raise PlanError(
            refused="to run the plan", got=f"{jax.process_count()} processes, of which {sorted(idle)} have no device "
            f"in it", needed="at least one device of each", where="plan=",
            try_="as many processes as the plan was made for, or planning again",
        )  # fmt: skip
