"""Attention of decoder layers, as data: with grouped keys and values, or with latent ones.

Each part declares its parameters, computes (b, s, m) -> (b, s, m), and counts its forward FLOPs. A causal product is
counted over all pairs of positions, as model FLOPs usually are (Chowdhery et al. 2022), one in a window over its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .layers import Attention, causal_attention, rms_norm
from .parameters import normal, ones, zeros

# Cosine and sine of the positions' angles, by (base, features).
Angles = Mapping[tuple[float, int], tuple[jax.Array, jax.Array]]


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


def rotary_angles(sequence: int, head_dim: int, theta: float = 500_000.0) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, float32 of shape (sequence, head_dim / 2); Llama 3's base `theta`."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = jnp.arange(sequence, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _turned(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """`rotary` with one or two dims of heads between positions and features."""
    over = (slice(None), *(None,) * (x.ndim - 3))
    cosine, sine = angles
    return rotary(x, cosine[over], sine[over])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Causal attention with each key head shared by a group of queries (Ainslie et al. 2023).

    Attributes:
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: features of a head.
        theta: base of the rotary angles; None for a layer without positions.
        window: keys that a query sees, itself included (Beltagy et al. 2020).
        chunk: positions that see each other alone, as if a sample were several (Llama 4).
        norms: whether queries and keys are normalised: "learned" with a scale (Henry et al. 2020), "plain" without,
            "none" not.
        sinks: whether each query head has a learned logit that takes weight from the keys (gpt-oss).
        bias: whether projections have biases.
        scale: of the scores beside `head_dim ** -0.5`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    theta: float | None = 500_000.0
    window: int | None = None
    chunk: int | None = None
    norms: str = "none"
    sinks: bool = False
    bias: bool = False
    scale: float = 1.0

    @property
    def angles(self) -> tuple[float, int] | None:
        """Which of the `Angles` it needs."""
        return None if self.theta is None else (self.theta, self.head_dim)

    def declare(self, hidden: int, out_deviation: float) -> dict[str, Any]:
        """Key heads and groups are separate dims throughout, so heads may be split over either, or over both."""
        heads, group, size = self.kv_heads, self.heads // self.kv_heads, self.head_dim
        params: dict[str, Any] = {
            "query": normal(hidden, heads, group, size),
            "key_value": normal(hidden, 2, heads, size),
            "out": normal(heads, group, size, hidden, deviation=out_deviation),
        }
        if self.norms == "learned":
            params |= {"query_norm": ones(size), "key_norm": ones(size)}
        if self.sinks:
            params["sinks"] = zeros(heads, group)
        if self.bias:
            params |= {"query_bias": zeros(heads, group, size), "key_value_bias": zeros(2, heads, size)}
            params["out_bias"] = zeros(hidden)
        return params

    def apply(self, params: dict[str, jax.Array], x: jax.Array, angles: Angles, attention: Attention) -> jax.Array:
        """(b, s, m) -> (b, s, m)."""
        query = jnp.einsum("bsm,mkgd->bskgd", x, params["query"].astype(x.dtype))
        key_value = jnp.einsum("bsm,mtkd->bstkd", x, params["key_value"].astype(x.dtype))
        if self.bias:
            query = query + params["query_bias"].astype(x.dtype)
            key_value = key_value + params["key_value_bias"].astype(x.dtype)
        key, value = (lax.index_in_dim(key_value, i, axis=2, keepdims=False) for i in range(2))  # (b, s, k, d)
        if self.norms != "none":
            still = jnp.ones(self.head_dim) if self.norms == "plain" else None
            query = rms_norm(params["query_norm"] if still is None else still, query)
            key = rms_norm(params["key_norm"] if still is None else still, key)
        if self.angles is not None:
            query, key = (_turned(each, angles[self.angles]) for each in (query, key))
        if self.scale != 1.0:
            query = query * jnp.asarray(self.scale, query.dtype)
        batch, positions = query.shape[:2]
        # A chunk sees nothing of another: the same attention of more, shorter samples.
        chunk = min(self.chunk or positions, positions)
        if chunk < positions:
            query, key, value = (each.reshape(-1, chunk, *each.shape[2:]) for each in (query, key, value))
        mixed = causal_attention(query, key, value, attention, sinks=params.get("sinks"), window=self.window)
        if chunk < positions:
            mixed = mixed.reshape(batch, positions, *mixed.shape[2:])
        out = jnp.einsum("bskgd,kgdm->bsm", mixed, params["out"].astype(x.dtype))
        return out + params["out_bias"].astype(x.dtype) if self.bias else out

    def flops(self, sequence: int, hidden: int) -> int:
        """Of the forward pass, for a sample."""
        keys = min(sequence, self.window or sequence, self.chunk or sequence)
        projections = 4 * sequence * hidden * self.head_dim * (self.heads + self.kv_heads)
        return projections + 4 * sequence * keys * self.head_dim * self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Causal attention whose queries, keys and values are made of narrow ones (MLA: DeepSeek-AI 2024, V2, section 2.1).

    Only some features of a head are turned by its position; those of the keys are shared by all heads.

    Attributes:
        heads: of queries, keys and values.
        query_rank: width that queries are made of.
        key_value_rank: width that keys and values are made of.
        still_dim: features of a query or a key that are not turned.
        turned_dim: features that are.
        value_dim: features of a value.
        theta: base of the rotary angles.
    """

    heads: int
    query_rank: int
    key_value_rank: int
    still_dim: int
    turned_dim: int
    value_dim: int
    theta: float = 10_000.0

    @property
    def angles(self) -> tuple[float, int] | None:
        """Which of the `Angles` it needs."""
        return self.theta, self.turned_dim

    def declare(self, hidden: int, out_deviation: float) -> dict[str, Any]:
        """Parameters of every projection and of the norms of what is narrow."""
        heads, query_dim = self.heads, self.still_dim + self.turned_dim
        return {
            "query_down": normal(hidden, self.query_rank),
            "query_norm": ones(self.query_rank),
            "query_up": normal(self.query_rank, heads, query_dim),
            "key_value_down": normal(hidden, self.key_value_rank),
            "key_value_norm": ones(self.key_value_rank),
            "key_turned": normal(hidden, self.turned_dim),
            "key_up": normal(self.key_value_rank, heads, self.still_dim),
            "value_up": normal(self.key_value_rank, heads, self.value_dim),
            "out": normal(heads, self.value_dim, hidden, deviation=out_deviation),
        }

    def apply(self, params: dict[str, jax.Array], x: jax.Array, angles: Angles, attention: Attention) -> jax.Array:
        """(b, s, m) -> (b, s, m)."""

        def project(how: str, operand: jax.Array, name: str) -> jax.Array:
            return jnp.einsum(how, operand, params[name].astype(x.dtype))

        narrow = rms_norm(params["query_norm"], project("bsm,mr->bsr", x, "query_down"))
        query = project("bsr,rhd->bshd", narrow, "query_up")
        still, turned = jnp.split(query, [self.still_dim], axis=-1)
        query = jnp.concatenate([still, _turned(turned, angles[self.theta, self.turned_dim])], axis=-1)

        narrow = rms_norm(params["key_value_norm"], project("bsm,mr->bsr", x, "key_value_down"))
        still, value = project("bsr,rhd->bshd", narrow, "key_up"), project("bsr,rhd->bshd", narrow, "value_up")
        turned = project("bsm,md->bsd", x, "key_turned")[:, :, None, :]
        turned = _turned(turned, angles[self.theta, self.turned_dim])
        turned = jnp.broadcast_to(turned, (*still.shape[:3], self.turned_dim))
        key = jnp.concatenate([still, turned], axis=-1)

        mixed = causal_attention(query[:, :, :, None, :], key, value, attention)[:, :, :, 0, :]
        return project("bshd,hdm->bsm", mixed, "out")

    def flops(self, sequence: int, hidden: int) -> int:
        """Of the forward pass, for a sample."""
        query_dim = self.still_dim + self.turned_dim
        wide = self.query_rank * query_dim + self.key_value_rank * (self.still_dim + self.value_dim)
        narrow = hidden * (self.query_rank + self.key_value_rank + self.turned_dim)
        projections = narrow + self.heads * (wide + self.value_dim * hidden)
        return 2 * sequence * projections + 2 * sequence**2 * self.heads * (query_dim + self.value_dim)
