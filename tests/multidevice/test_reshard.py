"""Moves of arrays between meshes of one process: bits, buffers, donation, refusals.

With `network=` the devices of this process are told to be hosts of their own, so that rounds and relays run here too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import meshwright as mw
from meshwright.resharding import Network, ReshardError, uniform_network
from meshwright.runtime.pipeline.transport import PlannedTransport
from meshwright.runtime.resharding.mover import Mover
from meshwright.runtime.resharding.reshard import _described

Dims = Sequence[str | tuple[str, ...] | None]


def on(places: Sequence[int], shape: Sequence[int], spec: Dims) -> NamedSharding:
    names = ("x", "y", "z")[: len(shape)]
    devices = np.array(jax.devices(), dtype=object)[list(places)].reshape(shape)
    return NamedSharding(Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names)), PartitionSpec(*spec))


def hosts(size: int, latency: float = 0.0) -> Network:
    ids = [d.id for d in jax.devices()]
    return uniform_network([ids[i : i + size] for i in range(0, len(ids), size)], nic_rate=1e9, latency_seconds=latency)


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


DTYPES = [
    *("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16", "float32", "complex64"),
]


def any_bits(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of any bits that the dtype has, NaNs that signal included."""
    dtype, rng = jnp.dtype(name), np.random.default_rng(0)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if name in ("int2", "uint2", "int4", "uint4"):
        return rng.integers(int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max) + 1, shape).astype(dtype)
    if name == "float4_e2m1fn":
        return rng.integers(0, 16, shape).astype(np.uint8).view(dtype)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize)).astype(np.uint8).view(dtype)


# `make test` moves them all by the pipelines' transport below.
@pytest.mark.parametrize(
    ("network", "every"),
    [(None, 2), (2, 3), pytest.param(None, 1, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)],
    ids=["one host", "hosts of two", "all on one host", "all between hosts of two"],
)
def test_every_dtype(network: int | None, every: int) -> None:
    source, target = on(range(4), (2, 2), ("x", "y")), on((6, 7, 0, 1), (2, 2), (None, "x"))
    names = DTYPES[::every]
    given = {name: any_bits(name, (64, 12)) for name in names}
    tree = jax.device_put(given, source)
    moved = mw.reshard(tree, target, network=hosts(network) if network else None)
    for name, x in given.items():
        assert moved[name].sharding == target
        assert moved[name].dtype == x.dtype
        assert bits(moved[name]) == bits(x), name


@pytest.mark.parametrize("size", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_every_dtype_by_the_pipelines_transport(size: int | None) -> None:
    """All in one program; between hosts of one device with relays, so that parts of slices are moved too."""
    source, target = on(range(2), (2,), ("x",)), on((3, 4, 5, 6, 7), (5,), ())
    given = [any_bits(name, (64, 12)) for name in DTYPES]
    transport = PlannedTransport(None if size is None else hosts(size))
    moved = transport.move(jax.device_put(given, source), [target] * len(given))
    for name, x, y in zip(DTYPES, given, moved, strict=True):
        assert y.dtype == x.dtype
        assert bits(y) == bits(x), name


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys(impl: str) -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(3, impl=impl), 8), on(range(4), (4,), ("x",)))
    moved = mw.reshard(keys, on((4, 5), (2,), ("x",)), network=hosts(2))
    assert moved.dtype == keys.dtype
    assert bits(jax.random.key_data(moved)) == bits(jax.random.key_data(keys))


@pytest.mark.parametrize("seed", range(6))
def test_random_moves(seed: int) -> None:
    """Any meshes and layouts, hosts of one to four devices, chunks of a few elements: bits, and buffers in bounds."""
    pick = random.Random(seed)
    network, chunk = hosts(pick.choice([1, 2, 4])), pick.choice([64, 1024, 1 << 20])
    tree, targets = [], []
    for _ in range(pick.choice([1, 3])):
        shape = tuple(pick.choice([8, 16, 24]) for _ in range(pick.choice([1, 2, 3])))
        sides = []
        for _ in range(2):
            size = pick.choice([1, 2, 4, 8])
            grid = (size,) if size < 4 or pick.random() < 0.5 else (2, size // 2)
            spec: list[Any] = [None] * len(shape)
            for axis in ("x", "y")[: len(grid)]:
                free = [d for d in range(len(shape)) if spec[d] is None]
                if free and pick.random() < 0.7:
                    spec[pick.choice(free)] = axis
            sides.append(on(pick.sample(range(8), size), grid, spec))
        dtype = pick.choice([np.float32, np.int8, np.complex64])
        x = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
        tree.append(jax.device_put(x, sides[0]))
        targets.append(sides[1])
    plan = mw.reshard_plan(tree, targets, network=network, chunk_bytes=chunk)
    seen: list[tuple[int, int]] = []
    moved = mw.reshard(tree, targets, network=network, chunk_bytes=chunk, tell=lambda *done: seen.append(done))
    for x, y, target in zip(tree, moved, targets, strict=True):
        assert y.sharding.is_equivalent_to(target, y.ndim)
        assert bits(x) == bits(y)
    if plan.rounds and seen:
        assert seen[-1] == (len(seen), len(seen))
    mover = Mover(plan, tree, [x.sharding for x in tree], targets)
    # Two buffers, each a chunk and what a piece of it is rounded up by.
    assert mover.buffer_bytes <= 2 * (chunk + max(chunk, 4 * 256 * 8))


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.set_mesh(jax.make_mesh((2,), ("other",))),
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.debug_nans(True),
        lambda: jax.disable_jit(),
        lambda: jax.default_device(jax.devices()[5]),
    ],
    ids=["mesh", "guard", "nans", "no jit", "device"],
)
@pytest.mark.parametrize("network", [None, hosts(1)], ids=["copies", "rounds"])
def test_what_the_code_around_has_set_for_itself_does_not_matter(context: Any, network: Network | None) -> None:
    x = np.full((8, 8), np.nan, np.float32)
    value = jax.device_put(x, on(range(4), (4,), ("x",)))
    target = on((4, 5, 6, 1), (4,), (None, "x"))
    with context():
        moved = mw.reshard(value, target, network=network)
    assert bits(moved) == bits(value)


