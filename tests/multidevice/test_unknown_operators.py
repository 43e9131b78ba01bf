"""Operators without a sharding rule run whole on every device, and the user is told where they stand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import TENSOR, assert_as_on_one_device

import meshwright as mw
from meshwright.program.rules import ReplicationWarning


def doubled(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    def loss(w: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ w)
        return jnp.mean(y**2 * doubled(jax.lax.stop_gradient(y)))

    value, grad = mw.value_and_grad(loss)(state)
    return state - 0.1 * grad, value


@pytest.mark.parametrize("options", [{}, TENSOR], ids=["free", "two axes"])
def test_a_callback_runs_whole_with_a_warning_that_names_its_line(options: dict[str, Any]) -> None:
    x = jax.random.normal(jax.random.key(0), (64, 32))
    with pytest.warns(ReplicationWarning, match=r"pure_callback at .*test_unknown_operators.py:\d+.*runs whole"):
        assert_as_on_one_device(step, jnp.eye(32), x, **options)
