"""Steps of models on the one device at hand: what is predicted of each, before it runs, and what it takes.

    meshwright calibrate --out cluster.toml
    python benchmarks/one_device.py [--cluster cluster.toml] [--seconds 600]

Where nothing is shared and nothing is sent, what is left of a prediction is compute and memory. Predicted by the preset
of the device (`load_cluster("local")`), which has never seen it, and by a calibration. Measured: the median of steps of
the compiled program. Memory is what the compiled program takes; what the allocator had in use at most is told beside
it. Nothing is fitted to a step. Each case has a process of its own, so that memory is its own.

Needs an accelerator that holds the models; on a CPU only the smallest fit the time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
from scipy.stats import spearmanr

from meshwright import zoo
from meshwright._jax.hlo import read_compiled
from meshwright.calibrate.sample import sample_of
from meshwright.cluster import load_cluster
from meshwright.planning.plan_for import plan_for
from meshwright.runtime.step import PlannedStep

# Steps run before any is timed; of the timed ones as many as fit this time, within these bounds.
_WARM_UP = 2
_SECONDS, _STEPS = 3.0, (5, 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its batch, and how it is run."""

    model: str
    batch: int
    microbatches: int = 1
    remat: str = "none"


CASES = (
    Case(model="gpt3-125m", batch=16),
    Case(model="moe-380m", batch=8),
    Case(model="gpt3-350m", batch=8),
    Case(model="gpt3-125m", batch=32, microbatches=4),
    Case(model="gpt3-125m", batch=16, remat="layer"),
    Case(model="gpt3-1.3b", batch=8, remat="layer"),
    # The compiler times many ways of convolutions, which takes a minute and more.
    Case(model="wresnet-250m", batch=64),
    Case(model="unet-470m", batch=16),
)


def row(case: Case, clusters: Mapping[str, str]) -> dict[str, Any]:
    """One case, predicted on each cluster and measured."""
    target = zoo.build(case.model, global_batch=case.batch)
    found: dict[str, Any] = {**asdict(case), "predicted_seconds": {}}
    for name, text in clusters.items():
        cluster = load_cluster(text)
        cluster = replace(cluster, hosts=(replace(cluster.hosts[0], devices=1),))
        planning = plan_for(
            target.step, (target.example_state, target.example_batch), cluster=cluster,
            microbatches=case.microbatches, remat=case.remat,
        )  # fmt: skip
        found["predicted_seconds"][name] = planning.step_seconds
    (device, *_) = jax.devices()
    found |= {"device": device.device_kind, "jax": jax.__version__}
    # They differ in what they predict alone; this one is the last cluster's.
    step = PlannedStep(planning.program, planning.plan, [device])
    begun = time.perf_counter()
    compiled = step.lower().compile()
    found["compile_seconds"] = time.perf_counter() - begun
    state = jax.jit(target.init)(jax.random.key(0))
    batch = jax.jit(target.make_batch)(jax.random.key(1))
    num_state = planning.program.state_inputs
    flat = step.place(jax.tree.leaves((state, batch)))
    del state, batch
    seconds: list[float] = []
    while len(seconds) < _WARM_UP + _STEPS[0] or (
        len(seconds) < _WARM_UP + _STEPS[1] and sum(seconds[_WARM_UP:]) < _SECONDS
    ):
        start = time.perf_counter()
        out = jax.block_until_ready(compiled(*flat))
        seconds.append(time.perf_counter() - start)
        flat = step.place([*out[:num_state], *flat[num_state:]])
    sample = sample_of(seconds[_WARM_UP:])
    return {
        **found, "measured_seconds": sample.seconds, "low_seconds": sample.low, "high_seconds": sample.high,
        "steps": len(seconds) - _WARM_UP,
        "predicted_memory_bytes": max(stage.memory.total for stage in planning.plan.stages),
        "compiled_memory_bytes": read_compiled(compiled).peak_bytes,
        # Where the compiler times kernels to choose among them, their buffers are in it.
        "allocated_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }  # fmt: skip


def in_a_process(number: int, cluster: str | None, limit: float) -> dict[str, Any]:
    """As `row`, in a new process; a failure is a row too. This process leaves the device alone."""
    command = [sys.executable, __file__, "--case", str(number)]
    command += ["--cluster", cluster] if cluster is not None else []
    # JAX leaves a quarter of a device's memory alone unless it is told otherwise.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".93", **os.environ}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=True, env=environment)
    except subprocess.CalledProcessError as error:
        return {**asdict(CASES[number]), "failed": error.stderr.strip()[-800:]}
    except subprocess.TimeoutExpired:
        return {**asdict(CASES[number]), "failed": f"not over in {limit:.0f} s"}
    return json.loads(ended.stdout.splitlines()[-1])


def summary(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Errors over all cases that ran."""
    ran = [one for one in rows if "failed" not in one]
    if not ran:
        return {}
    found: dict[str, Any] = {}
    for name in names:
        predicted, measured = [one["predicted_seconds"][name] for one in ran], [one["measured_seconds"] for one in ran]
        ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
        found[name] = {
            "median_absolute_error": statistics.median(abs(ratio - 1) for ratio in ratios),
            "predicted_over_measured": [round(ratio, 3) for ratio in ratios],
            "rank_correlation": float(spearmanr(predicted, measured).statistic) if len(ran) > 2 else None,
        }
    ratios = [one["predicted_memory_bytes"] / one["compiled_memory_bytes"] for one in ran]
    found["memory"] = {
        "median_absolute_error": statistics.median(abs(ratio - 1) for ratio in ratios),
        "predicted_over_compiled": [round(ratio, 3) for ratio in ratios],
    }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases and print the result; 1 if none was over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="a calibration of this device, to predict by beside its preset")
    parser.add_argument("--seconds", type=float, default=600.0, help="what is not over by then is left out")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    clusters = {"preset": "local"} | ({"calibration": given.cluster} if given.cluster is not None else {})
    if given.case is not None:
        print(json.dumps(row(CASES[given.case], clusters)))
        return 0
    begun = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(CASES):
        left = given.seconds - (time.perf_counter() - begun)
        rows.append(in_a_process(number, given.cluster, left) if left > 0 else {**asdict(case), "failed": "not begun"})
        print(f"{case}: {rows[-1]}", file=sys.stderr, flush=True)
    print(json.dumps({"cases": rows, "errors": summary(rows, list(clusters))}, indent=2))
    return 0 if any("failed" not in one for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
