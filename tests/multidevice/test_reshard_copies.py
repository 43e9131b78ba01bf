"""What a move inside one process holds beside the source and the destination: the process's own high-water mark."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import product
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.runtime.resharding.copies import cut

pytestmark = pytest.mark.compiled

_MIB = 1 << 20

_SCRIPT = """
import gc, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import meshwright as mw
from meshwright.resharding import uniform_network

devices = np.array(jax.devices(), dtype=object)

def on(ids, *spec):
    return NamedSharding(Mesh(devices[list(ids)], ("x",)), PartitionSpec(*spec))

def status(name):
    return int(next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1]) * 1024

rows, source = 2048, on(range(4), "x")
targets = {"whole": on((4,)), "columns": on((4, 5, 6, 7), None, "x"), "over": on(range(2, 6), None, "x")}
networks = {"hosts": uniform_network([[i] for i in range(8)], nic_rate=1e9), "one": None}

def move(target, network, dtype):
    x = jax.block_until_ready(jax.device_put(np.ones((rows, 8 * rows // dtype.itemsize), dtype), source))
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the mark begins here
    before = status("VmRSS")
    moved = jax.block_until_ready(mw.reshard(x, target, network=network, chunk_bytes=1 << 20))
    made = sum(shard.data.nbytes for shard in moved.addressable_shards)
    return status("VmHWM") - before - made

for target, network, dtype in CASES:
    given = targets[target], networks[network], np.dtype(getattr(jnp, dtype))
    move(*given)  # compiles
    print(target, network, dtype, move(*given))
"""

_QUICK = (
    ("whole", "hosts", "float32"),
    ("columns", "hosts", "bfloat16"),
    ("over", "one", "float8_e4m3fn"),
)
_OTHERS = (
    ("whole", "one", "float32"),
    ("columns", "hosts", "float32"),
    ("columns", "one", "float32"),
    ("columns", "one", "bfloat16"),
    ("over", "one", "float32"),
    ("over", "hosts", "float32"),
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark")
@pytest.mark.parametrize("cases", [_QUICK, pytest.param(_OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_a_device_holds_two_chunks_and_no_more(cases: tuple[tuple[str, str, str], ...]) -> None:
    """32 MiB in four blocks, in chunks of 1 MiB, onto one other device, four others, and onto some of the same: with
    copies inside the process, and with every device as a machine. One process makes all moves, each from a new mark."""
    script = _SCRIPT.replace("CASES", repr(cases))
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    lines = [line.split() for line in found.stdout.splitlines()]
    assert [tuple(case) for *case, _ in lines] == list(cases), found.stdout
    # Two chunks and what a piece is rounded up by, on each of eight devices; the rest is the interpreter's.
    assert all(int(held) <= 8 * 3 * _MIB + 8 * _MIB for *_, held in lines), found.stdout


def test_narrow_elements_are_written_in_place() -> None:
    """A write that passed over the whole block would make the move's time pieces x block: minutes here."""
    devices = np.array(jax.devices(), dtype=object)
    source = NamedSharding(Mesh(devices[:2], ("x",)), PartitionSpec("x"))
    target = NamedSharding(Mesh(devices[4:6], ("x",)), PartitionSpec(None, "x"))
    seconds = {}
    for name in ("uint8", "int4", "float8_e4m3fn"):
        x = jax.device_put(np.ones((4096, 4096), np.dtype(getattr(jnp, name))), source)
        for _ in range(2):
            begun = time.process_time()
            jax.block_until_ready(mw.reshard(x, target, chunk_bytes=1 << 16))
            seconds[name] = time.process_time() - begun
    assert max(seconds.values()) < 15 * seconds["uint8"], seconds


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=4), st.integers(1, 40))
def test_a_box_is_cut_into_boxes_that_fit(sides: list[tuple[int, int]], most: int) -> None:
    box = tuple((low, low + size) for low, size in sides)
    found = list(cut(box, most))
    assert all(prod(b - a for a, b in one) <= most for one in found)
    elements = [e for one in found for e in product(*(range(a, b) for a, b in one))]
    assert elements == list(product(*(range(a, b) for a, b in box)))
