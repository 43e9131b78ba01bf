"""The planned program on one device's shards: each equation by its algorithm, each operand moved where needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax import lax

from .._jax.jaxpr import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    consts_of,
    is_dropped,
    is_literal,
    is_remat,
    open_jaxpr,
    scan_parts,
    user_context,
)
from ..program.graph import Graph, Operator, Path
from ..program.local import COMBINE, Split, evaluate_local
from ..program.parameter_values import values_of_parameters
from ..program.rules import Rules, is_call
from ..program.segments import Segments
from ..sharding import Algorithm, Spec, algorithm_of
from ..sharding.deferred_sums import makes_a_number, partial_axes
from .collectives import gathers_are_named, gradients_are_added_up, shared_out
from .follow import Follower
from .local_value import LocalValue
from .loop_residuals import policy_of
from .matmul import matmul, turns
from .repeats import Repeats, Run

Env = dict[Any, LocalValue]

# By this name a rematerialised segment keeps results that its plan keeps.
_KEPT = "meshwright_kept"


class ShardedProgram:
    """A program together with an algorithm for each of its operators.

    Args:
      closed: the inlined program that `graph` was built from.
      graph: its operators.
      rules: their factor rules.
      algorithms: by operator index.
      settled: for values read by several operators, the spec they are moved to once.
      sizes: mesh axis sizes.
      segments: what is rematerialised in the backward pass.
      positions: where `closed` is a part of a larger program that paths and segments count in, the position there of
        each of its equations, ascending.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        graph: Graph,
        rules: Rules,
        algorithms: Sequence[Algorithm],
        settled: Mapping[int, Spec],
        sizes: Mapping[str, int],
        segments: Segments,
        positions: Sequence[int] | None = None,
    ) -> None:
        self._closed = closed
        self._graph, self._of_parameters = graph, values_of_parameters(graph)
        self._rules = rules
        self._algorithms = algorithms
        self._settled = settled
        self._sizes = sizes
        self._positions = range(len(open_jaxpr(closed).eqns)) if positions is None else positions
        # The passes of a stage are programs of their own, whose gradients may be one of their own too.
        self._is_one_program = positions is None
        # Runs at the top level count in the equations at hand.
        at = self._positions
        runs = [(bisect_left(at, start), bisect_left(at, stop)) for start, stop in segments.runs.get((), ())]
        self._segments, self._kept = {**segments.runs, (): runs}, segments.kept
        self._operator = {operator.path: operator for operator in graph.operators}
        # From here on nothing is computed again; None where nothing is.
        stops = [stop for _, stop in segments.runs.get((), ())]
        stops += [self._positions[n] + 1 for n, one in enumerate(open_jaxpr(closed).eqns) if is_remat(one)]
        self._last_stop = max(stops, default=None)
        self._follower = Follower(rules, sizes)
        self._repeats = Repeats(graph, rules, algorithms, settled, sizes, segments.kept)
        self._runs: dict[Path, list[Run]] = {}

    def __call__(self, shards: Sequence[Any], specs: Sequence[Spec], out_specs: Sequence[Spec]) -> list[Any]:
        """Evaluate on one device. Call inside a manual `shard_map`.

        Args:
          shards: this device's blocks of the program's inputs.
          specs: their specs.
          out_specs: the specs to leave the outputs in.
        """
        jaxpr = open_jaxpr(self._closed)
        env: Env = {}
        for var, index, shard, spec in zip(jaxpr.invars, self._graph.inputs, shards, specs, strict=True):
            env[var] = self._settle(index, self._value(index, shard, spec))
        for var, const in zip(jaxpr.constvars, consts_of(self._closed), strict=True):
            env[var] = self._whole(const)
        self._run(jaxpr, env, ())
        outs = []
        for atom, spec in zip(jaxpr.outvars, out_specs, strict=True):
            outs.append(self._read(env, atom).read(spec))
        return outs

    def output_specs(self, specs: Sequence[Spec]) -> list[Spec]:
        """The specs the outputs have when the inputs have `specs`, before anything is done to them."""
        graph = self._graph
        known = {value: self._settled.get(value, spec) for value, spec in zip(graph.inputs, specs, strict=True)}
        for operator in graph.operators:
            results = self._algorithms[operator.index].results
            operands = [Spec(()) if v is None else known.get(v, Spec(())) for v in operator.operands]
            if axes := self._summand_axes(operator, operands):
                results = (Spec((), partial=axes),)
            for value, spec in zip(operator.results, results, strict=True):
                if value is not None and not graph.values[value].constant:
                    known[value] = self._settled.get(value, spec)
        outs = []
        for atom, value in zip(open_jaxpr(self._closed).outvars, graph.outputs, strict=True):
            rank = len(getattr(atom.aval, "shape", ()))
            outs.append(known.get(value, Spec.replicated(rank)) if value is not None else Spec.replicated(rank))
        return outs

    def _summand_axes(self, operator: Operator, operands: Sequence[Spec]) -> frozenset[str]:
        """The axes over which it makes a number that is left as summands; where the plan marks (`broadcast`), that
        stays."""
        planned = self._algorithms[operator.index]
        if not makes_a_number(self._graph, operator) or any(s.broadcast for s in (*planned.operands, *planned.results)):
            return frozenset()
        return partial_axes(operator.name, operands, [self._is_differentiated(v) for v in operator.operands])

    def _value(self, index: int | None, shard: Any, spec: Spec) -> LocalValue:
        """A value of the program, by its number."""
        return LocalValue(
            shard, spec, self._sizes, differentiated=self._is_differentiated(index),
            of_parameters=index in self._of_parameters,
        )  # fmt: skip

    def _whole(self, x: Any) -> LocalValue:
        return LocalValue(x, Spec.replicated(len(getattr(x, "shape", ()))), self._sizes)

    def _read(self, env: Env, atom: Any) -> LocalValue:
        return self._whole(atom.val) if is_literal(atom) else env[atom]

    def _settle(self, index: int | None, value: LocalValue) -> LocalValue:
        spec = self._settled.get(index) if index is not None else None
        return value if spec is None or value.is_lazy else value.settle(spec)

    def _run(self, jaxpr: Jaxpr, env: Env, prefix: Path) -> None:
        """Evaluate the equations of one level, rematerialised segments as `jax.checkpoint` regions."""
        if prefix not in self._runs:
            paths = [self._path(prefix, position) for position in range(len(jaxpr.eqns))]
            self._runs[prefix] = self._repeats.runs(jaxpr, paths, self._segments.get(prefix, ()))
        for run in self._runs[prefix]:
            if run.segment is not None:
                self._segment(jaxpr, env, prefix, run)
            else:
                self._evaluate_run(jaxpr, env, prefix, run)

    def _evaluate_run(self, jaxpr: Jaxpr, env: Env, prefix: Path, run: Run) -> None:
        """Evaluate a run, with its repeats if there are some."""

        def plainly(env: Env) -> None:
            self._equations(jaxpr, env, prefix, run.start, run.stop)

        if run.repeated is None or not self._repeats.evaluate(run.repeated, env, plainly):
            plainly(env)
            return
        for position in run.repeated.constants:
            self._equations(jaxpr, env, prefix, position, position + 1)

    def _path(self, prefix: Path, position: int) -> Path:
        return (*prefix, position) if prefix else (self._positions[position],)

    def _equations(self, jaxpr: Jaxpr, env: Env, prefix: Path, start: int, stop: int) -> None:
        for position in range(start, stop):
            equation = jaxpr.eqns[position]
            with user_context(equation):
                path = self._path(prefix, position)
                results = self._equation(equation, env, path)
            if path in self._kept:
                indices = self._operator[path].results
                results = [
                    value.named(_KEPT, as_read=index is not None and self._graph.is_read_once(index))
                    for value, index in zip(results, indices, strict=True)
                ]
            for var, value in zip(equation.outvars, results, strict=True):
                if not is_dropped(var):
                    env[var] = value

    def _segment(self, jaxpr: Jaxpr, env: Env, prefix: Path, segment: Run) -> None:
        """Evaluate what is rematerialised together."""
        inside, stop = jaxpr.eqns[segment.start : segment.stop], segment.stop
        made = {var for eqn in inside for var in eqn.outvars}
        later = {a for eqn in jaxpr.eqns[stop:] for a in eqn.invars if not is_literal(a)}
        later |= {a for a in jaxpr.outvars if not is_literal(a)}
        results = [var for eqn in inside for var in eqn.outvars if var in later and not is_dropped(var)]
        read = {a: None for eqn in inside for a in eqn.invars if not is_literal(a) and a not in made}

        def run(inner: Env) -> list[LocalValue]:
            for one in segment.segment or ():
                self._evaluate_run(jaxpr, inner, prefix, one)
            return [inner[var] for var in results]

        # Nothing is kept by its name where nothing has one.
        options = {"policy": jax.checkpoint_policies.save_only_these_names(_KEPT)} if self._kept else {}
        env.update(zip(results, self._checkpoint(run, {a: env[a] for a in read}, options), strict=True))

    def _checkpoint(self, run: Any, operands: Env, options: Mapping[str, Any]) -> list[LocalValue]:
        """`run` on copies of `operands`, its intermediate results rematerialised in the backward pass."""
        lazy = {var: value for var, value in operands.items() if value.is_lazy}
        real = {var: value for var, value in operands.items() if not value.is_lazy}
        made: list[LocalValue] = []

        def on_shards(shards: list[Any]) -> list[Any]:
            inner = dict(lazy)
            for (var, value), shard in zip(real.items(), shards, strict=True):
                inner[var] = value.like(shard, value.spec)
            made[:] = [value.leave() for value in run(inner)]
            return [value.shard for value in made if not value.is_lazy]

        given = [value.shard for value in real.values()]
        if self._is_one_program:
            given = _waiting([*real.values()])
        shards = iter(jax.checkpoint(on_shards, **options)(given))
        return [value if value.is_lazy else value.like(next(shards), value.spec) for value in made]

    def _equation(self, equation: Equation, env: Env, path: Path) -> list[LocalValue]:
        if equation.primitive.name == "scan":
            return self._scan(equation, env, path)
        if is_remat(equation):
            return self._remat(equation, env, path)
        operator = self._operator[path]
        values = [self._read(env, atom) for atom in equation.invars]
        indices = operator.results
        if all(v is None or self._graph.values[v].constant for v in indices) and not is_call(equation):
            return [self._constant(equation, values, i) for i in range(len(indices))]
        algorithm = self._algorithms[operator.index]
        if axes := self._summand_axes(operator, [value.spec for value in values]):
            algorithm = replace(algorithm, results=(Spec((), partial=axes),))
            shards = self._summands(operator, values, axes)
        else:
            shards = [value.read(spec) for value, spec in zip(values, algorithm.operands, strict=True)]
            if operator.matmul and self._is_behind_all(path) and _is_weighted(values):
                shards = _together(shards)
        if is_call(equation):
            results = self._follower.call(equation, algorithm, shards, differentiated=operator.differentiated)
        elif turns(equation) and self._is_differentiated(operator.operands[1]):
            results = [matmul(equation, *shards, lhs_differentiated=self._is_differentiated(operator.operands[0]))]
        else:
            results = evaluate_local(equation, Split(operator.rule, algorithm.axes, self._sizes), shards)
        return [
            self._settle(index, self._value(index, shard, spec))
            for index, shard, spec in zip(indices, results, algorithm.results, strict=True)
        ]

    def _summands(self, operator: Operator, values: Sequence[LocalValue], axes: frozenset[str]) -> list[Any]:
        """What a device reads of numbers to make its summand, over these axes, of another one."""
        if operator.name in ("mul", "div"):
            kept = 0 if values[0].spec.partial and not self._is_differentiated(operator.operands[1]) else 1
            specs = [Spec((), partial=axes if at == kept else frozenset()) for at in range(2)]
            return [value.read(spec) for value, spec in zip(values, specs, strict=True)]
        shards = (value.read(Spec((), partial=value.spec.partial)) for value in values)
        others = (prod(self._sizes[axis] for axis in axes - value.spec.partial) for value in values)
        return [shared_out(shard, count) for shard, count in zip(shards, others, strict=True)]

    def _gathers_weights(self, path: Path) -> bool:
        """Whether anything in a loop's body reads of parameters more than a device has of them."""
        held: dict[int, Spec] = {}
        for operator in self._graph.operators:
            if operator.path[: len(path)] == path:
                algorithm = self._algorithms[operator.index]
                for value, spec in zip(operator.operands, algorithm.operands, strict=True):
                    if value in held and not {*held[value].sharded_axes} <= {*spec.sharded_axes}:
                        return True
                for value, spec in zip(operator.results, algorithm.results, strict=True):
                    if value is not None and value in self._of_parameters:
                        held[value] = self._settled.get(value, spec)
                        if not {*spec.sharded_axes} <= {*held[value].sharded_axes}:
                            return True
        return False

    def _is_behind_all(self, path: Path) -> bool:
        """Whether an equation comes after all that is computed again: what it holds for a gradient is there while that
        is, if compilers make the gradient last."""
        return self._is_one_program and self._last_stop is not None and len(path) == 1 and path[0] >= self._last_stop

    def _is_differentiated(self, index: int | None) -> bool:
        return index is not None and self._graph.values[index].differentiated

    def _constant(self, equation: Equation, operands: list[LocalValue], position: int) -> LocalValue:
        """A result that depends on no input: each reader computes the block it needs."""
        rule = self._rules.rule(equation, differentiated=False)
        allowed = set(rule.splittable)

        def make(spec: Spec) -> Any:
            axes: list[tuple[str, ...]] = [()] * len(rule.factors)
            for dim, split in zip(rule.results[position], spec.dims, strict=True):
                lead = next((f for f in dim if rule.factors[f].size > 1), None)
                if split and lead in allowed:
                    axes[lead] = split
            combines = COMBINE.get(equation.primitive.name) in ("max", "min")
            algorithm = algorithm_of(rule, tuple(axes), [False] * len(operands), combines_at_once=combines)
            shards = [value.read(s) for value, s in zip(operands, algorithm.operands, strict=True)]
            results = evaluate_local(equation, Split(rule, algorithm.axes, self._sizes), shards)
            return LocalValue(results[position], algorithm.results[position], self._sizes).read(Spec(spec.dims))

        whole = Spec.replicated(len(rule.results[position]))
        traced = any(value.is_traced for value in operands)
        return LocalValue(None, whole, self._sizes, make=make, of_traced=traced)

    def _remat(self, equation: Equation, env: Env, path: Path) -> list[LocalValue]:
        body = open_jaxpr(equation.params["jaxpr"])
        operands = {var: self._read(env, atom) for var, atom in zip(body.invars, equation.invars, strict=True)}

        def run(inner: Env) -> list[LocalValue]:
            self._run(body, inner, path)
            return [self._read(inner, atom) for atom in body.outvars]

        options = {"policy": equation.params["policy"], "prevent_cse": equation.params["prevent_cse"]}
        return self._checkpoint(run, operands, options)

    def _scan(self, equation: Equation, env: Env, path: Path) -> list[LocalValue]:
        parts = scan_parts(equation)
        body = open_jaxpr(parts.body)
        first_xs = parts.num_consts + parts.num_carry
        links = [self._operator[*path, -1, i] for i in range(len(body.invars))]
        chosen = [self._algorithms[link.index] for link in links]
        operands = [
            self._read(env, atom).read(algorithm.operands[0])
            for atom, algorithm in zip(equation.invars, chosen, strict=True)
        ]
        consts, carry, xs = operands[: parts.num_consts], operands[parts.num_consts : first_xs], operands[first_xs:]
        moving = [self._graph.values[link.results[0]].differentiated for link in links if link.results[0] is not None]
        whole = any(runs and at == path for at, runs in self._segments.items())  # which is computed again in any case
        asked = any(moving) and not whole
        policy = policy_of(body, gathers_weights=self._gathers_weights(path)) if asked else None
        stacks: dict[int, Any] = {}
        for i in range(parts.num_carry, len(equation.outvars)):
            link = self._operator.get((*path, -1, len(body.invars) + i))
            if link is not None:
                stacks[i] = (link, self._algorithms[link.index])

        def inside(i: int, shard: Any) -> LocalValue:
            index = links[i].results[0]
            assert index is not None
            return self._settle(index, self._value(index, shard, chosen[i].results[0]))

        def trip(carried: Any, row: Any) -> tuple[list[Any], list[Any]]:
            inner: Env = {}
            for i, (var, shard) in enumerate(zip(body.invars, [*consts, *carried, *row], strict=True)):
                inner[var] = inside(i, shard)
            for var, const in zip(body.constvars, consts_of(parts.body), strict=True):
                inner[var] = self._whole(const)
            with gradients_are_added_up(False), gathers_are_named(policy is not None):
                self._run(body, inner, path)
            kept = [
                self._read(inner, atom).read(algorithm.operands[1])
                for atom, algorithm in zip(body.outvars, chosen[parts.num_consts : first_xs], strict=False)
            ]
            out = [
                self._read(inner, body.outvars[i]).read(algorithm.operands[0]) for i, (_, algorithm) in stacks.items()
            ]
            return kept, out

        if policy is not None:
            trip = jax.checkpoint(trip, policy=policy, prevent_cse=False)
        final, stacked = lax.scan(trip, carry, xs, length=parts.length, reverse=parts.reverse, unroll=parts.unroll)
        results: list[LocalValue] = []
        made = dict(zip(stacks, stacked, strict=True))
        for i, var in enumerate(equation.outvars):
            if i < parts.num_carry:
                link, spec, shard = links[parts.num_consts + i], chosen[parts.num_consts + i].results[1], final[i]
                index = link.results[1]
            elif i in made:
                (link, algorithm), shard = stacks[i], made[i]
                index, spec = link.results[0], algorithm.results[0]
            else:
                results.append(self._whole(None))
                continue
            moving = index is not None and not is_dropped(var) and self._graph.values[index].differentiated
            results.append(self._settle(index, LocalValue(shard, spec, self._sizes, differentiated=moving)))
        return results


