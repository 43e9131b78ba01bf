"""FLOPs of a convolution from its shapes: the same for the forward pass and for both gradients.

In a dim of space, position i of the image, tap k of the window and position o of the result belong together where

    i * image_dilation + low = o * stride + k * window_dilation,

and so any two of the three say which the third is. A gradient is a convolution in which the three have changed places,
so that strides become dilations. What counts as work is symmetric in them: of the three kinds of pairs, the fewest
whose third is a whole number. Borders of padding are therefore work, as in published figures; the holes of dilated
arrays, which strides leave in gradients and groups in gradients of kernels, are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import NamedTuple


class SpaceDim(NamedTuple):
    """One dim of space of a convolution: extents without holes and borders, and the numbers of the equation above."""

    image: int
    window: int
    result: int
    stride: int = 1
    low: int = 0
    image_dilation: int = 1
    window_dilation: int = 1

    @property
    def pairs(self) -> int:
        """Multiplications for each sample and pair of features."""
        i, k, o = range(self.image), range(self.window), range(self.result)
        a, b, c = self.image_dilation, self.window_dilation, self.stride
        return min(
            _whole((o, c), (k, b), self.low, a),
            _whole((i, -a), (k, b), self.low, c),
            _whole((i, -a), (o, c), self.low, b),
        )


def convolution_flops(samples: int, made: int, read: int, space: Iterable[SpaceDim]) -> float:
    """FLOPs of a convolution.

    Args:
      samples: of the batch.
      made: features of the result.
      read: features of the image that each feature of the result sums over.
      space: the dims of space.

    >>> convolution_flops(1, 1, 1, [SpaceDim(8, 3, 8, low=1)] * 2) == 2 * 64 * 9
    True
    """
    return 2.0 * samples * made * read * prod(dim.pairs for dim in space)


def _whole(first: tuple[range, int], second: tuple[range, int], low: int, divisor: int) -> int:
    """How many pairs of an element of each, times their factors and together less `low`, are divisible."""
    (xs, factor), (ys, other) = first, second
    if divisor == 1:
        return len(xs) * len(ys)
    left, right = Counter(factor * x % divisor for x in xs), Counter((low - other * y) % divisor for y in ys)
    return sum(count * right[rest] for rest, count in left.items())
