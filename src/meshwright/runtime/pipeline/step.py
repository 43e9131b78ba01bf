"""A plan of several stages made executable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..._jax.context import no_mesh
from ..._jax.jaxpr import open_jaxpr
from ..._jax.trace import Traced, trace
from ...cluster.hardware import compiler_of
from ...errors import PlanError
from ...lowering.pipeline.local_stages import LocalStages
from ...lowering.pipeline.placement import is_small
from ...lowering.pipeline.rows import Rows
from ...lowering.pipeline.slots import Access, Role, Slot
from ...lowering.pipeline.stage_program import StageProgram, stage_mesh
from ...plan import Plan
from ...program.trace import Program
from ...resharding import Network
from ...schedule.schedule import Mode, Schedule
from ..arguments import Arguments
from ..effects import Replay
from ..placing import ghost, put
from ..watch import watch
from .executor import Executor, Memory
from .kept_leaf import Joint, KeptLeaf, joint_sharding, kept_leaf
from .operations import Work, operations
from .stage_runtime import StageRuntime
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
      what: the step and the plan in words, for errors: the same text in all processes.

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
        self.what = "a step"
        self._processes = tuple(sorted({devices[d].process_index for stage in plan.stages for d in stage.devices}))
        meshes = [stage_mesh(stage, [devices[d] for d in stage.devices]) for stage in plan.stages]
        self.local = LocalStages(program, plan, meshes, compiler_of(devices[0].device_kind, devices[0].platform))
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
        self._one_process = len(self._processes) == 1
        naive = LocalTransport() if self._one_process else ProcessTransport()
        between: Transport = naive if transport == "naive" else PlannedTransport(network)
        self._executor = Executor(self.stages, self._around, order, between, plan.microbatches)
        self._arguments = Arguments(program)
        self._kept = [update.kept for update in self.local.updates]
        self._replay = Replay(program)
        self._devices = list(dict.fromkeys(d for stage in self.stages for d in stage.mesh.devices.flat))
        self._donated = {
            slot.position for update in self.local.updates for slot in update.donated(update.rounds[-1])
        }  # fmt: skip
        self._everywhere: dict[int, Joint] = {}

    @cached_property
    def kept_leaves(self) -> list[KeptLeaf | None]:
        """For each argument how it is one array; None for one that is kept in pieces (a batch that is cut into
        microbatches) or not at all. Devices that are only compiled for have none."""
        return [self._leaf(i) for i in range(len(self.program.input_names))]

    @cached_property
    def in_shardings(self) -> tuple[Any, ...]:
        """For each argument of the step how it lies, or None."""
        return tuple(None if leaf is None else leaf.sharding for leaf in self.kept_leaves)

    def _leaf(self, index: int) -> KeptLeaf | None:
        """How an argument that stages keep whole, or in rows, is one array. State lies as it comes back."""
        shardings = {
            n: stage.sharding(_argument(index)) for n, stage in enumerate(self.stages) if self._keeps(n, index)
        }
        if index < self.program.state_inputs:
            made = {n: s for n, s in enumerate(self.stages) if index in s.update.wanted.outputs}
            shardings |= {n: stage.sharding(Slot(Role.OUTPUT, index)) for n, stage in made.items()}
        if not shardings:
            return None
        var, rows = self._around.invars[index], self._rows(index)
        name = self.program.input_names[index]
        return kept_leaf(var.aval.shape, var.aval.dtype, shardings, rows, self._executor, self._devices, name)

    def _keeps(self, number: int, index: int) -> bool:
        return _argument(index) in self._kept[number]

    def __call__(self, *args: Any) -> Any:
        """Run one step on the step's own arguments; what of its state is in `program.donated` is donated."""
        with no_mesh(), watch.call(self.what, self._processes):
            flat = self._arguments(jax.tree.leaves(args))
            parts = [self._parts(leaf, index) for index, leaf in enumerate(flat)]
            memories = [self._memory(number, flat, parts) for number in range(len(self.stages))]
            self._executor.run(memories)
            self._let_go(flat, parts)
            results = self._results(memories)
            self._arguments.remember(results)
            if not self._one_process:
                for metric in results[self.program.state_inputs :][:1]:
                    watch.follow(lambda: f"the end of {self.what}", metric)
            read = self._read_by_effects(memories)
        self._replay(read)
        return jax.tree.unflatten(self.program.out_tree, results)

    def place(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments' leaves, each where the plan wants it; arrays already there are not touched, and so are leaves
        that are only kept in pieces (a batch that is cut into microbatches)."""
        placed = []
        for index, (leaf, kept) in enumerate(zip(flat, self.kept_leaves, strict=True)):
            there = kept is None or (isinstance(leaf, jax.Array) and _lies(leaf, kept.sharding))
            placed.append(leaf if kept is None or there else kept.whole(self._parts(leaf, index)))
        return placed

    def create(self, make_state: Callable[..., Any], *args: Any) -> Any:
        """The state `make_state(*args)`, each leaf created where the plan keeps it and never whole on one device."""
        with no_mesh():
            return self._created(trace(make_state, args), jax.tree.leaves(args))

    def _created(self, make_state: Traced, args: Sequence[Any]) -> Any:
        leaves, tree = jax.tree.flatten(make_state.results)
        kept = self.kept_leaves[: len(leaves)]
        parts: list[dict[int, Any]] = [{} for _ in leaves]
        for number, stage in enumerate(self.stages):
            mine = [i for i, leaf in enumerate(kept) if leaf is not None and number in leaf.shardings]
            shardings = [kept[i].shardings[number] for i in mine]
            if not stage.is_mine:
                for i, sharding in zip(mine, shardings, strict=True):
                    parts[i][number] = ghost(self._part_shape(i, number), leaves[i].dtype, sharding)
                continue

            def some(*inner: Any, mine: Sequence[int] = mine, number: int = number) -> list[Any]:
                made = make_state.run(*inner)
                return [self._part(made[i], number, i) for i in mine]

            for index, array in zip(mine, jax.jit(some, out_shardings=shardings)(*args), strict=True):
                parts[index][number] = array
        return jax.tree.unflatten(tree, [leaf.whole(part) for leaf, part in zip(kept, parts, strict=True)])

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the step's flat arguments."""
        invars = open_jaxpr(self.program.outer).invars
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]

    # Arguments

    def _memory(self, number: int, flat: Sequence[Any], parts: Sequence[Mapping[int, Any]]) -> Memory:
        stage = self.stages[number]
        memory: Memory = {}
        if not stage.is_mine:
            return memory
        for slot in sorted(self._kept[number]):
            memory[slot] = parts[slot.position][number]
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

    def _let_go(self, flat: Sequence[Any], parts: Sequence[Mapping[int, jax.Array]]) -> None:
        """Delete leaves whose buffers were donated: JAX takes one of several buffers for there if its first one is."""
        for index in self._donated:
            leaf, kept = flat[index], self.kept_leaves[index]
            if not isinstance(leaf, jax.Array) or kept is None or not _lies(leaf, kept.sharding):
                continue  # the step had its own copy
            if not leaf.is_deleted() and any(part.is_deleted() for part in parts[index].values()):
                leaf.delete()

    def _host(self, leaf: Any, index: int) -> Any:
        aval = open_jaxpr(self.program.outer).invars[index].aval
        return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, aval.dtype)

    def _parts(self, leaf: Any, index: int) -> dict[int, jax.Array]:
        """What each stage keeps of a leaf, on its mesh."""
        kept = self.kept_leaves[index]
        if kept is None:
            return {}
        donated = index in self._donated
        if isinstance(leaf, jax.Array):
            if getattr(leaf, "weak_type", False):  # would be another signature, and compile programs again
                leaf = jax.lax.convert_element_type(leaf, leaf.dtype)
            if _lies(leaf, kept.sharding):
                return kept.parts(leaf, donated=donated)
            self._check_within_reach(leaf, kept.sharding, index)
        whole = self._host(leaf, index)
        parts: dict[int, jax.Array] = {}
        for number, sharding in kept.shardings.items():
            if not self.stages[number].is_mine:
                parts[number] = ghost(self._part_shape(index, number), whole.dtype, sharding)
                continue
            placed = put(self._part(whole, number, index), sharding)
            # Stages on the same devices take over a buffer each.
            shared = any(sharding.device_set & kept.shardings[other].device_set for other in parts)
            parts[number] = jax.numpy.copy(placed) if shared else placed
        return parts

    def _check_within_reach(self, leaf: jax.Array, sharding: NamedSharding, index: int) -> None:
        """Refuse an array of which this process has a part only: a step moves no arguments between processes."""
        if not leaf.is_fully_addressable:
            name = self.program.input_names[index]
            raise PlanError(
                refused="an argument of the step", got=f"{name}, shared by several processes as {leaf.sharding}",
                needed=f"what this plan keeps, {sharding}, or an array that each process has "
                "whole: a step moves no arguments between processes", where=name,
                try_="the state that step.init made; or meshwright.reshard(state, shardings) with those of "
                "step.abstract_state, which moves the state of another plan",
            )  # fmt: skip

    def _part_shape(self, index: int, number: int) -> tuple[int, ...]:
        return self._around.shape(self._around.invars[index], number)

    def _rows(self, index: int) -> Rows | None:
        """The rows of an argument that lie on several stages."""
        return self._around.rows.get(self._around.invars[index])

    def _part(self, x: Any, number: int, index: int) -> Any:
        """What a stage has of an argument."""
        rows = self._rows(index)
        return x if rows is None else rows.take(x, number)

    # Results

    def _results(self, memories: Sequence[Memory]) -> list[Any]:
        found = []
        for index in range(self.program.out_tree.num_leaves):
            slot = Slot(Role.OUTPUT, index)
            makers = [n for n, stage in enumerate(self.stages) if index in stage.update.wanted.outputs]
            if not self._one_process and index >= self.program.state_inputs and is_small(self._around.outvars[index]):
                found.append(self._delivered(memories, slot, makers[0]))
                continue
            # What is moved is not needed where it came from.
            parts = {n: memories[n].pop(slot) if self.stages[n].is_mine else self.stages[n].ghost(slot) for n in makers}
            kept = self.kept_leaves[index] if index < self.program.state_inputs else None
            found.append(parts[makers[0]] if kept is None else kept.whole(parts))
        return found

    def _read_by_effects(self, memories: Sequence[Memory]) -> list[Any]:
        """What the effects of the step read, whole on devices of process 0, which runs them; nothing in others."""
        first = self.program.out_tree.num_leaves
        here = [any(d.process_index == 0 for d in stage.mesh.devices.flat) for stage in self.stages]
        home, found = here.index(True), []
        for index in range(first, first + self._replay.count):
            slot, delivered = Slot(Role.OUTPUT, index), Slot(Role.DELIVERED, index)
            parts: dict[int, jax.Array] = {}
            for maker in (n for n, stage in enumerate(self.stages) if index in stage.update.wanted.outputs):
                if not here[maker]:
                    self._executor.deliver(memories, slot, maker, to=[home])
                if jax.process_index() == 0:
                    array = memories[maker][slot] if here[maker] else memories[home].pop(delivered)
                    parts[maker] = array.addressable_data(0)
            if parts:
                found.append(_whole(parts, self._around.rows_of(self._around.outvars[index])))
        return found

    def _delivered(self, memories: Sequence[Memory], slot: Slot, maker: int) -> Any:
        """A small result, replicated over all devices, so that every process can read it."""
        self._executor.deliver(memories, slot, maker)
        if slot.position not in self._everywhere:
            aval = self.stages[maker].update.global_shape(slot)
            shardings = {n: NamedSharding(stage.mesh, PartitionSpec()) for n, stage in enumerate(self.stages)}
            joint = joint_sharding(aval.shape, shardings)
            assert joint is not None
            self._everywhere[slot.position] = Joint(aval.shape, aval.dtype, shardings, None, joint)
        whole = Slot(Role.DELIVERED, slot.position)
        kept = self._everywhere[slot.position]
        return kept.whole({n: memory[whole] for n, memory in enumerate(memories) if self.stages[n].is_mine})


def _lies(leaf: jax.Array, sharding: NamedSharding) -> bool:
    return leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def _whole(parts: Mapping[int, jax.Array], rows: Rows | None) -> jax.Array:
    """An array on one device, of what stages have of it: all, or some rows each."""
    if rows is None:
        return next(iter(parts.values()))
    first, *more = [parts[stage] for stage, _, _ in sorted(rows.parts, key=lambda part: part[1])]
    (device,) = first.devices()
    return jax.numpy.concatenate([first, *jax.device_put(more, device)], axis=rows.dim)


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
