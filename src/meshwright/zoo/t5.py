"""T5: an encoder and a decoder with relative positions, RMS norm, no biases, and a head that is the embedding.

Shapes: Raffel et al. 2020 (section 3.7: small to 11B), trained on 512 tokens to be corrected and 114 that correct them
(section 3.1.4), 2,048 samples a step (section 3.7). Each stack of layers is one `jax.lax.scan` over stacked parameters.
Model FLOPs of a sample, for s tokens in and t out, hidden m, heads times head dim n, feed-forward f and vocabulary v:
3 * (layers * (8 * s * m * n + 4 * s**2 * n + 4 * s * m * f) + layers * (12 * t * m * n + 4 * s * m * n + 4 * t**2 * n +
4 * t * s * n + 4 * t * m * f) + 2 * t * m * v).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .layers import causal_mask, embed, full_attention, rms_norm, token_cross_entropy
from .parameters import normal, ones, stacked
from .train import Batch, Model, Optimizer, Target, make_target

BUCKETS = 32  # of distances, and the distance from which on all are in the last: Raffel et al., section 2.1
LONGEST = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config:
    """Shape of a T5; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        layers: of the encoder, and of the decoder.
        sequence: tokens that the encoder reads.
        targets: tokens that the decoder writes.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    head_dim: int = 64
    vocabulary: int = 32_128
    sequence: int = 512
    targets: int = 114
    global_batch: int = 2048
    dtype: str = "bfloat16"


SOURCE = "Raffel et al. 2020, section 3.7"

CONFIGS: dict[str, T5Config] = {
    config.name: config
    for config in (
        T5Config(name="t5-small", hidden=512, layers=6, heads=8, intermediate=2048),
        T5Config(name="t5-base", hidden=768, layers=12, heads=12, intermediate=3072),
        T5Config(name="t5-large", hidden=1024, layers=24, heads=16, intermediate=4096),
        T5Config(name="t5-3b", hidden=1024, layers=24, heads=32, head_dim=128, intermediate=16384),
        T5Config(name="t5-11b", hidden=1024, layers=24, heads=128, head_dim=128, intermediate=65536),
        T5Config(
            name="t5-tiny", hidden=64, layers=2, heads=8, head_dim=16, intermediate=128, vocabulary=256, sequence=32,
            targets=16, global_batch=16, dtype="float32",
        ),
    )
}  # fmt: skip


def distance_buckets(queries: int, keys: int, *, causal: bool) -> jax.Array:
    """Which of the `BUCKETS` the distance of each key from each query is in, int32 (queries, keys): small distances
    have one each, larger ones share by their logarithm; without `causal` half are for keys that come later."""
    shape = (queries, keys)
    later = lax.broadcasted_iota(jnp.int32, shape, 1) - lax.broadcasted_iota(jnp.int32, shape, 0)
    many = BUCKETS if causal else BUCKETS // 2
    first = jnp.zeros(shape, jnp.int32) if causal else many * (later > 0)
    distance = jnp.maximum(-later, 0) if causal else jnp.abs(later)
    exact = many // 2
    ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(LONGEST / exact)
    shared = jnp.minimum(exact + (ratio * (many - exact)).astype(jnp.int32), many - 1)
    return first + jnp.where(distance < exact, distance, shared)


def _attend(
    params: dict[str, jax.Array], x: jax.Array, memory: jax.Array, bias: jax.Array | None, mask: jax.Array | None
) -> jax.Array:
    """Attention of x (b, q, m) to memory (b, k, m), scores not scaled (section 2.1): (b, q, m)."""
    query = jnp.einsum("bqm,mhd->bqhd", x, params["query"].astype(x.dtype))
    key_value = jnp.einsum("bkm,mthd->btkhd", memory, params["key_value"].astype(x.dtype))
    key, value = (lax.index_in_dim(key_value, i, axis=1, keepdims=False) for i in range(2))
    mixed = full_attention(query, key, value, bias=bias, mask=mask, scale=1.0)
    return jnp.einsum("bqhd,hdm->bqm", mixed, params["out"].astype(x.dtype))


