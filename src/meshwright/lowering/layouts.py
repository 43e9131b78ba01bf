"""Specs that fit shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..sharding import Spec


def fitting(dims: Sequence[Sequence[str]], shape: Sequence[int], sizes: Mapping[str, int]) -> Spec:
    """A spec with the splits among `dims` that divide `shape`, each axis used once.

    >>> fitting((("x",), ("x", "y")), (6, 4), {"x": 2, "y": 2}).dims
    (('x',), ())

    Args:
      dims: for each dim the axes that would split it.
      shape: of the array.
      sizes: of the axes.
    """
    used: set[str] = set()
    kept: list[tuple[str, ...]] = []
    for extent, axes in zip(shape, dims, strict=True):
        good = extent % prod(sizes[axis] for axis in axes) == 0 and used.isdisjoint(axes)
        kept.append(tuple(axes) if good else ())
        used.update(axes if good else ())
    return Spec(tuple(kept))
