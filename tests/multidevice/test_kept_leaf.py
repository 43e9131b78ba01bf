"""One array for what several stages keep: its blocks are the stages' own where a sharding has such blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import meshwright as mw
from meshwright.lowering.pipeline.rows import Rows
from meshwright.runtime.pipeline.kept_leaf import Joint, joint_sharding


def on(devices: Sequence[int], sizes: tuple[int, ...], *dims: Any) -> NamedSharding:
    """A sharding on a mesh of some of the eight devices, with axes x, y."""
    grid = np.array([jax.devices()[d] for d in devices], dtype=object).reshape(sizes)
    return NamedSharding(Mesh(grid, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes)), P(*dims))


HALVES = Rows(0, 4, ((0, 0, 2), (1, 2, 4)))


@pytest.mark.parametrize(
    ("shardings", "rows"),
    [
        ([on(range(4), (4,))], None),
        ([on(range(4), (2, 2)), on(range(4, 6), (2,)), on([6], (1,))], None),  # replicated, on unlike meshes
        ([on(range(4), (2, 2), None, "y"), on(range(4, 8), (2, 2), None, "y")], None),  # split alike
        ([on(range(2), (2,)), on(range(2, 4), (2,)), on(range(2), (2,))], None),  # two stages on the same devices
        ([on(range(4), (4,)), on(range(4, 8), (4,))], HALVES),
        ([on(range(4), (2, 2), "y", "x"), on(range(4, 8), (2, 2), "y", "x")], HALVES),  # rows split further
        ([on(range(2, 4), (2,), None, "x"), on(range(2), (2,), None, "x")], Rows(0, 4, ((0, 2, 4), (1, 0, 2)))),
    ],
    ids=["one", "replicated", "alike", "shared", "rows", "split rows", "rows in another order"],
)
def test_it_has_the_blocks_of_the_stages(shardings: list[NamedSharding], rows: Rows | None) -> None:
    whole = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    found = joint_sharding(whole.shape, dict(enumerate(shardings)), rows)
    assert found is not None
    parts = {
        n: jnp.copy(jax.device_put(whole if rows is None else rows.take(whole, n), sharding))
        for n, sharding in enumerate(shardings)
    }
    kept = Joint(whole.shape, whole.dtype, dict(enumerate(shardings)), rows, found)
    leaf = kept.whole(parts)
    np.testing.assert_array_equal(np.asarray(leaf), whole)
    buffers = {s.data.unsafe_buffer_pointer() for part in parts.values() for s in part.addressable_shards}
    assert {s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards} <= buffers
    again = kept.parts(leaf, donated=True)
    for n, part in parts.items():
        assert again[n].sharding == part.sharding
        np.testing.assert_array_equal(np.asarray(again[n]), np.asarray(part))
    own = [s.data.unsafe_buffer_pointer() for part in again.values() for s in part.addressable_shards]
    assert len(set(own)) == len(own)  # each may be donated


@pytest.mark.parametrize(
    ("shardings", "rows"),
    [
        ([on(range(4), (4,), "x"), on(range(4, 8), (4,))], None),
        ([on(range(4), (4,), "x"), on(range(4, 6), (2,), "x")], None),
        ([on(range(4), (4,)), on(range(4, 8), (4,))], Rows(0, 4, ((0, 0, 1), (1, 1, 4)))),
        ([on(range(4), (4,)), on(range(4, 6), (2,))], HALVES),
        ([on(range(2), (2,)), on(range(2), (2,))], HALVES),
    ],
    ids=["split and whole", "other meshes", "unequal rows", "rows on other meshes", "rows on the same devices"],
)
def test_there_is_none_for_unequal_blocks(shardings: list[NamedSharding], rows: Rows | None) -> None:
    assert joint_sharding((4, 8), dict(enumerate(shardings)), rows) is None


def test_spread_shardings_split_evenly_over_the_same_devices() -> None:
    tree = {"w": jnp.ones((6, 20)), "odd": jnp.ones((7, 3)), "n": jnp.int32(0), "key": jax.random.key(0)}
    found = mw.spread_shardings(tree)
    assert len({sharding.mesh for sharding in found.values()}) == 1
    assert all(sharding.device_set == set(jax.devices()) for sharding in found.values())
    assert {name: found[name].shard_shape(tree[name].shape) for name in tree} == {
        "w": (3, 5), "odd": (7, 3), "n": (), "key": (),
    }  # fmt: skip
    six = mw.spread_shardings(tree, jax.devices()[:6])
    assert six["w"].shard_shape((6, 20)) == (1, 20)
    moved = mw.reshard(tree, found)
    assert jax.random.key_data(moved["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()
    np.testing.assert_array_equal(np.asarray(moved["w"]), np.ones((6, 20)))
