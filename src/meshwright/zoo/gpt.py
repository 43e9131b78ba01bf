"""GPT-3: a pre-norm causal transformer with learned positions and a head tied to the token embedding.

Shapes: Brown et al. 2020 (125M to 175B), the suite of Zheng et al. (Alpa, OSDI 2022) and the 1T model of Narayanan et
al. (Megatron-LM, SC 2021). Layers are an unrolled Python loop; from 39B on, one scan over stacked parameters, as
models of so many layers are written, since an unrolled one takes minutes to compile. Both may be cut between any two.
Model FLOPs of a sample: 3 * (layers * (24 * s * m**2 + 4 * s**2 * m) + 2 * s * m * v) for sequence s, hidden m and
vocabulary v: Megatron-LM's 96 * b * s * l * m**2 * (...) without its fourth, the rematerialised forward pass. Models
like it with another feed-forward (`intermediate`) or fewer key heads (`kv_heads`: Falcon, Nemotron-4) have their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .layers import (
    Attention,
    attention_parameters,
    embed,
    feed_forward,
    feed_forward_parameters,
    layer_norm,
    layer_norm_parameters,
    random_tokens,
    self_attention,
    token_cross_entropy,
)
from .parameters import normal, stacked
from .train import Batch, Model, Optimizer, Target, make_target


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of a GPT; `dtype` is that of the activations, parameters stay float32; with `scan` layers are one scan.

    Attributes:
        attention: how it is computed (`layers.Attention`).
        positions: whether positions are learned; without them (ALiBi) a longer sequence adds no parameters.
        intermediate: of each feed-forward; None for four times `hidden`.
        kv_heads: heads of keys and values, each shared by a group of queries; None for as many as `heads`.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int = 51200
    sequence: int = 1024
    global_batch: int = 1024
    dtype: str = "bfloat16"
    scan: bool = False
    attention: Attention = "plain"
    positions: bool = True
    intermediate: int | None = None
    kv_heads: int | None = None


SOURCE = "Brown et al. 2020; Zheng et al. 2022 (Alpa); Narayanan et al. 2021 (1T)"

CONFIGS: dict[str, GPTConfig] = {
    config.name: config
    for config in (
        GPTConfig(name="gpt3-125m", hidden=768, layers=12, heads=12),
        GPTConfig(name="gpt3-350m", hidden=1024, layers=24, heads=16),
        GPTConfig(name="gpt3-760m", hidden=1536, layers=24, heads=16),
        GPTConfig(name="gpt3-1.3b", hidden=2048, layers=24, heads=32),
        GPTConfig(name="gpt3-2.6b", hidden=2560, layers=32, heads=32),
        GPTConfig(name="gpt3-6.7b", hidden=4096, layers=32, heads=32),
        GPTConfig(name="gpt3-15b", hidden=5120, layers=48, heads=40),
        GPTConfig(name="gpt3-39b", hidden=8192, layers=48, heads=64, scan=True),
        GPTConfig(name="gpt3-76b", hidden=10240, layers=60, heads=80, scan=True),
        GPTConfig(name="gpt3-175b", hidden=12288, layers=96, heads=96, sequence=2048, global_batch=1536, scan=True),
        GPTConfig(name="gpt3-1t", hidden=25600, layers=128, heads=160, sequence=2048, global_batch=3072, scan=True),
        GPTConfig(
            name="gpt-tiny",
            hidden=64,
            layers=2,
            heads=8,
            vocabulary=256,
            sequence=32,
            global_batch=16,
            dtype="float32",
        ),
    )
}


def build(config: GPTConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a GPT; batch leaves `tokens` and `labels` are int32 (global_batch, sequence).

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each layer in the backward pass.

    Raises:
        ValueError: `hidden` is not a multiple of `heads`, or `heads` not one of `kv_heads`.
    """
    dtype, hidden, sequence, vocabulary = jnp.dtype(config.dtype), config.hidden, config.sequence, config.vocabulary
    intermediate, kv_heads = config.intermediate or 4 * hidden, config.kv_heads or config.heads
    # Each layer adds two terms to the residual stream; the smaller start keeps its variance from growing with depth.
    out_deviation = 0.02 * (2 * config.layers) ** -0.5
    layer = {
        "attention_norm": layer_norm_parameters(hidden),
        "attention": attention_parameters(
            config.name, hidden, config.heads, kv_heads=kv_heads, out_deviation=out_deviation
        ),
        "feed_forward_norm": layer_norm_parameters(hidden),
        "feed_forward": feed_forward_parameters(hidden, intermediate, out_deviation=out_deviation),
    }
    params = {
        "embedding": {
            "tokens": normal(vocabulary, hidden),
            **({"positions": normal(sequence, hidden)} if config.positions else {}),
        },
        "layers": stacked(layer, config.layers) if config.scan else [layer] * config.layers,
        "final_norm": layer_norm_parameters(hidden),
    }

    def decoder_layer(params: dict[str, Any], x: jax.Array) -> jax.Array:
        normalised = layer_norm(params["attention_norm"], x)
        x = x + self_attention(params["attention"], normalised, causal=True, attention=config.attention)
        return x + feed_forward(params["feed_forward"], layer_norm(params["feed_forward_norm"], x))

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        # A scan already keeps each layer's recomputation apart from the forward pass: it needs no CSE barrier.
        apply = jax.checkpoint(decoder_layer, prevent_cse=not config.scan) if remat else decoder_layer
        embedding = params["embedding"]
        x = embed(embedding["tokens"], batch["tokens"], dtype)  # (b, s, m)
        if config.positions:
            x = x + embedding["positions"].astype(dtype)
        if config.scan:
            x, _ = lax.scan(lambda x, layer_params: (apply(layer_params, x), None), x, params["layers"])
        else:
            for layer_params in params["layers"]:
                x = apply(layer_params, x)
        x = layer_norm(params["final_norm"], x)
        head = embedding["tokens"].astype(dtype)
        logits = jnp.einsum("bsm,vm->bsv", x, head, preferred_element_type=jnp.float32)
        return token_cross_entropy(logits, batch["labels"])

    def make_batch(key: jax.Array) -> Batch:
        return random_tokens(key, batch=config.global_batch, sequence=sequence, vocabulary=vocabulary)

    projections = 4 * sequence * hidden**2 * (config.heads + kv_heads) // config.heads
    per_layer = projections + 4 * sequence * hidden * intermediate + 4 * sequence**2 * hidden
    model = Model(
        name=config.name,
        family="gpt",
        params=params,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * (config.layers * per_layer + 2 * sequence * hidden * vocabulary),
    )
    return make_target(model, optimizer=optimizer)
