"""Moves between processes arrive to the bit, whatever the dtype and the layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import write_script

from meshwright.launch import run

_MULTIDEVICE = Path(__file__).parents[1] / "multidevice"

_HEAD = (
    f"""
import sys
sys.path.insert(0, {str(_MULTIDEVICE)!r})
"""
    + """
import meshwright as mw
mw.initialize(timeout_seconds=120)
import jax, jax.numpy as jnp, numpy as np, random
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
devices = np.array(jax.devices(), dtype=object)

def on(places, shape, spec):
    names = ("x", "y", "z")[: len(shape)]
    mesh = Mesh(devices[list(places)].reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, PartitionSpec(*spec))

def whole(x, sharding):
    mine = any(d.process_index == jax.process_index() for d in sharding.device_set)
    if not mine:
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [], dtype=x.dtype)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

def check(moved, expected, sharding):
    assert moved.sharding == sharding and moved.dtype == expected.dtype and moved.shape == expected.shape
    for shard in moved.addressable_shards:
        got, wanted = np.asarray(shard.data), expected[shard.index]
        assert got.tobytes() == np.ascontiguousarray(wanted).tobytes(), (shard.index, sharding)
"""
)


def outputs(folder: Path, text: str, processes: int = 2) -> list[str]:
    result = run(
        write_script(folder, _HEAD + text), processes=processes, devices_per_process=8 // processes, log_dir=folder,
        timeout_seconds=300, environment={"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    result.check()
    return [process.output() for process in result.processes]


# Split four ways to split eight ways and to replicas elsewhere; typed keys too.
_DTYPES = """
from test_reshard import DTYPES, any_bits
source, target = on(range(4), (2, 2), ("x", "y")), on((6, 7, 0, 1), (2, 2), (None, "x"))
wanted = {name: any_bits(name, (16, 12)) for name in DTYPES[::EVERY]}
moved = mw.reshard({name: whole(x, source) for name, x in wanted.items()}, target)
for name, x in wanted.items():
    check(moved[name], x, target)
words = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(7), 8)))
keys = jax.random.wrap_key_data(whole(words, on(range(4), (4,), ("x",))))
moved = mw.reshard(keys, on((4, 5), (2,), ("x",)))
assert jax.dtypes.issubdtype(moved.dtype, jax.dtypes.prng_key)
check(jax.random.key_data(moved), words, on((4, 5), (2,), ("x",)))
print("dtypes", len(wanted) + 1)
"""

# Of each kind of pair that stock `device_put` refuses between processes one; and nothing is read on a host.
_PAIRS = """
from jax._src.array import ArrayImpl
count = jax.process_count()
each = 8 // count
kinds = {
    "more devices": (on(range(2), (2,), ("x",)), on(range(4, 8), (4,), ("x",))),
    "fewer devices": (on(range(4), (4,), ("x",)), on((6, 7), (2,), ("x",))),
    "overlapping devices": (on(range(0, 4), (4,), ("x",)), on(range(2, 6), (4,), ("x",))),
    "one process to all": (on(range(each), (each,), ("x",)), on(range(8), (8,), ("x",))),
    "all processes to one": (on(range(8), (8,), ("x",)), on(range(each), (each,), (None, "x"))),
    "replicated to split": (on(range(4), (4,), ()), on(range(4, 8), (4,), ("x",))),
    "split to replicated": (on(range(4), (4,), ("x",)), on(range(4, 8), (4,), ())),
    "another dim": (on(range(4), (4,), ("x",)), on(range(4, 8), (4,), (None, "x"))),
    "two dims to one": (on(range(4), (2, 2), ("x", "y")), on(range(4, 8), (4,), ("x",))),
    "uneven hosts": (on(range(each + 1), (each + 1,), ()), on(range(8 - each - 1, 8), (each + 1,), (None, "x"))),
}
read, value = [], ArrayImpl._value
x = np.arange(16 * 120, dtype=np.float32).reshape(16, 120)
for kind, (source, target) in kinds.items():
    given = whole(x, source)
    try:
        jax.device_put(given, target)
        print("stock moves", kind)
    except (ValueError, NotImplementedError):
        pass
    ArrayImpl._value = property(lambda self: read.append(self.shape) or value.fget(self))
    moved = jax.block_until_ready(mw.reshard(given, target))
    ArrayImpl._value = value
    assert not read, read
    check(moved, x, target)
