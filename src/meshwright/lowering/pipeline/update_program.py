"""What one stage computes around its core, as programs of one device: preparing operands, then rounds of the update.

The first round synchronises the gradients, once a step: what the microbatches have added up on each device is summed
over the axes the parameter was broadcast over, straight into the layout of the optimizer state. Small gradients travel
in one buffer. If the update needs more rounds (`surroundings`), gradients leave the first one as arrays; small values
for other stages leave each round bundled, one array for each dtype.

Equations are split the way their operands are, by the same follower that serves plans of one stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..._jax.jaxpr import is_literal, open_jaxpr
from ..._jax.passes import part_of
from ..._jax.random import is_key, key_words, keys_of
from ...program.staged import StagedProgram
from ...sharding import Spec
from ..collectives import run_together
from ..follow import Follower
from ..layouts import fitting
from ..local_value import LocalValue, planned_conversion
from ..microbatches import finished
from .at_rows import at_rows
from .rows import combined
from .slots import Access, Role, Slot
from .stage_program import StageProgram
from .surroundings import Surroundings


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(Access):
    """A program on one device's shards; `run` goes from those of its inputs to those of its outputs."""

    run: Callable[..., list[Any]]


class UpdateProgram:
    """What one stage computes around its core.

    Args:
      staged: the program in stages.
      stage: the stage's part of the core.
      surroundings: of the core.

    Attributes:
      number: of the stage.
      state_inputs: how many leading arguments and results of the step are state.
      taken_over: those of its arguments that are donated.
      mesh: of the stage.
      specs: of every slot that is not packed.
      prepare: computes the core's operands that are not arguments of the step; None if all are.
      rounds: of the update, in order.
      report: where each microbatch has an update, computes what depends on the results of all of them; else None.
    """

    def __init__(self, staged: StagedProgram, stage: StageProgram, surroundings: Surroundings) -> None:
        self._program = staged.source
        self._stage = stage
        self._around = surroundings
        self.number = stage.number
        self.state_inputs = staged.source.state_inputs
        self.taken_over = staged.source.donated.intersection(range(self.state_inputs))
        self.mesh = stage.mesh
        self.wanted = surroundings.stages[stage.number]
        self.specs: dict[Slot, Spec] = {Slot(Role.ARGUMENT, i): self._argument_spec(i) for i in self.wanted.inputs}
        for slot in stage.sums:
            self.specs[slot] = stage.specs[slot]
        for slot in stage.collected:
            self.specs[slot] = self.specs[Slot(Role.JOINED, slot.position)] = stage.specs[slot]
        for p in range(len(surroundings.gradients)):
            if (plan := self._parameter_plan(p)) is not None:
                for holder in surroundings.holders[p]:
                    self.specs[Slot(Role.SYNCHRONISED, p, holder)] = plan.storage
        self.prepared = self._prepared_slots()
        self.prepare = self._prepare() if self.prepared else None
        self.rounds = tuple(self._round(number) for number in range(self.wanted.rounds))
        self.report = self._report() if stage.asynchronous else None

    def _parameter_plan(self, parameter: int) -> Any:
        for held, plan in zip(self._stage.cut.parameters, self._stage.stage.parameters, strict=True):
            if held.parameter == parameter:
                return plan
        return None

    def _argument_spec(self, index: int) -> Spec:
        program, stage = self._program, self._stage
        aval = self._around.invars[index].aval
        rank = len(aval.shape)
        if index in program.parameter_inputs:
            plan = self._parameter_plan(program.parameter_inputs.index(index))
            return Spec(plan.use.dims) if plan is not None else Spec.replicated(rank)
        leaf = program.state[index] if index < program.state_inputs else None
        if leaf is not None and (plan := self._parameter_plan(leaf.parameter)) is not None:
            dims = tuple(plan.storage.dims[d] if d is not None else () for d in leaf.dims)
            return fitting(dims, self._around.shape(self._around.invars[index], stage.number), stage.sizes)
        for slot, position in zip(stage.inputs, stage.cut.program_inputs, strict=True):
            if program.core_inputs[position] == index and stage.stacked_dim(slot) is None:
                return stage.specs[slot]
        return Spec.replicated(rank)

    # What the core reads

    def direct(self, slot: Slot) -> int | None:
        """The argument of the step that a parameter or input of the stage is, or None if it is computed."""
        cut, program = self._stage.cut, self._program
        if slot.role is Role.PARAMETER:
            return program.parameter_inputs[cut.parameters[slot.position].parameter]
        return program.core_inputs[cut.program_inputs[slot.position]]

    def is_argument(self, slot: Slot) -> bool:
        """Whether a parameter or input of the stage is an argument of the step as it is kept."""
        index = self.direct(slot)
        if index is None or self._is_stacked(slot):
            return False
        return self._stage.specs[slot] == self.specs[Slot(Role.ARGUMENT, index)]

    def _is_stacked(self, slot: Slot) -> bool:
        return slot.role is Role.INPUT and self._stage.stacked_dim(slot) is not None

    @cached_property
    def kept(self) -> frozenset[Slot]:
        """The arguments of the step that the stage keeps whole."""
        programs = [*self.rounds, *(p for p in (self.prepare, self.report) if p is not None)]
        found = {slot for one in programs for slot in one.inputs if slot.role is Role.ARGUMENT}
        for slot in (*self._stage.parameters, *self._stage.inputs):
            index = self.direct(slot)
            if index is not None and not self._is_stacked(slot):
                found.add(Slot(Role.ARGUMENT, index))
        return frozenset(found)

    def donated(self, program: Round, *, versions: bool = False) -> tuple[Slot, ...]:
        """What a round takes over: the last one the old state; the first of several the sums of gradients, which leave
        it synchronised.

        Args:
          program: the round.
          versions: whether the old weights are still needed by microbatches in flight.
        """
        if program is not self.rounds[-1]:
            left = {s.position: self.local_shape(s).shape for s in program.outputs if s.role is Role.SYNCHRONISED}
            pairs = zip(self._stage.gradients, self._contributions(), strict=True)
            taken = [slot for slot, p in pairs if left.get(p) == self._stage.local_shape(slot).shape]
            return tuple(slot for slot in taken if slot in program.inputs)
        weights = {self.direct(slot) for slot in self._stage.parameters} if versions else set()
        taken = [s for s in program.inputs if s.role is Role.ARGUMENT and s.position in self.taken_over]
        return tuple(s for s in taken if s.position not in weights)

    def _prepared_slots(self) -> tuple[Slot, ...]:
        stage = self._stage
        return tuple(slot for slot in (*stage.parameters, *stage.inputs) if self.direct(slot) is None)

    def _prepare(self) -> Round:
        atoms = dict(
            zip(
                (*self._stage.parameters, *self._stage.inputs),
                self._around.operands_of(self._stage.number),
                strict=True,
            )
        )
        wanted = [atoms[slot] for slot in self.prepared]
        inputs = self._arguments_for(wanted)
        specs = [self.prepared_spec(slot) for slot in self.prepared]

        def run(*shards: Any) -> list[Any]:
            env = self._environment(inputs, shards)
            return [v.read(s) for v, s in zip(self._evaluate(wanted, env), specs, strict=True)]

        return Round(run=run, inputs=inputs, outputs=self.prepared)

    def prepared_spec(self, slot: Slot) -> Spec:
        """The spec in which `prepare` leaves an operand, which is not yet cut into microbatches."""
        spec = self._stage.specs[slot]
        dim = self._stage.stacked_dim(slot) if slot.role is Role.INPUT else None
        return spec if dim is None else Spec(spec.dims[1:])

    def _arguments_for(self, wanted: Sequence[Any]) -> tuple[Slot, ...]:
        equations = self._around.needed(wanted, ())
        read = {a for e in equations for a in e.invars if not is_literal(a)} | {a for a in wanted if not is_literal(a)}
        return tuple(Slot(Role.ARGUMENT, i) for i, var in enumerate(self._around.invars) if var in read)

    # Evaluation

    def _environment(self, inputs: Sequence[Slot], shards: Sequence[Any]) -> dict[Any, LocalValue]:
        """The values that a program is given, by variable."""
        around, sizes = self._around, self._stage.sizes
        given = dict(zip(inputs, shards, strict=True))
        env: dict[Any, LocalValue] = {}
        parts: dict[int, list[Any]] = {}
        bundled: dict[Any, list[tuple[Any, Spec]]] = {}
        for slot, shard in given.items():
            match slot.role:
                case Role.ARGUMENT:
                    env[around.invars[slot.position]] = LocalValue(shard, self.specs[slot], sizes)
                case Role.SUM | Role.JOINED | Role.COLLECTED:
                    if slot.role is Role.SUM:
                        shard = finished(self._stage.reduction(slot), self._program.microbatches, shard)
                    env[around.results[slot.position]] = LocalValue(shard, self.specs[slot], sizes)
                case Role.SYNCHRONISED:
                    parts.setdefault(slot.position, []).append(shard)
                case Role.BUNDLE:
                    for var, value in self._unbundled(slot, shard).items():
                        bundled.setdefault(var, []).append((value, self._bundled_spec(slot, var)))
        for parameter, pieces in parts.items():
            # In the order of stages at every holder, so that all have the same sum.
            plan = self._parameter_plan(parameter)
            total = sum(pieces[1:], pieces[0])
            env[around.gradients[parameter]] = LocalValue(total, plan.storage, sizes)
        for var, pieces in bundled.items():
            if len(pieces) < self._pieces(var):
                continue  # another round has the other contributions
            if len(pieces) == 1:
                env[var] = LocalValue(*pieces[0], sizes)
                continue
            whole = Spec.replicated(len(var.aval.shape))
            shards = [LocalValue(shard, spec, sizes).read(whole) for shard, spec in pieces]
            env[var] = LocalValue(combined(around.contributions[var][0], shards), whole, sizes)
        return env

    def _evaluate(
        self, wanted: Sequence[Any], env: dict[Any, LocalValue], outputs: Sequence[int] = ()
    ) -> list[LocalValue]:
        """Variables, the last ones as these outputs of the step: of state, the rows that the stage has of it."""
        around = self._around
        for parameter, var in enumerate(around.gradients):
            if not around.holders[parameter]:  # nothing reads it
                zeros = jnp.zeros(var.aval.shape, var.aval.dtype)
                env.setdefault(var, LocalValue(zeros, Spec.replicated(zeros.ndim), self._stage.sizes))
        equations = around.needed(wanted, env)
        closed = part_of(around.outer, equations, list(env), wanted)
        rules = self._program.rules
        if around.rows:
            state = [around.rows.get(around.invars[i]) if i < self.state_inputs else None for i in outputs]
            targets = [*(None for _ in wanted[len(outputs) :]), *state]
            closed = at_rows(closed, around.rows, self._stage.number, rules, targets)
            rules.prepare([(equation, False) for equation in open_jaxpr(closed).eqns])
        return Follower(rules, self._stage.sizes).program(closed, list(env.values()))

    # Rounds of the update

    def bundles(self, source: int, number: int) -> dict[Slot, list[Any]]:
        """The variables in each bundle that a stage sends after a round."""
        sent = self._around.stages[source].sends.get(number, {})
        return {Slot(Role.BUNDLE, number, source, content): variables for content, variables in sent.items()}

    def bundle(self, slot: Slot) -> list[Any]:
        """The variables in a bundle."""
        return self._around.stages[slot.source].sends[slot.position][slot.content]

    def bundle_spec(self, slot: Slot) -> Spec:
        """How a bundle lies on the stage's mesh: a large value is split over all devices where a dim allows it."""
        shape = self.global_shape(slot).shape
        if not self._around.is_large(self.bundle(slot)[0]):
            return Spec(((),))
        axes, devices = tuple(self._stage.sizes), prod(self._stage.sizes.values())
        dim = next((d for d, n in enumerate(shape) if n % devices == 0), None)
        return Spec(tuple(axes if d == dim else () for d in range(len(shape))))

    def _bundled_spec(self, slot: Slot, var: Any) -> Spec:
        """How a value lies that comes out of a bundle."""
        return self.bundle_spec(slot) if self._around.is_large(var) else Spec.replicated(len(var.aval.shape))

    def _pieces(self, var: Any) -> int:
        """How many bundles a value arrives in."""
        return len(self._around.contributions[var][1]) if var in self._around.contributions else 1

    def arrived(self, slots: Iterable[Slot]) -> list[Any]:
        """The variables that are there once these bundles are."""
        count = Counter(var for slot in slots for var in self.bundle(slot))
        return [var for var, pieces in count.items() if pieces == self._pieces(var)]

    def _bundled(self, slot: Slot, values: Sequence[LocalValue]) -> Any:
        variables = self.bundle(slot)
        whole = [
            value.settle(Spec.replicated(len(var.aval.shape))) for value, var in zip(values, variables, strict=True)
        ]
        if self._around.is_large(variables[0]):
            return whole[0].read(self.bundle_spec(slot))
        if is_key(variables[0].aval):
            return jnp.concatenate([jax.random.key_data(value.shard).ravel() for value in whole])
        return jnp.concatenate([value.shard.ravel() for value in whole])

    def _unbundled(self, slot: Slot, shard: Any) -> dict[Any, Any]:
        found, start = {}, 0
        variables = self.bundle(slot)
        if self._around.is_large(variables[0]):
            return {variables[0]: shard}
        for var in variables:
            shape = key_words(var.aval) if is_key(var.aval) else var.aval.shape
            part = shard[start : start + prod(shape)].reshape(shape)
            found[var] = keys_of(part, var.aval) if is_key(var.aval) else part
            start += prod(shape)
        return found

    def _contributions(self) -> list[int]:
        """The parameters whose gradients the stage has."""
        return [held.parameter for held in self._stage.cut.parameters]

    def _round(self, number: int) -> Round:
        around, me = self._around, self._stage.number
        last = number == self.wanted.rounds - 1
        sent = self.bundles(me, number)
        outputs = [i for i in self.wanted.outputs if i not in self.reported] if last else []
        small = [var for bundle in sent.values() for var in bundle]
        wanted = [*small, *(around.outvars[i] for i in outputs)]
        leaving = [p for p in self._contributions() if number == 0 and around.is_read_later(p, me)]
        synchronised = tuple(Slot(Role.SYNCHRONISED, p, me) for p in leaving)
        inputs = self._round_inputs(number, wanted)
        output_slots = tuple(Slot(Role.OUTPUT, i) for i in outputs)

        def evaluate(*shards: Any) -> tuple[list[Any], list[Any], list[LocalValue]]:
            env = self._environment(inputs, shards)
            mine: list[Any] = []
            if number == 0:
                mine = self._synchronise(dict(zip(inputs, shards, strict=True)))
                for p, x in zip(self._contributions(), mine, strict=True):
                    if not around.is_tied(p):
                        env[around.gradients[p]] = LocalValue(x, self._parameter_plan(p).storage, self._stage.sizes)
            made = self._evaluate(wanted, env, outputs)
            values = dict(zip(small, made, strict=False))
            bundled = [self._bundled(slot, [values[var] for var in bundle]) for slot, bundle in sent.items()]
            left = [x for p, x in zip(self._contributions(), mine, strict=bool(mine)) if p in leaving]
            return left, bundled, made[len(made) - len(outputs) :]

        for slot in output_slots:
            if slot.position < self.state_inputs:
                self.specs[slot] = self._state_spec(slot.position)
        self._make_whole(output_slots)
        self._probe([slot for slot in output_slots if slot not in self.specs], inputs, evaluate, outputs)

        def run(*shards: Any) -> list[Any]:
            mine, bundled, made = evaluate(*shards)
            return [*mine, *bundled, *(v.read(self.specs[s]) for v, s in zip(made, output_slots, strict=True))]

        return Round(run=run, inputs=inputs, outputs=(*synchronised, *sent, *output_slots))

    # What all microbatches gave

    @cached_property
    def reported(self) -> frozenset[int]:
        """Where each microbatch has an update, the outputs of the step that wait for the last: those that read neither
        gradients nor state. The others are those of the last update."""
        if not self._stage.asynchronous:
            return frozenset()
        return frozenset(i for i in self.wanted.outputs if self._around.is_report(i))

    def _report(self) -> Round:
        around, outputs = self._around, sorted(self.reported)
        wanted = [around.outvars[i] for i in outputs]
        read = around.reads(wanted)
        inputs = [Slot(Role.ARGUMENT, i) for i, var in enumerate(around.invars) if var in read]
        joined = [Slot(Role.JOINED, s.position) for s in self._stage.collected if around.results[s.position] in read]
        slots, found = (*inputs, *joined), tuple(Slot(Role.OUTPUT, i) for i in outputs)

        def evaluate(*shards: Any) -> tuple[list[Any], list[Any], list[LocalValue]]:
            return [], [], self._evaluate(wanted, self._environment(slots, shards))

        self._make_whole(found)
        self._probe([slot for slot in found if slot not in self.specs], slots, evaluate, outputs)

        def run(*shards: Any) -> list[Any]:
            *_, made = evaluate(*shards)
            return [v.read(self.specs[s]) for v, s in zip(made, found, strict=True)]

        return Round(run=run, inputs=slots, outputs=found)

    def _make_whole(self, outputs: Sequence[Slot]) -> None:
        """Keep what effects read whole on every device of the stage."""
        for slot in outputs:
            if slot.position >= self._program.out_tree.num_leaves:
                self.specs[slot] = Spec.replicated(len(self._around.outvars[slot.position].aval.shape))

    def _state_spec(self, index: int) -> Spec:
        """State leaves as it came."""
        slot = Slot(Role.ARGUMENT, index)
        return self.specs[slot] if slot in self.specs else self._argument_spec(index)

    def _round_inputs(self, number: int, wanted: Sequence[Any]) -> tuple[Slot, ...]:
        """What a round reads; gradients come packed in the first, as arrays in later ones."""
        around, me = self._around, self._stage.number
        arriving = [
            slot
            for source, stage in enumerate(around.stages)
            for earlier in range(number)
            if earlier in stage.sends
            for slot, bundle in self.bundles(source, earlier).items()
            if source == me or any(me in around.readers(v, source) for v in bundle)
        ]
        known = set(self.arrived(arriving))
        known.update(var for p, var in enumerate(around.gradients) if me in around.holders[p])
        equations = around.needed(wanted, known)
        read = {a for e in equations for a in e.invars if not is_literal(a)} | {a for a in wanted if not is_literal(a)}
        found = [Slot(Role.ARGUMENT, i) for i, var in enumerate(around.invars) if var in read]
        for slot in (*self._stage.sums, *self._stage.collected):
            var = around.results[slot.position]
            mine = number == 0 if var in around.contributions else me in around.at[var]
            if var in read and mine:
                joined = slot.role is Role.COLLECTED and not self._stage.asynchronous
                found.append(Slot(Role.JOINED, slot.position) if joined else slot)
        if number == 0:
            found += self._stage.gradients
        else:
            for p, var in enumerate(around.gradients):
                if var in read and me in around.holders[p]:
                    holders = sorted(around.holders[p]) if around.is_tied(p) else [me]
                    found += [Slot(Role.SYNCHRONISED, p, holder) for holder in holders]
        return (*found, *(s for s in arriving if any(v in read for v in self.bundle(s))))

    def _synchronise(self, given: dict[Slot, Any]) -> list[Any]:
        """The gradients in the layout of the optimizer state, scaled as the losses are."""
        plans = self._stage.stage.parameters
        conversions = [planned_conversion(self._stage.gradient_spec(plan), plan.storage) for plan in plans]
        return run_together([given[s] for s in self._stage.gradients], conversions, self._stage.sizes)

    def _probe(
        self, slots: Sequence[Slot], inputs: Sequence[Slot], evaluate: Callable[..., Any], outputs: Sequence[int]
    ) -> None:
        """Find in what layout the step's other results come out."""
        if not slots:
            return

        def trace(*shards: Any) -> list[Any]:
            made = dict(zip(outputs, evaluate(*shards)[2], strict=True))
            for slot in slots:
                self.specs[slot] = Spec(made[slot.position].spec.dims)
            return [made[slot.position].read(self.specs[slot]) for slot in slots]

        everywhere = PartitionSpec()
        jax.eval_shape(
            jax.shard_map(trace, mesh=self._stage.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False),
            *(self.local_shape(slot) for slot in inputs),
        )

    # Shapes

    def global_shape(self, slot: Slot) -> jax.ShapeDtypeStruct:
        """Shape of a slot that is not packed."""
        around = self._around
        match slot.role:
            case Role.ARGUMENT:
                var = around.invars[slot.position]
                return jax.ShapeDtypeStruct(around.shape(var, self._stage.number), var.aval.dtype)
            case Role.COLLECTED:
                return self._stage.global_shape(slot)
            case Role.SUM | Role.JOINED:
                aval = around.results[slot.position].aval
            case Role.SYNCHRONISED:
                var = around.gradients[slot.position]
                return jax.ShapeDtypeStruct(around.shape(var, self._stage.number), var.aval.dtype)
            case Role.BUNDLE:
                variables = self.bundle(slot)
                aval = variables[0].aval
                if around.is_large(variables[0]):
                    return jax.ShapeDtypeStruct(around.sent_shape(variables[0], slot.source), aval.dtype)
                if is_key(aval):
                    return jax.ShapeDtypeStruct((sum(prod(key_words(v.aval)) for v in variables),), jnp.uint32)
                return jax.ShapeDtypeStruct((sum(v.aval.size for v in variables),), aval.dtype)
            case _ if slot.position < self.state_inputs:
                return self.global_shape(Slot(Role.ARGUMENT, slot.position))
            case _:
                aval = open_jaxpr(self._program.outer).outvars[slot.position].aval
                if (rows := around.rows_of(around.outvars[slot.position])) is not None:
                    return jax.ShapeDtypeStruct(rows.shape(aval.shape, self._stage.number), aval.dtype)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def local_shape(self, slot: Slot) -> jax.ShapeDtypeStruct:
        """Shape of one device's block."""
        if slot.role is Role.GRADIENT:
            return self._stage.local_shape(slot)
        whole = self.global_shape(slot)
        spec = self.bundle_spec(slot) if slot.role is Role.BUNDLE else self.specs[slot]
        return jax.ShapeDtypeStruct(spec.local_shape(whole.shape, self._stage.sizes), whole.dtype)
