"""Flax NNX: a residual network trained by a plan, the module split into its graph and its state as for any transform.

`meshwright verify examples/flax_nnx.py:make` holds the plan's predictions against the compiled step.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # read when JAX starts

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshwright as mw


class Network(nnx.Module):
    """A residual block: normalised, widened, and added to its input."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(width, 4 * width, rngs=rngs)
        self.outer = nnx.Linear(4 * width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, width) to (batch, width)."""
        return x + self.outer(nnx.gelu(self.inner(self.norm(x))))


def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The train step and example arguments for it."""
    model = Network(64, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def train_step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        model, optimizer = nnx.merge(graph, state)
        model_graph, parameters = nnx.split(model)

        def loss_fn(parameters: nnx.State) -> jax.Array:
            prediction = nnx.merge(model_graph, parameters)(batch["x"])
            return jnp.mean((prediction - batch["y"]) ** 2)

        loss, gradients = mw.value_and_grad(loss_fn)(parameters)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), {"loss": loss}

    x = jax.random.normal(jax.random.key(1), (256, 64))
    return train_step, (state, {"x": x, "y": jnp.sin(3 * x)})


def main() -> None:
    """Ten steps, each with the batch in two microbatches."""
    step, (state, batch) = make()
    train_step = mw.parallelize(step, cluster="local", microbatches=2)
    print(train_step.plan(state, batch))
    for i in range(10):
        state, metrics = train_step(state, batch)
        print(f"step {i}: loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
