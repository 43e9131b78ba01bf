"""A plan made executable: one jitted function of the step's arguments on real devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from .._jax.ahead import lower
from .._jax.compiler_options import compiler_options
from .._jax.context import no_mesh
from .._jax.placement import HOST_MEMORY
from .._jax.trace import trace
from ..errors import PlanError
from ..lowering.local_step import LocalStep, partition
from ..plan import Plan
from ..program.trace import Program
from ..sharding import Spec
from .arguments import Arguments
from .effects import Replay
from .placing import put
from .watch import watch


class PlannedStep:
    """A step that runs by a plan.

    Args:
      program: the traced step.
      plan: for this program and these devices.
      devices: the devices of the plan's stages, in the plan's order.

    Attributes:
      what: the step and the plan in words, for errors: the same text in all processes.

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
        self.what = "a step"
        self._local = LocalStep(program, plan)
        self._replay = Replay(program)
        names, shape = zip(*plan.stages[0].mesh, strict=True)
        grid = np.array(devices, dtype=object).reshape(shape)
        self.mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
        self._processes = tuple(sorted({device.process_index for device in devices}))
        self.in_shardings = self._shardings(self._local.in_specs, program.host_inputs)
        self.out_shardings = self._shardings(self._local.out_specs, program.host_outputs)
        self._dtypes = tuple(aval.dtype for aval in self._local.avals())
        self.jitted = jax.jit(
            self._between_memories(self._local.on(self.mesh)),
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=tuple(sorted(program.donated)),
            compiler_options=compiler_options(devices),
        )
        self._arguments = Arguments(program)

    def _shardings(self, specs: Sequence[Spec], hosted: Collection[int]) -> tuple[NamedSharding, ...]:
        return tuple(
            NamedSharding(self.mesh, partition(spec), memory_kind=HOST_MEMORY if i in hosted else None)
            for i, spec in enumerate(specs)
        )

    def _between_memories(self, step: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """The step with what is kept in the host's memory moved from there to the devices, and back."""
        program = self.program
        if not program.host_inputs and not program.host_outputs:
            return step

        def moved(values: Sequence[Any], which: Collection[int], space: Any) -> list[Any]:
            return [jax.device_put(x, space) if i in which else x for i, x in enumerate(values)]

        def run(*flat: Any) -> tuple[Any, ...]:
            made = step(*moved(flat, program.host_inputs, jax.memory.Space.Device))
            return tuple(moved(made, program.host_outputs, jax.memory.Space.Host))

        return run

    def __call__(self, *args: Any) -> Any:
        """Run one step on the step's own arguments, of which `program.donated` are donated."""
        with no_mesh():
            made = self._run(jax.tree.leaves(args))
        self._arguments.remember(made)
        return self._results(made)

    def _run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        if len(self._processes) == 1:
            return self.jitted(*self.place(self._arguments(leaves)))
        with watch.call(self.what, self._processes):
            flat = self.place(self._arguments(leaves))
            with watch.over(self._about):
                made = self.jitted(*flat)
            # A leaf of the state counts until the next step takes it over.
            for token in sorted(made[self.program.state_inputs :] or made, key=lambda x: x.size)[:1]:
                watch.follow(self._about, token)
        return made

    def _results(self, made: Sequence[Any]) -> Any:
        """The step's results; runs its effects."""
        results = self.program.out_tree.num_leaves
        self._replay(made[results:])
        return jax.tree.unflatten(self.program.out_tree, made[:results])

    def _about(self) -> str:
        others = ", ".join(str(p) for p in self._processes if p != jax.process_index())
        return f"{self.what}, with process {others}"

    def place(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments' leaves, each where the plan wants it; arrays already there are not touched."""
        placed = []
        for x, sharding, dtype in zip(flat, self.in_shardings, self._dtypes, strict=True):
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
        with no_mesh():
            traced = trace(make_state, args)
            tree = jax.tree.structure(traced.results)
            shardings = list(self.in_shardings[: tree.num_leaves])
            made = jax.jit(traced.run, out_shardings=shardings)(*jax.tree.leaves(args))
        return jax.tree.unflatten(tree, made)

    def lower(self) -> Any:
        """The lowered step, from shapes alone; compiled, it is what a call runs."""
        placed = zip(self.avals(), self.in_shardings, strict=True)
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in placed]
        with no_mesh():
            return lower(self.jitted, avals, self.mesh.devices.flat[0])

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the step's flat arguments."""
        return self._local.avals()
