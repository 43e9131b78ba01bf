"""Convolutions in the one form that XLA's CPU compiler has fast code for wherever they stand.

The compiler brings a convolution's dims into order (batch, space, features) before it looks for fast code, but as
compiled programs show (JAX 0.10.2) only in a program's entry, not in the bodies of its loops. There, what is not in
order runs as plain nested loops: the gradient of a kernel, whose batch stands where features do, takes 20 times as
long. Here the order is made in the traced program.

Known limit: loops inside of conditionals, of functions with derivatives of their own and of rematerialised parts are
left as they are, and so are grouped convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .jaxpr import ClosedJaxpr, Equation, evaluate, open_jaxpr, scan_parts, user_context


def with_ordered_convolutions(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of arrays, its convolutions with dims in order.

    Args:
      function: of trees of arrays, traced where it is called.
    """

    def ordered(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        if not _holds_others(closed):
            return function(*args)
        results = evaluate(closed, *jax.tree.leaves(args), on_equation=_ordered)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


def _holds_others(closed: ClosedJaxpr) -> bool:
    return any(
        _is_other(equation) or (equation.primitive.name == "scan" and _holds_others(scan_parts(equation).body))
        for equation in open_jaxpr(closed).eqns
    )


def _is_other(equation: Equation) -> bool:
    """Whether it is a convolution of one group whose dims are in another order."""
    if equation.primitive.name != "conv_general_dilated":
        return False
    if equation.params["feature_group_count"] > 1 or equation.params["batch_group_count"] > 1:
        return False
    return any(order != tuple(range(len(order))) for order in _orders(equation))


def _orders(equation: Equation) -> tuple[tuple[int, ...], ...]:
    """Of image, kernel and result, which dim comes where: batch, space, features; of a kernel space, read, made."""
    numbers = equation.params["dimension_numbers"]
    (batch, read, *space), (made, taken, *window), (left, written, *where) = numbers
    return (batch, *space, read), (*window, taken, made), (left, *where, written)


def _ordered(equation: Equation, operands: Sequence[Any]) -> Sequence[Any] | None:
    if equation.primitive.name == "scan" and _holds_others(scan_parts(equation).body):
        return _scan(equation, operands)
    if not _is_other(equation):
        return None
    image, kernel, result = _orders(equation)
    params, rank = equation.params, len(image)
    space = tuple(range(1, rank - 1))
    numbers = lax.ConvDimensionNumbers(
        lhs_spec=(0, rank - 1, *space), rhs_spec=(rank - 1, rank - 2, *range(rank - 2)), out_spec=(0, rank - 1, *space)
    )
    with user_context(equation):
        made = lax.conv_general_dilated(
            lax.transpose(operands[0], image), lax.transpose(operands[1], kernel),
            window_strides=params["window_strides"], padding=params["padding"], lhs_dilation=params["lhs_dilation"],
            rhs_dilation=params["rhs_dilation"], dimension_numbers=numbers, precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )  # fmt: skip
        return [lax.transpose(made, tuple(np.argsort(result)))]


def _scan(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    parts = scan_parts(equation)
    first_xs = parts.num_consts + parts.num_carry
    consts, carry, xs = operands[: parts.num_consts], operands[parts.num_consts : first_xs], operands[first_xs:]

    def trip(carried: Any, rows: Any) -> Any:
        outs = evaluate(parts.body, *consts, *carried, *rows, on_equation=_ordered)
        return tuple(outs[: parts.num_carry]), tuple(outs[parts.num_carry :])

    with user_context(equation):
        carried, stacked = lax.scan(
            trip, tuple(carry), tuple(xs), length=parts.length, reverse=parts.reverse, unroll=parts.unroll
        )
    return [*carried, *stacked]
