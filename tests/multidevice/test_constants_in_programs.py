"""Values that depend on no input: each reader computes the block that it needs."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from one_device import assert_as_on_one_device

import meshwright as mw

POSITIONS = 256


def test_a_prefix_sum_of_constants_is_made_once_for_each_reader() -> None:
    """Its terms are reached in as many ways as there are: evaluated as a tree, 256 positions would take for ever."""

    def step(weights: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            ones = jnp.ones(x.shape[:2], jnp.int32)
            after = jax.lax.associative_scan(
                lambda p, q: ((p[0] + 1) * (p[1] == q[1]) + q[0], q[1]), (jnp.zeros_like(ones), ones), axis=-1
            )[0]
            return jnp.mean((x @ w * jnp.sin(after[..., None].astype(jnp.float32))) ** 2)

        value, gradient = mw.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    rng = np.random.default_rng(0)
    weights, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 8), (16, POSITIONS, 8)))
    start = time.perf_counter()
    assert_as_on_one_device(step, weights, x, mesh={"x": 8}, microbatches=1)
    assert time.perf_counter() - start < 60
