"""Diffusion transformer: patches of a latent image, each layer scaled and shifted by what a time and a class say.

Shapes: Peebles and Xie 2022 (table 1: S/2 to XL/2, of 675M parameters), latents of 32 x 32 x 4 (images of 256 pixels a
side), 256 samples a step. Their network predicts a variance beside the noise: here the noise alone, with a cosine
schedule as the U-Net's. Layers are one `jax.lax.scan`.
Model FLOPs of a sample: 3 * (4 * n * p**2 * 4 * m + 2 * 256 * m + 2 * m**2 + layers * (8 * n * m**2 + 4 * n**2 * m +
16 * n * m**2 + 12 * m**2) + 4 * m**2) for n patches of p latents a side and hidden m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .layers import (
    attention_parameters,
    embed,
    feed_forward,
    feed_forward_parameters,
    layer_norm,
    self_attention,
)
from .parameters import normal, stacked, zeros
from .train import Batch, Model, Optimizer, Target, make_target
from .unet import TIMESTEPS, dense, dense_parameters, time_embedding
from .vit import patches_of

TIME_FEATURES = 256  # of a timestep, before its two products: the paper's code


@dataclass(frozen=True, slots=True, kw_only=True)
class DiTConfig:
    """Shape of a diffusion transformer; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        patch: latents a side of a patch, a part of those of the image.
        classes: that an image may be of; one more stands for none.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    patch: int = 2
    image_size: int = 32
    image_channels: int = 4
    classes: int = 1000
    global_batch: int = 256
    dtype: str = "bfloat16"


SOURCE = "Peebles and Xie 2022, table 1"

CONFIGS: dict[str, DiTConfig] = {
    config.name: config
    for config in (
        DiTConfig(name="dit-b", hidden=768, layers=12, heads=12),
        DiTConfig(name="dit-l", hidden=1024, layers=24, heads=16),
        DiTConfig(name="dit-xl", hidden=1152, layers=28, heads=16),
        DiTConfig(
            name="dit-tiny", hidden=64, layers=2, heads=8, image_size=8, classes=15, global_batch=16, dtype="float32"
        ),
    )
}


def _still(x: jax.Array) -> dict[str, jax.Array]:
    """Parameters of a normalisation that has none."""
    return {"scale": jnp.ones(x.shape[-1]), "bias": jnp.zeros(x.shape[-1])}


def _modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """x (b, n, m) normalised, then scaled and shifted by (b, m) each."""
    return layer_norm(_still(x), x, 1e-6) * (1.0 + scale[:, None]) + shift[:, None]


def build(config: DiTConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a diffusion transformer: the mean-square error of the noise predicted from a noised latent.

    The batch is `images` and `noise`, (global_batch, image_size, image_size, image_channels) in `config.dtype`, and
    int32 `timesteps` and `labels` (global_batch,).

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each layer in the backward pass.

    Raises:
        ValueError: `hidden` is not a multiple of `heads`, or `image_size` not one of `patch`.
    """
    if config.image_size % config.patch:
        raise ValueError(
            f"refused to build {config.name!r}: got image_size={config.image_size} in patches of {config.patch}, "
            f"needed a multiple; try image_size={config.image_size // config.patch * config.patch or config.patch}"
        )
    dtype, hidden = jnp.dtype(config.dtype), config.hidden
    patches, size = (config.image_size // config.patch) ** 2, config.patch**2 * config.image_channels

    layer = {
        "condition": {"w": normal(hidden, 6, hidden), "bias": zeros(6, hidden)},
        "attention": attention_parameters(config.name, hidden, config.heads),
        "feed_forward": feed_forward_parameters(hidden, 4 * hidden),
    }
    params = {
        "in": dense_parameters(size, hidden),
        "time": {"in": dense_parameters(TIME_FEATURES, hidden), "out": dense_parameters(hidden, hidden)},
        "labels": normal(config.classes + 1, hidden),
        "layers": stacked(layer, config.layers),
        "final_condition": {"w": normal(hidden, 2, hidden), "bias": zeros(2, hidden)},
        "out": dense_parameters(hidden, size),
    }

    def parts(params: dict[str, jax.Array], condition: jax.Array) -> list[jax.Array]:
        """What a condition (b, m) says, (b, m) each."""
        made = jnp.einsum("bm,mtn->btn", condition, params["w"].astype(dtype)) + params["bias"].astype(dtype)
        return [lax.index_in_dim(made, i, axis=1, keepdims=False) for i in range(made.shape[1])]

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        angle = (0.5 * math.pi / TIMESTEPS) * batch["timesteps"].astype(jnp.float32)[:, None, None, None]
        noised = jnp.cos(angle) * batch["images"] + jnp.sin(angle) * batch["noise"]
        x = dense(params["in"], patches_of(noised.astype(dtype), config.patch))
        x = x + time_embedding(jnp.arange(patches), hidden).astype(dtype)  # of positions, which are not learned
        time = time_embedding(batch["timesteps"], TIME_FEATURES).astype(dtype)
        time = dense(params["time"]["out"], jax.nn.silu(dense(params["time"]["in"], time)))
        condition = jax.nn.silu(time + embed(params["labels"], batch["labels"], dtype))  # (b, m)

        def encoder_layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, None]:
            said = parts(params["condition"], condition)
            added = self_attention(params["attention"], _modulated(x, said[0], said[1]), causal=False)
            x = x + said[2][:, None] * added
            added = feed_forward(params["feed_forward"], _modulated(x, said[3], said[4]))
            return x + said[5][:, None] * added, None

        x, _ = lax.scan(
            jax.checkpoint(encoder_layer, prevent_cse=False) if remat else encoder_layer, x, params["layers"]
        )
        shift, scale = parts(params["final_condition"], condition)
        predicted = dense(params["out"], _modulated(x, shift, scale)).astype(jnp.float32)
        return jnp.mean(jnp.square(predicted - patches_of(batch["noise"], config.patch)))

    def make_batch(key: jax.Array) -> Batch:
        image_key, noise_key, time_key, label_key = jax.random.split(key, 4)
        shape = (config.global_batch, config.image_size, config.image_size, config.image_channels)
        return {
            "images": jax.random.normal(image_key, shape, dtype),
            "noise": jax.random.normal(noise_key, shape, dtype),
            "timesteps": jax.random.randint(time_key, shape[:1], 0, TIMESTEPS, jnp.int32),
            "labels": jax.random.randint(label_key, shape[:1], 0, config.classes, jnp.int32),
        }

    per_layer = 24 * patches * hidden**2 + 4 * patches**2 * hidden + 12 * hidden**2
    ends = 4 * patches * size * hidden + 2 * TIME_FEATURES * hidden + 2 * hidden**2 + 4 * hidden**2
    model = Model(
        name=config.name,
        family="dit",
        params=params,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * (config.layers * per_layer + ends),
    )
    return make_target(model, optimizer=optimizer)