def _is_weighted(values: Sequence[LocalValue]) -> bool:
    """Whether an activation meets a weight, and both have gradients."""
    kinds = [value.of_parameters for value in values if value.differentiated]
    return any(kinds) and not all(kinds) and len(kinds) == len(values)


def _waiting(operands: Sequence[LocalValue]) -> list[Any]:
    """What a rematerialised part reads: the cotangents of its activations wait for the gradients of its weights.

    Compilers may make a gradient as late as whatever reads it, and all that was computed again stays until then: XLA's
    TPU compiler makes those that are scattered at the end of the step, its GPU compiler all of them, to have something
    beside their sums. Weights that are gathered in the part are left out: what leaves it has been scattered by then,
    for which nobody should wait.
    """
    shards = [value.shard for value in operands]
    moving = [i for i, value in enumerate(operands) if value.differentiated]
    weights = [i for i in moving if operands[i].of_parameters and operands[i].spec.broadcast]
    activations = [i for i in moving if not operands[i].of_parameters]
    if weights and activations:
        chosen = [*activations, *weights]
        for i, shard in zip(chosen, _together([shards[i] for i in chosen]), strict=True):
            shards[i] = shard
    return shards


@jax.custom_vjp
def _together(xs: list[Any]) -> list[Any]:
    """Arrays whose cotangents are there together, or not at all."""
    return xs


_together.defvjp(lambda xs: (xs, None), lambda _, cotangents: (lax.optimization_barrier(cotangents),))
