"""A plan applied to a program: the whole step as one device runs it.

The step runs inside one fully manual `shard_map`. The core has the plan's algorithms and collectives; what surrounds it
(preprocessing, the optimizer) is split the way the arrays it reads are, which the layouts of the state tie down at both
ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .._jax.accumulate import accumulate_in_scans
from .._jax.barriers import barriers_hold
from .._jax.convolutions import with_fast_convolutions
from .._jax.gathered_again import gather_again
from .._jax.grad import value_and_grad_p
from .._jax.jaxpr import ClosedJaxpr, eliminate_dead_code, open_jaxpr
from .._jax.liveness_adapter import dataflow_of
from .._jax.random import is_key
from .._jax.rewrite import Pass, rewriting
from ..errors import PlanError
from ..memory.liveness import PredictedMemory, predict
from ..plan import Plan, Stage
from ..program.microbatch_rows import MicrobatchRows, rows_of_microbatch
from ..program.trace import Program
from ..sharding import Spec
from .collectives import gradients_are_added_up, run_centrally, run_together
from .evaluate import ShardedProgram
from .follow import Follower
from .layouts import fitting
from .local_value import LocalValue, planned_conversion
from .microbatches import (
    combined,
    finished,
    grown_dims,
    nothing_added,
    reduction_of,
    share_of_loss,
    summed_spec,
    to_be_added,
)
from .plan_of_program import algorithms_of, check_program, segments_of, settled_of


class LocalStep:
    """A step split by a plan, without devices.

    Args:
      program: the traced step.
      plan: for this program.

    Attributes:
      in_specs: of the step's flat arguments.
      out_specs: of its flat results.

    Raises:
      PlanError: if the plan is for another program.
    """

    def __init__(self, program: Program, plan: Plan) -> None:
        _check(program, plan)
        self.program = program
        self.plan = plan
        self._stage = plan.stages[0]
        self._check_pieces()
        self._sharded = _sharded_program(program, self._stage)
        self.in_specs = self._input_specs()
        self.out_specs = self._output_specs()

    def _check_pieces(self) -> None:
        """Refuse microbatches that take groups of examples apart, of which the loss makes one number.

        A microbatch is made of a piece of each block of the batch; a pair of neighbours has to be in one piece.
        """
        program = self.program
        if program.microbatches == 1 or program.piece == 0:
            return
        blocks = self._blocks(self._batch_axes())
        if program.piece % (program.microbatches * blocks):
            fewer = math.gcd(program.piece // blocks, program.microbatches) if program.piece % blocks == 0 else 1
            raise PlanError(
                refused=f"microbatches={program.microbatches}",
                got=f"a loss of {program.piece} groups of neighbouring examples, of a batch that is cut into "
                f"{program.microbatches * blocks} pieces ({blocks} on devices, {program.microbatches} in time)",
                needed="pieces of whole groups", where="the loss function",
                try_=f'microbatches={fewer}, or meshwright.value_and_grad(..., reduction="{program.reduction}") to let '
                "groups be of whichever examples are neighbours in a microbatch",
            )  # fmt: skip

    def _input_specs(self) -> list[Spec]:
        program, stage = self.program, self._stage
        specs: list[Spec] = []
        consts = {source: plan.spec for source, plan in zip(program.core_inputs, stage.inputs, strict=True)}
        for index, var in enumerate(open_jaxpr(program.outer).invars):
            spec = Spec.replicated(var.aval.ndim if not is_key(var.aval) else len(var.aval.shape))
            if index in program.parameter_inputs:
                spec = Spec(stage.parameters[program.parameter_inputs.index(index)].use.dims)
            elif index < program.state_inputs and (leaf := program.state[index]) is not None:
                storage = stage.parameters[leaf.parameter].storage
                dims = tuple(storage.dims[d] if d is not None else () for d in leaf.dims)
                spec = fitting(dims, var.aval.shape, stage.sizes)
            elif index in consts:
                spec = consts[index]
            specs.append(spec)
        return specs

    def on(self, mesh: Mesh | AbstractMesh, platform: str | None = None) -> Callable[..., tuple[Any, ...]]:
        """The step as a function of its flat arguments on a mesh of the plan's axes.

        Args:
          mesh: of the plan's axes.
          platform: of its devices; that of the mesh's own if not given.
        """
        if platform is None and isinstance(mesh, Mesh):
            platform = mesh.devices.flat[0].platform
        return jax.shard_map(
            lambda *shards: tuple(
                v.read(s) for v, s in zip(self._local(shards, platform), self.out_specs, strict=True)
            ),
            mesh=mesh,
            in_specs=tuple(partition(s) for s in self.in_specs),
            out_specs=tuple(partition(s) for s in self.out_specs),
            check_vma=False,
        )

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the step's flat arguments."""
        invars = open_jaxpr(self.program.outer).invars
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]

    def abstract_mesh(self) -> AbstractMesh:
        """The plan's mesh without devices."""
        names, sizes = zip(*self._stage.mesh, strict=True)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def predicted_memory(self, platform: str = "cpu") -> PredictedMemory:
        """Peak memory of one device, from the traced step: nothing is compiled, no device is needed. What is kept in
        the host's memory counts while the step has it on the device.

        Args:
          platform: of the devices, as `Device.compiler`.
        """
        step = jax.jit(self.on(self.abstract_mesh(), platform))
        program = self.program
        return predict(
            dataflow_of(
                step, *self.avals(), donate_argnums=sorted(program.donated), platform=platform,
                host_inputs=program.host_inputs, host_outputs=program.host_outputs,
            )
        )  # fmt: skip

    def _output_specs(self) -> list[Spec]:
        """State leaves as it came; what effects read is whole on every device; the rest in whatever layout it has at
        the end."""
        program, sizes = self.program, self._stage.sizes
        carried = self.in_specs[: program.state_inputs]
        if not program.marked:
            return [*carried, *self._whole_specs()[program.state_inputs :]]
        found: list[Spec] = []
        results = eliminate_dead_code(program.outer, first_output=program.state_inputs)

        def skeleton(equation: Any, values: Sequence[LocalValue]) -> Sequence[LocalValue] | None:
            """The core's results without its work: only their layouts matter here."""
            del values
            if equation.primitive is not value_and_grad_p:
                return None
            blocks = [
                jnp.zeros(spec.local_shape(var.aval.shape, sizes), var.aval.dtype)
                for var, spec in zip(equation.outvars, self._core_specs(), strict=True)
            ]
            return [LocalValue(x, s, sizes) for x, s in zip(blocks, self._core_specs(), strict=True)]

        def trace(*shards: Any) -> list[Any]:
            operands = [LocalValue(x, s, sizes) for x, s in zip(shards, self.in_specs, strict=True)]
            follower = Follower(program.rules, sizes, skeleton)
            made = follower.program(results, operands)
            found[:] = self._with_whole_effects([Spec(v.spec.dims) for v in made])
            return [v.read(s) for v, s in zip(made, found, strict=True)]

        in_specs = tuple(partition(s) for s in self.in_specs)
        probe = jax.shard_map(
            trace, mesh=self.abstract_mesh(), in_specs=in_specs, out_specs=PartitionSpec(), check_vma=False
        )
        jax.eval_shape(probe, *self.avals())
        return [*carried, *found]

    def _whole_specs(self) -> list[Spec]:
        """Output specs of a program that is planned whole."""
        inputs = [plan.spec for plan in self._stage.inputs]
        outs = [Spec(s.dims) for s in self._sharded.output_specs(inputs)]
        outs[: self.program.state_inputs] = inputs[: self.program.state_inputs]
        return self._with_whole_effects(outs)

    def _with_whole_effects(self, specs: list[Spec]) -> list[Spec]:
        """Specs of the step's last results, those that effects read made whole."""
        first = len(specs) - self.program.effects.count
        return [*specs[:first], *(Spec.replicated(len(spec.dims)) for spec in specs[first:])]

    def _core_specs(self) -> list[Spec]:
        """Specs of the core's results: loss, auxiliary results, then gradients in storage layout."""
        stage = self._stage
        inputs = [*(plan.spec for plan in stage.inputs), *(plan.use for plan in stage.parameters)]
        made = [Spec(s.dims) for s in self._sharded.output_specs(inputs)]
        if self.program.microbatches > 1:
            # Stacked results are put in order along the batch, so they are split as it is or not at all.
            batch = self._batch_axes()
            for i, dim in enumerate(self._grown(), start=1):
                if dim is not None and made[i].dims[dim] != batch[: len(made[i].dims[dim])]:
                    made[i] = Spec((*made[i].dims[:dim], (), *made[i].dims[dim + 1 :]))
        return [*made, *(plan.storage for plan in stage.parameters)]

    def _grown(self) -> tuple[int | None, ...]:
        """For each auxiliary result, the dim that grows with the batch."""
        return grown_dims(self.program)[1:]

    def _local(self, shards: Sequence[Any], platform: str | None) -> list[LocalValue]:
        """The whole step on one device's shards."""
        program, sizes = self.program, self._stage.sizes
        operands = [LocalValue(x, s, sizes) for x, s in zip(shards, self.in_specs, strict=True)]
        if not program.marked:
            inputs, outs = [plan.spec for plan in self._stage.inputs], self._whole_specs()
            made = self._sharded([v.read(s) for v, s in zip(operands, inputs, strict=True)], inputs, outs)
            return [LocalValue(x, s, sizes) for x, s in zip(made, outs, strict=True)]

        def take_over(equation: Any, values: Sequence[LocalValue]) -> Sequence[LocalValue] | None:
            return self._value_and_grad(values, platform) if equation.primitive is value_and_grad_p else None

        return Follower(program.rules, sizes, take_over).program(program.outer, operands)

    def _value_and_grad(self, operands: Sequence[LocalValue], platform: str | None) -> list[LocalValue]:
        """Loss, auxiliary results and gradients; gradients leave in their storage specs."""
        program, stage, sizes = self.program, self._stage, self._stage.sizes
        n = program.num_consts
        const_specs = [plan.spec for plan in stage.inputs]
        uses = [plan.use for plan in stage.parameters]
        storages = [plan.storage for plan in stage.parameters]
        shards = [v.read(Spec(s.dims)) for v, s in zip(operands, [*const_specs, *uses], strict=True)]
        made = self._core_specs()[: len(open_jaxpr(program.core).outvars)]
        left = self._left_specs(made, [*const_specs, *uses])
        share, holds = share_of_loss(program), platform is None or barriers_hold(platform)

        def microbatch(consts: Sequence[Any], parameters: Sequence[Any]) -> tuple[Any, list[Any], Any]:
            def loss(*leaves: Any) -> tuple[Any, list[Any]]:
                out = self._sharded([*consts, *leaves], [*const_specs, *uses], left)
                return out[0] if share == 1 else out[0] * jnp.asarray(share, out[0].dtype), out[1:]

            value, pull, aux = jax.vjp(loss, *parameters, has_aux=True)
            seed = jnp.ones_like(value)
            if holds:
                # The backward pass waits for the loss and what comes with it. XLA's TPU and GPU compilers read the
                # labels' logits for it last otherwise, and keep all logits until then (gpt3-1.3b as a scan on 8 v5e,
                # layers computed again: 7.0 GiB instead of 5.4; gpt3-125m as a scan on 8 A100: 20.9 instead of 19.2).
                value, aux, seed = lax.optimization_barrier((value, aux, seed))
            return value, aux, pull(seed)

        convolves = any(operator.name == "conv_general_dilated" for operator in program.graph.operators)
        if platform == "cpu" and convolves:
            microbatch = with_fast_convolutions(microbatch)
        passes: list[Pass] = [gather_again] if holds else []
        consts, parameters = shards[:n], shards[n:]
        if program.microbatches == 1:
            value, aux, grads = rewriting(microbatch, passes)(consts, parameters)
            grads = [to_be_added(g, plan, sizes) for g, plan in zip(grads, stage.parameters, strict=True)]
        else:
            value, aux, grads = self._accumulate(microbatch, consts, parameters, passes)
        # One synchronisation a step: gradients are partial over the axes they were broadcast over.
        have = [*left, *map(summed_spec, stage.parameters)]
        conversions = []
        for source, target in zip(have, [*made, *storages], strict=True):
            conversions.append(planned_conversion(source, target))
        results = [value, *aux]
        if stage.gradient_exchange == "central":
            own, summed = conversions[: len(results)], conversions[len(results) :]
            synchronised = run_together(results, own, sizes) + run_centrally(grads, summed, sizes)
        else:
            synchronised = run_together([*results, *grads], conversions, sizes)
        return [LocalValue(x, s, sizes) for x, s in zip(synchronised, [*made, *storages], strict=True)]

    def _left_specs(self, made: Sequence[Spec], inputs: Sequence[Spec]) -> list[Spec]:
        """Specs in which a microbatch leaves loss and auxiliary results: single numbers that add up over microbatches
        are summed over devices once, at the end."""
        program = self.program
        found = []
        for position, (spec, known) in enumerate(zip(made, self._sharded.output_specs(inputs), strict=True)):
            adds = program.microbatches == 1 or reduction_of(program, position) in ("mean", "sum")
            found.append(Spec((), partial=known.partial) if adds and spec == Spec(()) else spec)
        return found

    def _blocks(self, axes: Sequence[str]) -> int:
        return prod(self._stage.sizes[axis] for axis in axes)

    def _batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch. Its blocks over them are each cut into microbatches, the same for every array:
        all must give a microbatch the same examples, however they are split over devices.

        Raises:
          PlanError: if two arrays split the batch over axes of which neither continues the other.
        """
        inputs, dims = self._stage.inputs, self.program.split_dims
        splits = {plan.name: plan.spec.dims[d] for plan, d in zip(inputs, dims, strict=True) if d is not None}
        longest = max(splits.values(), key=len, default=())
        for name, axes in splits.items():
            if axes != longest[: len(axes)]:
                raise PlanError(
                    refused="the plan",
                    got=f"{name} with its batch split over {' '.join(axes)}, another array over {' '.join(longest)}",
                    needed="one split of the batch for all arrays that microbatches cut",
                    where="inputs of stage 1",
                    try_="microbatches=1, or pins that agree",
                )
        return longest

    def _accumulate(
        self, microbatch: Any, consts: Sequence[Any], parameters: Sequence[Any], passes: Sequence[Pass]
    ) -> tuple[Any, list[Any], Any]:
        """Microbatches one after the other, their shares of the loss and its gradients summed locally."""
        program, count = self.program, self.program.microbatches
        plans, sizes = self._stage.parameters, self._stage.sizes
        split = program.split_dims
        blocks = self._blocks(self._batch_axes())
        rows = [
            _cut(c, d, count, blocks // self._blocks(plan.spec.dims[d]))
            for c, d, plan in zip(consts, split, self._stage.inputs, strict=True)
            if d is not None
        ]
        core = open_jaxpr(program.core)
        grown = self._grown()
        reductions = program.aux_reductions

        def added(given: Any, parameters: Any) -> tuple[Any, list[Any], list[Any]]:
            inputs, sums = given
            value, aux, grads = microbatch(inputs, parameters)
            moved = [to_be_added(g, plan, sizes) for g, plan in zip(grads, plans, strict=True)]
            return value, aux, jax.tree.map(jnp.add, sums, moved)

        if any(operator.name == "scan_slice" for operator in program.graph.operators):
            passes = [*passes, _accumulated]

        def trip(carry: Any, given: Any) -> tuple[Any, list[Any]]:
            position, cut = given
            pieces = iter(cut)
            inputs = []
            for const, dim in zip(consts, split, strict=True):
                inputs.append(next(pieces) if dim is not None else const)
            total, sums, kept = carry
            # What is computed from parameters alone (gathers above all) would be moved out of the loop and stay alive
            # all through it. Tied to a value that changes, they no longer look the same in every trip.
            total, fresh = lax.optimization_barrier((total, list(parameters)))
            rows_of = MicrobatchRows(number=position, count=count, blocks=blocks)
            with rows_of_microbatch(rows_of), gradients_are_added_up(True):
                value, aux, sums = rewriting(added, passes)((inputs, sums), fresh)
            stacked = [a for a, d in zip(aux, grown, strict=True) if d is not None]
            kept = [
                k if d is not None else combined(how, position, k, a)
                for k, a, d, how in zip(kept, aux, grown, reductions, strict=True)
            ]
            return (total + value, sums, kept), stacked

        made = zip(core.outvars, self._core_specs(), strict=False)
        loss, *sums = [jnp.zeros(s.local_shape(v.aval.shape, self._stage.sizes), v.aval.dtype) for v, s in made]
        kept = [x if d is None else jnp.zeros(()) for x, d in zip(sums, grown, strict=True)]
        zeros = [nothing_added(p, plan, sizes) for p, plan in zip(parameters, plans, strict=True)]
        (value, grads, kept), stacked = lax.scan(trip, (loss, zeros, kept), (jnp.arange(count), rows))
        pieces = iter(stacked)
        aux = []
        for k, d, how in zip(kept, grown, reductions, strict=True):
            if d is None:
                aux.append(finished(how, count, k))
            else:
                spec, extent = self._core_specs()[1 + len(aux)], core.outvars[1 + len(aux)].aval.shape[d]
                # One row for each microbatch (what effects read) is not cut into blocks.
                aux.append(_joined(next(pieces), d, min(blocks // self._blocks(spec.dims[d]), extent)))
        return value, aux, grads


def _accumulated(closed: ClosedJaxpr, first_parameter: int) -> ClosedJaxpr | None:
    del first_parameter
    return accumulate_in_scans(closed, lambda function, avals: jax.make_jaxpr(function)(*avals))


def _cut(x: jax.Array, dim: int, count: int, blocks: int) -> jax.Array:
    """Microbatches of a shard, stacked in front: `count` pieces of each of its `blocks` blocks along `dim`."""
    parts = x.reshape(*x.shape[:dim], blocks, count, x.shape[dim] // (blocks * count), *x.shape[dim + 1 :])
    parts = jnp.moveaxis(parts, dim + 1, 0)
    return parts.reshape(count, *x.shape[:dim], -1, *x.shape[dim + 1 :])


def _joined(pieces: jax.Array, dim: int, blocks: int) -> jax.Array:
    """The inverse of `_cut`."""
    count, *shape = pieces.shape
    parts = pieces.reshape(count, *shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    parts = jnp.moveaxis(parts, 0, dim + 1)
    return parts.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def partition(spec: Spec) -> PartitionSpec:
    """A spec in JAX's words."""
    return PartitionSpec(*(axes if axes else None for axes in spec.dims))


def _check(program: Program, plan: Plan) -> None:
    check_program(program, plan)
    if len(plan.stages) != 1:
        raise PlanError(
            refused="the plan",
            got=f"{len(plan.stages)} stages",
            needed="one",
            where="plan=",
            try_="a plan with one stage",
        )


def _sharded_program(program: Program, stage: Stage) -> ShardedProgram:
    return ShardedProgram(
        program.core,
        program.graph,
        program.rules,
        algorithms_of(program.graph, stage, 0),
        settled_of(program.graph, stage, 0),
        stage.sizes,
        segments_of(program.graph, stage, 0),
    )
