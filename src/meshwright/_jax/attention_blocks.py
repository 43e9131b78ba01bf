"""Attention in plain XLA operations, a block of queries and a block of keys at a time: no scores in memory.

The forward pass keeps for each query the largest score, the sum of exponentials and the mix of values so far (Milakov
and Gimelshein 2018; Rabe and Staats 2021; Dao et al. 2022); the backward pass computes the scores of a block again from
the log-sum-exp that the forward pass kept. Blocks that the mask leaves nothing of are skipped.

Shapes: query (b, s, k, g, d), key (b, t, k, d), value (b, t, k, e), result (b, s, k, g, e), log-sum-exp (b, k, g, s).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Positions of a block: its scores (512 x 512 float32 for each head) are 1 MiB, which fits the caches of today's CPUs.
_BLOCK = 512


class Mask(NamedTuple):
    """Which keys a query sees.

    Args:
      causal: none later than itself.
      window: with `causal`, so many positions back at most, itself included; None for all.
      offset: position of the first query, the first key being at 0.
    """

    causal: bool = False
    window: int | None = None
    offset: int = 0


def block_of(extent: int) -> int:
    """The largest block that divides an extent, no longer than `_BLOCK`."""
    return next(size for size in range(min(extent, _BLOCK), 0, -1) if extent % size == 0)


def _bounds(mask: Mask, start: Any, block: int, other: int, count: int, *, of_keys: bool) -> tuple[Any, Any]:
    """The first and one past the last block that a block's mask leaves something of.

    Args:
      mask: of all positions.
      start: of the block.
      block: its extent.
      other: extent of the blocks asked about.
      count: how many of them there are.
      of_keys: whether the block is of keys and queries are asked about, or the other way round.
    """
    if not mask.causal:
        return 0, count
    if of_keys:  # queries from the first key on, to the window past the last one
        low = (start - mask.offset) // other
        high = count if mask.window is None else (start + block - 1 + mask.window - 1 - mask.offset) // other + 1
    else:
        high = (start + mask.offset + block - 1) // other + 1
        low = 0 if mask.window is None else (start + mask.offset - mask.window + 1) // other
    return jnp.clip(low, 0, count), jnp.clip(high, 0, count)


def _loop(count: int, low: Any, high: Any, step: Callable[[Any, Any], Any], start: Any) -> Any:
    """Steps from `low` up to `high` of a loop of as many trips as there could be: a loop of a length that is known only
    when it runs has no FLOPs that compilers could tell."""

    def trip(number: Any, kept: Any) -> Any:
        return lax.cond((low <= number) & (number < high), step, lambda _, kept: kept, number, kept)

    every = isinstance(low, int) and isinstance(high, int)
    return lax.fori_loop(0, count, step if every else trip, start)


def _scores(query: jax.Array, key: jax.Array, mask: Mask, first: Any, scale: float) -> jax.Array:
    """Scores of a block in float32, (b, k, g, q, t); `first` is the position of its first query less that of its first
    key."""
    scores = jnp.einsum("bqkgd,btkd->bkgqt", query, key, preferred_element_type=jnp.float32) * scale
    if not mask.causal:
        return scores
    shape = scores.shape[-2:]
    ahead = first + lax.broadcasted_iota(jnp.int32, shape, 0) - lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = ahead >= 0
    if mask.window is not None:
        seen &= ahead < mask.window
    return jnp.where(seen, scores, -jnp.inf)


def forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Mask, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The mix of values, in the queries' type, and the log-sum-exp, in float32; of a query that sees no key 0 and
    minus infinity."""
    batch, queries, key_heads, group, _ = query.shape
    keys, size = key.shape[1], value.shape[-1]
    rows, columns = block_of(queries), block_of(keys)

    def of_rows(start: Any) -> tuple[jax.Array, jax.Array]:
        mine = lax.dynamic_slice_in_dim(query, start, rows, 1)

        def step(number: Any, kept: Any) -> Any:
            largest, total, mixed = kept
            at = number * columns
            its_keys = lax.dynamic_slice_in_dim(key, at, columns, 1)
            its_values = lax.dynamic_slice_in_dim(value, at, columns, 1)
            scores = _scores(mine, its_keys, mask, start + mask.offset - at, scale)
            larger = jnp.maximum(largest, scores.max(-1))
            finite = jnp.where(jnp.isneginf(larger), 0.0, larger)
            weights = jnp.exp(scores - finite[..., None])
            before = jnp.exp(largest - finite)
            more = jnp.einsum(
                "bkgqt,btke->bkgqe", weights.astype(value.dtype), its_values, preferred_element_type=jnp.float32
            )
            return larger, total * before + weights.sum(-1), mixed * before[..., None] + more

        numbers = (batch, key_heads, group, rows)
        none = jnp.full(numbers, -jnp.inf), jnp.zeros(numbers), jnp.zeros((*numbers, size))
        if keys == columns:
            largest, total, mixed = step(0, none)
        else:
            low, high = _bounds(mask, start, rows, columns, keys // columns, of_keys=False)
            largest, total, mixed = _loop(keys // columns, low, high, step, none)
        some = jnp.where(total == 0, 1.0, total)
        return jnp.moveaxis(mixed / some[..., None], 3, 1).astype(query.dtype), largest + jnp.log(some)

    if queries == rows:
        return of_rows(0)
    out, sums = lax.map(of_rows, jnp.arange(0, queries, rows))
    return (
        jnp.moveaxis(out, 0, 1).reshape(batch, queries, key_heads, group, size),
        jnp.moveaxis(sums, 0, 3).reshape(batch, key_heads, group, queries),
    )


def backward(
    query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, sums: jax.Array, cotangent: jax.Array, *,
    mask: Mask, scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Gradients of queries, keys and values.

    Args:
      query: of the forward pass, as the next two.
      key: may be some of the keys only: the gradients are then what these add to.
      value: of these keys.
      out: the result over all keys.
      sums: the log-sum-exp over all keys.
      cotangent: of the result.
      mask: which keys a query sees.
      scale: of the scores.
    """
    queries, keys = query.shape[1], key.shape[1]
    rows, columns = block_of(queries), block_of(keys)
    inner = jnp.einsum("bqkge,bqkge->bkgq", out, cotangent, preferred_element_type=jnp.float32)
    finite = jnp.where(jnp.isneginf(sums), 0.0, sums)

    def of_columns(to_query: jax.Array, start: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        its_keys = lax.dynamic_slice_in_dim(key, start, columns, 1)
        its_values = lax.dynamic_slice_in_dim(value, start, columns, 1)

        def step(number: Any, kept: Any) -> Any:
            to_query, to_keys, to_values = kept
            at = number * rows
            mine, moved = (lax.dynamic_slice_in_dim(x, at, rows, 1) for x in (query, cotangent))
            lasting, less = (lax.dynamic_slice_in_dim(x, at, rows, 3) for x in (finite, inner))
            scores = _scores(mine, its_keys, mask, at + mask.offset - start, scale)
            weights = jnp.exp(scores - lasting[..., None])
            narrow = weights.astype(cotangent.dtype)
            more = jnp.einsum("bkgqt,bqkge->btke", narrow, moved, preferred_element_type=jnp.float32)
            by_values = jnp.einsum("bqkge,btke->bkgqt", moved, its_values, preferred_element_type=jnp.float32)
            change = (weights * (by_values - less[..., None]) * scale).astype(query.dtype)
            mine_too = jnp.einsum("bkgqt,btkd->bqkgd", change, its_keys, preferred_element_type=jnp.float32)
            before = lax.dynamic_slice_in_dim(to_query, at, rows, 1)
            to_query = lax.dynamic_update_slice_in_dim(to_query, before + mine_too, at, 1)
            to_keys += jnp.einsum("bkgqt,bqkgd->btkd", change, mine, preferred_element_type=jnp.float32)
            return to_query, to_keys, to_values + more

        none = to_query, jnp.zeros(its_keys.shape, jnp.float32), jnp.zeros(its_values.shape, jnp.float32)
        if queries == rows:
            to_query, to_keys, to_values = step(0, none)
        else:
            low, high = _bounds(mask, start, columns, rows, queries // rows, of_keys=True)
            to_query, to_keys, to_values = _loop(queries // rows, low, high, step, none)
        return to_query, (to_keys.astype(key.dtype), to_values.astype(value.dtype))

    none = jnp.zeros(query.shape, jnp.float32)
    if keys == columns:
        to_query, (to_key, to_value) = of_columns(none, 0)
        return to_query.astype(query.dtype), to_key, to_value
    to_query, pieces = lax.scan(of_columns, none, jnp.arange(0, keys, columns))
    to_key, to_value = (jnp.moveaxis(x, 0, 1).reshape(y.shape) for x, y in zip(pieces, (key, value), strict=True))
    return to_query.astype(query.dtype), to_key, to_value