print("pairs", len(kinds))
"""

# Any meshes, overlapping or not, any layouts; relays in small chunks; buffers within bounds.
_RANDOM_MOVES = """
pick, total, relayed = random.Random(1), 0, 0
for number in range(MOVES):
    shape = tuple(pick.choice([8, 16, 24]) for _ in range(pick.choice([1, 2, 3])))
    sides = []
    for _ in range(2):
        size = pick.choice([1, 2, 4, 8])
        grid = (size,) if size < 4 or pick.random() < 0.5 else (2, size // 2)
        free = ["x", "y"][: len(grid)]
        spec = [None] * len(shape)
        for axis in free:
            if pick.random() < 0.7:
                spec[pick.choice([d for d in range(len(shape)) if spec[d] is None] or [0])] = axis
        sides.append(on(pick.sample(range(8), size), grid, spec))
    x = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
    chunk = pick.choice([256, 1 << 20])
    if not any(d.process_index == jax.process_index() for s in sides for d in s.device_set):
        continue
    moved = mw.reshard(whole(x, sides[0]), sides[1], chunk_bytes=chunk)
    relayed += mw.reshard_plan(whole(x, sides[0]), sides[1], chunk_bytes=chunk).chunks > 1
    check(moved, x, sides[1])
    total += 1
print("random moves", total, "relayed", relayed)
"""

# Of each difference: what was to be moved is still there, though it was to be given up; and the next move goes well.
_DIFFERENCES = """
for what in WHAT:
    other = what if jax.process_index() else None
    x = np.arange(32, dtype=np.int32 if other == "dtype" else np.float32)
    x = x[:16] if other == "shape" else x
    source = whole(x, on(range(4), (4,), ("x",)))
    target = on(range(4, 8), (4,), (None,) if other == "sharding" else ("x",))
    target = source.sharding if other == "in place" else target
    beside = np.ones(8, np.float32) * (2 if other == "host" else 1)
    try:
        mw.reshard(
            {"beside": beside, "x": source}, {"beside": on(range(8), (8,), ("x",)), "x": target},
            donate=other != "donated", chunk_bytes=64 if other == "chunks" else 1 << 20,
            dtype="bfloat16" if other == "cast" else None,
        )
    except mw.PlanError as error:
        print("refused:", what, *str(error).split())
    assert not source.is_deleted()
    check(source, x, source.sharding)
    y = np.arange(64, dtype=np.float32)
    target = on(range(4, 8), (4,), ("x",))
    check(mw.reshard(whole(y, on(range(4), (4,), ("x",))), target), y, target)
"""


def assert_differences_are_told(found: list[str], differences: tuple[str, ...]) -> None:
    for what in differences:
        lines = [[line for line in output.splitlines() if line.startswith(f"refused: {what} ")] for output in found]
        assert all(len(line) == 1 and "one plan in all processes" in line[0] for line in lines), found


@pytest.mark.parametrize(
    ("processes", "every", "dtypes", "moves"), [(2, 4, 7, 6), pytest.param(4, 1, 25, 12, marks=pytest.mark.slow)]
)
def test_moves_arrive_to_the_bit_and_processes_that_disagree_are_told_before(
    tmp_path: Path, processes: int, every: int, dtypes: int, moves: int
) -> None:
    """Dtypes of every width, pairs that stock `device_put` refuses, random moves; then differences in one process."""
    differences = "sharding", "host"
    told = _DIFFERENCES.replace("WHAT", repr(differences))
    numbers = f"EVERY, MOVES = {every}, {moves}\n"
    found = outputs(tmp_path, numbers + _DTYPES + _PAIRS + _RANDOM_MOVES + told, processes)
    assert all(f"dtypes {dtypes}\n" in output for output in found), found
    assert all("pairs 10" in output and "stock moves" not in output for output in found), found
    assert all("random moves" in output and "relayed 0" not in output for output in found), found
    assert_differences_are_told(found, differences)


@pytest.mark.slow
def test_other_differences_are_told(tmp_path: Path) -> None:
    differences = "dtype", "cast", "in place", "shape", "chunks", "donated"
    found = outputs(tmp_path, _DIFFERENCES.replace("WHAT", repr(differences)))
    assert_differences_are_told(found, differences)


@pytest.mark.parametrize(
    "cases",
    [
        "[(pairs, moves[0]), (uneven, moves[2])]",
        pytest.param("[(pairs, moves[2]), (uneven, moves[0])]", marks=pytest.mark.slow),
        pytest.param(
            "[(network, move) for network in (pairs, uneven) for move in moves[1::2]]", marks=pytest.mark.slow
        ),
    ],
    ids=["to replicas", "to others", "to blocks"],
)
def test_domains_of_several_processes(tmp_path: Path, cases: str) -> None:
    """Two processes in each fast domain; or two machines, one a device, the other all the rest: what enters a domain,
    or is there from the beginning, is handed on to its other processes too."""
    found = outputs(
        tmp_path,
        f"""
from meshwright.resharding import Host, Network, Nic, uniform_network
ids = [d.id for d in devices]
nic = Nic(send_rate=1e9, receive_rate=1e9)
pairs = Network(hosts=[Host(devices=ids[2 * h : 2 * h + 2], nics=[nic]) for h in range(4)], domains=[[0, 1], [2, 3]])
uneven = uniform_network([ids[:1], ids[1:]], nic_rate=1e9)
x = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
moves = [
    (on((0,), (1,), ()), on((1, 2, 5, 7), (4,), ())),
    (on(range(2), (2,), ("x",)), on(range(8), (2, 4), (None, "y"))),
    (on((6, 1), (2,), (None, "x")), on(range(8), (8,), ())),
    (on(range(8), (8,), ("x",)), on(range(8), (4, 2), ("y",))),
]
for network, (source, target) in {cases}:
    moved = mw.reshard(whole(x, source), target, network=network, chunk_bytes=1 << 12)
    check(moved, x, target)
print("moved")
""",
        4,
    )
    assert all("moved" in output for output in found), found


@pytest.mark.slow
def test_elements_of_64_bits(tmp_path: Path) -> None:
    found = outputs(
        tmp_path,
        """
jax.config.update("jax_enable_x64", True)
source, target = on(range(4), (2, 2), ("x", "y")), on((6, 7, 0, 1), (2, 2), (None, "x"))
bits = np.random.default_rng(0).integers(0, 256, (16, 12 * 16)).astype(np.uint8)
wanted = {name: bits[:, : 12 * np.dtype(name).itemsize].copy().view(name)
          for name in ("int64", "uint64", "float64", "complex128")}
moved = mw.reshard({name: whole(x, source) for name, x in wanted.items()}, target)
for name, x in wanted.items():
    check(moved[name], x, target)
print("moved", len(wanted))
""",
    )
    assert all("moved 4" in output for output in found), found
