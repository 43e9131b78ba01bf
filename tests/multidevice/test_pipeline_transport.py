"""The transport between processes, run within one: any layout to any other."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.runtime.pipeline.transport import ProcessTransport


def random_sharding(generator: np.random.Generator, shape: tuple[int, ...]) -> NamedSharding:
    """Over a mesh of some of the devices, in any order, with every dim split over the axes that divide it."""
    sizes = [(1,), (2,), (4,), (2, 2), (4, 2), (2, 3), (8,)][generator.integers(7)]
    devices = generator.permutation(np.array(jax.devices(), dtype=object))[: prod(sizes)].reshape(sizes)
    names = tuple("xyz"[: len(sizes)])
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))
    dims: list[Any] = [None] * len(shape)
    for name in generator.permutation(names):
        free = [d for d, n in enumerate(shape) if dims[d] is None and n % mesh.shape[name] == 0]
        if free and generator.random() < 0.7:
            dims[generator.choice(free)] = str(name)
    return NamedSharding(mesh, PartitionSpec(*dims))


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_to_any_other(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = [(24, 8), (8,), (), (4, 6, 2), (12, 1), (0, 4)][generator.integers(6)]
    dtype = [np.float32, np.int32, np.bool_][generator.integers(3)]
    source, target = random_sharding(generator, shape), random_sharding(generator, shape)
    x = (generator.random(shape) * 100).astype(dtype)
    transport = ProcessTransport()
    for value in (x, np.flip(x)):
        moved = transport.move(jax.device_put(value, source), target)
        assert moved.sharding.is_equivalent_to(target, len(shape))
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


def test_keys_travel() -> None:
    generator = np.random.default_rng(0)
    source, target = random_sharding(generator, ()), random_sharding(generator, ())
    key = jax.device_put(jax.random.key(3), source)
    moved = ProcessTransport().move(key, target)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(jax.random.key(3)))
