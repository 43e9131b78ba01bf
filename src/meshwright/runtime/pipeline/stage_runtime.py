"""A stage on its devices: its programs compiled, once each, and where its arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._jax.ahead import lower
from ..._jax.compiler_options import compiler_options
from ..._jax.jaxpr import evaluate
from ...lowering.local_step import partition
from ...lowering.microbatches import combined, finished
from ...lowering.pipeline.slots import PACKED, Access, Role, Slot
from ...lowering.pipeline.stage_program import Piece, StageProgram
from ...lowering.pipeline.update_program import UpdateProgram
from ...sharding import Spec
from ..placing import ghost, is_mine


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled(Access):
    """A jitted program of a stage; `run` goes from the arrays of its inputs to those of its outputs."""

    run: Any


class StageRuntime:
    """A stage on its mesh.

    Args:
      stage: what it computes of the core.
      update: what it computes around it.
      mesh: of its devices, the one that `stage` was made for.

    Attributes:
      is_mine: whether this process has a device of it.
    """

    def __init__(self, stage: StageProgram, update: UpdateProgram, mesh: Mesh) -> None:
        self.stage = stage
        self.update = update
        self.mesh = mesh
        self.is_mine = is_mine(mesh)
        self._packed = PartitionSpec(mesh.axis_names)
        self._shardings: dict[Slot, NamedSharding] = {}

    def is_state(self, output: Slot) -> bool:
        """Whether an output of the step is state, which the next update reads."""
        return output.role is Role.OUTPUT and output.position < self.update.state_inputs

    # Layouts

    def spec(self, slot: Slot) -> Spec | None:
        """The sharding spec of an array, None if it is packed."""
        if slot.role in PACKED:
            return None
        if slot.role is Role.BUNDLE:
            return self.update.bundle_spec(slot)
        return self.update.specs[slot] if slot in self.update.specs else self.stage.specs[slot]

    def partition(self, slot: Slot) -> PartitionSpec:
        """How an array lies on the mesh."""
        spec = self.spec(slot)
        return self._packed if spec is None else partition(spec)

    def sharding(self, slot: Slot) -> NamedSharding:
        """How an array lies on the mesh."""
        if slot not in self._shardings:
            self._shardings[slot] = NamedSharding(self.mesh, self.partition(slot))
        return self._shardings[slot]

    # Programs

    @cached_property
    def _compiler_options(self) -> dict[str, Any]:
        # Looked up where a program is made: other processes have no compiler for the stage's devices.
        return compiler_options(self.mesh.devices.ravel().tolist())

    def _jitted(
        self,
        run: Callable[..., Sequence[Any]],
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
        donated: Sequence[Slot],
    ) -> Compiled:
        scalars = {s for s in (*inputs, *outputs) if s.role in PACKED and not self.stage.local_shape(s).shape}

        def local(*shards: Any) -> tuple[Any, ...]:
            blocks = [x.reshape(()) if s in scalars else x for s, x in zip(inputs, shards, strict=True)]
            made = run(*blocks)
            return tuple(x.reshape(1) if s in scalars else x for s, x in zip(outputs, made, strict=True))

        region = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(self.partition(slot) for slot in inputs),
            out_specs=tuple(self.partition(slot) for slot in outputs),
            check_vma=False,
        )
        donate = tuple(i for i, slot in enumerate(inputs) if slot in donated)
        jitted = jax.jit(region, donate_argnums=donate, compiler_options=self._compiler_options)
        return Compiled(run=jitted, inputs=tuple(inputs), outputs=tuple(outputs))

    def _piece(self, piece: Piece) -> Compiled:
        inputs = tuple(slot for slot in piece.inputs if slot.role is not Role.SEED)

        def run(*shards: Any) -> Sequence[Any]:
            given = dict(zip(inputs, shards, strict=True))
            return evaluate(piece.program, *(given.get(slot, np.float32(1.0)) for slot in piece.inputs))

        # Sums and gradients are added to in place.
        donated = [slot for slot in piece.outputs if slot.role in (Role.SUM, Role.GRADIENT)]
        return self._jitted(run, inputs, piece.outputs, donated)

    @cached_property
    def forward(self) -> Compiled:
        """Of one microbatch."""
        return self._piece(self.stage.forward)

    @cached_property
    def backward(self) -> Compiled:
        """Of one microbatch."""
        return self._piece(self.stage.backward)

    @cached_property
    def backward_input(self) -> Compiled:
        """The cotangents of what one microbatch received."""
        return self._piece(self.stage.backward_halves[0])

    @cached_property
    def backward_weight(self) -> Compiled:
        """The gradients of one microbatch."""
        return self._piece(self.stage.backward_halves[1])

    @cached_property
    def begin(self) -> Compiled:
        """Sums and gradients of zero, where they are added to."""
        outputs = (*self.stage.sums, *(() if self.stage.asynchronous else self.stage.gradients))
        shapes = [self.stage.local_shape(slot) for slot in outputs]
        return self._jitted(lambda: [jnp.zeros(s.shape, s.dtype) for s in shapes], (), outputs, ())

    @cached_property
    def prepare(self) -> Compiled | None:
        """The core's operands that are not arguments of the step, at the size of the whole batch."""
        program = self.update.prepare
        if program is None:
            return None
        region = jax.shard_map(
            lambda *shards: tuple(program.run(*shards)),
            mesh=self.mesh,
            in_specs=tuple(self.partition(slot) for slot in program.inputs),
            out_specs=tuple(partition(self.update.prepared_spec(slot)) for slot in program.outputs),
            check_vma=False,
        )
        stacked = {slot: self.stacking(slot) for slot in program.outputs}
        shardings = tuple(self.sharding(slot) for slot in program.outputs)

        def run(*arguments: Any) -> tuple[Any, ...]:
            made = zip(program.outputs, region(*arguments), strict=True)
            return tuple(x if (cut := stacked[slot]) is None else cut(x) for slot, x in made)

        return Compiled(run=jax.jit(run, out_shardings=shardings), inputs=program.inputs, outputs=program.outputs)

    def stacking(self, slot: Slot) -> Callable[[Any], Any] | None:
        """How an input at the size of the whole batch becomes the stage's microbatches, stacked in front; None if it is
        not cut. Microbatches are contiguous, whatever a stage's layout, so that all stages have the same examples."""
        dim = self.stage.stacked_dim(slot) if slot.role is Role.INPUT else None
        if dim is None:
            return None
        count, own = self.stage.microbatches, self.stage.own

        def cut(x: Any) -> Any:
            parts = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
            stacked = (jnp if isinstance(x, jax.Array) else np).moveaxis(parts, dim, 0)
            return stacked if len(own) == count else stacked[own.start : own.stop]

        return cut

    @cached_property
    def rounds(self) -> tuple[Compiled, ...]:
        """Of the update."""
        donated = self.update.donated
        return tuple(self._jitted(p.run, p.inputs, p.outputs, donated(p)) for p in self.update.rounds)

    @cached_property
    def update_beside(self) -> Compiled:
        """The update where microbatches in flight still need the old weights."""
        (program,) = self.update.rounds
        donated = self.update.donated(program, versions=True)
        return self._jitted(program.run, program.inputs, program.outputs, donated)

    @cached_property
    def report(self) -> Compiled | None:
        """What depends on the results of all microbatches, where each has an update."""
        program = self.update.report
        if program is None or not program.outputs:
            return None
        return self._jitted(program.run, program.inputs, program.outputs, ())

    def join(self, slot: Slot) -> Callable[[Sequence[Any]], Any]:
        """Puts the parts of a result together."""
        dim = self.stage.grown[slot.position]
        sharding = self.sharding(Slot(Role.JOINED, slot.position))
        if dim is None:
            how, count = self.stage.reduction(slot), self.stage.microbatches

            def combine(parts: Sequence[Any]) -> Any:
                kept = parts[0]
                for position, part in enumerate(parts[1:], start=1):
                    kept = combined(how, position, kept, part)
                return finished(how, count, kept)

            return jax.jit(combine, out_shardings=sharding)
        return jax.jit(lambda parts: jnp.concatenate(parts, axis=dim), out_shardings=sharding)

    def lower(self, program: Compiled) -> Any:
        """A program lowered from shapes alone."""
        return lower(program.run, [self._aval(slot) for slot in program.inputs], self.mesh.devices.flat[0])

    def ghost(self, slot: Slot) -> jax.Array:
        """What a process without a device of the stage has of one of its arrays."""
        aval = self._aval(slot)
        return ghost(aval.shape, aval.dtype, self.sharding(slot))

    def _aval(self, slot: Slot) -> jax.ShapeDtypeStruct:
        outside = slot.role in (Role.ARGUMENT, Role.JOINED, Role.SYNCHRONISED, Role.BUNDLE, Role.OUTPUT)
        sharding = self.sharding(slot)
        if slot.role in PACKED:
            local = self.stage.local_shape(slot)
            first, *rest = local.shape or (1,)
            return jax.ShapeDtypeStruct((self.mesh.size * first, *rest), local.dtype, sharding=sharding)
        whole = self.update.global_shape(slot) if outside else self.stage.global_shape(slot)
        return jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)
