"""One stage as programs of one device: forward, backward, and where a schedule wants them apart its two halves.

The stage's equations are evaluated on shards by the plan, as for a plan of one stage, and differentiated by JAX in one
trace: `(parameters, inputs, received, cotangents) -> (sent, outputs, cotangents of what was received, gradients)`. That
program is then cut (`_jax.passes`): what does not depend on cotangents and is needed for what the stage sends is the
forward program, the rest the backward program, with as few bytes between them as can be. Cutting the backward program
once more, by what the cotangents of the received values need, gives the two halves of zero-bubble schedules.

Gradients are added up on each device and stay partial; they are synchronised once a step (`update_program`).

Nothing here needs a device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ..._jax.accumulate import accumulate_in_scans
from ..._jax.jaxpr import ClosedJaxpr, open_jaxpr
from ..._jax.passes import Halves, least_effort_first, part_of, size_bytes, split_program, trace_local
from ..._jax.reverse import vjp
from ...errors import PlanError
from ...plan import ParameterPlan, Plan, Stage
from ...program.cut import Cut
from ...program.microbatch_rows import MicrobatchRows, rows_of_microbatch
from ...program.reduction import Reduction
from ...program.staged import StagedProgram
from ...sharding import Spec
from ..evaluate import ShardedProgram
from ..local_value import LocalValue
from ..microbatches import combined, grown_dims, reduction_of, share_of_loss, summed_spec, to_be_added
from ..plan_of_program import algorithms_of, segments_of, settled_of
from .slots import Access, Role, Slot
from .stage_jaxpr import stage_jaxpr


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Access):
    """A program of one device; `program` is what it computes."""

    program: ClosedJaxpr


class StageProgram:
    """What one stage of a plan computes.

    Args:
      staged: the program, its scans split as the plan says.
      plan: for it.
      number: of the stage.
      mesh: its mesh; None for one without devices, whose programs can be looked at and not be compiled.
      asynchronous: whether each microbatch has an update of its own: gradients and results are then not added up.

    Raises:
      PlanError: the plan's transfers to this stage are not what it reads.

    Attributes:
      cut: the stage's equations as a graph.
      stage: its part of the plan.
      microbatches: of a step.
      own: those of them that the stage runs: all, or a replica's share.
      asynchronous: as given.
      sent: pairs of a value that is sent and the stage that reads it.
      source_of: for each received value the stage it comes from.
      specs: of every slot but those that are packed.
    """

    def __init__(
        self, staged: StagedProgram, plan: Plan, number: int, mesh: Mesh | None = None, *, asynchronous: bool = False
    ) -> None:
        self.stage: Stage = plan.stages[number]
        self.mesh = mesh if mesh is not None else abstract_mesh(self.stage)
        assert self.stage.equations is not None
        self.number = number
        self.asynchronous = asynchronous
        self._staged = staged
        self.microbatches = plan.microbatches
        first = sum(plan.shares[:number])
        self.own = range(first, first + plan.microbatches_of(number))
        self.cut: Cut = staged.cutter.cut(*self.stage.equations)
        self.sizes = self.stage.sizes
        _check_transfers(staged, plan, number, self.cut)
        self.sent = tuple((t.value, t.target) for t in plan.transfers if t.source == number)
        self.source_of = {t.value: t.source for t in plan.transfers if t.target == number}
        self._closed, self._positions = stage_jaxpr(staged, self.cut)
        self._sharded = self._sharded_program()
        self.specs = self._slot_specs()

    # What it is made of

    def _sharded_program(self) -> ShardedProgram:
        stage, graph = self.stage, self.cut.graph
        values = {whole: mine for mine, whole in enumerate(self.cut.values)}
        return ShardedProgram(
            self._closed,
            graph,
            self._staged.rules,
            algorithms_of(graph, stage, self.number),
            {values[v]: spec for v, spec in settled_of(self._staged.graph, stage, self.number).items() if v in values},
            self.sizes,
            segments_of(graph, stage, self.number),
            positions=self._positions,
        )

    @cached_property
    def parameters(self) -> tuple[Slot, ...]:
        """One for each parameter, in the order of the plan's stage."""
        return tuple(Slot(Role.PARAMETER, i) for i in range(len(self.cut.parameters)))

    @cached_property
    def inputs(self) -> tuple[Slot, ...]:
        """One for each input of the program that the stage reads."""
        return tuple(Slot(Role.INPUT, i) for i in range(len(self.cut.program_inputs)))

    @cached_property
    def received(self) -> tuple[Slot, ...]:
        """One for each value that another stage sends."""
        return tuple(Slot(Role.RECEIVED, value) for value in self.cut.received)

    @cached_property
    def gradients(self) -> tuple[Slot, ...]:
        """One for each parameter."""
        return tuple(Slot(Role.GRADIENT, slot.position) for slot in self.parameters)

    @cached_property
    def sums(self) -> tuple[Slot, ...]:
        """The losses and auxiliary results of which there is one for all microbatches."""
        return tuple(Slot(Role.SUM, i) for i in self.cut.program_outputs if not self._is_collected(i))

    @cached_property
    def collected(self) -> tuple[Slot, ...]:
        """The results of which each microbatch keeps its own: those that grow with the batch; asynchronously all."""
        return tuple(Slot(Role.COLLECTED, i) for i in self.cut.program_outputs if self._is_collected(i))

    def _is_collected(self, output: int) -> bool:
        return self.asynchronous or self.grown[output] is not None

    @cached_property
    def grown(self) -> tuple[int | None, ...]:
        """For each output of the core the dim that grows with the batch, or None."""
        return grown_dims(self._staged.source)

    def reduction(self, slot: Slot) -> Reduction:
        """How a sum's microbatches combine."""
        return reduction_of(self._staged.source, slot.position)

    @cached_property
    def cotangents(self) -> tuple[Slot, ...]:
        """One for each differentiated value and stage it is sent to."""
        values = self._staged.graph.values
        return tuple(Slot(Role.COTANGENT, v, target) for v, target in self.sent if values[v].differentiated)

    def stacked_dim(self, slot: Slot) -> int | None:
        """The dim of a program input that microbatches cut, or None: all of its microbatches are stacked in front."""
        dims = self._staged.split_dims
        position = self.cut.program_inputs[slot.position]
        return dims[position] if self.microbatches > 1 and position < len(dims) else None

    def _slot_specs(self) -> dict[Slot, Spec]:
        stage = self.stage
        specs = {slot: Spec(plan.use.dims) for slot, plan in zip(self.parameters, stage.parameters, strict=True)}
        others = dict(zip((*self.inputs, *self.received), stage.inputs, strict=True))
        for slot, plan in others.items():
            dims = plan.spec.dims
            stacked = slot.role is Role.INPUT and self.stacked_dim(slot) is not None
            specs[slot] = Spec(((), *dims)) if stacked else Spec(dims)
        specs[Slot(Role.INDEX)] = Spec(())
        made = self._output_specs()
        for value, spec in zip(self.cut.graph.outputs, made, strict=True):
            assert value is not None
            specs[Slot(Role.SENT, self.cut.values[value])] = Spec(spec.dims)
        for slot in self.received:
            specs[Slot(Role.RETURNED, slot.position)] = specs[slot]
        for slot in self.cotangents:
            specs[slot] = specs[Slot(Role.SENT, slot.position)]
        for slot in (*self.sums, *self.collected):
            value = self._staged.graph.outputs[slot.position]
            assert value is not None
            specs[slot] = specs[Slot(Role.SENT, value)]
        return specs

    def _uses(self) -> list[Spec]:
        """The spec in which the program takes each of its inputs."""
        return [*(plan.use for plan in self.stage.parameters), *(plan.spec for plan in self.stage.inputs)]

    def _output_specs(self) -> list[Spec]:
        return [Spec(spec.dims) for spec in self._sharded.output_specs(self._uses())]

    # Shapes

    def global_shape(self, slot: Slot) -> jax.ShapeDtypeStruct:
        """Shape of a slot that is not packed."""
        aval = self._aval(slot)
        shape = tuple(aval.shape)
        if slot.role is Role.INPUT and self.stacked_dim(slot) is not None:
            shape = (len(self.own), *shape)
        return jax.ShapeDtypeStruct(shape, aval.dtype)

    def local_shape(self, slot: Slot) -> jax.ShapeDtypeStruct:
        """Shape of one device's block."""
        if slot.role is Role.GRADIENT:
            whole, plan = self._aval(Slot(Role.PARAMETER, slot.position)), self.stage.parameters[slot.position]
            return jax.ShapeDtypeStruct(self.gradient_spec(plan).local_shape(whole.shape, self.sizes), whole.dtype)
        if slot.role is Role.RESIDUAL:
            return self._residual_shape(slot)
        whole = self.global_shape(slot)
        return jax.ShapeDtypeStruct(self.specs[slot].local_shape(whole.shape, self.sizes), whole.dtype)

    def gradient_spec(self, plan: ParameterPlan) -> Spec:
        """In which a gradient leaves the stage, or is added up."""
        return Spec(plan.use.dims, partial=plan.use.broadcast) if self.asynchronous else summed_spec(plan)

    def _residual_shape(self, slot: Slot) -> jax.ShapeDtypeStruct:
        made = self.forward if slot in self.forward.outputs else self.backward_halves[0]
        aval = open_jaxpr(made.program).outvars[made.outputs.index(slot)].aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def _aval(self, slot: Slot) -> Any:
        jaxpr = open_jaxpr(self._closed)
        match slot.role:
            case Role.PARAMETER:
                return jaxpr.invars[slot.position].aval
            case Role.INPUT:
                return jaxpr.invars[len(self.parameters) + slot.position].aval
            case Role.RECEIVED | Role.RETURNED:
                first = len(self.parameters) + len(self.inputs)
                return jaxpr.invars[first + self.cut.received.index(slot.position)].aval
            case Role.INDEX:
                return jax.ShapeDtypeStruct((), jnp.int32)
        value = self._output_value(slot)
        return jaxpr.outvars[self.cut.graph.outputs.index(self.cut.values.index(value))].aval

    def _output_value(self, slot: Slot) -> int:
        if slot.role in (Role.SUM, Role.COLLECTED):
            value = self._staged.graph.outputs[slot.position]
            assert value is not None
            return value
        return slot.position

    # The trace

    @cached_property
    def _moving_received(self) -> tuple[Slot, ...]:
        values = self._staged.graph.values
        return tuple(slot for slot in self.received if values[slot.position].differentiated)

    @cached_property
    def _groups(self) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
        """What the whole program reads and writes."""
        inputs = (
            *self.parameters, *self.inputs, Slot(Role.INDEX), *self.received, *self.sums, *self.cotangents,
            Slot(Role.SEED), *self.gradients,
        )  # fmt: skip
        sent = tuple(Slot(Role.SENT, value) for value in self.cut.sent)
        returned = tuple(Slot(Role.RETURNED, slot.position) for slot in self._moving_received)
        return inputs, (*sent, *self.collected, *self.sums, *returned, *self.gradients)

    @cached_property
    def _whole(self) -> ClosedJaxpr:
        inputs, outputs = self._groups
        seed = jax.ShapeDtypeStruct((), jnp.float32)

        def local(*shards: Any) -> list[Any]:
            made = self._evaluate(dict(zip(inputs, shards, strict=True)))
            return [made[slot] for slot in outputs]

        return trace_local(local, [seed if s.role is Role.SEED else self.local_shape(s) for s in inputs], self.mesh)

    def _evaluate(self, given: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """Both passes on one device."""
        values = self.cut.values
        out_of = {values[v]: i for i, v in enumerate(self.cut.graph.outputs) if v is not None}
        moving_values = [v for v in out_of if self._is_pulled(v)]
        specs, made_specs = self._uses(), self._output_specs()
        inputs = [self._microbatch(slot, given) for slot in self.inputs]

        def run(parameters: Sequence[Any], moving: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            back = dict(zip(self._moving_received, moving, strict=True))
            received = [self._received(slot, back.get(slot, given[slot])) for slot in self.received]
            outs = self._sharded([*parameters, *inputs, *received], specs, made_specs)
            return [outs[out_of[v]] for v in moving_values], outs

        parameters = [given[slot] for slot in self.parameters]
        moving = [given[slot] for slot in self._moving_received]
        with rows_of_microbatch(MicrobatchRows(number=given[Slot(Role.INDEX)], count=self.microbatches)):
            results, pull, outs = vjp(run, parameters, moving)
        found = {Slot(Role.SENT, v): outs[out_of[v]] for v in self.cut.sent}
        for slot in self.collected:
            found[slot] = outs[out_of[self._output_value(slot)]]
        for slot in self.sums:
            out = outs[out_of[self._output_value(slot)]]
            place = given[Slot(Role.INDEX)] - self.own.start
            found[slot] = combined(self.reduction(slot), place, given[slot], out)
        gradients, back = pull([self._cotangent(v, x, given) for v, x in zip(moving_values, results, strict=True)])
        for slot, plan, gradient in zip(self.gradients, self.stage.parameters, gradients, strict=True):
            if self.asynchronous:
                found[slot] = gradient
            else:
                found[slot] = given[slot] + to_be_added(gradient, plan, self.sizes)
        for slot, cotangent in zip(self._moving_received, back, strict=True):
            found[Slot(Role.RETURNED, slot.position)] = cotangent
        return found

    def _is_pulled(self, value: int) -> bool:
        """Whether a cotangent comes back for an output."""
        is_loss = self._staged.source.marked and value == self._staged.graph.outputs[0]
        return is_loss or any(slot.position == value for slot in self.cotangents)

    def _cotangent(self, value: int, out: Any, given: Mapping[Slot, Any]) -> Any:
        """The cotangent of an output: the sum of what its readers send back, and one for the loss."""
        parts = [given[slot] for slot in self.cotangents if slot.position == value]
        if self._staged.source.marked and value == self._staged.graph.outputs[0]:
            # An asynchronous microbatch is a batch of its own.
            share = 1.0 if self.asynchronous else share_of_loss(self._staged.source)
            parts.append(given[Slot(Role.SEED)].astype(out.dtype) * jnp.asarray(share, out.dtype))
        return sum(parts[1:], parts[0])

    def _received(self, slot: Slot, shard: Any) -> Any:
        """A value as it arrived, in the spec the plan has for it."""
        plan = self.stage.inputs[len(self.inputs) + self.cut.received.index(slot.position)]
        differentiated = self._staged.graph.values[slot.position].differentiated
        return LocalValue(shard, Spec(plan.spec.dims), self.sizes, differentiated=differentiated).read(plan.spec)

    def _microbatch(self, slot: Slot, given: Mapping[Slot, Any]) -> Any:
        """A program input of the microbatch: of the batch its part."""
        x = given[slot]
        if self.stacked_dim(slot) is None:
            return x
        return lax.dynamic_index_in_dim(x, given[Slot(Role.INDEX)] - self.own.start, keepdims=False)

    # The programs

    @cached_property
    def _halves(self) -> tuple[Piece, Piece]:
        inputs, outputs = self._groups
        late = (Role.COTANGENT, Role.SEED, Role.GRADIENT)
        whole = Piece(program=self._whole, inputs=inputs, outputs=outputs)
        early = [slot for slot in outputs if slot.role not in (Role.RETURNED, Role.GRADIENT)]
        return _cut(whole, early, [slot for slot in inputs if slot.role in late])

    def kept_bytes(self) -> int:
        """Bytes on one device that a microbatch in flight keeps from its forward to its backward pass."""
        kept = [s for s in self.backward.inputs if s.role in (Role.RESIDUAL, Role.RECEIVED)]
        return sum(size_bytes(self.local_shape(slot)) for slot in kept)

    @property
    def forward(self) -> Piece:
        """What it sends, and its sums with this microbatch added."""
        return self._halves[0]

    @cached_property
    def backward(self) -> Piece:
        """The cotangents of what it received, and its gradients with this microbatch added."""
        piece = _in_order_of_effort(self._halves[1])
        program = accumulate_in_scans(piece.program, lambda function, avals: trace_local(function, avals, self.mesh))
        return piece if program is None else replace(piece, program=program)

    @cached_property
    def backward_halves(self) -> tuple[Piece, Piece]:
        """The cotangents of what it received alone, and the gradients."""
        # Gradients that are added up in a scan could not come later than the cotangents that it makes.
        backward = self._halves[1]
        returned = [slot for slot in backward.outputs if slot.role is Role.RETURNED]
        early, late = _cut(backward, returned, [slot for slot in backward.inputs if slot.role is Role.GRADIENT])
        return early, _in_order_of_effort(late)


def _cut(piece: Piece, first: Sequence[Slot], late: Sequence[Slot]) -> tuple[Piece, Piece]:
    jaxpr = open_jaxpr(piece.program)
    sizes = [
        0 if slot.role in (Role.PARAMETER, Role.INPUT, Role.INDEX) else max(1, size_bytes(var.aval))
        for slot, var in zip(piece.inputs, jaxpr.invars, strict=True)
    ]
    halves: Halves = split_program(
        piece.program,
        first=[piece.outputs.index(slot) for slot in first],
        late=[piece.inputs.index(slot) for slot in late],
        input_bytes=sizes,
    )
    known = sum(slot.role is Role.RESIDUAL for slot in piece.inputs)
    handed = tuple(Slot(Role.RESIDUAL, known + i) for i in range(halves.residuals))
    return (
        Piece(
            program=halves.first,
            inputs=tuple(piece.inputs[i] for i in halves.first_inputs),
            outputs=(*first, *handed),
        ),
        Piece(
            program=halves.second,
            inputs=(*handed, *(piece.inputs[i] for i in halves.second_inputs)),
            outputs=tuple(slot for slot in piece.outputs if slot not in first),
        ),
    )


def _in_order_of_effort(piece: Piece) -> Piece:
    """The same with the outputs that need the fewest equations first. XLA looks at the order in which a walk from the
    outputs leaves equations, the first output first: gradients of weights are then computed as soon as they can be,
    and not after all cotangents, which would have to wait for them. What is donated stands in the order of the outputs
    that take its place, as JAX pairs them."""
    jaxpr = open_jaxpr(piece.program)
    order = least_effort_first(piece.program)
    outputs = tuple(piece.outputs[place] for place in order)
    given = dict(zip(piece.inputs, jaxpr.invars, strict=True))
    moved = iter([slot for slot in outputs if slot in given])
    kept = set(piece.outputs)
    inputs = tuple(next(moved) if slot in kept else slot for slot in piece.inputs)
    program = part_of(
        piece.program, jaxpr.eqns, [given[slot] for slot in inputs], [jaxpr.outvars[place] for place in order]
    )
    return Piece(program=program, inputs=inputs, outputs=outputs)


def stage_mesh(stage: Stage, devices: Sequence[jax.Device]) -> Mesh:
    """A stage's mesh; one axis of size one where the plan names none.

    Args:
      stage: of the plan.
      devices: of the stage, in the mesh's row-major order.
    """
    names, sizes = _axes(stage)
    grid = np.array(devices, dtype=object).reshape(sizes)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def abstract_mesh(stage: Stage) -> AbstractMesh:
    """A stage's mesh without devices."""
    names, sizes = _axes(stage)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def _axes(stage: Stage) -> tuple[tuple[str, ...], tuple[int, ...]]:
    axes = stage.mesh or (("device", 1),)
    return tuple(name for name, _ in axes), tuple(size for _, size in axes)


def _check_transfers(staged: StagedProgram, plan: Plan, number: int, cut: Cut) -> None:
    """Refuse a plan in which a stage sends what it does not compute, or does not get what it reads."""
    ends = [stage.equations[1] for stage in plan.stages if stage.equations is not None]
    needed = {(bisect_right(ends, staged.cutter.made_at[value]), value) for value in cut.received}
    planned = {(t.source, t.value) for t in plan.transfers if t.target == number}
    for transfer in plan.transfers:
        if transfer.source == number and transfer.value not in cut.sent:
            raise PlanError(
                refused="the plan", got=f"a transfer of value {transfer.value} from stage {number + 1}",
                needed=f"values that the stage computes and later ones read: {', '.join(map(str, cut.sent)) or 'none'}",
                where=f"transfers, stage {number + 1} of {len(plan.stages)}",
                try_="the transfers as planned, or planning again",
            )  # fmt: skip
    for source, value in sorted(needed ^ planned):
        said = "a transfer of" if (source, value) in planned else "no transfer of"
        wanted = ", ".join(f"value {v} from stage {s + 1}" for s, v in sorted(needed)) or "none"
        raise PlanError(
            refused="the plan", got=f"{said} value {value} from stage {source + 1} to stage {number + 1}",
            needed=f"a transfer of each value that the stage reads and other stages compute: {wanted}",
            where=f"transfers, stage {number + 1} of {len(plan.stages)}",
            try_="the transfers as planned, or planning again",
        )  # fmt: skip
