"""The transports, run within one process: any layout to any other, on machines of any size."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.resharding import Network, uniform_network
from meshwright.runtime.pipeline.transport import LocalTransport, PlannedTransport, ProcessTransport, Transport
from meshwright.runtime.resharding.one_program import OneProgram

SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 10))]
SHAPES = [(24, 8), (8,), (), (4, 6, 2), (12, 1), (0, 4)]


def hosts(size: int) -> Network:
    """The devices of this process as machines of some each; without latency, so that what is relayed is cut up."""
    ids = [device.id for device in jax.devices()]
    return uniform_network([ids[i : i + size] for i in range(0, len(ids), size)], nic_rate=1e9)


def random_mesh(generator: np.random.Generator) -> Mesh:
    """Some of the devices, in any order."""
    sizes = [(1,), (2,), (4,), (2, 2), (4, 2), (2, 3), (8,)][generator.integers(7)]
    devices = generator.permutation(np.array(jax.devices(), dtype=object))[: prod(sizes)].reshape(sizes)
    return Mesh(devices, tuple("xyz"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


def random_sharding(generator: np.random.Generator, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Dims split over axes that divide them."""
    dims: list[Any] = [None] * len(shape)
    for name in generator.permutation(mesh.axis_names):
        free = [d for d, n in enumerate(shape) if dims[d] is None and n % mesh.shape[name] == 0]
        if free and generator.random() < 0.7:
            dims[generator.choice(free)] = str(name)
    return NamedSharding(mesh, PartitionSpec(*dims))


def assert_moves(transport: Transport, generator: np.random.Generator, count: int) -> None:
    """Some values of random shapes, dtypes and layouts, twice."""
    meshes = random_mesh(generator), random_mesh(generator)
    shapes = [SHAPES[generator.integers(len(SHAPES))] for _ in range(count)]
    dtypes = [[np.float32, np.int32, np.bool_, jnp.bfloat16][generator.integers(4)] for _ in shapes]
    sources, targets = ([random_sharding(generator, shape, mesh) for shape in shapes] for mesh in meshes)
    whole = [(generator.random(shape) * 100).astype(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for values in (whole, [np.flip(x) for x in whole]):
        placed = [jax.device_put(x, source) for x, source in zip(values, sources, strict=True)]
        for moved, x, target in zip(transport.move(placed, targets), values, targets, strict=True):
            assert moved.sharding == target
            assert (moved.shape, moved.dtype) == (x.shape, x.dtype)
            for shard in moved.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("transport", [LocalTransport, ProcessTransport])
def test_naive(transport: type[Transport], seed: int) -> None:
    assert_moves(transport(), np.random.default_rng(seed), 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [None, 1, 2, 4])
def test_planned(size: int | None, seed: int) -> None:
    network = None if size is None else hosts(size)
    assert_moves(PlannedTransport(network), np.random.default_rng(seed), 1 + seed % 3)


@pytest.mark.parametrize("transport", [ProcessTransport(), PlannedTransport(), PlannedTransport(hosts(1))])
def test_keys_travel(transport: Transport) -> None:
    generator = np.random.default_rng(0)
    source, target = (random_sharding(generator, (), random_mesh(generator)) for _ in range(2))
    key = jax.device_put(jax.random.key(3), source)
    (moved,) = transport.move([key], [target])
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(jax.random.key(3)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_byte_enters_a_machine_once(size: int) -> None:
    """Of everything the program sends, what crosses from one machine to another is the least there is."""
    names = ("x", "y")
    devices = np.array(jax.devices(), dtype=object)
    ends = [
        Mesh(devices[half].reshape(2, 2), names, axis_types=(AxisType.Auto,) * 2) for half in (slice(4), slice(4, 8))
    ]
    shape, network = (16, 8), hosts(size)
    source = NamedSharding(ends[0], PartitionSpec("x", "y"))
    home = [network.domain_of[d.id] for d in sorted(jax.devices(), key=lambda d: d.id)]
    for spec in (PartitionSpec(), PartitionSpec("y"), PartitionSpec(None, "x"), PartitionSpec("y", "x")):
        target = NamedSharding(ends[1], spec)
        x = jax.device_put(np.arange(128, dtype=np.float32).reshape(shape), source)
        transport = PlannedTransport(network)
        (moved,) = transport.move([x], [target])
        np.testing.assert_array_equal(np.asarray(moved), np.asarray(x))
        (way,) = transport._ways.values()
        assert isinstance(way, OneProgram)
        crossed = sum(
            sum(4 * (np.prod(kind.sizes) if kind.length is None else kind.length) for kind in group.kinds)
            for groups in way._steps for group in groups for a, b in group.pairs if home[a] != home[b]
        )  # fmt: skip
        assert crossed == way.plan.demand.needed_bytes
        if not any(spec):
            assert crossed == 4 // size * 512  # to each machine of the other side the whole, once


def test_values_of_a_call_are_planned_together_once() -> None:
    generator = np.random.default_rng(3)
    source, target = random_mesh(generator), random_mesh(generator)
    shardings = [NamedSharding(mesh, PartitionSpec()) for mesh in (source, target)]
    values = [jax.device_put(np.full((4, n), n, np.float32), shardings[0]) for n in (2, 4)]
    transport = PlannedTransport(hosts(1))
    for _ in range(2):
        moved = transport.move(values, [shardings[1]] * 2)
        assert [float(x[0, 0]) for x in moved] == [2.0, 4.0]
    (way,) = transport._ways.values()
    assert isinstance(way, OneProgram)
    assert len(way.plan.demand.moves) == 2
    assert way._jitted._cache_size() == 1
