"""Attention over positions that are split over devices: its numbers and gradients are those of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import meshwright as mw
from meshwright._jax.attention import Options, attention_p
from meshwright._jax.attention_blocks import Mask
from meshwright._jax.attention_ring import Ring

SIZES = {"a": 2, "b": 4}


@pytest.mark.parametrize(
    ("axes", "circulates", "mask", "sinks"),
    [
        (("b", "a"), True, Mask(causal=True), True),
        (("b",), False, Mask(causal=True), True),
        (("b",), True, Mask(), False),
        (("a", "b"), True, Mask(causal=True, window=11), True),  # of blocks of eight, two before
        (("b",), False, Mask(causal=True, window=20), False),
    ],
)
def test_split_positions(axes: tuple[str, ...], circulates: bool, mask: Mask, sinks: bool) -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (2, 64, 2, 3, 8), (2, 64, 2, 8), (2, 64, 2, 8), (2, 3), (2, 64, 2, 3, 8)
    *given, cotangent = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    given = given[: 3 + sinks]

    def on_one(*operands: Any) -> jax.Array:
        query, key, value = operands[:3]
        return mw.attention(
            query, key, value, causal=mask.causal, window=mask.window, sinks=operands[3] if sinks else None
        )

    out, pull = jax.vjp(jax.jit(on_one), *given)
    ring = Ring(axes, tuple(axis for axis in SIZES if axis in axes), tuple(SIZES[axis] for axis in axes), circulates)
    options = Options(mask, 8**-0.5, sinks, ring)

    def on_blocks(cotangent: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        made, pull = jax.vjp(lambda *given: attention_p.bind(*given, options=options)[0], *operands)
        to_query, *others = pull(cotangent)
        # What a device has whole it has a part of the gradient of.
        whole = [not circulates, not circulates, True]
        others = [jax.lax.psum(x, axes) if w else x for x, w in zip(others, whole, strict=False)]
        return made, to_query, *others

    rows, everywhere = PartitionSpec(None, axes), PartitionSpec()
    columns = rows if circulates else everywhere
    specs = (rows, rows, columns, columns, *[everywhere] * sinks)
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)
    split = jax.jit(jax.shard_map(on_blocks, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))
    compiled = split.lower(cotangent, *given).compile()
    assert ("collective-permute" in compiled.as_text()) == (circulates or mask.window is None)
    for found, expected in zip(compiled(cotangent, *given), (out, *pull(cotangent)), strict=True):
        scale = float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale + 1e-6)
