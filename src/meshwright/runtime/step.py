"""A plan made executable: one jitted function of the step's arguments on real devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from ..errors import PlanError
from ..plan import Plan
from ..program.trace import Program
from .local_step import LocalStep, partition
from .pipeline.placing import check_not_donated, put
from .watch import watch


def _about() -> str:
    return "a step of all processes together"


class PlannedStep:
    """A step that runs by a plan.

    Args:
      program: the traced step.
      plan: for this program and these devices.
      devices: the devices of the plan's stages, in the plan's order.

    Raises:
      PlanError: if the plan is for another program or another number of devices.
    """

    def __init__(self, program: Program, plan: Plan, devices: Sequence[jax.Device]) -> None:
        if plan.num_devices != len(devices):
            raise PlanError(
                refused="the plan", got=f"{len(devices)} devices",
                needed=f"{plan.num_devices}, as planned", where="plan=",
                try_="planning again for the devices at hand",
            )  # fmt: skip
        self.program = program
        self.plan = plan
        self._local = LocalStep(program, plan)
        names, shape = zip(*plan.stages[0].mesh, strict=True)
        grid = np.array(devices, dtype=object).reshape(shape)
        self.mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
        self.in_shardings = tuple(NamedSharding(self.mesh, partition(s)) for s in self._local.in_specs)
        self.out_shardings = tuple(NamedSharding(self.mesh, partition(s)) for s in self._local.out_specs)
        self._dtypes = tuple(aval.dtype for aval in self._local.avals())
        self.jitted = jax.jit(
            self._local.on(self.mesh),
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=tuple(range(program.state_inputs)),
        )

    def __call__(self, *args: Any) -> Any:
        """Run one step on the step's own arguments; state buffers are donated."""
        flat = self.place(jax.tree.leaves(args))
        if jax.process_count() == 1:
            return jax.tree.unflatten(self.program.out_tree, self.jitted(*flat))
        with watch.over(_about):
            made = self.jitted(*flat)
        if len(made) > self.program.state_inputs:
            watch.follow(_about, min(made[self.program.state_inputs :], key=lambda x: x.size))
        return jax.tree.unflatten(self.program.out_tree, made)

    def place(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments' leaves, each where the plan wants it; arrays already there are not touched."""
        placed = []
        for index, (x, sharding, dtype) in enumerate(zip(flat, self.in_shardings, self._dtypes, strict=True)):
            check_not_donated(x, self.program.input_names[index])
            if isinstance(x, jax.Array):
                if getattr(x, "weak_type", False):  # would be another signature, and compile the step again
                    x = jax.lax.convert_element_type(x, x.dtype)
                here = x.sharding.is_equivalent_to(sharding, x.ndim)
            else:
                x, here = np.asarray(x, dtype), False
            placed.append(x if here else put(x, sharding))
        return placed

    def create(self, make_state: Callable[..., Any], *args: Any) -> Any:
        """The state `make_state(*args)`, created as the plan keeps it and never whole on one device."""
        tree = jax.tree.structure(jax.eval_shape(make_state, *args))
        shardings = jax.tree.unflatten(tree, self.in_shardings[: tree.num_leaves])
        return jax.jit(make_state, out_shardings=shardings)(*args)

    def lower(self) -> Any:
        """The lowered step, from shapes alone; compiled, it is what a call runs."""
        placed = zip(self.avals(), self.in_shardings, strict=True)
        return self.jitted.lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in placed))

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the step's flat arguments."""
        return self._local.avals()
