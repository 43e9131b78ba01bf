"""Flax Linen: a `TrainState` and dropout, the state created already sharded."""

import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # read when JAX starts

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import meshwright as mw


class Network(nn.Module):
    """Two wide layers with dropout, and a narrow one."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, features) to (batch, 1)."""
        for _ in range(2):
            x = nn.Dropout(0.1, deterministic=False)(nn.relu(nn.Dense(256)(x)))
        return nn.Dense(1)(x)


model, optimizer = Network(), optax.adam(1e-3)
x = jax.random.normal(jax.random.key(1), (512, 32))
batch = {"x": x, "y": jnp.sin(x.sum(1, keepdims=True))}


def make_state(key: jax.Array) -> TrainState:
    """Parameters and optimizer state."""
    keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
    parameters = model.init(keys, x)["params"]
    return TrainState.create(apply_fn=model.apply, params=parameters, tx=optimizer)


@mw.parallelize(cluster="local", zero=3)  # parameters and moments split over all devices
def train_step(
    state: TrainState, batch: dict[str, jax.Array], key: jax.Array
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step of Adam, with numbers of its own for dropout."""

    def loss_fn(parameters: Any) -> jax.Array:
        drop = {"dropout": jax.random.fold_in(key, state.step)}
        prediction = state.apply_fn({"params": parameters}, batch["x"], rngs=drop)
        return jnp.mean((prediction - batch["y"]) ** 2)

    loss, gradients = mw.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), {"loss": loss}


key = jax.random.key(2)
state = train_step.init(make_state, jax.random.key(0), batch=(batch, key))
print(train_step.plan(state, batch, key))
for i in range(10):
    state, metrics = train_step(state, batch, key)
    print(f"step {i}: loss {metrics['loss']:.4f}")
