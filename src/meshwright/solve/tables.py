"""Sums of tables minimised over one dim, without holding the sum: the inner loop of elimination.

The sum is built in pieces that stay in the cache, each minimised at once. Cost: about a nanosecond an entry.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.solve.deadline import NEVER, Deadline

# Pieces have about this many entries.
_PIECE = 1 << 16
# Rows shorter than this are slower to add than the cache is worth.
_NARROWEST = 256


def min_sum(
    parts: list[np.ndarray], shape: tuple[int, ...], deadline: Deadline = NEVER, room: np.ndarray | None = None
) -> np.ndarray:
    """The minimum over dim 0 of the broadcast sum of `parts`.

    Args:
        parts: arrays with the rank of `shape`, of the same size or 1 in every dim; together they span it.
        shape: of the sum.
        deadline: when to give up.
        room: memory to work in, for pieces of one table.

    Returns:
        An array of shape `shape[1:]`.

    Raises:
        OutOfTime: the deadline has passed.
    """
    if len(shape) == 1:
        return sum(parts[1:], start=parts[0]).min(axis=0)
    if room is None:  # one for all pieces: the time of fresh memory is several times that of the sum
        room = np.empty(min(math.prod(shape), max(_PIECE, shape[0] * _NARROWEST)))
    parts = _summed_by_shape(parts)
    if math.prod(shape) <= _PIECE:
        return _sum(parts, shape, room).min(axis=0)
    out = np.empty(shape[1:])
    slab = shape[0] * math.prod(shape[2:])
    if len(shape) > 2 and slab > _PIECE:
        for i in range(shape[1]):
            deadline.check("exact elimination")
            piece = [part[:, i if part.shape[1] > 1 else 0] for part in parts]
            out[i] = min_sum(piece, (shape[0], *shape[2:]), deadline, room)
        return out
    width = max(_PIECE // slab, 1 if len(shape) > 2 else _NARROWEST)
    for first in range(0, shape[1], width):
        deadline.check("exact elimination")
        last = min(first + width, shape[1])
        piece = [part[:, first:last] if part.shape[1] > 1 else part for part in parts]
        _sum(piece, (shape[0], last - first, *shape[2:]), room).min(axis=0, out=out[first:last])
    return out


def _summed_by_shape(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Parts of one shape summed, small ones first, so that few additions are over the whole table."""
    by_shape: dict[tuple[int, ...], np.ndarray] = {}
    for part in parts:
        by_shape[part.shape] = by_shape[part.shape] + part if part.shape in by_shape else part
    return sorted(by_shape.values(), key=lambda part: (part.size, part.shape))


def _sum(parts: list[np.ndarray], shape: tuple[int, ...], room: np.ndarray) -> np.ndarray:
    """The broadcast sum of `parts`, which lies in `room` as soon as it has the whole shape."""
    out = room[: math.prod(shape)].reshape(shape)
    total = parts[0]
    for part in parts[1:]:
        whole = all(max(a, b) == c for a, b, c in zip(total.shape, part.shape, shape, strict=True))
        total = np.add(total, part, out=out if whole else None)
    return total
