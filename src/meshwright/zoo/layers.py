"""Layers shared by the families: dense products, normalisations, attention and losses.

Everywhere parameters are float32 and are cast to the activations' dtype where they are used; statistics (means,
variances, softmax, losses) are computed in float32. Dims in comments: b batch, s or q or k sequence, m hidden,
h heads, d head dim, v vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._jax.attention import attention as operator
from .parameters import normal, ones, zeros

# How attention is computed: with its scores in memory, or by `meshwright.attention`.
Attention = Literal["plain", "fused"]


def layer_norm_parameters(hidden: int) -> dict[str, Any]:
    """Declares the scale and the bias of `layer_norm`, each of shape (hidden,)."""
    return {"scale": ones(hidden), "bias": zeros(hidden)}


def layer_norm(params: dict[str, jax.Array], x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Layer normalisation over the last dim, (..., m) -> (..., m)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * lax.rsqrt(variance + epsilon) * params["scale"] + params["bias"]).astype(x.dtype)


def rms_norm(scale: jax.Array, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Root-mean-square normalisation over the last dim, (..., m) -> (..., m)."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)


def attention_parameters(
    name: str, hidden: int, heads: int, *, kv_heads: int | None = None, out_deviation: float = 0.02
) -> dict[str, Any]:
    """Declares `self_attention`: queries, keys and values in one weight of shape (hidden, 3, heads, head dim); with
    fewer `kv_heads` (Ainslie et al. 2023) queries in one, keys and values in another, all by key head.

    Heads stay a dim of their own, so that splitting heads over devices is splitting one dim of each tensor.

    Raises:
        ValueError: `hidden` is not a multiple of `heads`, or `heads` not one of `kv_heads`; the message calls the model
            `name`.
    """
    if hidden % heads:
        raise ValueError(
            f"refused to build {name!r}: got hidden={hidden} with heads={heads}, needed a multiple of the heads; "
            f"try hidden={hidden // heads * heads + heads}"
        )
    head_dim = hidden // heads
    if kv_heads is None or kv_heads == heads:
        return {
            "qkv": normal(hidden, 3, heads, head_dim),
            "qkv_bias": zeros(3, heads, head_dim),
            "out": normal(heads, head_dim, hidden, deviation=out_deviation),
            "out_bias": zeros(hidden),
        }
    if heads % kv_heads:
        raise ValueError(
            f"refused to build {name!r}: got heads={heads} with kv_heads={kv_heads}, needed a multiple of the key "
            "heads; try kv_heads=1"
        )
    group = heads // kv_heads
    return {
        "query": normal(hidden, kv_heads, group, head_dim),
        "query_bias": zeros(kv_heads, group, head_dim),
        "key_value": normal(hidden, 2, kv_heads, head_dim),
        "key_value_bias": zeros(2, kv_heads, head_dim),
        "out": normal(kv_heads, group, head_dim, hidden, deviation=out_deviation),
        "out_bias": zeros(hidden),
    }


def causal_mask(queries: int, keys: int, window: int | None = None) -> jax.Array:
    """Boolean (queries, keys), True where the key is not later than the query and less than `window` before it."""
    shape = (queries, keys)
    query, key = lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)
    return query >= key if window is None else (query >= key) & (query < key + window)


def _plain_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None, window: int | None
) -> jax.Array:
    scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key, preferred_element_type=jnp.float32)
    scores = scores * query.shape[-1] ** -0.5
    scores = jnp.where(causal_mask(scores.shape[-2], scores.shape[-1], window), scores, jnp.finfo(jnp.float32).min)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks[:, :, None, None]  # (k, g, 1, 1): one more logit of each row, whose weight goes to no value
        largest = lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
        powers = jnp.exp(scores - largest)
        weights = powers / (jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(sink - largest))
    return jnp.einsum("bkgqs,bskd->bqkgd", weights.astype(value.dtype), value)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention: Attention,
    *,
    sinks: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """What each query mixes of the values that are not later than it, (b, s, k, g, e).

    Args:
        query: (b, s, k, g, d), key heads k each shared by a group g of queries.
        key: (b, s, k, d).
        value: (b, s, k, e), of which a query mixes (e,).
        attention: how.
        sinks: float32 (k, g), a logit of each query head that takes weight from all keys (Xiao et al. 2023).
        window: keys that a query sees, itself included; None for all that are not later.
    """
    if window is not None and window >= query.shape[1]:
        window = None
    if attention == "plain":
        return _plain_attention(query, key, value, sinks, window)
    return operator(query, key, value, causal=True, sinks=sinks, window=window)


def full_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """What each query mixes of all values, (b, q, h, d), with its scores in memory.

    Args:
        query: (b, q, h, d).
        key: (b, k, h, d).
        value: (b, k, h, d).
        mask: boolean (q, k), True where a query sees a key.
        bias: float32 (h, q, k), added to the scores.
        scale: of the scores; None for `d ** -0.5`.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def self_attention(
    params: dict[str, jax.Array], x: jax.Array, *, causal: bool, attention: Attention = "plain"
) -> jax.Array:
    """Multi-head self-attention, (b, s, m) -> (b, s, m); one product makes queries, keys and values.

    Args:
        params: as `attention_parameters` declares them.
        x: activations.
        causal: whether a query sees no later keys.
        attention: how the inner part is computed; with fewer key heads it is always causal.
    """
    if "query" in params:
        return _grouped_attention(params, x, attention)
    qkv = jnp.einsum("bsm,mthd->bsthd", x, params["qkv"].astype(x.dtype)) + params["qkv_bias"].astype(x.dtype)
    query, key, value = (lax.index_in_dim(qkv, i, axis=2, keepdims=False) for i in range(3))  # (b, s, h, d) each
    if attention == "fused":
        mixed = operator(query, key, value, causal=causal)
        return jnp.einsum("bshd,hdm->bsm", mixed, params["out"].astype(x.dtype)) + params["out_bias"].astype(x.dtype)
    mixed = full_attention(query, key, value, mask=causal_mask(x.shape[1], x.shape[1]) if causal else None)
    return jnp.einsum("bshd,hdm->bsm", mixed, params["out"].astype(x.dtype)) + params["out_bias"].astype(x.dtype)


