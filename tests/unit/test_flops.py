"""FLOPs of equations, from their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwright._jax.jaxpr import open_jaxpr
from meshwright.program.flops import equation_flops

_SIZES = jnp.array([3, 5])
_X, _W, _Y = jnp.ones((8, 4)), jnp.ones((2, 4, 6)), jnp.ones((8, 6))


def flops(function: Callable[..., Any], name: str) -> list[float]:
    """Of all equations of a name."""
    found = [e for e in open_jaxpr(jax.make_jaxpr(function)(_X, _W)).eqns if e.primitive.name == name]
    return [equation_flops(equation)[0] for equation in found]


def test_ragged_products_cost_what_their_rows_do() -> None:
    # Each row meets the matrix of one group, forward and in both gradients.
    assert flops(lambda x, w: lax.ragged_dot(x, w, _SIZES), "ragged_dot_general") == [2 * 8 * 4 * 6]
    both = jax.vjp(lambda x, w: lax.ragged_dot(x, w, _SIZES), _X, _W)[1]
    assert flops(lambda x, w: both(x @ w[0]), "ragged_dot_general") == [2 * 8 * 4 * 6] * 2


@pytest.mark.parametrize(
    ("solve", "name", "expected"),
    [
        (lambda x, w: lax.linalg.cholesky(x @ x.T), "cholesky", 8**3 / 3),
        (lambda x, w: lax.linalg.lu(x @ x.T)[0], "lu", 2 * 8**3 / 3),
        (lambda x, w: lax.linalg.triangular_solve(x @ x.T, x, left_side=True), "triangular_solve", 8 * 8 * 4),
    ],
)
def test_solving_costs_more_than_its_elements(solve: Callable[..., Any], name: str, expected: float) -> None:
    assert flops(solve, name) == [pytest.approx(expected)]
