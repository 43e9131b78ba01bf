"""Parts of slices into and out of the blocks that devices hold, on one device, one small program for each kind.

Blocks that are being made are of a dtype in which pieces are written in place, and no bit is changed (`_making`);
`finished` gives them their own.

A piece is a range of the elements of a data slice, in row-major order. A whole slice is one box, copied as such. A part
of one (relays pass on chunks) is one run of elements where the slice is whole rows of the block, and copied as that:
chunks have few different lengths. Elsewhere it is addressed element by element: positions are computed from its first
element, carried from dim to dim so that no number exceeds an extent, and lengths are rounded up to powers of two, so
that however many chunks there are, a few programs do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from ...resharding import Piece
from ...resharding.layout import Box
from .words import as_bits, bits_dtype, from_words, is_bytes, item_bytes, to_words

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
    if (run := _run(origin, piece)) is not None:
        return _take_run(buffer, block, np.int32(run), np.int32(offset), length=piece.stop - piece.start)
    return _take(buffer, block, *_address(origin, piece), np.int32(offset), **_shape(piece))


def give(block: jax.Array, origin: Box, piece: Piece, buffer: jax.Array, offset: int) -> jax.Array:
    """A block in the making, donated, with a piece from a buffer of words written into it; arguments as of `take`."""
    if (run := _run(origin, piece)) is not None:
        return _give_run(block, buffer, np.int32(run), np.int32(offset), length=piece.stop - piece.start)
    return _give(block, buffer, *_address(origin, piece), np.int32(offset), **_shape(piece))


def whole(buffer: jax.Array, piece: Piece, dtype: Any, offset: int) -> jax.Array:
    """A block in the making that is one piece, from a buffer of words."""
    (device,) = buffer.devices()
    return _whole(buffer, np.int32(offset), tuple(b - a for a, b in piece.slice), _making(dtype, device))


def part(block: jax.Array, origin: Box, box: Box) -> jax.Array:
    """A box of the whole array, out of a block that has it; the block itself where that is all of it."""
    if origin == box:
        return block
    (device,) = block.devices()
    return _part(block, _starts(origin, box), tuple(b - a for a, b in box), _making(block.dtype, device))


def place(block: jax.Array, origin: Box, box: Box, value: jax.Array) -> jax.Array:
    """A block in the making with a box written into it; it is donated."""
    return _place(block, value, _starts(origin, box))


def empty(box: Box, dtype: Any, device: Any) -> jax.Array:
    """A block to be made, of zeros."""
    return zeros(tuple(b - a for a, b in box), _making(dtype, device), device)


def zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
    """Zeros made where they are wanted: `jnp.zeros(..., device=)` makes them on the first device and copies them."""
    return _zeros(shape, np.dtype(dtype), device)()


def finished(block: jax.Array, dtype: Any) -> jax.Array:
    """A block that has been made, in its dtype; it is given up."""
    if block.dtype == dtype:
        return block
    (device,) = block.devices()
    if device.platform == "cpu" and bits_dtype(dtype).itemsize == block.dtype.itemsize and is_bytes(dtype):
        # The same memory: XLA would hold the block twice, even donated. Who donates the array later has it copied then.
        return jax.device_put(np.asarray(block).view(dtype), device, may_alias=True)
    return _finished(block, np.dtype(dtype))


def _making(dtype: Any, device: Any) -> Any:
    """In which a block is made. Elements of less than a byte take one, or every write would pass over the whole block;
    and so would narrow floating-point numbers on CPU, which computes with them as wider ones and quiets NaNs."""
    if not is_bytes(dtype):
        return np.dtype(np.uint8)
    return bits_dtype(dtype) if device.platform == "cpu" else np.dtype(dtype)


def _starts(origin: Box, box: Box) -> np.ndarray:
    return np.array([a - o for (a, _), (o, _) in zip(box, origin, strict=True)], np.int32)


def _run(origin: Box, piece: Piece) -> int | None:
    """Where a part of a slice begins in the block, as one run of its elements; None for a whole slice, or if it is
    several runs or begins beyond what 32 bits count."""
    if piece.stop - piece.start == prod(b - a for a, b in piece.slice) or piece.slice[1:] != origin[1:]:
        return None
    first = (piece.slice[0][0] - origin[0][0]) * prod(b - a for a, b in origin[1:]) + piece.start
    return first if prod(b - a for a, b in origin) < 1 << 31 else None


def _address(origin: Box, piece: Piece) -> tuple[np.ndarray, np.ndarray, np.int32]:
    """Where the slice begins in the block, where the piece begins in the slice, and how many elements it has."""
    sizes = [b - a for a, b in piece.slice]
    first = np.unravel_index(piece.start, sizes) if sizes else ()
    return _starts(origin, piece.slice), np.array(first, np.int32), np.int32(piece.stop - piece.start)


def _shape(piece: Piece) -> dict[str, Any]:
    sizes = tuple(b - a for a, b in piece.slice)
    return {"sizes": sizes, "length": padded_elements(piece), "whole": piece.stop - piece.start == prod(sizes)}


@lru_cache(maxsize=1 << 14)  # for each shape and device
def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))


@partial(jax.jit, static_argnames=("sizes", "length", "whole"), donate_argnums=(0,))
def _take(
    buffer: jax.Array, block: jax.Array, start: Any, first: Any, count: Any, offset: Any, *,
    sizes: tuple[int, ...], length: int, whole: bool,
) -> jax.Array:  # fmt: skip
    del count
    block = as_bits(block)
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


@partial(jax.jit, static_argnames=("length",), donate_argnums=(0,))
def _take_run(buffer: jax.Array, block: jax.Array, first: Any, offset: Any, *, length: int) -> jax.Array:
    values = lax.dynamic_slice(as_bits(block).reshape(-1), (first,), (length,))
    return lax.dynamic_update_slice(buffer, to_words(values, buffer.dtype), (offset,))


@partial(jax.jit, static_argnames=("length",), donate_argnums=(0,))
def _give_run(block: jax.Array, buffer: jax.Array, first: Any, offset: Any, *, length: int) -> jax.Array:
    words = lax.dynamic_slice(buffer, (offset,), (length * item_bytes(block.dtype) // buffer.dtype.itemsize,))
    return lax.dynamic_update_slice(block.reshape(-1), from_words(words, block.dtype), (first,)).reshape(block.shape)


@partial(jax.jit, static_argnums=(2, 3))
def _whole(buffer: jax.Array, offset: Any, sizes: tuple[int, ...], dtype: Any) -> jax.Array:
    words = lax.dynamic_slice(buffer, (offset,), (prod(sizes) * item_bytes(dtype) // buffer.dtype.itemsize,))
    return from_words(words, dtype).reshape(sizes)


@partial(jax.jit, static_argnums=(2, 3))
def _part(block: jax.Array, start: Any, sizes: tuple[int, ...], dtype: Any) -> jax.Array:
    return _as(dtype, lax.dynamic_slice(as_bits(block), [start[d] for d in range(block.ndim)], sizes))


@partial(jax.jit, donate_argnums=(0,))
def _place(block: jax.Array, value: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice(block, _as(block.dtype, value), [start[d] for d in range(block.ndim)])


@partial(jax.jit, static_argnums=(1,), donate_argnums=(0,))
def _finished(block: jax.Array, dtype: Any) -> jax.Array:
    return from_words(block.reshape(-1), dtype).reshape(block.shape)


def _as(dtype: Any, values: jax.Array) -> jax.Array:
    """Elements of an array, or their bits, in the dtype in which its block is made."""
    if values.dtype == dtype:
        return values
    if not is_bytes(values.dtype):
        return to_words(values.reshape(-1), np.uint8).reshape(values.shape)
    return lax.bitcast_convert_type(values, dtype)


def _positions(start: Any, first: Any, sizes: tuple[int, ...], length: int) -> tuple[jax.Array, ...]:
    """In the block, of elements `first` and on of a slice of `sizes` that begins at `start`: an index for each dim."""
    found: list[jax.Array] = []
    left = lax.iota(jnp.int32, length)
    for dim in range(len(sizes) - 1, -1, -1):
        left = left + first[dim]
        found.append(start[dim] + (left % sizes[dim] if dim else left))
        left = left // sizes[dim]
    return tuple(found[::-1])
