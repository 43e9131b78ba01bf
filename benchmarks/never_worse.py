"""Whether the plan of any number of stages is as fast as every plan of a given number and of every preset.

    python benchmarks/never_worse.py
    python benchmarks/never_worse.py --only 'gpt3-1.3b/*' --stages 1,2,4

For each request: `compare` (the best plan, and every preset that applies) and `plan_for` for each number of stages, on
one memory of traces. All have the same time limit. Prints one JSON object: for each request the predicted step of the
plan, of the best preset and of each number of stages, and the plan's as a ratio to the least of them, where a split
backward counts 2 % more than it takes, as the planner compares it. `found` is what
the search itself found, before `compare` takes a faster preset's plan for its own. Exit status 1 if a ratio is more
than 1.005, the tolerance of `golden_plans.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import planning_time

MOST_RATIO = 1.005

# Models of up to a few billion parameters, on one host and on several, of devices with little and with much memory.
REQUESTS = (
    *product(("gpt3-125m", "gpt3-350m", "gpt3-1.3b"), ("p3.16xlarge:1", "dgx-a100-40:1", "dgx-h100:2"), (64, 512)),
    *product(("gpt3-2.6b",), ("p3.16xlarge:2", "dgx-a100-80:1"), (64, 512)),
    *product(("llama3-8b",), ("dgx-a100-80:2", "dgx-h100:4"), (64, 512)),
    *product(("moe-1.3b", "moe-2.4b"), ("p3.16xlarge:2", "dgx-a100-40:1"), (None,)),
    *product(("wresnet-500m", "wresnet-1b"), ("p3.16xlarge:1", "p3.16xlarge:2", "dgx-a100-40:1"), (None,)),
    *product(("unet-470m",), ("p3.16xlarge:1", "p3.16xlarge:2"), (None,)),
    *product(("gpt3-350m",), ("tpu-v5e:1", "rtx4090-4:2"), (256,)),
)


def name_of(request: tuple[str, str, int | None]) -> str:
    """As in `golden_plans.py`."""
    target, cluster, batch = request
    return f"{target}/{cluster}/{batch or 'own'}"


def measured(request: tuple[str, str, int | None], stages: Sequence[int], seconds: float) -> dict[str, Any]:
    """The steps of one request, in this process."""
    from dataclasses import replace

    from meshwright import zoo
    from meshwright.cluster import load_cluster
    from meshwright.compare import compare
    from meshwright.errors import PlanError
    from meshwright.planning.plan_for import plan_without_advice
    from meshwright.planning.request import PlanOptions
    from meshwright.program.traces import traces_of

    target, cluster, batch = request
    built = zoo.build(target, global_batch=batch)
    args, where = (built.example_state, built.example_batch), load_cluster(cluster)
    traces = traces_of(built.step)
    options = PlanOptions(cluster=where, stages=None, time_limit_seconds=seconds)
    begun = time.process_time()
    auto = plan_without_advice(traces, args, options)
    spent = time.process_time() - begun
    by_stages: dict[str, Any] = {}
    for count in stages:
        try:
            by_stages[str(count)] = plan_without_advice(traces, args, replace(options, stages=count)).counted_seconds
        except PlanError as error:
            by_stages[str(count)] = str(error)[:200]
    compared = compare(traces, args, cluster=where, time_limit_seconds=2 * seconds)[1:]
    presets = {one.name: one.step_seconds for one in compared if one.plan is not None and "pipedream" not in one.name}
    preset = min(presets, key=presets.__getitem__, default=None)
    known = [step for step in by_stages.values() if isinstance(step, float)]
    least = min([*known, *presets.values()], default=auto.counted_seconds)
    assert auto.plan.predicted is not None
    return {
        "step_seconds": auto.step_seconds, "gap": auto.plan.predicted.optimality_gap, "stages": len(auto.plan.stages),
        "cpu_seconds": round(spent, 2), "by_stages": by_stages, "preset": preset,
        "preset_seconds": presets.get(preset) if preset is not None else None, "ratio": auto.counted_seconds / least,
    }  # fmt: skip


def each(file: str, names: Sequence[str], only: str, *options: str) -> dict[str, Any]:
    """What a benchmark prints for each of its requests, by name, each in a process of its own.

    Args:
      file: of the benchmark, which prints one request's document with `--one NUMBER`.
      names: of all its requests.
      only: names or patterns of names, comma-separated.
      options: for every request.
    """
    rows: dict[str, Any] = {}
    for number, name in enumerate(names):
        if any(fnmatchcase(name, pattern) for pattern in only.split(",")):
            command = [sys.executable, file, "--one", str(number), *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            rows[name] = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr.strip()[-400:]}
            print(f"{name}: {json.dumps(rows[name])}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Plan all requests, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or patterns of names, comma-separated")
    parser.add_argument("--stages", default="1,2,4,8", help="numbers of stages, comma-separated")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each plan")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    stages = [int(count) for count in given.stages.split(",")]
    if given.one is not None:
        print(json.dumps(measured(REQUESTS[given.one], stages, given.time_limit)))
        return 0
    options = "--stages", given.stages, "--time-limit", str(given.time_limit)
    rows = each(__file__, [*map(name_of, REQUESTS)], given.only, *options)
    worse = {name: row["ratio"] for name, row in rows.items() if row.get("ratio", 0.0) > MOST_RATIO}
    failed = [name for name, row in rows.items() if "failed" in row]
    print(json.dumps({"machine": planning_time.machine(), "worse": worse, "failed": failed, "rows": rows}, indent=1))
    return 1 if worse or failed else 0


if __name__ == "__main__":
    sys.exit(main())
