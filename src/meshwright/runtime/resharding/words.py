"""Elements of any dtype as unsigned words, which is what devices send each other.

A plan's word is as wide as the narrowest element that moves, so that packing changes no bits and widens nothing:
booleans and numbers of less than eight bits take a byte each, complex numbers are their two halves. Typed keys are
taken apart before (`reshard`), whole, as JAX has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def item_bytes(dtype: Any) -> int:
    """Bytes that an element takes while it moves."""
    return np.dtype(dtype).itemsize if is_bytes(dtype) else 1


def is_bytes(dtype: Any) -> bool:
    """Whether elements take whole bytes; booleans do."""
    return dtype == jnp.bool_ or _bits(dtype) >= 8


def word_of(dtypes: Iterable[Any]) -> Any:
    """The word in which elements of all of these dtypes move."""
    return _WORDS[min(4, *(item_bytes(dtype) for dtype in dtypes))]


def as_bits(x: jax.Array) -> jax.Array:
    """The same elements; floating-point numbers of less than 32 bits as unsigned integers of their width.

    To be done before anything else is: compilers may carry narrow floats as wider ones, which quiets NaNs that signal.
    """
    return lax.bitcast_convert_type(x, bits_dtype(x.dtype)) if bits_dtype(x.dtype) != x.dtype else x


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_bits`."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


def bits_dtype(dtype: Any) -> Any:
    """In which `as_bits` has elements of a dtype."""
    if not jnp.issubdtype(dtype, jnp.floating) or _bits(dtype) >= 32:
        return np.dtype(dtype)
    return _unsigned(dtype) or np.dtype(f"uint{_bits(dtype)}")


def to_words(x: jax.Array, word: Any) -> jax.Array:
    """A vector as a vector of words."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    elif _bits(x.dtype) < 8:
        x = lax.bitcast_convert_type(x, _unsigned(x.dtype)).astype(jnp.uint8)
    elif jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1).reshape(-1)
    return lax.bitcast_convert_type(x, word).reshape(-1)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """A vector of elements from words; the inverse of `to_words`."""
    if dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    if _bits(dtype) < 8:
        return lax.bitcast_convert_type(words.astype(_unsigned(dtype)), dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.float32 if np.dtype(dtype).itemsize == 8 else jnp.float64
        halves = from_words(words, part).reshape(-1, 2)
        return lax.complex(halves[:, 0], halves[:, 1])
    wide = np.dtype(dtype).itemsize // words.dtype.itemsize
    return lax.bitcast_convert_type(words.reshape(-1, wide) if wide > 1 else words, dtype)


def _bits(dtype: Any) -> int:
    """Of an element, as it is told apart; a boolean has one."""
    if dtype == jnp.bool_:
        return 1
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * np.dtype(dtype).itemsize


def _unsigned(dtype: Any) -> Any:
    return jnp.dtype({2: jnp.uint2, 4: jnp.uint4}[_bits(dtype)]) if 1 < _bits(dtype) < 8 else None
