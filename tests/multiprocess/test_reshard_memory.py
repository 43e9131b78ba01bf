"""What a move between processes holds beside the source and the destination: the live bytes of each process."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_reshard_processes import outputs

_CHUNK = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "spec"), [(2, "'x'"), (2, ""), (4, "")])
def test_at_most_two_chunks_for_each_other_process(tmp_path: Path, processes: int, spec: str) -> None:
    """Split by rows in one process; split or whole on all devices of the others, with relays where there are several.

    Counted between the parts of every message's way, buffers that several arrays share once.
    """
    found = outputs(
        tmp_path,
        f"""
from meshwright.runtime.resharding import lanes

def live():
    found = {{}}
    for x in jax.live_arrays():
        try:
            for shard in x.addressable_shards:
                found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
        except (RuntimeError, ValueError):  # given up in the meantime
            continue
    return sum(found.values())

count, chunk = jax.process_count(), {_CHUNK}
each = 8 // count
source = on(range(each), (each,), ("x",))
target = on(range(each, 8), (8 - each,), (None, {spec}))
x = np.random.default_rng(0).standard_normal((2048, 6 * 8 * (8 - each))).astype(np.float32)
value = jax.block_until_ready(whole(x, source))
peak, carried = [0], lanes._carried

def watched(lane, buffer, flight):
    peak.append(live())
    received = jax.block_until_ready(carried(lane, buffer, flight))
    peak.append(live())
    return received

lanes._carried = watched
before = live()
moved = jax.block_until_ready(mw.reshard(value, target, chunk_bytes=chunk))
check(moved, x, target)
made = sum(shard.data.nbytes for shard in moved.addressable_shards)
peers = count - 1 if jax.process_index() or {spec!r} == "" else 1
beside = max(peak) - before - made
print("messages", len(peak) // 2, "beside", beside, "of", 2 * chunk * peers)
assert 10 < len(peak) and beside <= 2 * chunk * peers, (beside / chunk, peers)
print("within")
""",
        processes,
    )
    assert all("within" in output for output in found), found
