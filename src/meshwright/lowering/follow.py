"""Programs inside calls, evaluated on shards by following their operands' specs.

A call (`custom_jvp_call`, `custom_vjp_call`, `cond`, `while`) is planned as one operator, split only along dims that
its forward and its backward program have in common. Its equations need no plan: each is split the way its operands are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from .._jax.jaxpr import (
    ClosedJaxpr,
    Equation,
    consts_of,
    inline,
    is_literal,
    is_remat,
    open_jaxpr,
    scan_parts,
    user_context,
)
from ..program.local import COMBINE, Split, evaluate_local, overflows
from ..program.rules import Rules
from ..sharding import Algorithm, Spec, algorithm_of
from .local_value import LocalValue

# Linear in all operands together.
_LINEAR = frozenset(
    [
        "add",
        "add_any",
        "sub",
        "neg",
        "convert_element_type",
        "reshape",
        "transpose",
        "squeeze",
        "broadcast_in_dim",
        "reduce_sum",
        "copy",
    ]
)


class Follower:
    """Evaluates the programs inside calls.

    Args:
      rules: factor rules of every equation inside.
      sizes: mesh axis sizes.
      take_over: may evaluate an equation in the place of the follower, by returning its results.
    """

    def __init__(
        self,
        rules: Rules,
        sizes: Mapping[str, int],
        take_over: Callable[[Equation, Sequence[LocalValue]], Sequence[LocalValue] | None] | None = None,
    ) -> None:
        self._rules = rules
        self._sizes = sizes
        self._take_over = take_over

    def call(
        self, equation: Equation, algorithm: Algorithm, operands: Sequence[Any], *, differentiated: bool
    ) -> list[Any]:
        """Results of a call on shards laid out as `algorithm` says."""
        specs = [spec.without_broadcast() for spec in algorithm.operands]
        if differentiated and equation.primitive.name != "while":
            return self._differentiable(equation, algorithm, specs, operands)
        values = [LocalValue(x, s, self._sizes) for x, s in zip(operands, specs, strict=True)]
        made = self._equation(equation, values)
        return [_settle(value, spec) for value, spec in zip(made, algorithm.results, strict=True)]

    def _differentiable(
        self, equation: Equation, algorithm: Algorithm, specs: Sequence[Spec], operands: Sequence[Any]
    ) -> list[Any]:
        parts = self._rules.derivative(equation)
        num_results = len(equation.outvars)
        residual_specs: list[Spec] = []

        def forward(*shards: Any) -> tuple[list[Any], list[Any]]:
            values = [LocalValue(x, s, self._sizes) for x, s in zip(shards, specs, strict=True)]
            made = self.program(parts.forward, values)
            outs = [_settle(v, s) for v, s in zip(made[:num_results], algorithm.results, strict=True)]
            residuals = made[num_results:]
            residual_specs[:] = [Spec(v.spec.dims) for v in residuals]
            return outs, [v.read(s) for v, s in zip(residuals, residual_specs, strict=True)]

        def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
            values = [LocalValue(x, s, self._sizes) for x, s in zip(residuals, residual_specs, strict=True)]
            for spec, smooth, cotangent in zip(algorithm.results, parts.results, cotangents, strict=True):
                if smooth:
                    # Of a partial result it is whole, of one with a broadcast cotangent partial.
                    values.append(LocalValue(cotangent, Spec(spec.dims, partial=spec.broadcast), self._sizes))
            grads = iter(self.program(parts.backward, values))
            found = []
            for spec, operand, smooth in zip(algorithm.operands, equation.invars, parts.operands, strict=True):
                if not smooth:
                    found.append(None)
                    continue
                # The operand's cotangent is partial exactly over the axes it is broadcast over. JAX lets rules give
                # cotangents in a wider type.
                cotangent = _settle(next(grads), Spec(spec.dims, partial=spec.broadcast))
                found.append(cotangent.astype(operand.aval.dtype))
            return tuple(found)

        @jax.custom_vjp
        def run(*shards: Any) -> list[Any]:
            return forward(*shards)[0]

        run.defvjp(forward, backward)
        return run(*operands)

    def program(self, closed: ClosedJaxpr, operands: Sequence[LocalValue]) -> list[LocalValue]:
        """Evaluate a whole program."""
        jaxpr = open_jaxpr(closed)
        env: dict[Any, LocalValue] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, const in zip(jaxpr.constvars, consts_of(closed), strict=True):
            env[var] = self._whole(const)

        def read(atom: Any) -> LocalValue:
            return self._whole(atom.val) if is_literal(atom) else env[atom]

        for equation in jaxpr.eqns:
            with user_context(equation):
                env.update(
                    zip(equation.outvars, self._equation(equation, [read(a) for a in equation.invars]), strict=True)
                )
        return [read(atom) for atom in jaxpr.outvars]

    def _whole(self, x: Any) -> LocalValue:
        return LocalValue(x, Spec.replicated(len(getattr(x, "shape", ()))), self._sizes)

    def _equation(self, equation: Equation, operands: Sequence[LocalValue]) -> list[LocalValue]:
        name, params = equation.primitive.name, equation.params
        if self._take_over is not None and (taken := self._take_over(equation, operands)) is not None:
            return list(taken)
        if name in ("custom_jvp_call", "custom_vjp_call"):
            return self.program(inline(params["call_jaxpr"]), operands)
        if is_remat(equation):
            return self.program(ClosedJaxpr(open_jaxpr(params["jaxpr"]), ()), operands)
        if name == "cond":
            return self._cond(equation, operands)
        if name == "while":
            return self._while(equation, operands)
        if name == "scan":
            return self._scan(equation, operands)
        algorithm = self._follow(equation, operands)
        partial = _common_partial(equation, operands)
        shards = [
            value.read(Spec(spec.dims, partial=partial))
            for value, spec in zip(operands, algorithm.operands, strict=True)
        ]
        rule = self._rules.rule(equation, differentiated=False)
        results = evaluate_local(equation, Split(rule, algorithm.axes, self._sizes), shards)
        return [
            LocalValue(x, Spec(s.dims, partial=s.partial | partial), self._sizes)
            for x, s in zip(results, algorithm.results, strict=True)
        ]

    def _follow(self, equation: Equation, operands: Sequence[LocalValue]) -> Algorithm:
        """Split each factor as the first operand that has it split is."""
        rule = self._rules.rule(equation, differentiated=False)
        axes: list[tuple[str, ...]] = [()] * len(rule.factors)
        allowed, used = set(rule.splittable), set[str]()
        for value, dims in zip(operands, rule.operands, strict=True):
            for dim, split in zip(dims, value.spec.dims, strict=True):
                lead = next((f for f in dim if rule.factors[f].size > 1), None)
                if split and lead in allowed and not axes[lead] and used.isdisjoint(split):
                    axes[lead] = split
                    used.update(split)
        combines = COMBINE.get(equation.primitive.name) in ("max", "min")
        return algorithm_of(rule, tuple(axes), [False] * len(operands), combines_at_once=combines)

    def _body_specs(self, closed: ClosedJaxpr, operands: Sequence[LocalValue]) -> list[Spec]:
        """Specs of a program's results, found by tracing it once."""
        specs: list[Spec] = []

        def trace(*shards: Any) -> list[Any]:
            values = [LocalValue(x, v.spec, self._sizes) for x, v in zip(shards, operands, strict=True)]
            made = self.program(closed, values)
            specs[:] = [Spec(v.spec.dims) for v in made]
            return [v.read(s) for v, s in zip(made, specs, strict=True)]

        jax.eval_shape(trace, *(v.read(v.spec) for v in operands))
        return specs

    def _cond(self, equation: Equation, operands: Sequence[LocalValue]) -> list[LocalValue]:
        index, *rest = operands
        branches = equation.params["branches"]
        specs = self._body_specs(branches[0], rest)

        def on_shards(branch: ClosedJaxpr) -> Any:
            def run(*shards: Any) -> list[Any]:
                values = [LocalValue(x, v.spec, self._sizes) for x, v in zip(shards, rest, strict=True)]
                return [v.read(s) for v, s in zip(self.program(branch, values), specs, strict=True)]

            return run

        shards = [v.read(v.spec) for v in rest]
        results = lax.switch(index.read(Spec(())), [on_shards(branch) for branch in branches], *shards)
        return [LocalValue(x, s, self._sizes) for x, s in zip(results, specs, strict=True)]

    def _while(self, equation: Equation, operands: Sequence[LocalValue]) -> list[LocalValue]:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
        carry = operands[num_cond + num_body :]
        specs = [Spec(v.spec.dims) for v in carry]

        def values(shards: Sequence[Any]) -> list[LocalValue]:
            return [LocalValue(x, s, self._sizes) for x, s in zip(shards, specs, strict=True)]

        def condition(shards: Sequence[Any]) -> Any:
            (go_on,) = self.program(params["cond_jaxpr"], [*(v.enter() for v in cond_consts), *values(shards)])
            return go_on.read(Spec(()))

        def body(shards: Sequence[Any]) -> list[Any]:
            made = self.program(params["body_jaxpr"], [*(v.enter() for v in body_consts), *values(shards)])
            return [v.read(s) for v, s in zip(made, specs, strict=True)]

        results = lax.while_loop(condition, body, [v.read(s) for v, s in zip(carry, specs, strict=True)])
        return values(results)

    def _scan(self, equation: Equation, operands: Sequence[LocalValue]) -> list[LocalValue]:
        parts = scan_parts(equation)
        first_xs = parts.num_consts + parts.num_carry
        consts, carry, xs = operands[: parts.num_consts], operands[parts.num_consts : first_xs], operands[first_xs:]
        carry_specs = [Spec(v.spec.dims) for v in carry]
        rows = [Spec(((), *v.spec.dims[1:])) for v in xs]
        stacked: list[Spec] = []

        def body(shards: Any, row: Any) -> tuple[list[Any], list[Any]]:
            values = [LocalValue(x, s, self._sizes) for x, s in zip(shards, carry_specs, strict=True)]
            values += [LocalValue(x, Spec(s.dims[1:]), self._sizes) for x, s in zip(row, rows, strict=True)]
            made = self.program(parts.body, [*(v.enter() for v in consts), *values])
            kept, out = made[: parts.num_carry], made[parts.num_carry :]
            stacked[:] = [Spec(((), *v.spec.dims)) for v in out]
            return [v.read(s) for v, s in zip(kept, carry_specs, strict=True)], [v.read(Spec(v.spec.dims)) for v in out]

        init = [v.read(s) for v, s in zip(carry, carry_specs, strict=True)]
        final, ys = lax.scan(
            body, init, [v.read(s) for v, s in zip(xs, rows, strict=True)], length=parts.length,
            reverse=parts.reverse, unroll=parts.unroll,
        )  # fmt: skip
        results = [LocalValue(x, s, self._sizes) for x, s in zip(final, carry_specs, strict=True)]
        return results + [LocalValue(x, s, self._sizes) for x, s in zip(ys, stacked, strict=True)]


def _common_partial(equation: Equation, operands: Sequence[LocalValue]) -> frozenset[str]:
    """Axes over which a linear equation may leave its result partial, as all its operands are: many sums then cost one
    all-reduce, of their total."""
    if equation.primitive.name not in _LINEAR or overflows(equation) or not operands:
        return frozenset()
    return frozenset.intersection(*(value.spec.partial for value in operands))


def _settle(value: LocalValue, spec: Spec) -> Any:
    """The shard in `spec`, which may be partial over axes that the value is not: one device of each group keeps it."""
    missing = spec.partial - value.spec.partial
    if not missing:
        return value.read(spec)
    whole = value.read(Spec(spec.dims, partial=spec.partial - missing))
    return jax.numpy.where(lax.axis_index(tuple(sorted(missing))) == 0, whole, jax.numpy.zeros_like(whole))
