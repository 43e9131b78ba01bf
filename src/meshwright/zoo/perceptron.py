"""A multilayer perceptron: the smallest model with the structure of the large ones.

`layers` dense layers of equal width with a ReLU between them, trained on a mean-square error.
Model FLOPs of a sample: 6 * layers * width**2 (2 a multiply-add, forward once, backward twice).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .parameters import normal, zeros
from .train import Batch, Model, Optimizer, Target, make_target


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Shape of a perceptron: `layers` square matrices of `width`; `dtype` is that of the activations."""

    name: str
    width: int
    layers: int
    global_batch: int
    bias: bool = True
    dtype: str = "float32"


SOURCE = "none: layers of any size"

CONFIGS: dict[str, MLPConfig] = {
    config.name: config for config in (MLPConfig(name="mlp-tiny", width=64, layers=6, global_batch=32),)
}


def mlp(
    *,
    width: int = 64,
    layers: int = 6,
    batch: int = 32,
    bias: bool = True,
    dtype: str = "float32",
    optimizer: Optimizer = "adam",
    remat: bool = False,
) -> Target:
    """A perceptron of any size: `layers` matrices of (width, width), batch leaves `x` and `y` of (batch, width)."""
    name = f"mlp-{layers}x{width}"
    config = MLPConfig(name=name, width=width, layers=layers, global_batch=batch, bias=bias, dtype=dtype)
    return build(config, optimizer=optimizer, remat=remat)


def build(config: MLPConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a perceptron.

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each layer in the backward pass.
    """
    dtype, width = jnp.dtype(config.dtype), config.width
    layer = {"w": normal(width, width, deviation=width**-0.5)}
    if config.bias:
        layer["b"] = zeros(width)

    def dense(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        x = jnp.einsum("bi,io->bo", x, params["w"].astype(x.dtype))
        return x + params["b"].astype(x.dtype) if config.bias else x

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        apply = jax.checkpoint(dense) if remat else dense
        x = batch["x"].astype(dtype)
        for i, layer_params in enumerate(params["layers"]):
            x = apply(layer_params, x)
            if i + 1 < config.layers:
                x = jax.nn.relu(x)
        return jnp.mean(jnp.square(x.astype(jnp.float32) - batch["y"]))

    def make_batch(key: jax.Array) -> Batch:
        x_key, y_key = jax.random.split(key)
        shape = (config.global_batch, width)
        return {"x": jax.random.normal(x_key, shape), "y": jax.random.normal(y_key, shape)}

    model = Model(
        name=config.name,
        family="mlp",
        params={"layers": [layer] * config.layers},
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=6 * config.layers * width**2,
    )
    return make_target(model, optimizer=optimizer)
