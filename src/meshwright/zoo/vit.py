"""Vision transformer: an image as a sequence of patches, encoder layers, and a class of their mean.

Shapes: Dosovitskiy et al. 2020 (table 1: L/16, H/14) and Zhai et al. 2021 (table 2: G/14, of 1.84B parameters). Their
1,000 classes are those of ImageNet, 4,096 samples a step those of both papers. Layers are one `jax.lax.scan`.
Model FLOPs of a sample: 3 * (2 * n * p**2 * 3 * m + layers * (8 * n * m**2 + 4 * n**2 * m + 4 * n * m * f) + 2 * m * c)
for n patches of p pixels a side, hidden m, feed-forward f and c classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .layers import (
    attention_parameters,
    feed_forward,
    feed_forward_parameters,
    layer_norm,
    layer_norm_parameters,
    self_attention,
    token_cross_entropy,
)
from .parameters import normal, stacked, zeros
from .train import Batch, Model, Optimizer, Target, make_target


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig:
    """Shape of a vision transformer; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        patch: pixels a side of a patch, a part of those of the image.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    patch: int
    image_size: int = 224
    image_channels: int = 3
    classes: int = 1000
    global_batch: int = 4096
    dtype: str = "bfloat16"


SOURCE = "Dosovitskiy et al. 2020, table 1; Zhai et al. 2021, table 2"

CONFIGS: dict[str, ViTConfig] = {
    config.name: config
    for config in (
        ViTConfig(name="vit-l", hidden=1024, layers=24, heads=16, intermediate=4096, patch=16),
        ViTConfig(name="vit-h", hidden=1280, layers=32, heads=16, intermediate=5120, patch=14),
        ViTConfig(name="vit-g", hidden=1664, layers=48, heads=16, intermediate=8192, patch=14),
        ViTConfig(
            name="vit-tiny", hidden=64, layers=2, heads=8, intermediate=128, patch=8, image_size=32, classes=16,
            global_batch=16, dtype="float32",
        ),
    )
}  # fmt: skip


def patches_of(images: jax.Array, patch: int) -> jax.Array:
    """Images (b, h, w, c) as rows of patches, (b, h / patch * w / patch, patch * patch * c)."""
    batch, height, width, channels = images.shape
    cut = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, patch * patch * channels)


def build(config: ViTConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a vision transformer; `images` are (global_batch, image_size, image_size, image_channels) in
    `config.dtype`, `labels` int32 (global_batch,).

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
    dtype, hidden, inner = jnp.dtype(config.dtype), config.hidden, config.intermediate
    patches, pixels = (config.image_size // config.patch) ** 2, config.patch**2 * config.image_channels
    out_deviation = 0.02 * (2 * config.layers) ** -0.5
    layer = {
        "attention_norm": layer_norm_parameters(hidden),
        "attention": attention_parameters(config.name, hidden, config.heads, out_deviation=out_deviation),
        "feed_forward_norm": layer_norm_parameters(hidden),
        "feed_forward": feed_forward_parameters(hidden, inner, out_deviation=out_deviation),
    }
    params = {
        "embedding": {"patches": normal(pixels, hidden), "bias": zeros(hidden), "positions": normal(patches, hidden)},
        "layers": stacked(layer, config.layers),
        "final_norm": layer_norm_parameters(hidden),
        "head": normal(hidden, config.classes),
        "head_bias": zeros(config.classes),
    }

    def encoder_layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, None]:
        x = x + self_attention(params["attention"], layer_norm(params["attention_norm"], x), causal=False)
        return x + feed_forward(params["feed_forward"], layer_norm(params["feed_forward_norm"], x)), None

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        embedding = params["embedding"]
        rows = patches_of(batch["images"].astype(dtype), config.patch)
        x = jnp.einsum("bnp,pm->bnm", rows, embedding["patches"].astype(dtype))
        x = x + (embedding["bias"] + embedding["positions"]).astype(dtype)
        x, _ = lax.scan(
            jax.checkpoint(encoder_layer, prevent_cse=False) if remat else encoder_layer, x, params["layers"]
        )
        x = jnp.mean(layer_norm(params["final_norm"], x), axis=1)
        logits = jnp.einsum("bm,mc->bc", x, params["head"].astype(dtype), preferred_element_type=jnp.float32)
        return token_cross_entropy(logits + params["head_bias"], batch["labels"])

    def make_batch(key: jax.Array) -> Batch:
        image_key, label_key = jax.random.split(key)
        shape = (config.global_batch, config.image_size, config.image_size, config.image_channels)
        labels = jax.random.randint(label_key, shape[:1], 0, config.classes, jnp.int32)
        return {"images": jax.random.normal(image_key, shape, dtype), "labels": labels}

    per_layer = 8 * patches * hidden**2 + 4 * patches**2 * hidden + 4 * patches * hidden * inner
    ends = 2 * patches * pixels * hidden + 2 * hidden * config.classes
    model = Model(
        name=config.name,
        family="vit",
        params=params,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * (config.layers * per_layer + ends),
    )
    return make_target(model, optimizer=optimizer)
