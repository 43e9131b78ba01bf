"""A program that computes the same with its sums taken in another order, to see what rounding alone does to results.

Every sum of floating-point numbers over a dim (matrix products, convolutions, reductions, scattered additions) is taken
in two parts, each rounded to the program's own type, that end where an argument says. That is how the devices of a mesh
add up their parts, and in exact arithmetic it changes nothing. So the spread of the results over a few cuts is the
noise that a difference is judged against: stochastic arithmetic (Vignes 1993; Parker 1997) with the operations' own
rounding in the place of random numbers. It needs no property of the program, as a permuted batch would (a loss that is
a mean over examples, no draws by position), and no other types, as float64 would (a program that asks for float32 keeps
it; draws have other bits).

Known limit: programs inside of kernels (Pallas, foreign calls) and running sums (`cumsum`) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .grad import inline_value_and_grad
from .jaxpr import ClosedJaxpr, Equation, bind, consts_of, evaluate, inline, open_jaxpr, scan_parts

_CALLS = frozenset(
    ["jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat", "custom_jvp_call", "custom_vjp_call"]
)


def reordered(function: Callable[..., Any], *args: Any) -> Callable[..., list[Any]]:
    """A function of a cut (a number from 0 to 1) and of the leaves of `args`, that gives the leaves of the results.

    Args:
      function: of trees of arrays, without side effects that must happen once.
      args: its arguments; only shapes and dtypes are looked at.
    """
    closed = inline_value_and_grad(inline(jax.make_jaxpr(function)(*args)))

    def run(cut: Any, *leaves: Any) -> list[Any]:
        return _evaluated(closed, leaves, cut)

    return run


def _evaluated(closed: ClosedJaxpr, operands: Sequence[Any], cut: Any) -> list[Any]:
    return evaluate(closed, *operands, on_equation=lambda e, xs: _equation(e, xs, cut))


def _equation(equation: Equation, operands: Sequence[Any], cut: Any) -> Sequence[Any] | None:
    """What an equation gives, its sums reordered; None where it has none."""
    name, params = equation.primitive.name, equation.params
    match name:
        case "scan":
            return _scan(equation, operands, cut)
        case "while":
            return _while(params, operands, cut)
        case "cond":
            index, *rest = operands
            branches = [lambda *xs, b=branch: _evaluated(b, xs, cut) for branch in params["branches"]]
            return lax.switch(index, branches, *rest)
        case "debug_callback" | "debug_print":
            return []  # the program itself has said it
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = params.get(key)
        if body is not None and name in _CALLS:
            return _evaluated(ClosedJaxpr(open_jaxpr(body), consts_of(body)), operands, cut)
    if not jnp.issubdtype(equation.outvars[0].aval.dtype if equation.outvars else jnp.int32, jnp.inexact):
        return None
    match name:
        case "dot_general":
            (contracted, _) = params["dimension_numbers"]
            return _in_two(equation, operands, list(zip(*contracted, strict=True)), cut)
        case "conv_general_dilated" if params["feature_group_count"] == params["batch_group_count"] == 1:
            numbers = params["dimension_numbers"]
            return _in_two(equation, operands, [(numbers.lhs_spec[1], numbers.rhs_spec[1])], cut)
        case "reduce_sum":
            return _in_two(equation, operands, [(axis,) for axis in params["axes"]], cut)
        case "scatter-add" | "scatter_add":
            return _scattered(equation, operands, cut)
    return None


def _in_two(
    equation: Equation, operands: Sequence[Any], dims: Sequence[tuple[int, ...]], cut: Any
) -> Sequence[Any] | None:
    """A sum over dims of all operands together, the longest of which is cut."""
    sizes = [operands[0].shape[one[0]] for one in dims]
    if max(sizes, default=0) < 2:
        return None
    summed = dims[sizes.index(max(sizes))]
    first = [_before(x, dim, cut) for x, dim in zip(operands, summed, strict=True)]
    # All operands lose what they have outside of a part: an infinity times a zero would be none of the sum.
    parts = [
        bind(equation, *(jnp.where(mask == kept, x, 0) for mask, x in zip(first, operands, strict=True)))[0]
        for kept in (True, False)
    ]
    return [parts[0] + parts[1]]


def _before(x: Any, dim: int, cut: Any) -> Any:
    """Which elements come before the cut of a dim."""
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    return lax.broadcasted_iota(jnp.float32, shape, dim) < jnp.floor(cut * x.shape[dim])


def _scattered(equation: Equation, operands: Sequence[Any], cut: Any) -> Sequence[Any]:
    """Additions at given places, those before the cut apart."""
    target, places, updates = operands
    if not updates.ndim:
        return bind(equation, *operands)
    first = _before(updates, updates.shape.index(max(updates.shape)), cut)
    early = bind(equation, jnp.zeros_like(target), places, jnp.where(first, updates, 0))[0]
    return [bind(equation, target, places, jnp.where(first, 0, updates))[0] + early]


def _scan(equation: Equation, operands: Sequence[Any], cut: Any) -> Sequence[Any]:
    parts = scan_parts(equation)
    first, last = parts.num_consts, parts.num_consts + parts.num_carry
    consts = operands[:first]

    def trip(carried: Any, rows: Any) -> Any:
        made = _evaluated(parts.body, [*consts, *carried, *rows], cut)
        return tuple(made[: parts.num_carry]), tuple(made[parts.num_carry :])

    carried, stacked = lax.scan(
        trip, tuple(operands[first:last]), tuple(operands[last:]), length=parts.length, reverse=parts.reverse
    )
    return [*carried, *stacked]


def _while(params: dict[str, Any], operands: Sequence[Any], cut: Any) -> Sequence[Any]:
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    first, second = operands[:of_condition], operands[of_condition : of_condition + of_body]
    return lax.while_loop(
        lambda state: _evaluated(params["cond_jaxpr"], [*first, *state], cut)[0],
        lambda state: tuple(_evaluated(params["body_jaxpr"], [*second, *state], cut)),
        tuple(operands[of_condition + of_body :]),
    )
