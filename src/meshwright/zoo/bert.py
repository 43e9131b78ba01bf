"""BERT's encoder layers alone: post-norm transformer layers, hidden states in, hidden states out.

Without embeddings and head, the collectives of a plan can be counted by hand (Shoeybi et al., Megatron-LM, 2019: two
all-reduces a layer and direction). The loss is the mean-square error to given hidden states.
Model FLOPs of a sample: 3 * layers * (24 * s * m**2 + 4 * s**2 * m) for sequence s and hidden m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .layers import (
    attention_parameters,
    feed_forward,
    feed_forward_parameters,
    layer_norm,
    layer_norm_parameters,
    self_attention,
)
from .train import Batch, Model, Optimizer, Target, make_target


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """Shape of an encoder; `dtype` is that of the activations."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    global_batch: int
    dtype: str = "float32"


SOURCE = "layers of Devlin et al. 2018"

CONFIGS: dict[str, BertConfig] = {
    config.name: config
    for config in (BertConfig(name="bert-tiny", layers=2, hidden=64, heads=8, sequence=32, global_batch=16),)
}


def bert_layers(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 8,
    batch: int = 16,
    sequence: int = 32,
    dtype: str = "float32",
    optimizer: Optimizer = "adam",
    remat: bool = False,
) -> Target:
    """Encoder layers of any size; batch leaves `x` and `y` are (batch, sequence, hidden).

    Raises:
        ValueError: `hidden` is not a multiple of `heads`.
    """
    config = BertConfig(
        name=f"bert-{layers}x{hidden}",
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=sequence,
        global_batch=batch,
        dtype=dtype,
    )
    return build(config, optimizer=optimizer, remat=remat)


def build(config: BertConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of the encoder layers.

    Args:
        config: their shape.
        optimizer: see `train.make_target`.
        remat: recompute each layer in the backward pass.

    Raises:
        ValueError: `hidden` is not a multiple of `heads`.
    """
    dtype, hidden, sequence = jnp.dtype(config.dtype), config.hidden, config.sequence
    layer = {
        "attention": attention_parameters(config.name, hidden, config.heads),
        "attention_norm": layer_norm_parameters(hidden),
        "feed_forward": feed_forward_parameters(hidden, 4 * hidden),
        "feed_forward_norm": layer_norm_parameters(hidden),
    }

    def encoder_layer(params: dict[str, Any], x: jax.Array) -> jax.Array:
        x = layer_norm(params["attention_norm"], x + self_attention(params["attention"], x, causal=False))
        return layer_norm(params["feed_forward_norm"], x + feed_forward(params["feed_forward"], x))

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        apply = jax.checkpoint(encoder_layer) if remat else encoder_layer
        x = batch["x"].astype(dtype)
        for layer_params in params["layers"]:
            x = apply(layer_params, x)
        return jnp.mean(jnp.square(x.astype(jnp.float32) - batch["y"]))

    def make_batch(key: jax.Array) -> Batch:
        x_key, y_key = jax.random.split(key)
        shape = (config.global_batch, sequence, hidden)
        return {"x": jax.random.normal(x_key, shape), "y": jax.random.normal(y_key, shape)}

    model = Model(
        name=config.name,
        family="bert",
        params={"layers": [layer] * config.layers},
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * config.layers * (24 * sequence * hidden**2 + 4 * sequence**2 * hidden),
    )
    return make_target(model, optimizer=optimizer)
