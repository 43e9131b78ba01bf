"""Parts of slices into and out of the blocks that devices hold, on one device, one small program for each kind.

A piece is a range of the elements of a data slice, in row-major order. A whole slice is one box, copied as such. A part
of one (relays pass on chunks) is addressed element by element: positions are computed from its first element, carried
from dim to dim so that no number exceeds an extent, and lengths are rounded up to powers of two, so that however
many chunks there are, a few programs do.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...resharding import Piece
from ...resharding.layout import Box
from .words import from_words, item_bytes, to_words

# The shortest part of a slice that gets a program of its own.
_SHORTEST = 256


def padded_elements(piece: Piece) -> int:
    """How many elements a piece takes in a buffer while it is written there: its own, rounded up."""
    count = piece.stop - piece.start
    whole = prod(b - a for a, b in piece.slice)
    if count == whole:
        return count
    return min(whole, max(_SHORTEST, 1 << (count - 1).bit_length()))


def take(buffer: jax.Array, block: jax.Array, origin: Box, piece: Piece, offset: int) -> jax.Array:
    """A buffer of words with a piece of a block written at `offset`; the buffer is donated.

    Args:
      buffer: words on the block's device.
      block: what the device holds.
      origin: the block's box in the whole array.
      piece: of the whole array.
      offset: in words.
    """
    return _take(buffer, block, *_address(origin, piece), np.int32(offset), **_shape(piece))


def give(block: jax.Array, origin: Box, piece: Piece, buffer: jax.Array, offset: int) -> jax.Array:
    """A block with a piece from a buffer of words written into it; the block is donated. Arguments as of `take`."""
    return _give(block, buffer, *_address(origin, piece), np.int32(offset), **_shape(piece))


def whole(buffer: jax.Array, piece: Piece, dtype: Any, offset: int) -> jax.Array:
    """A block that is one piece, from a buffer of words."""
    return _whole(buffer, np.int32(offset), tuple(b - a for a, b in piece.slice), np.dtype(dtype))


def part(block: jax.Array, origin: Box, box: Box) -> jax.Array:
    """A box of the whole array, out of a block that has it; the block itself where that is all of it."""
    if origin == box:
        return block
    return _part(block, _starts(origin, box), tuple(b - a for a, b in box))


def place(block: jax.Array, origin: Box, box: Box, value: jax.Array) -> jax.Array:
    """A block with a box written into it; the block is donated."""
    return _place(block, value, _starts(origin, box))


def _starts(origin: Box, box: Box) -> np.ndarray:
    return np.array([a - o for (a, _), (o, _) in zip(box, origin, strict=True)], np.int32)


def _address(origin: Box, piece: Piece) -> tuple[np.ndarray, np.ndarray, np.int32]:
    """Where the slice begins in the block, where the piece begins in the slice, and how many elements it has."""
    sizes = [b - a for a, b in piece.slice]
    first = np.unravel_index(piece.start, sizes) if sizes else ()
    return _starts(origin, piece.slice), np.array(first, np.int32), np.int32(piece.stop - piece.start)


def _shape(piece: Piece) -> dict[str, Any]:
    sizes = tuple(b - a for a, b in piece.slice)
    return {"sizes": sizes, "length": padded_elements(piece), "whole": piece.stop - piece.start == prod(sizes)}


@partial(jax.jit, static_argnames=("sizes", "length", "whole"), donate_argnums=(0,))
def _take(
    buffer: jax.Array, block: jax.Array, start: Any, first: Any, count: Any, offset: Any, *,
    sizes: tuple[int, ...], length: int, whole: bool,
) -> jax.Array:  # fmt: skip
    del count
    if whole:
        values = lax.dynamic_slice(block, [start[d] for d in range(block.ndim)], sizes).reshape(-1)
    else:
        values = block[_positions(start, first, sizes, length)]
    return lax.dynamic_update_slice(buffer, to_words(values, buffer.dtype), (offset,))


@partial(jax.jit, static_argnames=("sizes", "length", "whole"), donate_argnums=(0,))
def _give(
    block: jax.Array, buffer: jax.Array, start: Any, first: Any, count: Any, offset: Any, *,
    sizes: tuple[int, ...], length: int, whole: bool,
) -> jax.Array:  # fmt: skip
    words = lax.dynamic_slice(buffer, (offset,), (length * item_bytes(block.dtype) // buffer.dtype.itemsize,))
    values = from_words(words, block.dtype)
    if whole:
        return lax.dynamic_update_slice(block, values.reshape(sizes), [start[d] for d in range(block.ndim)])
    outer, *rest = _positions(start, first, sizes, length)
    # What is read beyond the piece is somebody else's: positions outside the block are dropped.
    outer = jnp.where(lax.iota(jnp.int32, length) < count, outer, block.shape[0])
    return block.at[outer, *rest].set(values, mode="drop", unique_indices=True)


@partial(jax.jit, static_argnums=(2, 3))
def _whole(buffer: jax.Array, offset: Any, sizes: tuple[int, ...], dtype: Any) -> jax.Array:
    words = lax.dynamic_slice(buffer, (offset,), (prod(sizes) * item_bytes(dtype) // buffer.dtype.itemsize,))
    return from_words(words, dtype).reshape(sizes)


@partial(jax.jit, static_argnums=(2,))
def _part(block: jax.Array, start: Any, sizes: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(block, [start[d] for d in range(block.ndim)], sizes)


@partial(jax.jit, donate_argnums=(0,))
def _place(block: jax.Array, value: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice(block, value, [start[d] for d in range(block.ndim)])


def _positions(start: Any, first: Any, sizes: tuple[int, ...], length: int) -> tuple[jax.Array, ...]:
    """In the block, of elements `first` and on of a slice of `sizes` that begins at `start`: an index for each dim."""
    found: list[jax.Array] = []
    left = lax.iota(jnp.int32, length)
    for dim in range(len(sizes) - 1, -1, -1):
        left = left + first[dim]
        found.append(start[dim] + (left % sizes[dim] if dim else left))
        left = left // sizes[dim]
    return tuple(found[::-1])
