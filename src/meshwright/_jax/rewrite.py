"""Passes over the program of a function, where the function is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .jaxpr import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    bind,
    consts_of,
    hoist_consts,
    is_dropped,
    is_inlined,
    is_literal,
    open_jaxpr,
)

# Of a program whose calls are in line, and the number of arguments before its parameters: the program it makes of it,
# or None where there is nothing to be changed.
Pass = Callable[[ClosedJaxpr, int], ClosedJaxpr | None]


def rewriting(function: Callable[..., Any], passes: Sequence[Pass]) -> Callable[..., Any]:
    """The same function, its program as passes leave it, one after the other.

    Args:
      function: of two trees of arrays, the second the parameters. Traced where it is called.
      passes: over its program.
    """

    if not passes:
        return function

    def changed(others: Any, parameters: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(others, parameters)
        first = len(jax.tree.leaves(others))
        found, flat = closed, _in_line(closed)
        for each in passes:
            if (made := each(flat, first)) is not None:
                found = flat = made
        # What no pass has changed stays as it was traced, its calls too.
        results = _called(found, jax.tree.leaves((others, parameters)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return changed


def _called(closed: ClosedJaxpr, args: Sequence[Any]) -> Sequence[Any]:
    """Run a program as one call, where whoever traces this need not trace each of its equations again."""
    args, closed = [*consts_of(closed), *args], hoist_consts(closed)
    outs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in open_jaxpr(closed).outvars]
    like = jax.jit(lambda *xs: [jax.numpy.zeros(one.shape, one.dtype) for one in outs], keep_unused=True)
    (call,) = open_jaxpr(jax.make_jaxpr(like)(*args)).eqns
    return bind(call.replace(params={**call.params, "jaxpr": closed, "name": "microbatch"}), *args)


def _in_line(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with the equations of all calls in line: runs of layers keep what they cast of a weight."""
    found: list[Equation] = []
    constants: dict[Any, Any] = dict(zip(open_jaxpr(closed).constvars, consts_of(closed), strict=True))

    def add(jaxpr: Jaxpr, names: dict[Any, Any]) -> list[Any]:
        for equation in jaxpr.eqns:
            operands = [a if is_literal(a) else names.get(a, a) for a in equation.invars]
            if is_inlined(equation) and "jaxpr" in equation.params:
                inner = open_jaxpr(equation.params["jaxpr"])
                constants.update(zip(inner.constvars, consts_of(equation.params["jaxpr"]), strict=True))
                made = add(inner, dict(zip(inner.invars, operands, strict=True)))
                names.update(zip(equation.outvars, made, strict=True))
            else:
                # What JAX has traced once stands here several times.
                results = [v if is_dropped(v) else Var(v.aval) for v in equation.outvars]
                names.update(zip(equation.outvars, results, strict=True))
                found.append(equation.replace(invars=operands, outvars=results))
        return [a if is_literal(a) else names.get(a, a) for a in jaxpr.outvars]

    jaxpr = open_jaxpr(closed)
    outvars = add(jaxpr, {})
    flat = jaxpr.replace(
        eqns=found, outvars=outvars, constvars=[*constants], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    return ClosedJaxpr(flat, [*constants.values()])
