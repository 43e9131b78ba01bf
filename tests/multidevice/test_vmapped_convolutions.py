"""Convolutions under `jax.vmap`, whose reshapes transpose too, are split like any other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from one_device import assert_as_on_one_device

import meshwright as mw


def step(weights: Any, batch: Any) -> Any:
    """Frames are the second dim, and each is convolved by itself."""

    def loss(weights: Any) -> Any:
        def frame(x: Any) -> Any:
            x = lax.conv_general_dilated(x, weights["in"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jax.nn.relu(x)

        x = jax.vmap(frame, in_axes=1, out_axes=1)(batch["x"])
        return jnp.mean((jnp.einsum("nthwc,cd->nd", x, weights["out"]) - batch["y"]) ** 2)

    value, gradients = mw.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def given() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    weights = {"in": array(3, 3, 4, 8), "out": array(8, 5)}
    return weights, {"x": array(16, 3, 8, 8, 4), "y": array(16, 5)}


@pytest.mark.parametrize(
    "options", [{"preset": "data_parallel"}, {"microbatches": 2}, {"microbatches": 2, "stages": 2}]
)
def test_numbers_are_those_of_one_device(options: Any) -> None:
    weights, batch = given()
    parallel = assert_as_on_one_device(step, weights, batch, **options)
    if "preset" in options:
        (stage,) = parallel.plan(weights, batch).stages
        (images,) = (one for one in stage.inputs if "['x']" in one.name)
        assert images.spec.shards(stage.sizes) == 8
        assert not images.spec.dims[1], "frames are no batch"
