"""Predicted peaks beside those of the target's own compiler, which needs no device.

    python benchmarks/compiled_memory.py --only 'gpt3-125m/*'
    python benchmarks/compiled_memory.py --record compiled.json

A row is one `meshwright verify TARGET --cluster CLUSTER` command: a model, a cluster, a batch, and what its plan is
held to. It needs the compiler of the cluster (`make setup-tpu`; docs/compilers.md) and takes as long as that compiles:
a minute for each ten layers that are not a loop.

Prints one JSON object: for each row the predicted and compiled peak, their ratio, whether the compiler accepts the
programs, predicted and compiled FLOPs, collective bytes and compute seconds, and what compiling took; and over all rows
the median error of peaks, the 90th percentile and the worst that is too low. `--record FILE` writes rows as they are
done, and runs only those that FILE does not have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# Model, cluster, samples, and further options of the command.
ROWS: tuple[tuple[str, str, int, str], ...] = (
    ("gpt-tiny", "tpu-v5e:8", 64, ""),
    ("gpt-tiny", "tpu-v5e:8", 64, "--stages 2"),
    ("moe-tiny", "tpu-v4:4", 32, ""),
    ("gpt3-125m", "tpu-v5e:8", 64, "--stages 1"),
    ("gpt3-125m", "tpu-v5p:8", 64, "--stages 1 --microbatches 1"),
    ("gpt3-350m", "tpu-v5e:8", 512, "--stages 1"),
    ("gpt3-1.3b", "tpu-v5p:8", 64, "--stages 1"),
    ("gpt3-1.3b", "tpu-v5p:8", 64, "--stages 2"),
    ("llama3-8b", "tpu-v5p:16", 64, "--stages 1"),
    ("moe-2.4b", "tpu-v5p:8", 64, "--stages 1"),
    ("wresnet-500m", "tpu-v5e:8", 256, "--stages 1"),
    ("unet-470m", "tpu-v5e:8", 256, "--stages 1"),
)

# A command is stopped after so long.
LATE_SECONDS = 1800.0


def name_of(row: tuple[str, str, int, str]) -> str:
    """As `--only` matches it."""
    model, cluster, batch, options = row
    return f"{model}/{cluster}/{batch}/{options.replace('--', '').replace(' ', ',') or 'auto'}"


def measured(row: tuple[str, str, int, str]) -> dict[str, Any]:
    """What the command says of a row."""
    model, cluster, batch, options = row
    command = [sys.executable, "-m", "meshwright", "verify", model, "--cluster", cluster, "--json"]
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--global-batch", str(batch), *options.split()], capture_output=True, text=True, check=False,
            timeout=LATE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {LATE_SECONDS:g} s"}
    if done.returncode not in (0, 1) or not done.stdout:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    found = json.loads(done.stdout)
    stages = [
        {
            "peak_bytes": stage["memory_bytes"], "limit_bytes": stage["memory_limit_bytes"],
            "accepted": not stage.get("refusals"), "flops": stage["flops"],
            "compute_seconds": stage.get("compute_seconds"),
            "collective_bytes": {
                side: {kind: one["bytes"] for kind, one in stage["collectives"][side].items()}
                for side in ("predicted", "compiled")
            },
            "beside_compute": stage.get("beside_compute"),
        }
        for stage in found["stages"]
    ]  # fmt: skip
    seconds = time.perf_counter() - begun
    return {"stages": stages, "compile_seconds": found["compile_seconds"], "wall_seconds": seconds}


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Of each row that was compiled, predicted over compiled peaks of its stages."""
    found = {}
    for name, row in rows.items():
        peaks = [stage["peak_bytes"] for stage in row.get("stages", ()) if stage["accepted"]]
        if peaks:
            found[name] = [one["predicted"] / one["compiled"] for one in peaks]
    return found


def main() -> int:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or patterns of names, separated by semicolons")
    parser.add_argument("--record", type=Path, help="write the rows to this file")
    asked = parser.parse_args()
    known = json.loads(asked.record.read_text()) if asked.record and asked.record.exists() else {}
    for row in ROWS:
        name = name_of(row)
        if name in known or not any(fnmatchcase(name, pattern) for pattern in asked.only.split(";")):
            continue
        known[name] = measured(row)
        print(name, json.dumps(known[name])[:400], file=sys.stderr, flush=True)
        if asked.record:
            asked.record.write_text(json.dumps(known, indent=1))
    each = [ratio for row in ratios(known).values() for ratio in row]
    errors = sorted(abs(ratio - 1) for ratio in each)
    summary = {
        "stages": len(each),
        "median_error": statistics.median(errors) if errors else None,
        "error_90th": errors[min(len(errors) - 1, int(0.9 * len(errors)))] if errors else None,
        "most_too_low": 1 - min(each) if each else None,
    }
    print(json.dumps({"rows": known, "peaks": summary}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
