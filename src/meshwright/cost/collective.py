"""Seconds of a collective over one or more axes of a logical mesh, by the best algorithm for its size.

What S bytes are, and what a collective leaves behind:

    all_reduce      S: the local buffer, summed on every device
    all_gather      S: the gathered output
    reduce_scatter  S: the input
    all_to_all      S: the local buffer
    permute         S: the buffer sent to one other device

Several axes at once are one collective over all their devices, or several in a row, whichever is faster.
`collective_ways` holds the algorithms. Each is a handful of lines in S (a launch and latencies, and seconds for each
byte), so the price is their lower envelope: increasing and concave. The envelope belongs to the kind and the axes, is
found once, and is all that a search has to keep (`collective_lines`).

Axes of size 1 and empty buffers cost nothing.

Measured beside predicted: `benchmarks/collectives.py`, docs/clusters.md. Known limits: no overlap of collectives with
each other; `by axis` (hierarchical) is what a caller gets who issues the parts himself.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np

from ..cluster import Axis
from .collective_ways import Line, lines_of

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")


@overload
def collective_seconds(kind: str, size_bytes: float, axes: Sequence[Axis]) -> float: ...
@overload
def collective_seconds(kind: str, size_bytes: np.ndarray, axes: Sequence[Axis]) -> np.ndarray: ...
def collective_seconds(kind: str, size_bytes: float | np.ndarray, axes: Sequence[Axis]) -> float | np.ndarray:
    """Predicted seconds of one collective.

    Args: `kind`: one of `KINDS`. `size_bytes`: the buffer on one device that is not yet (or no longer) divided by
    `axes`: the local buffer, the gathered output, the input, the local buffer, the buffer sent; a number, or an array
    of them of any shape. `axes`: the mesh axes it spans, in any order.

    Returns a number, or an array of the shape of `size_bytes`.

    Raises ValueError for an unknown kind, or for bytes that are negative or not finite.

    >>> axis = Axis(name="x", size=4, latency_seconds=1.0, bandwidth_bytes_per_second=10.0, launch_seconds=5.0)
    >>> collective_seconds("all_reduce", 100.0, [axis])  # 5 + 2*3*1 + 2*3/4*100/10
    26.0
    """
    lines = _lines(kind, tuple(axes))
    if isinstance(size_bytes, np.ndarray):
        if not np.all((size_bytes >= 0) & (size_bytes < math.inf)):
            raise _refused(f"an array with {size_bytes.min()} to {size_bytes.max()}", axes)
        if not lines:
            return np.zeros(size_bytes.shape)
        seconds = np.min([line.fixed_seconds + line.seconds_per_byte * size_bytes for line in lines], axis=0)
        return np.where(size_bytes > 0, seconds, 0.0)
    if not 0 <= size_bytes < math.inf:  # false for NaN too
        raise _refused(repr(size_bytes), axes)
    if not lines or size_bytes == 0:
        return 0.0
    return min([line.fixed_seconds + line.seconds_per_byte * size_bytes for line in lines])


def collective_lines(kind: str, axes: Sequence[Axis]) -> tuple[np.ndarray, np.ndarray]:
    """Fixed seconds and seconds per byte, `[lines]` each: a collective of S > 0 bytes takes the least of them.

    Zeros over axes of size 1. Raises ValueError for an unknown kind.

    >>> axis = Axis(name="x", size=2, latency_seconds=1.0, bandwidth_bytes_per_second=10.0, launch_seconds=5.0)
    >>> fixed, rate = collective_lines("permute", [axis])
    >>> fixed.tolist(), rate.tolist()
    ([6.0], [0.1])
    """
    lines = _lines(kind, tuple(axes)) or (Line(0.0, 0.0, ""),)
    return np.array([line.fixed_seconds for line in lines]), np.array([line.seconds_per_byte for line in lines])


def collective_algorithm(kind: str, size_bytes: float, axes: Sequence[Axis]) -> str:
    """The name of the algorithm that is the fastest: "ring", "tree", "switch", "memory", "torus", "direct" or "by
    axis".

    Empty over axes of size 1. Raises ValueError as `collective_seconds`.
    """
    lines = _lines(kind, tuple(axes))
    if not 0 <= size_bytes < math.inf:
        raise _refused(repr(size_bytes), axes)
    if not lines:
        return ""
    return min(lines, key=lambda line: line.fixed_seconds + line.seconds_per_byte * size_bytes).name


@lru_cache(maxsize=1 << 14)
def _lines(kind: str, axes: tuple[Axis, ...]) -> tuple[Line, ...]:
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        raise ValueError(
            f"refused a collective: got kind {kind!r}; needed one of {', '.join(KINDS)}; "
            f"where: collective_seconds(kind); try: {near[0] if near else 'all_reduce'!r}"
        )
    used = tuple(axis for axis in axes if axis.size > 1)
    return lines_of(kind, used) if used else ()


def _refused(got: str, axes: Sequence[Axis]) -> ValueError:
    return ValueError(
        f"refused a collective: got {got} bytes; needed a finite number >= 0; "
        f"where: over axes {tuple(axis.name for axis in axes)}; try: the bytes of one device's buffer"
    )