def _feed_forward(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    inner = jax.nn.relu(jnp.einsum("bsm,mf->bsf", x, params["in"].astype(x.dtype)))
    return jnp.einsum("bsf,fm->bsm", inner, params["out"].astype(x.dtype))


def build(config: T5Config, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a T5; `tokens` is int32 (global_batch, sequence), `previous` and `labels` int32
    (global_batch, targets): the tokens before the labels, and the labels.

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each layer in the backward pass.
    """
    dtype, hidden, heads, head_dim = jnp.dtype(config.dtype), config.hidden, config.heads, config.head_dim
    sequence, targets, vocabulary, inner = config.sequence, config.targets, config.vocabulary, config.intermediate
    # Scores are not scaled: the queries start as much smaller (Raffel et al.'s code).
    attention = {
        "query": normal(hidden, heads, head_dim, deviation=(hidden * head_dim) ** -0.5),
        "key_value": normal(hidden, 2, heads, head_dim, deviation=hidden**-0.5),
        "out": normal(heads, head_dim, hidden, deviation=(heads * head_dim) ** -0.5),
    }
    feed_forward = {
        "in": normal(hidden, inner, deviation=hidden**-0.5), "out": normal(inner, hidden, deviation=inner**-0.5),
    }  # fmt: skip
    layer = {
        "attention_norm": ones(hidden), "attention": attention,
        "feed_forward_norm": ones(hidden), "feed_forward": feed_forward,
    }  # fmt: skip
    across = {"across_norm": ones(hidden), "across": attention}
    params = {
        "embedding": normal(vocabulary, hidden, deviation=1.0),
        "encoder": {"distances": normal(BUCKETS, heads), "layers": stacked(layer, config.layers)},
        "encoder_norm": ones(hidden),
        "decoder": {"distances": normal(BUCKETS, heads), "layers": stacked({**layer, **across}, config.layers)},
        "decoder_norm": ones(hidden),
    }

    def bias_of(table: jax.Array, size: int, *, causal: bool) -> jax.Array:
        rows = jnp.take(table, distance_buckets(size, size, causal=causal), axis=0, mode="clip")
        return jnp.transpose(rows, (2, 0, 1))  # (h, q, k)

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        read = bias_of(params["encoder"]["distances"], sequence, causal=False)
        write, mask = bias_of(params["decoder"]["distances"], targets, causal=True), causal_mask(targets, targets)

        def encoder_layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, None]:
            normalised = rms_norm(params["attention_norm"], x)
            x = x + _attend(params["attention"], normalised, normalised, read, None)
            return x + _feed_forward(params["feed_forward"], rms_norm(params["feed_forward_norm"], x)), None

        x, _ = lax.scan(
            jax.checkpoint(encoder_layer, prevent_cse=False) if remat else encoder_layer,
            embed(params["embedding"], batch["tokens"], dtype), params["encoder"]["layers"],
        )  # fmt: skip
        memory = rms_norm(params["encoder_norm"], x)

        def decoder_layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, None]:
            normalised = rms_norm(params["attention_norm"], x)
            x = x + _attend(params["attention"], normalised, normalised, write, mask)
            x = x + _attend(params["across"], rms_norm(params["across_norm"], x), memory, None, None)
            return x + _feed_forward(params["feed_forward"], rms_norm(params["feed_forward_norm"], x)), None

        x, _ = lax.scan(
            jax.checkpoint(decoder_layer, prevent_cse=False) if remat else decoder_layer,
            embed(params["embedding"], batch["previous"], dtype), params["decoder"]["layers"],
        )  # fmt: skip
        x = rms_norm(params["decoder_norm"], x) * jnp.asarray(hidden**-0.5, dtype)
        head = params["embedding"].astype(dtype)
        logits = jnp.einsum("bsm,vm->bsv", x, head, preferred_element_type=jnp.float32)
        return token_cross_entropy(logits, batch["labels"])

    def make_batch(key: jax.Array) -> Batch:
        in_key, out_key = jax.random.split(key)
        tokens = jax.random.randint(in_key, (config.global_batch, sequence), 0, vocabulary, jnp.int32)
        written = jax.random.randint(out_key, (config.global_batch, targets + 1), 0, vocabulary, jnp.int32)
        return {"tokens": tokens, "previous": written[:, :-1], "labels": written[:, 1:]}

    wide = heads * head_dim
    encoder = 8 * sequence * hidden * wide + 4 * sequence**2 * wide + 4 * sequence * hidden * inner
    decoder = 12 * targets * hidden * wide + 4 * sequence * hidden * wide + 4 * targets**2 * wide
    decoder += 4 * targets * sequence * wide + 4 * targets * hidden * inner
    model = Model(
        name=config.name,
        family="t5",
        params=params,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * (config.layers * (encoder + decoder) + 2 * targets * hidden * vocabulary),
    )
    return make_target(model, optimizer=optimizer)
