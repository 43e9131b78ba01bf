"""Reverse differentiation of a long program in one trace of its tangents.

`jax.vjp` makes a trace for every operation that has no linearization rule of its own, which most have not (JAX 0.10).
Forward differentiation, of which the linear part is transposed, makes one for all of them, in a half to four fifths of
the time (`benchmarks/tracing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def vjp(
    function: Callable[..., tuple[Sequence[Any], Any]], *primals: Any
) -> tuple[Sequence[Any], Callable[[Sequence[Any]], tuple[Any, ...]], Any]:
    """As `jax.vjp` with `has_aux`, of a function whose results are all differentiable.

    >>> results, pull, aux = vjp(lambda x: ([x * x], x + 1), 3.0)
    >>> float(results[0]), [float(x) for x in pull([1.0])], float(aux)
    (9.0, [6.0], 4.0)

    Args:
      function: of the primals; its results, and what else it makes.
      primals: trees of arrays that are differentiable.

    Returns:
      The results, the function from their cotangents to those of the primals, and what else was made.

    Raises:
      TypeError: a primal or a result is not differentiable, which `jax.vjp` allows.
    """
    made: list[Any] = []

    def tangents(*moving: Any) -> Sequence[Any]:
        results, moved, aux = jax.jvp(function, primals, moving, has_aux=True)
        made[:] = results, aux  # values of the trace around this one: they depend on no tangent
        return moved

    pull = jax.linear_transpose(tangents, *primals)
    results, aux = made
    return results, pull, aux
