"""A plan of several stages made executable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..._jax.jaxpr import open_jaxpr
from ...errors import PlanError
from ...plan import Plan
from ...program.trace import Program
from ...resharding import Network
from ...schedule.schedule import Mode, Schedule
from .executor import Executor, Memory
from .local_stages import LocalStages
from .operations import Work, operations
from .placing import check_not_donated, put
from .rows import Rows
from .slots import Access, Role, Slot
from .stage_program import StageProgram, stage_mesh
from .stage_runtime import StageRuntime
from .staged_array import StagedArray
from .surroundings import is_small
from .transport import LocalTransport, PlannedTransport, ProcessTransport, Transport


class PipelinedStep:
    """A step that runs by a plan of several stages.

    Args:
      program: the traced step.
      plan: for this program and these devices.
      devices: those of the plan's cluster, in its order; `plan.stages[i].devices` are positions among them.
      transport: "planned", by `meshwright.resharding`; or "naive", each device sent its piece apart, to compare with.
      network: for the planned one, the machines by device id; None for each process as one machine, all alike.

    Attributes:
      local: its programs.
      schedule: the plan's.
      operations: of a step, in the order of all processes.
      stages: on their devices.
      in_shardings: for each argument of the step how it is kept, for each stage that keeps it.

    Raises:
      PlanError: if the plan is for another program or other devices, or asks for what the runtime cannot do.
    """

    def __init__(
        self, program: Program, plan: Plan, devices: Sequence[jax.Device], *,
        transport: Literal["planned", "naive"] = "planned", network: Network | None = None,
    ) -> None:  # fmt: skip
        _check_devices(plan, devices)
        self.program = program
        self.plan = plan
        meshes = [stage_mesh(stage, [devices[d] for d in stage.devices]) for stage in plan.stages]
        self.local = LocalStages(program, plan, meshes)
        self.schedule = self.local.schedule
        self._around = self.local.around
        self.stages = [
            StageRuntime(stage, update, mesh)
            for stage, update, mesh in zip(self.local.stages, self.local.updates, meshes, strict=True)
        ]
        programs = [_accesses(stage, self.schedule) for stage in self.local.stages]
        order = operations(self.schedule, [stage.sent for stage in self.local.stages], programs)
        self.operations = order
        if not any(stage.is_mine for stage in self.stages):
            raise PlanError(
                refused="the plan", got=f"no stage on a device of process {jax.process_index()}",
                needed="one for every process that runs the step", where="plan=",
                try_="fewer processes, or a plan that uses all devices",
            )  # fmt: skip
        self._one_process = len({d.process_index for stage in self.stages for d in stage.mesh.devices.flat}) == 1
        naive = LocalTransport() if self._one_process else ProcessTransport()
        between: Transport = naive if transport == "naive" else PlannedTransport(network)
        self._executor = Executor(self.stages, self._around, order, between, plan.microbatches)
        self._kept = [update.kept for update in self.local.updates]
        shared = len({d for s in plan.stages for d in s.devices}) < sum(len(s.devices) for s in plan.stages)
        self._copies = shared  # stages on the same devices must not keep one buffer
        self.in_shardings = tuple(
            {n: stage.sharding(slot) for n, stage in enumerate(self.stages) if (slot := _argument(i)) in self._kept[n]}
            for i in range(len(program.input_names))
        )

    def __call__(self, *args: Any) -> Any:
        """Run one step on the step's own arguments; state buffers are donated.

        Leaves of the state that several stages hold come back as `StagedArray`s and go into the next call as such.
        """
        flat = jax.tree.leaves(args)
        for leaf, name in zip(flat, self.program.input_names, strict=True):
            for part in leaf.parts.values() if isinstance(leaf, StagedArray) else (leaf,):
                check_not_donated(part, name)
        memories = [self._memory(number, flat) for number in range(len(self.stages))]
        del flat
        self._executor.run(memories)
        return jax.tree.unflatten(self.program.out_tree, self._results(memories))

    def place(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments' leaves, each where the plan wants it; arrays already there are not touched, and so are leaves
        that are only kept in pieces (a batch that is cut into microbatches)."""
        placed = []
        for index, (leaf, shardings) in enumerate(zip(flat, self.in_shardings, strict=True)):
            parts = {n: self._placed(leaf, n, index, sharding) for n, sharding in shardings.items()}
            placed.append(self._one(parts, index) if parts else leaf)
        return placed

    def create(self, make_state: Callable[..., Any], *args: Any) -> Any:
        """The state `make_state(*args)`, each leaf created where the plan keeps it and never whole on one device."""
        shapes = jax.eval_shape(make_state, *args)
        leaves, tree = jax.tree.flatten(shapes)
        parts: list[dict[int, Any]] = [{} for _ in leaves]
        for number, stage in enumerate(self.stages):
            mine = [i for i in range(len(leaves)) if number in self.in_shardings[i]]
            if not stage.is_mine:
                for index in mine:
                    parts[index][number] = stage.ghost(_argument(index))
                continue
            shardings = [stage.sharding(_argument(i)) for i in mine]

            def some(*inner: Any, mine: Sequence[int] = mine, number: int = number) -> list[Any]:
                made = jax.tree.leaves(make_state(*inner))
                return [self._part(made[i], number, i) for i in mine]

            for index, array in zip(mine, jax.jit(some, out_shardings=shardings)(*args), strict=True):
                parts[index][number] = array
        return jax.tree.unflatten(tree, [self._one(part, index) for index, part in enumerate(parts)])

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the step's flat arguments."""
        invars = open_jaxpr(self.program.outer).invars
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]

    # Arguments

    def _memory(self, number: int, flat: Sequence[Any]) -> Memory:
        stage = self.stages[number]
        memory: Memory = {}
        if not stage.is_mine:
            return memory
        for slot in sorted(self._kept[number]):
            memory[slot] = self._placed(flat[slot.position], number, slot.position, stage.sharding(slot))
        for slot in (*stage.stage.parameters, *stage.stage.inputs):
            index = stage.update.direct(slot)
            if index is None:
                continue
            cut, sharding = stage.stacking(slot), stage.sharding(slot)
            if cut is not None:
                memory[slot] = put(cut(self._host(flat[index], index)), sharding)
            else:
                same = stage.update.is_argument(slot)
                memory[slot] = memory[_argument(index)] if same else jax.device_put(memory[_argument(index)], sharding)
        return memory

    def _host(self, leaf: Any, index: int) -> Any:
        aval = open_jaxpr(self.program.outer).invars[index].aval
        return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, aval.dtype)

    def _placed(self, leaf: Any, number: int, index: int, sharding: NamedSharding) -> jax.Array:
        """A leaf on a stage's mesh."""
        rows = self._rows(index)
        # Stages on the same devices take over a buffer each: the first that keeps a leaf has that of the leaf.
        own = not self._copies or number == min(self.in_shardings[index])
        if isinstance(leaf, StagedArray) and leaf.rows == rows:
            own = not self._copies or number in leaf.parts
            leaf = leaf.parts.get(number, next(iter(leaf.parts.values())))
        elif isinstance(leaf, StagedArray):
            self._check_within_reach(leaf, number, index, sharding)
            leaf = self._part(np.asarray(leaf), number, index)
        elif rows is not None:
            self._check_within_reach(leaf, number, index, sharding)
            leaf = self._part(leaf if isinstance(leaf, jax.Array) else self._host(leaf, index), number, index)
        if isinstance(leaf, jax.Array):
            if getattr(leaf, "weak_type", False):  # would be another signature, and compile programs again
                leaf = jax.lax.convert_element_type(leaf, leaf.dtype)
            if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                return leaf if own or not self.stages[number].is_mine else jax.numpy.copy(leaf)
            self._check_within_reach(leaf, number, index, sharding)
        else:
            leaf = self._host(leaf, index)
        placed = put(leaf, sharding)
        return jax.numpy.copy(placed) if self._copies else placed

    def _check_within_reach(self, leaf: Any, number: int, index: int, sharding: NamedSharding) -> None:
        """Refuse an array of which this process has a part only: a step moves no arguments between processes."""
        for part in leaf.parts.values() if isinstance(leaf, StagedArray) else (leaf,):
            if isinstance(part, jax.Array) and not part.is_fully_addressable:
                name = self.program.input_names[index]
                raise PlanError(
                    refused="an argument of the step", got=f"{name}, shared by several processes as {part.sharding}",
                    needed=f"what this plan keeps on stage {number + 1}, {sharding}, or an array that each process has "
                    "whole: a step moves no arguments between processes", where=name,
                    try_="the state that step.init made; or meshwright.reshard(state, shardings), which moves the "
                    "state of another plan",
                )  # fmt: skip

    def _rows(self, index: int) -> Rows | None:
        """The rows of an argument that lie on several stages."""
        return self._around.rows.get(self._around.invars[index])

    def _part(self, x: Any, number: int, index: int) -> Any:
        """What a stage has of an argument."""
        rows = self._rows(index)
        return x if rows is None else rows.take(x, number)

    # Results

    def _one(self, parts: dict[int, Any], index: int) -> Any:
        """A leaf of the step's results, or an argument: a plain array where one stage has it."""
        rows = self._rows(index) if index < self.program.state_inputs else None
        return next(iter(parts.values())) if len(parts) == 1 and rows is None else StagedArray(parts, rows)

    def _results(self, memories: Sequence[Memory]) -> list[Any]:
        found = []
        for index in range(self.program.out_tree.num_leaves):
            slot = Slot(Role.OUTPUT, index)
            makers = [n for n, stage in enumerate(self.stages) if index in stage.update.wanted.outputs]
            if not self._one_process and index >= self.program.state_inputs and is_small(self._around.outvars[index]):
                found.append(self._delivered(memories, slot, makers[0]))
                continue
            parts = {n: memories[n][slot] if self.stages[n].is_mine else self.stages[n].ghost(slot) for n in makers}
            found.append(self._one(parts, index))
        return found

    def _delivered(self, memories: Sequence[Memory], slot: Slot, maker: int) -> Any:
        """A small result as this process can read it."""
        self._executor.deliver(memories, slot, maker)
        if self.stages[maker].is_mine:
            return memories[maker][slot]
        return next(
            m[Slot(Role.DELIVERED, slot.position)] for m, s in zip(memories, self.stages, strict=True) if s.is_mine
        )


def _argument(index: int) -> Slot:
    return Slot(Role.ARGUMENT, index)


def _accesses(stage: StageProgram, schedule: Schedule) -> dict[Work, Access]:
    if schedule.mode is Mode.INFERENCE:
        return {Work.FORWARD: stage.forward}
    if schedule.splits_backward:
        first, second = stage.backward_halves
        return {Work.FORWARD: stage.forward, Work.BACKWARD_INPUT: first, Work.BACKWARD_WEIGHT: second}
    return {Work.FORWARD: stage.forward, Work.BACKWARD: stage.backward}


def _check_devices(plan: Plan, devices: Sequence[jax.Device]) -> None:
    positions = [d for stage in plan.stages for d in stage.devices]
    if len(devices) <= max(positions):
        raise PlanError(
            refused="the plan", got=f"{len(devices)} devices", needed=f"{max(positions) + 1}, as planned",
            where="plan=", try_="planning again for the devices at hand",
        )  # fmt: skip
