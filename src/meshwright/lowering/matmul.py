"""Matrix products whose weight gradients come out in the weight's own dim order.

JAX's cotangent of the right operand, `x @ w`, is `(g^T x)^T`: a product and a transpose. Compilers fold that transpose
into the product, and XLA's CPU backend then leaves its fast matrix library for a slow loop (1.4 to 1.8 times the time
of weight gradients of 256 x 64 from 256 rows, on 8 virtual devices). Computed as `x^T g` there is nothing to fold.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from .._jax.jaxpr import Equation


def turns(equation: Equation) -> bool:
    """Whether JAX would transpose the right operand's cotangent and the other order of the product would not."""
    if equation.primitive.name != "dot_general":
        return False
    (lhs_contract, rhs_contract), (_, rhs_batch) = equation.params["dimension_numbers"]
    rank = equation.invars[1].aval.ndim
    contracted = [rhs_contract[i] for i in np.argsort(lhs_contract)]
    free = [d for d in range(rank) if d not in {*rhs_contract, *rhs_batch}]
    return bool(contracted and free) and [*rhs_batch, *contracted, *free] == list(range(rank))


def matmul(equation: Equation, lhs: jax.Array, rhs: jax.Array, *, lhs_differentiated: bool) -> jax.Array:
    """The product of a `dot_general` that `turns`, on shards.

    Args:
      equation: the `dot_general`.
      lhs: one device's block of the left operand.
      rhs: of the right one, which is differentiated.
      lhs_differentiated: whether the left one is too; if not, its cotangent is not computed.
    """
    params = equation.params
    options = {name: params[name] for name in ("precision", "preferred_element_type")}
    (lhs_contract, _), (lhs_batch, _) = params["dimension_numbers"]
    lhs_free = [d for d in range(lhs.ndim) if d not in {*lhs_contract, *lhs_batch}]
    batch = len(lhs_batch)

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return lax.dot_general(left, right, params["dimension_numbers"], **options)

    def forward(left: jax.Array, right: jax.Array) -> tuple[jax.Array, Any]:
        return product(left, right), (left, right if lhs_differentiated else None)

    def backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        left, right = saved
        to_left = jax.linear_transpose(lambda x: product(x, right), left)(cotangent)[0] if lhs_differentiated else None
        rows = tuple(range(batch, batch + len(lhs_free)))
        dims = ((tuple(lhs_free), rows), (tuple(lhs_batch), tuple(range(batch))))
        to_right = lax.dot_general(left, cotangent, dims, **options)
        return to_left, to_right.astype(rhs.dtype)

    run = jax.custom_vjp(product)
    run.defvjp(forward, backward)
    return run(lhs, rhs)
