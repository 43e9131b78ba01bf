"""Collectives beside compute: what the cost model hides, and what the schedule of the target's own compiler does.

    python benchmarks/compiled_overlap.py --platform gpu
    python benchmarks/compiled_overlap.py --platform tpu --only 'gpt3-125m/*'

A row is a model, a cluster, a batch and a preset whose collectives all are of parameters and their gradients, over all
devices (rows of `compiled_memory.py`, with its needs). XLA prints instructions in the order in which they are issued:
what stands between start and done of a collective runs beside it. On TPUs that takes what the compiler's cycles say;
compilers of GPUs say nothing, and a kernel takes what its FLOPs or the bytes that it writes do by the cost model. So do
collectives.

Prints one JSON object: for each row and pass the seconds of gathers and sums and the share of them that is hidden, and
of all of them what the schedule and the plan's prediction say. Each row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compiled_memory import Row, dumping, lowered_row, measured, name_of

ROWS: tuple[Row, ...] = (
    ("llama3-8b", "dgx-h100:2", 64, "zero(stage=3)"),  # its layers are one loop
    ("llama3-8b", "dgx-h100:2", 64, "zero(stage=3)@4"),
    ("gpt3-1.3b", "dgx-h100:2", 64, "zero(stage=3)"),
    ("gpt3-350m", "dgx-h100:1", 128, "zero(stage=3)"),
    ("gpt3-350m+scan", "dgx-h100:1", 128, "zero(stage=3)"),
    ("gpt3-350m", "dgx-h100:2", 256, "zero(stage=1)"),
    ("gpt3-350m", "dgx-h100:1", 128, "data_parallel"),
    ("gpt3-350m", "dgx-h100:1", 256, "data_parallel"),
    ("gpt3-350m+scan", "dgx-h100:1", 256, "data_parallel"),
    ("llama3-8b", "dgx-a100-80:2", 32, "zero(stage=3)"),
    ("gpt3-1.3b", "dgx-a100-80:2", 64, "zero(stage=3)"),
    ("gpt3-350m", "dgx-a100-80:1", 128, "zero(stage=3)"),
    ("gpt3-350m+scan", "dgx-a100-80:1", 128, "zero(stage=3)"),
    ("gpt3-350m", "dgx-a100-80:1", 128, "data_parallel"),
    ("gpt3-350m", "p3.16xlarge:1", 64, "zero(stage=3)"),
    ("llama3-8b", "tpu-v5p:16", 32, "zero(stage=3)"),
    ("llama3-8b", "tpu-v6e:32", 32, "zero(stage=3)"),
    ("gpt3-125m+scan", "tpu-v5e:8", 64, "zero(stage=3)"),
    ("gpt3-125m+scan", "tpu-v5e:8", 64, "data_parallel"),
    ("gpt3-350m+scan", "tpu-v5p:8", 64, "zero(stage=3)"),
)

_PASSES = (("transpose(", "backward"), ("jvp(", "forward"), ("", "update"))


def compiled_text(lowered: Any, folder: Path, *, early: bool) -> str:
    """The scheduled program; `early`: as soon as it is written, code being generated still."""
    from meshwright._jax.ahead import compile_ahead

    if not early:
        return str(lowered.compile().as_text())
    thread = threading.Thread(target=compile_ahead, args=(lowered, dumping(folder)), daemon=True)
    thread.start()
    while thread.is_alive() and not list(folder.glob("*memory-usage-report.txt")):
        time.sleep(0.2)
    return max(folder.glob("*_gpu_after_optimizations.txt"), key=lambda path: path.stat().st_size).read_text()


def run_row(row: Row, folder: Path) -> dict[str, Any]:
    """What schedule and plan hide."""
    from meshwright._jax.hlo_schedule import ScheduledCollective, read_schedule
    from meshwright.cost.collective import collective_seconds
    from meshwright.report.why import why

    found, cluster, lowered = lowered_row(row)
    device, is_tpu = cluster.device, cluster.device.platform == "tpu"
    schedule = read_schedule(compiled_text(lowered, folder, early=not is_tpu))
    axes = cluster.logical_mesh((cluster.num_devices,)).axes

    def beside(one: ScheduledCollective) -> float:
        if is_tpu:
            return one.cycles / device.clock_hertz
        written = 2 * one.written_bytes / device.memory_bandwidth_bytes_per_second
        return max(one.flops / device.achievable_flops("bfloat16"), written)

    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in schedule.collectives:
        when = next(name for part, name in _PASSES if part in one.source)
        takes = collective_seconds(one.kind, float(one.bytes), axes)
        for key in (f"{one.kind}, {when}", "all"):
            sums[key][0] += one.count * takes
            sums[key][1] += one.count * min(takes, beside(one))
    told = why(found.plan)
    assert told is not None  # it does something
    hidden, exposed = (sum(getattr(rank, name) for rank in told.ranks) for name in ("hidden", "collectives"))
    return {
        "microbatches": found.plan.microbatches,
        "scheduled": {
            key: {"seconds": takes, "hidden": least / takes if takes else None} for key, (takes, least) in sums.items()
        },
        "predicted": {"seconds": hidden + exposed, "hidden": hidden / (hidden + exposed) if hidden + exposed else None},
    }  # fmt: skip


def main() -> int:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or patterns of names, separated by semicolons")
    parser.add_argument("--platform", choices=("tpu", "gpu"), help="only rows of these devices")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(run_row(tuple(json.loads(asked.row)), asked.folder)), flush=True)
        os._exit(0)  # the compiler may still be at work
    rows: dict[str, Any] = {}
    for row in ROWS:
        platform = "tpu" if row[1].startswith("tpu") else "gpu"
        wanted = any(fnmatchcase(name_of(row), pattern) for pattern in asked.only.split(";"))
        if not wanted or asked.platform not in (None, platform):
            continue
        rows[name_of(row)] = measured(row, __file__)
        print(name_of(row), json.dumps(rows[name_of(row)]), file=sys.stderr, flush=True)
    done_rows = [one for one in rows.values() if "failed" not in one]
    pairs = [(one["predicted"]["hidden"], one["scheduled"]["all"]["hidden"]) for one in done_rows]
    off = [abs(predicted - scheduled) for predicted, scheduled in pairs if None not in (predicted, scheduled)]
    print(json.dumps({"rows": rows, "most_off": max(off, default=None)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
