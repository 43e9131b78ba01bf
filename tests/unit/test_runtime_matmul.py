"""The turned weight gradient equals JAX's own, and needs no transpose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.lowering.matmul import matmul, turns

TURNED = {
    "bsm,mf->bsf": ((2, 3, 4), (4, 5)),
    "bsm,mthd->bsthd": ((2, 3, 4), (4, 3, 2, 2)),
    "gsm,gmf->gsf": ((2, 3, 4), (2, 4, 5)),
}
KEPT = {"bsm,vm->bsv": ((2, 3, 4), (5, 4)), "bm,m->b": ((3, 4), (4,)), "bqhd,bkhd->bhqk": ((2, 3, 2, 4), (2, 5, 2, 4))}


def product(formula: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[Any, list[jax.Array]]:
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.einsum(formula, x, w))(*arrays)
    (dot,) = [e for e in _flat(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    return dot, arrays


def _flat(jaxpr: Any) -> list[Any]:
    found: list[Any] = []
    for equation in jaxpr.eqns:
        found += _flat(equation.params["jaxpr"].jaxpr) if "jaxpr" in equation.params else [equation]
    return found


@pytest.mark.parametrize("formula", TURNED)
@pytest.mark.parametrize("both", [True, False])
def test_gradients_are_those_of_jax_without_a_transpose(formula: str, both: bool) -> None:
    dot, (x, w) = product(formula, TURNED[formula])
    assert turns(dot)

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(matmul(dot, x, w, lhs_differentiated=both)))

    def jaxs(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.lax.dot_general(x, w, dot.params["dimension_numbers"])))

    argnums = (0, 1) if both else (1,)
    for a, b in zip(jax.grad(ours, argnums)(x, w), jax.grad(jaxs, argnums)(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert " transpose[" not in str(jax.make_jaxpr(jax.grad(ours, 1))(x, w))
    assert " transpose[" in str(jax.make_jaxpr(jax.grad(jaxs, 1))(x, w))


@pytest.mark.parametrize("formula", KEPT)
def test_products_whose_gradient_jax_already_lays_out_well_are_left_alone(formula: str) -> None:
    dot, _ = product(formula, KEPT[formula])
    assert not turns(dot)
