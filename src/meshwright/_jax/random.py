"""Random bits of one block of an array, equal to what the whole array would hold there.

JAX's partitionable threefry draws element i from the 64-bit counter i alone, so a device can draw just its block and
the run gives the same numbers on any mesh. Other generators have no such counter; each block then draws from a key of
its own (`fold_in` of the block's position): other numbers on other meshes, reproducible on the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

_UINTS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def is_key(aval: Any) -> bool:
    """Whether an aval is of typed PRNG keys."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def key_words(aval: Any) -> tuple[int, ...]:
    """Shape of the words behind an array of typed keys."""
    return (*aval.shape, *aval.dtype._impl.key_shape)  # no public form up to 0.12


def keys_of(words: jax.Array, aval: Any) -> jax.Array:
    """Typed keys of the dtype of `aval` from their words."""
    return jax.random.wrap_key_data(words, impl=aval.dtype._impl.name)


def random_bits_block(
    key: jax.Array, bit_width: int, shape: Sequence[int], block: Sequence[int], offsets: Sequence[Any]
) -> jax.Array:
    """Bits of the block of shape `block` at `offsets` of an array of global `shape` drawn from one typed `key`."""
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    if str(jax.random.key_impl(key)) != "threefry2x32" or not jax.config.jax_threefry_partitionable:  # pyrefly: ignore
        position = sum(
            (jnp.uint32(o) * jnp.uint32(s % 2**32) for o, s in zip(offsets, strides, strict=True)), jnp.uint32(0)
        )
        return jax.random.bits(jax.random.fold_in(key, position), tuple(block), _UINTS[bit_width])
    high = low = jnp.zeros(block, jnp.uint32)
    for d, (offset, stride) in enumerate(zip(offsets, strides, strict=True)):
        index = lax.broadcasted_iota(jnp.uint32, block, d) + jnp.uint32(offset)
        term_high, term_low = _multiply(index, stride)
        low = low + term_low
        high = high + term_high + (low < term_low).astype(jnp.uint32)
    words = jax.random.key_data(key)
    first, second = threefry2x32_p.bind(words[0], words[1], high, low)
    if bit_width == 64:
        return lax.shift_left(first.astype(jnp.uint64), jnp.uint64(32)) | second.astype(jnp.uint64)
    return (first ^ second).astype(_UINTS[bit_width])


def _multiply(index: jax.Array, stride: int) -> tuple[jax.Array | int, jax.Array]:
    """High and low words of the 64-bit product of 32-bit indices and a stride."""
    low = index * jnp.uint32(stride % 2**32)
    if stride == 1:
        return jnp.zeros_like(index), low
    mask = jnp.uint32(0xFFFF)
    a, b = index & mask, index >> 16
    c, d = jnp.uint32(stride & 0xFFFF), jnp.uint32((stride >> 16) & 0xFFFF)
    middle = (a * c >> 16) + (b * c & mask) + (a * d & mask)
    high = b * d + (b * c >> 16) + (a * d >> 16) + (middle >> 16)
    return high + index * jnp.uint32((stride >> 32) & 0xFFFFFFFF), low