def test_scalars_and_arrays_of_no_elements() -> None:
    source, target = on(range(2), (2,), ()), on((5, 6, 7), (3,), ())
    tree = {"scalar": jax.device_put(jnp.float32(3.5), source), "none": jax.device_put(jnp.zeros((0, 4)), source)}
    moved = mw.reshard(tree, target, network=hosts(1))
    assert float(moved["scalar"]) == 3.5
    assert moved["none"].shape == (0, 4)
    assert moved["none"].sharding == target


def test_nothing_passes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.array import ArrayImpl

    x = jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), on(range(4), (4,), ("x",)))
    with monkeypatch.context() as patched:
        patched.setattr(ArrayImpl, "_value", property(lambda self: pytest.fail("read on the host")))
        near = mw.reshard(x, on((2, 3, 4, 5), (4,), (None, "x")))
        far = mw.reshard(x, on((4, 5), (2,), (None, "x")), network=hosts(2))
        jax.block_until_ready((near, far))
    assert bits(near) == bits(far) == bits(x)


def test_what_stays_is_taken_over_when_donated_and_copied_when_not() -> None:
    x = jax.device_put(np.arange(8, dtype=np.float32), on(range(2), (2,), ("x",)))
    where = {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
    target = on((0, 1, 2, 3), (2, 2), ("x",))
    swapped = NamedSharding(Mesh(target.mesh.devices.T.reshape(2, 2).T, ("x", "y")), target.spec)
    copied = mw.reshard(x, swapped)
    x_again = np.asarray(x)
    kept = mw.reshard(x, swapped, donate=True)
    assert bits(copied) == bits(kept) == bits(x_again)
    taken = {s.device: s.data.unsafe_buffer_pointer() for s in kept.addressable_shards}
    assert taken[jax.devices()[0]] == where[jax.devices()[0]]
    assert {s.device: s.data.unsafe_buffer_pointer() for s in copied.addressable_shards}[jax.devices()[0]] != where[
        jax.devices()[0]
    ]
    jax.jit(lambda v: v + 1, donate_argnums=0)(kept)
    with pytest.raises(ValueError, match="that was donated"):
        mw.reshard(kept, target)


def test_casts_on_arrival_and_host_arrays() -> None:
    target = on((4, 5), (2,), ("x",))
    tree = {"a": np.arange(4, dtype=np.float32), "b": jax.device_put(jnp.arange(4), on((0,), (1,), ()))}
    moved = mw.reshard(tree, target, dtype=jnp.bfloat16)
    assert moved["a"].dtype == jnp.bfloat16
    assert moved["b"].dtype == tree["b"].dtype
    assert all(leaf.sharding == target for leaf in moved.values())


def test_a_sharding_for_a_whole_branch() -> None:
    one, other = SingleDeviceSharding(jax.devices()[3]), on((4, 5), (2,), ("x",))
    tree = {"a": {"w": jnp.arange(4.0), "b": jnp.ones(2)}, "c": jnp.arange(6.0)}
    moved = mw.reshard(tree, {"a": other, "c": one})
    assert moved["a"]["w"].sharding == other
    assert moved["c"].sharding == one


@pytest.mark.parametrize(
    ("tree", "shardings", "said"),
    [
        ({"w": np.zeros(4)}, {"v": None}, "a tree that does not fit"),
        ({"w": np.zeros(4)}, {"w": None}, "None for a leaf|does not fit"),
        ({"w": 3.5}, "here", "str 'here'"),
        ({"w": np.zeros(5)}, on((0, 1), (2,), ("x",)), "axes that divide"),
        ({"w": np.zeros(4)}, on((0, 1), (2,), (None, "x")), "at most one entry for each dim"),
        ({"w": "text"}, on((0, 1), (2,), ()), "needed an array"),
    ],
)
def test_refusals(tree: Any, shardings: Any, said: str) -> None:
    with pytest.raises(ReshardError, match=said):
        mw.reshard(tree, shardings)


def test_a_device_that_the_network_does_not_have() -> None:
    x = jax.device_put(np.zeros(4), on((0,), (1,), ()))
    network = uniform_network([(0, 1)], nic_rate=1e9)
    with pytest.raises(ReshardError, match="device 3, which does not exist"):
        mw.reshard(x, on((3,), (1,), ()), network=network)


def test_what_is_in_place_already_is_copied_unless_donated() -> None:
    """A trainer goes on and donates its weights; what was handed out before stays."""
    x = jax.device_put(np.arange(8, dtype=np.float32), on(range(2), (2,), ("x",)))
    kept = mw.reshard(x, x.sharding)
    same = mw.reshard(x, x.sharding, donate=True)
    assert same is x
    jax.jit(lambda v: v + 1, donate_argnums=0)(x)
    assert bits(kept) == np.arange(8, dtype=np.float32).tobytes()


def test_what_is_at_several_places_of_a_tree_is_not_taken_over() -> None:
    """A tied weight, as one array twice, as two arrays of the same buffers, and as one that stays for a part."""
    target = on((4, 5), (2,), (None, "x"))
    for other in (lambda w: w, lambda w: jax.device_put(w, w.sharding)):
        for place in (None, target, on((0, 5), (2,), ("x",))):
            w = jax.device_put(np.arange(16, dtype=np.float32).reshape(4, 4), on((0, 1), (2,), ("x",)))
            tree = {"emb": w, "head": other(w), "own": w + 1}
            places = {"emb": place if place is not None else w.sharding, "head": target, "own": target}
            moved = mw.reshard(tree, places, donate=True)
            for name, more in (("emb", 0), ("head", 0), ("own", 1)):
                assert bits(moved[name]) == (np.arange(16, dtype=np.float32) + more).tobytes()
            assert tree["own"].is_deleted()


def test_nothing_moves_when_the_request_is_wrong() -> None:
    x = jax.device_put(np.arange(8, dtype=np.float32), on(range(2), (2,), ("x",)))
    target = on((4, 5), (2,), ("x",))
    wrong: list[tuple[dict[str, Any], str]] = [
        *(({"dtype": dtype}, "one that JAX has") for dtype in ("banana", object, "U4", "float64")),
        ({"chunk_bytes": 0}, "chunk_bytes"), ({"network": "p3"}, "a meshwright.resharding.Network"),
        ({"tell": 5}, "a function of two numbers"),
    ]  # fmt: skip
    for options, said in wrong:
        with pytest.raises(ReshardError, match=said):
            mw.reshard(x, target, donate=True, **options)
        assert not x.is_deleted()
    with pytest.raises(ReshardError, match="memory of the kind"):
        mw.reshard(x, target.with_memory_kind("pinned_host"), donate=True)
    with pytest.raises(ReshardError, match="one of a mesh of devices"):
        mw.reshard(x, NamedSharding(target.mesh.abstract_mesh, target.spec), donate=True)
    assert not x.is_deleted()
    gone = x + 1
    gone.delete()
    with pytest.raises(ReshardError, match=r"that was donated.*where: the array"):
        mw.reshard(gone, target)
    for ask in (mw.reshard, mw.reshard_plan):
        with pytest.raises(ReshardError, match=r"a shape can be planned for|to know where it is"):
            ask(jax.ShapeDtypeStruct((8,), "float32"), target)
    with pytest.raises(ReshardError, match=r"outside jax\.jit"):
        jax.jit(lambda v: mw.reshard(v, target))(x)


def test_the_plan_of_keys_host_arrays_and_shapes() -> None:
    target = on((4, 5), (2,), ("x",))
    key = jax.device_put(jax.random.split(jax.random.key(0), 4), on((0,), (1,), ()))
    tree = [key, np.zeros(4), jax.ShapeDtypeStruct((8,), "float32", sharding=on(range(2), (2,), ("x",)))]
    assert mw.reshard_plan(tree, target, network=hosts(2)).bytes_between_domains == 4 * 8 + 8 * 4


def test_processes_may_write_one_sharding_in_several_ways() -> None:
    """They agree on what is moved by its text."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    whole, split = ({_described(NamedSharding(mesh, spec)) for spec in specs} for specs in (
        [PartitionSpec(), PartitionSpec(None), PartitionSpec(None, None), PartitionSpec(())],
        [PartitionSpec(None, "x"), PartitionSpec((), ("x",)), PartitionSpec(None, "x", None)],
    ))  # fmt: skip
    assert (len(whole), len(split)) == (1, 1)
    others = {_described(NamedSharding(mesh, spec)) for spec in (PartitionSpec("x"), PartitionSpec(("x", "y")))}
    assert len(whole | split | others) == 4