def _grouped_attention(params: dict[str, jax.Array], x: jax.Array, attention: Attention) -> jax.Array:
    """`self_attention` with each key head k shared by a group g of queries; key heads and groups are separate dims, so
    heads may be split over either."""
    query = jnp.einsum("bsm,mkgd->bskgd", x, params["query"].astype(x.dtype)) + params["query_bias"].astype(x.dtype)
    both = jnp.einsum("bsm,mtkd->bstkd", x, params["key_value"].astype(x.dtype))
    both = both + params["key_value_bias"].astype(x.dtype)
    key, value = (lax.index_in_dim(both, i, axis=2, keepdims=False) for i in range(2))  # (b, s, k, d)
    mixed = causal_attention(query, key, value, attention)
    return jnp.einsum("bskgd,kgdm->bsm", mixed, params["out"].astype(x.dtype)) + params["out_bias"].astype(x.dtype)


def feed_forward_parameters(hidden: int, intermediate: int, *, out_deviation: float = 0.02) -> dict[str, Any]:
    """Declares `feed_forward`: (hidden, intermediate), (intermediate, hidden) and their biases."""
    return {
        "in": normal(hidden, intermediate),
        "in_bias": zeros(intermediate),
        "out": normal(intermediate, hidden, deviation=out_deviation),
        "out_bias": zeros(hidden),
    }


def feed_forward(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Two dense products around a GELU, (..., m) -> (..., m)."""
    inner = jnp.einsum("...m,mf->...f", x, params["in"].astype(x.dtype)) + params["in_bias"].astype(x.dtype)
    inner = jax.nn.gelu(inner)
    return jnp.einsum("...f,fm->...m", inner, params["out"].astype(x.dtype)) + params["out_bias"].astype(x.dtype)


def embed(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the (v, m) table for int tokens (b, s) -> (b, s, m) in `dtype`; tokens must lie in [0, v)."""
    return jnp.take(table.astype(dtype), tokens, axis=0, mode="clip")


def token_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats over all labels: float32 logits (..., v) and int labels (...) -> scalar.

    Both terms, the log-sum-exp and the label's own logit, are reductions over the vocabulary, so logits split over the
    vocabulary need two small all-reduces and are never gathered.
    """
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    label_logit = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.mean(log_normaliser - label_logit)


def random_tokens(key: jax.Array, *, batch: int, sequence: int, vocabulary: int) -> dict[str, jax.Array]:
    """A batch of uniformly random text: int32 `tokens` (b, s) and `labels`, the tokens one place later."""
    tokens = jax.random.randint(key, (batch, sequence + 1), 0, vocabulary, jnp.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
