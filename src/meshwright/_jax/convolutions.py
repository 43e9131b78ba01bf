"""Convolutions in the forms that XLA's CPU compiler has fast code for.

The compiler brings a convolution's dims into order (batch, space, features) before it looks for fast code, but as
compiled programs show (JAX 0.10.2) only in a program's entry, not in the bodies of its loops. There, what is not in
order runs as plain nested loops: the gradient of a kernel, whose batch stands where features do, takes 20 times as
long. Here the order is made in the traced program.

Where the window has more elements than the image, the compiler takes one for the other, in a form that it has no fast
code for: 3 x 3 over images of 2 x 2, or the gradient of its input where a stride made 2 x 2 of 4 x 4, take 6 to 7 times
as long. Here such images get a border of zeros, which padding then has the less of. Nor is there fast code for an odd
number of channels (three colours, but not one): they get one more, of zeros. `benchmarks/cpu_costs.py` times all three.

Known limit: what is inside of conditionals, of functions with derivatives of their own and of rematerialised parts is
left as it is, and so are grouped convolutions, stages of pipelines and programs that are planned whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax

from .jaxpr import ClosedJaxpr, Equation, evaluate, is_inlined, open_jaxpr, scan_parts, user_context

# Images spread further apart get no border: with one, the gradient of steps of 16 took twelve times as long.
_MOST_DILATION = 2


def with_fast_convolutions(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of arrays, its convolutions in the form that there is fast code for.

    Args:
      function: of trees of arrays, traced where it is called.
    """

    def changed(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        if not _holds_others(closed):
            return function(*args)
        results = evaluate(closed, *jax.tree.leaves(args), on_equation=_changed)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return changed


def _holds_others(closed: ClosedJaxpr) -> bool:
    return any(
        _is_other(equation)
        or (equation.primitive.name == "scan" and _holds_others(scan_parts(equation).body))
        or (is_inlined(equation) and _holds_others(equation.params["jaxpr"]))
        for equation in open_jaxpr(closed).eqns
    )


def _is_other(equation: Equation) -> bool:
    """Whether it is a convolution of one group in another form."""
    if equation.primitive.name != "conv_general_dilated":
        return False
    if equation.params["feature_group_count"] > 1 or equation.params["batch_group_count"] > 1:
        return False
    if _is_taken_for_the_window(equation) or _channels(equation) % 2:
        return True
    return any(order != tuple(range(len(order))) for order in _orders(equation))


def _channels(equation: Equation) -> int:
    """That are read; one counts as even, since there is code for it."""
    channels = equation.invars[0].aval.shape[equation.params["dimension_numbers"].lhs_spec[1]]
    return channels if channels > 1 else 0


def _is_taken_for_the_window(equation: Equation) -> bool:
    """Whether the image has fewer elements than the window. With a single one it has the faster form as a window, and
    spread far apart, for the gradient of large steps, a border is mostly more zeros to multiply."""
    image, window = map(prod, _extents(equation))
    return 1 < image < window and max(equation.params["lhs_dilation"]) <= _MOST_DILATION


def _extents(equation: Equation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of image and window, in space."""
    (_, _, *space), (_, _, *window), _ = equation.params["dimension_numbers"]
    image, kernel = (atom.aval.shape for atom in equation.invars)
    return tuple(image[d] for d in space), tuple(kernel[d] for d in window)


def _orders(equation: Equation) -> tuple[tuple[int, ...], ...]:
    """Of image, kernel and result, which dim comes where: batch, space, features; of a kernel space, read, made."""
    numbers = equation.params["dimension_numbers"]
    (batch, read, *space), (made, taken, *window), (left, written, *where) = numbers
    return (batch, *space, read), (*window, taken, made), (left, *where, written)


def _changed(equation: Equation, operands: Sequence[Any]) -> Sequence[Any] | None:
    if equation.primitive.name == "scan" and _holds_others(scan_parts(equation).body):
        return _scan(equation, operands)
    if is_inlined(equation) and _holds_others(equation.params["jaxpr"]):
        return evaluate(equation.params["jaxpr"], *operands, on_equation=_changed)
    if not _is_other(equation):
        return None
    image, kernel, result = _orders(equation)
    params, rank = equation.params, len(image)
    space = tuple(range(1, rank - 1))
    numbers = lax.ConvDimensionNumbers(
        lhs_spec=(0, rank - 1, *space), rhs_spec=(rank - 1, rank - 2, *range(rank - 2)), out_spec=(0, rank - 1, *space)
    )
    with user_context(equation):
        pixels, window = lax.transpose(operands[0], image), lax.transpose(operands[1], kernel)
        padding = params["padding"]
        if _channels(equation) % 2:
            pixels, window = _with_zeros(pixels, {rank - 1: 1}), _with_zeros(window, {rank - 2: 1})
        if _is_taken_for_the_window(equation):
            pixels, padding = _bordered(equation, pixels)
        made = lax.conv_general_dilated(
            pixels, window, window_strides=params["window_strides"], padding=padding,
            lhs_dilation=params["lhs_dilation"],
            rhs_dilation=params["rhs_dilation"], dimension_numbers=numbers, precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )  # fmt: skip
        return [lax.transpose(made, tuple(np.argsort(result)))]


def _bordered(equation: Equation, pixels: Any) -> tuple[Any, list[tuple[int, int]]]:
    """Images [batch, *space, features] with zeros behind what they have in each dim, at least as large as the window,
    and the padding that they need then."""
    more = [max(0, window - image) for image, window in zip(*_extents(equation), strict=True)]
    grown = _with_zeros(pixels, dict(enumerate(more, start=1)))
    params = equation.params
    padding = [
        (low, high - n * dilation)
        for (low, high), n, dilation in zip(params["padding"], more, params["lhs_dilation"], strict=True)
    ]
    # The compiler would find the zeros and take them for padding again.
    return lax.optimization_barrier(grown), padding


def _with_zeros(x: Any, more: Mapping[int, int]) -> Any:
    """With so many zeros behind what it has in these dims."""
    return lax.pad(x, np.zeros((), x.dtype), [(0, more.get(dim, 0), 0) for dim in range(x.ndim)])


def _scan(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    parts = scan_parts(equation)
    first_xs = parts.num_consts + parts.num_carry
    consts, carry, xs = operands[: parts.num_consts], operands[parts.num_consts : first_xs], operands[first_xs:]

    def trip(carried: Any, rows: Any) -> Any:
        outs = evaluate(parts.body, *consts, *carried, *rows, on_equation=_changed)
        return tuple(outs[: parts.num_carry]), tuple(outs[parts.num_carry :])

    with user_context(equation):
        carried, stacked = lax.scan(
            trip, tuple(carry), tuple(xs), length=parts.length, reverse=parts.reverse, unroll=parts.unroll
        )
    return [*carried, *stacked]
