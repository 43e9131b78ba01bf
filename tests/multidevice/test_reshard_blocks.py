"""Parts of slices into buffers and out of them, wherever they begin and end, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.resharding import Piece
from meshwright.runtime.resharding.blocks import give, padded_elements, take

_CASES = [  # the block's box, the slice in it
    (((0, 8), (0, 40)), ((2, 7), (8, 32))),
    (((4, 70), (0, 16)), ((4, 69), (1, 15))),
    (((0, 3), (0, 9), (5, 25)), ((1, 2), (2, 9), (5, 20))),  # its first dim has one element
    (((0, 2), (0, 5000)), ((0, 2), (100, 4900))),  # few long rows: element by element
]


@pytest.mark.parametrize(("origin", "slice_"), _CASES)
def test_any_part_of_a_slice(origin: tuple[tuple[int, int], ...], slice_: tuple[tuple[int, int], ...]) -> None:
    generator = np.random.default_rng(0)
    shape, sizes = ([b - a for a, b in box] for box in (origin, slice_))
    inside = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(slice_, origin, strict=True))
    whole = int(np.prod(sizes))
    held = generator.integers(0, 1 << 16, shape).astype(np.uint16)
    lengths = (1, 13, 60)
    places = [(start, min(start + n, whole)) for n in lengths for start in (0, 1, 23, whole // 2, whole - n)]
    for start, stop in places:
        piece = Piece(move=0, slice=slice_, start=start, stop=stop)
        buffer = jnp.zeros(7 + padded_elements(piece), jnp.uint16)
        packed = take(buffer, jnp.asarray(held), origin, piece, 7)
        wanted = held[inside].reshape(-1)[start:stop]
        np.testing.assert_array_equal(np.asarray(packed)[7 : 7 + stop - start], wanted)
        other = generator.integers(0, 1 << 16, shape).astype(np.uint16)
        given = give(jnp.asarray(other), origin, piece, packed, 7)
        expected = other.copy()
        part = expected[inside].reshape(-1)
        part[start:stop] = wanted
        expected[inside] = part.reshape(sizes)
        np.testing.assert_array_equal(np.asarray(given), expected)
