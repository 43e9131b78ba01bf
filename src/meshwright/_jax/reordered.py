"""A program that computes the same with its sums taken in another order, to see what rounding alone does to results.

Every sum of floating-point numbers over a dim (matrix products, convolutions, reductions, scattered additions) is taken
in two halves, each rounded to the program's own type, of its elements rotated by a number that is an argument. That is
how the devices of a mesh add up their parts, and all that a correct plan changes in exact arithmetic is nothing. So the
spread of the results over a few rotations is the noise that a difference is judged against: stochastic arithmetic
(Vignes 1993; Parker 1997) with the operations' own rounding in the place of random numbers. It needs no property of the
program, as a permuted batch would (a loss that is a mean over examples, no draws by position), and no other types, as
float64 would (a program that asks for float32 keeps it; draws have other bits).

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


def reordered(function: Callable[..., Any], *args: Any) -> Callable[..., list[Any]]:
    """A function of a rotation (a whole number) and of the leaves of `args`, that gives the leaves of the results.

    Args:
      function: of trees of arrays, without side effects that must happen once.
      args: its arguments; only shapes and dtypes are looked at.
    """
    closed = inline_value_and_grad(inline(jax.make_jaxpr(function)(*args)))

    def run(rotation: Any, *leaves: Any) -> list[Any]:
        return _evaluated(closed, leaves, rotation)

    return run


def _evaluated(closed: ClosedJaxpr, operands: Sequence[Any], rotation: Any) -> list[Any]:
    return evaluate(closed, *operands, on_equation=lambda e, xs: _equation(e, xs, rotation))


def _equation(equation: Equation, operands: Sequence[Any], rotation: Any) -> Sequence[Any] | None:
    """What an equation gives, its sums reordered; None where it has none."""
    name, params = equation.primitive.name, equation.params
    match name:
        case "scan":
            return _scan(equation, operands, rotation)
        case "while":
            return _while(params, operands, rotation)
        case "cond":
            index, *rest = operands
            branches = [lambda *xs, b=branch: _evaluated(b, xs, rotation) for branch in params["branches"]]
            return lax.switch(index, branches, *rest)
        case "debug_callback" | "debug_print":
            return []  # the program itself has said it
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = params.get(key)
        if body is not None and name in _CALLS:
            return _evaluated(ClosedJaxpr(open_jaxpr(body), consts_of(body)), operands, rotation)
    if not jnp.issubdtype(equation.outvars[0].aval.dtype if equation.outvars else jnp.int32, jnp.inexact):
        return None
    match name:
        case "dot_general":
            (contracted, _) = params["dimension_numbers"]
            return _in_halves(equation, operands, list(zip(*contracted, strict=True)), rotation)
        case "conv_general_dilated" if params["feature_group_count"] == params["batch_group_count"] == 1:
            numbers = params["dimension_numbers"]
            return _in_halves(equation, operands, [(numbers.lhs_spec[1], numbers.rhs_spec[1])], rotation)
        case "reduce_sum":
            return _in_halves(equation, operands, [(axis,) for axis in params["axes"]], rotation)
        case "scatter-add" | "scatter_add":
            return _scattered(equation, operands, rotation)
    return None


_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "remat",
    "custom_jvp_call",
    "custom_vjp_call",
)


def _in_halves(
    equation: Equation, operands: Sequence[Any], dims: Sequence[tuple[int, ...]], rotation: Any
) -> Sequence[Any] | None:
    """A sum over dims of all operands together, the longest of which is rotated and halved."""
    sizes = [operands[0].shape[one[0]] for one in dims]
    if max(sizes, default=0) < 2:
        return None
    summed, size = dims[sizes.index(max(sizes))], max(sizes)
    turned = [jnp.roll(x, rotation, axis=dim) for x, dim in zip(operands, summed, strict=True)]
    parts = []
    for start, stop in ((0, size // 2), (size // 2, size)):
        halves = [lax.slice_in_dim(x, start, stop, axis=dim) for x, dim in zip(turned, summed, strict=True)]
        parts.append(bind(equation, *halves)[0])
    return [parts[0] + parts[1]]


def _scattered(equation: Equation, operands: Sequence[Any], rotation: Any) -> Sequence[Any]:
    """Additions at given places: every second update first, which ones depends on the rotation."""
    target, places, updates = operands
    first = (jnp.arange(updates.size).reshape(updates.shape) + rotation) % 2 == 0
    early = bind(equation, jnp.zeros_like(target), places, jnp.where(first, updates, 0))[0]
    return [bind(equation, target, places, jnp.where(first, 0, updates))[0] + early]


def _scan(equation: Equation, operands: Sequence[Any], rotation: Any) -> Sequence[Any]:
    parts = scan_parts(equation)
    first, last = parts.num_consts, parts.num_consts + parts.num_carry
    consts = operands[:first]

    def trip(carried: Any, rows: Any) -> Any:
        made = _evaluated(parts.body, [*consts, *carried, *rows], rotation)
        return tuple(made[: parts.num_carry]), tuple(made[parts.num_carry :])

    carried, stacked = lax.scan(
        trip, tuple(operands[first:last]), tuple(operands[last:]), length=parts.length, reverse=parts.reverse
    )
    return [*carried, *stacked]


def _while(params: dict[str, Any], operands: Sequence[Any], rotation: Any) -> Sequence[Any]:
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    first, second = operands[:of_condition], operands[of_condition : of_condition + of_body]
    return lax.while_loop(
        lambda state: _evaluated(params["cond_jaxpr"], [*first, *state], rotation)[0],
        lambda state: tuple(_evaluated(params["body_jaxpr"], [*second, *state], rotation)),
        tuple(operands[of_condition + of_body :]),
    )
