"""Llama 3: rotary positions, grouped-query attention, SwiGLU, RMS norm, untied head (Grattafiori et al. 2024).

Layers run in one `jax.lax.scan` over stacked parameters: every layer leaf has a leading dim of size `layers`.
Model FLOPs of a sample: 3 * (layers * (4 * s * m * d * (heads + kv_heads) + 4 * s**2 * d * heads + 6 * s * m * f)
+ 2 * s * m * v) for sequence s, hidden m, head dim d, feed-forward f and vocabulary v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .layers import Attention, causal_attention, embed, random_tokens, rms_norm, token_cross_entropy
from .parameters import normal, ones, stacked
from .train import Batch, Model, Optimizer, Target, make_target

ROPE_THETA = 500_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        attention: how it is computed (`layers.Attention`).
        head_dim: features of a head; None for an equal share of `hidden`.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 128_256
    sequence: int = 8192
    global_batch: int = 2048  # 16 Mi tokens a step, the last stage of Llama 3's pre-training
    dtype: str = "bfloat16"
    attention: Attention = "plain"
    head_dim: int | None = None


CONFIGS: dict[str, LlamaConfig] = {
    config.name: config
    for config in (
        LlamaConfig(name="llama3-8b", hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336),
        LlamaConfig(name="llama3-70b", hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672),
        LlamaConfig(name="llama3-405b", hidden=16384, layers=126, heads=128, kv_heads=8, intermediate=53248),
        LlamaConfig(
            name="llama-tiny",
            hidden=128,
            layers=2,
            heads=16,
            kv_heads=8,
            intermediate=256,
            vocabulary=256,
            sequence=32,
            global_batch=16,
            dtype="float32",
        ),
    )
}


def rotary(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotates pairs of features by their position's angle (Su et al. 2021), halves paired with each other.

    Args:
        x: (b, s, ..., d).
        cosine: float32 of shape (s, 1..., d / 2), broadcast against a half of x.
        sine: likewise.
    """
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)
    return turned.astype(x.dtype)


def rotary_angles(sequence: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, float32 of shape (sequence, head_dim / 2)."""
    frequency = ROPE_THETA ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = jnp.arange(sequence, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def grouped_attention(
    params: dict[str, jax.Array], x: jax.Array, cosine: jax.Array, sine: jax.Array, attention: Attention = "plain"
) -> jax.Array:
    """Causal attention with each key head k shared by a group g of queries, (b, s, m) -> (b, s, m).

    Key heads and groups are separate dims throughout, so heads may be split over either, or over both.
    """
    query = jnp.einsum("bsm,mkgd->bskgd", x, params["query"].astype(x.dtype))
    key_value = jnp.einsum("bsm,mtkd->bstkd", x, params["key_value"].astype(x.dtype))
    key, value = (lax.index_in_dim(key_value, i, axis=2, keepdims=False) for i in range(2))  # (b, s, k, d)
    query = rotary(query, cosine[:, None, None, :], sine[:, None, None, :])
    key = rotary(key, cosine[:, None, :], sine[:, None, :])
    mixed = causal_attention(query, key, value, attention)
    return jnp.einsum("bskgd,kgdm->bsm", mixed, params["out"].astype(x.dtype))


def swiglu(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Gated feed-forward (Shazeer 2020), (b, s, m) -> (b, s, m); gate and input come from one product."""
    both = jnp.einsum("bsm,mtf->bstf", x, params["gate_in"].astype(x.dtype))
    gate, inner = (lax.index_in_dim(both, i, axis=2, keepdims=False) for i in range(2))  # (b, s, f)
    return jnp.einsum("bsf,fm->bsm", jax.nn.silu(gate) * inner, params["out"].astype(x.dtype))


def build(config: LlamaConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a Llama; batch leaves `tokens` and `labels` are int32 (global_batch, sequence).

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each layer in the backward pass (`jax.checkpoint` on the scan's body).

    Raises:
        ValueError: `hidden` is not a multiple of `heads`, or `heads` not one of `kv_heads`.
    """
    hidden, heads, kv_heads = config.hidden, config.heads, config.kv_heads
    if (config.head_dim is None and hidden % heads) or heads % kv_heads:
        raise ValueError(
            f"refused to build {config.name!r}: got hidden={hidden}, heads={heads}, kv_heads={kv_heads}, needed each "
            "to be a multiple of the next; try kv_heads=1"
        )
    dtype, sequence, vocabulary = jnp.dtype(config.dtype), config.sequence, config.vocabulary
    group, head_dim = heads // kv_heads, config.head_dim or hidden // heads
    out_deviation = 0.02 * (2 * config.layers) ** -0.5
    layer = {
        "attention_norm": ones(hidden),
        "attention": {
            "query": normal(hidden, kv_heads, group, head_dim),
            "key_value": normal(hidden, 2, kv_heads, head_dim),
            "out": normal(kv_heads, group, head_dim, hidden, deviation=out_deviation),
        },
        "feed_forward_norm": ones(hidden),
        "feed_forward": {
            "gate_in": normal(hidden, 2, config.intermediate),
            "out": normal(config.intermediate, hidden, deviation=out_deviation),
        },
    }
    params = {
        "embedding": normal(vocabulary, hidden),
        "layers": stacked(layer, config.layers),
        "final_norm": ones(hidden),
        "head": normal(hidden, vocabulary),
    }

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        cosine, sine = rotary_angles(sequence, head_dim)

        def decoder_layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, None]:
            normalised = rms_norm(params["attention_norm"], x)
            x = x + grouped_attention(params["attention"], normalised, cosine, sine, config.attention)
            return x + swiglu(params["feed_forward"], rms_norm(params["feed_forward_norm"], x)), None

        x = embed(params["embedding"], batch["tokens"], dtype)  # (b, s, m)
        # The scan already keeps each layer's recomputation apart from the forward pass: no CSE barrier is needed.
        body = jax.checkpoint(decoder_layer, prevent_cse=False) if remat else decoder_layer
        x, _ = lax.scan(body, x, params["layers"])
        x = rms_norm(params["final_norm"], x)
        logits = jnp.einsum("bsm,mv->bsv", x, params["head"].astype(dtype), preferred_element_type=jnp.float32)
        return token_cross_entropy(logits, batch["labels"])

    def make_batch(key: jax.Array) -> Batch:
        return random_tokens(key, batch=config.global_batch, sequence=sequence, vocabulary=vocabulary)

    per_layer = (
        4 * sequence * hidden * head_dim * (heads + kv_heads)
        + 4 * sequence**2 * head_dim * heads
        + 6 * sequence * hidden * config.intermediate
    )
    model = Model(
        name=config.name,
        family="llama",
        params=params,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * (config.layers * per_layer + 2 * sequence * hidden * vocabulary),
    )
    return make_target(model, optimizer=optimizer)
