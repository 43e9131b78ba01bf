"""A move as one program: what memory it needs, how large it is, and when it is not one."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from test_pipeline_transport import assert_moves, hosts, random_mesh, random_sharding

from meshwright.resharding import Move, plan_reshard
from meshwright.runtime.pipeline import transport
from meshwright.runtime.pipeline.transport import PlannedTransport
from meshwright.runtime.resharding.layouts import layout_of
from meshwright.runtime.resharding.one_program import OneProgram

pytestmark = pytest.mark.compiled


def program(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], size: int, chunks: int) -> OneProgram:
    """A move of float32 between hosts of some devices each."""
    ends = layout_of(source, shape), layout_of(target, shape)
    move = Move(name="x", shape=shape, item_bytes=4, source=ends[0], destination=ends[1])
    plan = plan_reshard(hosts(size), [move], most_chunks=chunks)

    def nothing(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
        return jnp.zeros(shape, dtype, device=device)

    return OneProgram(plan, [jax.ShapeDtypeStruct(shape, np.float32)], [source], [target], nothing=nothing)


def lowered(one: OneProgram) -> Any:
    given = [
        jax.ShapeDtypeStruct((len(one._devices) * block[0], *block[1:]), array.dtype, sharding=one._sharding)
        for block, array in zip(one._blocks, one._arrays, strict=True)
    ]
    return one._jitted.lower(*given)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_memory_beside_source_and_destination(seed: int) -> None:
    """What is there only while data moves: at most four times the blocks, which `transport` counts on."""
    generator = np.random.default_rng(seed)
    shape = (48, 64, 32)
    source, target = (random_sharding(generator, shape, random_mesh(generator)) for _ in range(2))
    one = program(source, target, shape, [1, 2, 4][seed % 3], 8)
    memory = lowered(one).compile().memory_analysis()
    before, after = (4 * prod(s.shard_shape(shape)) for s in (source, target))
    receives_only = target.device_set - source.device_set
    beside = memory.temp_size_in_bytes + (before if receives_only else 0)
    assert beside <= 4 * (before + after), (beside, before, after)


def test_blocks_that_nobody_reads_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers have none of the source: what stands for it stays within an eighth of a chunk, however many shapes."""
    monkeypatch.setattr(transport, "KEPT_BYTES", 1 << 16)
    devices = np.array(jax.devices(), dtype=object)
    source, target = (
        NamedSharding(Mesh(devices[part], ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x"))
        for part in (slice(2), slice(4, 8))
    )
    there, before = PlannedTransport(hosts(4)), sum(x.nbytes for x in jax.live_arrays())
    for rows in range(8, 96, 8):
        moved = there.move([jax.device_put(np.ones((rows, 256), np.float32), source)], [target])
        jax.block_until_ready(moved)
    del moved
    assert all(isinstance(way, OneProgram) for way in there._ways.values())
    kept = sum(x.nbytes for x in jax.live_arrays()) - before
    assert 0 < kept <= len(devices) * (1 << 16), kept


def test_more_chunks_are_no_larger_program() -> None:
    """Split over one host to replicas on two, which is relayed: equal rounds are a loop."""
    devices = np.array(jax.devices(), dtype=object)
    source, target = (
        NamedSharding(Mesh(devices[part], ("x",), axis_types=(AxisType.Auto,)), PartitionSpec(*spec))
        for part, spec in ((slice(2), ["x"]), (slice(2, 6), []))
    )
    sizes = []
    for chunks in (16, 64):
        one = program(source, target, (256, 16), 2, chunks)
        assert one.plan.chunks == chunks
        sizes.append(len(lowered(one).as_text()))
    assert sizes[1] < 1.5 * sizes[0], sizes  # the tables of places grow
    x = jax.device_put(np.arange(256 * 16, dtype=np.float32).reshape(256, 16), source)
    (moved,), _ = one([x])
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(x))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_large_values_go_round_by_round(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_MOST_BYTES", 0)
    monkeypatch.setattr(transport, "CHUNK_BYTES", 64)
    there = PlannedTransport(hosts(2))
    assert_moves(there, np.random.default_rng(seed), 2)
    assert not any(isinstance(way, OneProgram) for way in there._ways.values())
