"""Equinox: the arrays of a module are the state, everything else (activation functions, sizes) is closed over.

`meshwright verify examples/equinox_mlp.py:make` holds the plan's predictions against the compiled step.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # read when JAX starts

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import meshwright as mw


def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The train step and example arguments for it."""
    model = eqx.nn.MLP(32, 1, width_size=128, depth=3, activation=jax.nn.gelu, key=jax.random.key(0))
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def train_step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        parameters, moments = state

        def loss_fn(parameters: eqx.nn.MLP) -> jax.Array:
            prediction = jax.vmap(eqx.combine(parameters, static))(batch["x"])
            return jnp.mean((prediction - batch["y"]) ** 2)

        loss, gradients = mw.value_and_grad(loss_fn)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (eqx.apply_updates(parameters, updates), moments), {"loss": loss}

    x = jax.random.normal(jax.random.key(1), (256, 32))
    return train_step, ((parameters, optimizer.init(parameters)), {"x": x, "y": jnp.sin(x.sum(1, keepdims=True))})


def main() -> None:
    """Ten steps by the plan."""
    step, (state, batch) = make()
    train_step = mw.parallelize(step, cluster="local")
    print(train_step.plan(state, batch))
    for i in range(10):
        state, metrics = train_step(state, batch)
        print(f"step {i}: loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
