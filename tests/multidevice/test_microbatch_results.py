"""With microbatches, what a loss function returns beside the loss is what the whole batch would have given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import TENSOR, assert_as_on_one_device

import meshwright as mw
from meshwright.program.reduction import ReductionWarning

_RANDOM = np.random.default_rng(0)
X, Y = (jnp.asarray(_RANDOM.normal(size=(32, 16)), jnp.float32) for _ in range(2))
PARAMETERS = {"out": jnp.asarray(_RANDOM.normal(size=(16, 16)) * 0.3, jnp.float32)}


def error(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


def test_results_beside_the_loss_are_those_of_the_whole_batch() -> None:
    def step(p, b):
        def loss(p):
            y = b[0] @ p["out"]
            aux = {
                "max": y.max(), "min": jnp.min(y, axis=0), "sum": y.sum(), "mean": jnp.abs(y).mean(),
                "count": jnp.array(y.shape[0]), "positive": jnp.sum(y[:, 0] > 0), "weight": jnp.sum(p["out"]),
                "rows": y * 2, "truth": jnp.array(True),
            }  # fmt: skip
            return error(y, b[1]), aux

        (value, aux), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), {"loss": value, **aux}

    assert_as_on_one_device(step, PARAMETERS, (X, Y), microbatches=4)
    assert_as_on_one_device(step, PARAMETERS, (X, Y), microbatches=2, reduction="mean", **TENSOR)


def test_a_result_that_does_not_combine_is_said_to() -> None:
    def step(p, b):
        def loss(p):
            y = b[0] @ p["out"]
            return error(y, b[1]), jnp.std(y)

        (value, aux), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), (value, aux)

    with pytest.warns(ReductionWarning, match=r"test_microbatch_results.py:\d+.* is neither a mean nor a sum"):
        mw.parallelize(step, microbatches=2).plan(PARAMETERS, (X, Y))
