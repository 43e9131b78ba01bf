"""How arrays lie in a TPU's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

_ROWS, _COLUMNS = 8, 128


def elements_in_tiles(shape: Sequence[int]) -> int:
    """Elements that an array takes on a TPU, which keeps two dims in tiles of 8 x 128: those that fit best.

    >>> elements_in_tiles([1024, 4, 64])
    262144
    >>> elements_in_tiles([2, 64])
    1024

    Args:
      shape: of the array.
    """
    return _in_tiles(tuple(sorted(size for size in shape if size != 1)))


@cache
def _in_tiles(dims: tuple[int, ...]) -> int:
    elements = math.prod(dims)
    if len(dims) < 2 or not elements:
        return elements
    pairs = set(itertools.permutations(dims, 2))
    return min(elements // (a * b) * (-(-a // _ROWS) * _ROWS) * (-(-b // _COLUMNS) * _COLUMNS) for a, b in pairs)
