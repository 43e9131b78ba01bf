"""Predicted compute seconds beside a TPU compiler's cycles, by class of kernel; no device is needed.

    python benchmarks/compiled_cycles.py --only 'gpt*/tpu-v5e*'
    python benchmarks/compiled_cycles.py --record cycles.json

A row is a reference model with other sizes (its layers one scan where it has that), a cluster, a batch, and a preset or
the search's own plan; one stage. It needs the TPU compiler (`make setup-tpu`; docs/compilers.md) and takes as long as
that compiles: 10 to 60 s.

Predicted are the kernels of the plan's operators, by the operator; compiled are the kernels of the compiler's schedule,
by what is in them: what is fused into a product is part of it there, and is a chain in the prediction. So the classes
show where an error is, their sum (`all`) is what a plan is chosen by.

Prints one JSON object: for each row and class predicted seconds, cycles / clock, and their ratio; and over all rows the
median error of `all`, its 90th percentile, and the median ratio of each class. `--record FILE` writes rows as they are
done, and runs only those that FILE does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.cluster import Cluster, load_cluster
from meshwright.compilers import target_devices
from meshwright.compilers.facts import StageFacts, facts_of
from meshwright.lowering.plan_of_program import algorithms_of
from meshwright.plan import Stage
from meshwright.planning.plan_for import plan_for
from meshwright.program.effects import without_effects
from meshwright.program.graph import Graph, Operator
from meshwright.runtime.executable import executable
from meshwright.search.intra.node_merging import forward_runs
from meshwright.search.prices.operators import prices_of
from meshwright.zoo import registry

GPT = {"layers": 2, "scan": True, "vocabulary": 8192}

# Name, model, changed sizes, samples, options of the search, cluster.
ROWS: tuple[tuple[str, str, Mapping[str, Any], int, Mapping[str, Any], str], ...] = tuple(
    (f"{name}/{cluster}", model, changes, samples, options, cluster)
    for name, model, changes, samples, options in (
        ("gpt-768", "gpt3-125m", GPT, 32, {"preset": "data_parallel"}),
        ("gpt-768-unrolled", "gpt3-125m", {**GPT, "scan": False}, 32, {"preset": "data_parallel"}),
        ("gpt-2048", "gpt3-1.3b", GPT, 32, {"preset": "zero(1)", "microbatches": 2}),
        ("gpt-2048-tensor", "gpt3-1.3b", GPT, 16, {"preset": "megatron(tp=4)"}),
        ("gpt-4096", "gpt3-6.7b", GPT, 16, {"stages": 1}),
        ("llama-4096", "llama3-8b", {"layers": 2, "vocabulary": 16384, "sequence": 2048}, 16, {"preset": "zero(3)"}),
        ("moe-768", "moe-380m", {"layers": 2, "vocabulary": 8192}, 32, {"stages": 1}),
        ("wresnet", "wresnet-250m", {"blocks": (1, 1), "image_size": 112}, 256, {"preset": "data_parallel"}),
        ("bert", "bert-tiny", {"hidden": 1024, "heads": 16}, 256, {"preset": "data_parallel"}),
    )
    for cluster in ("tpu-v4:8", "tpu-v5e:8", "tpu-v5p:8", "tpu-v6e:8")
)

_INDEXING = frozenset(
    ("gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice", "sort", "top_k", "argmax", "argmin")
)
_COMPILED = {"reductions": "chains", "elementwise": "chains", "copies": "chains"}


def class_of(operator: Operator) -> str:
    """The class of an operator's kernels."""
    if operator.name == "conv_general_dilated":
        return "convolutions"
    if operator.matmul or operator.name == "dot_general":
        return "products"
    return "indexing" if operator.name in _INDEXING else "chains"


def predicted(graph: Graph, stage: Stage, cluster: Cluster, microbatches: int) -> dict[str, float]:
    """Seconds of a stage in a step by class."""
    prices = prices_of(
        cluster.logical_mesh([size for _, size in stage.mesh], [name for name, _ in stage.mesh]), cluster.device
    )
    found: dict[str, float] = {}
    for operator, algorithm in zip(graph.operators, algorithms_of(graph, stage, 0), strict=True):
        seconds, _ = prices.operator(graph, operator, algorithm, forward_runs=forward_runs(graph, operator))
        name = class_of(operator)
        found[name] = found.get(name, 0.0) + microbatches * operator.repeats * seconds
    found["updates"] = stage.update_seconds
    return found


def compiled(facts: StageFacts, cluster: Cluster) -> dict[str, float]:
    """The same by the compiler's cycles."""
    found: dict[str, float] = {}
    assert facts.schedule is not None
    for name, kernels in facts.schedule.kernels.items():
        of = _COMPILED.get(name, name)
        found[of] = found.get(of, 0.0) + kernels.cycles / cluster.device.clock_hertz
    return found


def measured(row: tuple[str, str, Mapping[str, Any], int, Mapping[str, Any], str]) -> dict[str, Any]:
    """A row: by class and in all, predicted and compiled seconds and their ratio."""
    _, model, changes, samples, options, name = row
    family, config = next((f, f.CONFIGS[model]) for f in registry.FAMILIES if model in f.CONFIGS)
    target = family.build(dataclasses.replace(config, global_batch=samples, **changes))
    cluster = load_cluster(name)
    found = plan_for(target.step, (target.example_state, target.example_batch), cluster=cluster, **options)
    plan = found.plan
    step = executable(without_effects(found.program), plan, target_devices(cluster, plan))
    (facts,) = facts_of(step, plan, cluster=cluster)
    if facts.refusals:
        return {"failed": facts.refusals[0]}
    ours = predicted(found.program.graph, plan.stages[0], cluster, plan.microbatches)
    theirs = compiled(facts, cluster)
    ours["all"], theirs["all"] = sum(ours.values()), sum(theirs.values())
    return {
        one: {
            "predicted_seconds": ours.get(one, 0.0), "compiled_seconds": theirs.get(one, 0.0),
            "ratio": ours.get(one, 0.0) / theirs[one] if theirs.get(one) else None,
        }
        for one in sorted({*ours, *theirs})
    }  # fmt: skip


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The errors over all rows that were compiled."""
    ratios: dict[str, list[float]] = {}
    for row in rows.values():
        for name, one in row.items():
            if name != "failed" and one["ratio"] is not None and isfinite(one["ratio"]):
                ratios.setdefault(name, []).append(one["ratio"])
    errors = sorted(abs(ratio - 1) for ratio in ratios.get("all", ()))
    if not errors:
        return {}
    return {
        "rows": len(errors), "median_error": statistics.median(errors),
        "error_90th_percentile": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "median_ratios": {name: statistics.median(some) for name, some in sorted(ratios.items())},
    }  # fmt: skip


def main() -> int:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or patterns of names, separated by semicolons")
    parser.add_argument("--record", type=Path, help="write the rows to this file")
    asked = parser.parse_args()
    known = json.loads(asked.record.read_text()) if asked.record and asked.record.exists() else {}
    for row in ROWS:
        if row[0] in known or not any(fnmatchcase(row[0], pattern) for pattern in asked.only.split(";")):
            continue
        known[row[0]] = measured(row)
        print(row[0], json.dumps(known[row[0]]), file=sys.stderr, flush=True)
        if asked.record:
            asked.record.write_text(json.dumps(known, indent=1))
    print(json.dumps({"rows": known, "all": summary(known)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
