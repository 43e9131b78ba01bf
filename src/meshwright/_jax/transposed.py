"""Reshapes that transpose first, as two operators: factors relate the dims of each, and of both at once none.

Known limit: the dim that such a reshape merges can be split along its first part only. `jax.vmap` of a convolution puts
the mapped dim first, so a batch that is not the mapped dim is not split there (it is gathered, and its results sliced),
though it is still cut into microbatches.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def transposes(equation: Any) -> bool:
    """Whether an equation is a reshape that also transposes, as JAX writes a convolution under `jax.vmap`."""
    return equation.primitive.name == "reshape" and equation.params["dimensions"] is not None


def in_two(equation: Any) -> Any:
    """Such a reshape as a program of a transpose and a reshape."""
    (operand,) = equation.invars
    params = equation.params
    return jax.make_jaxpr(lambda x: lax.reshape(lax.transpose(x, params["dimensions"]), params["new_sizes"]))(
        jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)
    )
