"""A train step written for one device, run on eight virtual CPU devices by the plan that Meshwright finds."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # read when JAX starts

import jax
import jax.numpy as jnp

import meshwright as mw


def make_state(key: jax.Array) -> list[jax.Array]:
    """The weights of three layers."""
    shapes = [(256, 1024), (1024, 1024), (1024, 1)]
    return [jax.random.normal(jax.random.fold_in(key, i), shape) * shape[0] ** -0.5 for i, shape in enumerate(shapes)]


@mw.parallelize(cluster="local")
def train_step(weights: list[jax.Array], batch: dict[str, jax.Array]) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """One step of gradient descent on the squared error, as for one device."""

    def loss_fn(weights: list[jax.Array]) -> jax.Array:
        x = batch["x"]
        for w in weights[:-1]:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x @ weights[-1] - batch["y"]) ** 2)

    loss, gradients = mw.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.002 * g, weights, gradients), {"loss": loss}


x = jax.random.normal(jax.random.key(1), (512, 256))
batch = {"x": x, "y": jnp.sin(x.sum(1, keepdims=True) / 16)}
state = train_step.init(make_state, jax.random.key(0), batch=batch)  # created sharded, never whole on one device
print(train_step.plan(state, batch))
for step in range(10):
    state, metrics = train_step(state, batch)
    print(f"step {step}: loss {metrics['loss']:.4f}")
