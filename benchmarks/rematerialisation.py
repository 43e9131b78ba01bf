"""What rematerialisation as the search chooses it gains, where memory binds.

    python benchmarks/rematerialisation.py
    python benchmarks/rematerialisation.py --only 'gpt3-1.3b/*,llama3-70b/*'

For each request the best plan with nothing rematerialised, with all of every layer, with what is cheap of every layer
(`selective`), and as the search chooses for each stage, on one memory of traces and by the same prices. Prints one JSON
object: for each the predicted step, the memory of the fullest device as a share of the limit, and how many FLOPs are
computed again, as a share of the model's; and `ratio`, the chosen step over the least of those with nothing and with
all of every layer, which is what there was before results were kept inside segments (but for stages of which some
layers are rematerialised and others not). Exit status 1 if a request is refused or a ratio is more than 1.005, the
tolerance of `golden_plans.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from operator import truediv
from statistics import geometric_mean
from typing import Any

import planning_time
from never_worse import MOST_RATIO, each

# Model, cluster, samples a step (None for the model's own) and bytes of a device (None for its own): all bind.
REQUESTS: tuple[tuple[str, str, int | None, float | None], ...] = (
    ("gpt3-1.3b", "p3.16xlarge:1", None, 14e9),
    ("gpt3-2.6b", "p3.16xlarge:2", None, None),
    ("gpt3-6.7b", "dgx-a100-40:1", None, None),
    ("llama3-8b", "dgx-a100-80:1", 64, None),
    ("llama3-8b", "dgx-h100:1", 64, None),
    ("llama3-70b", "dgx-h100:16", None, None),
    ("gemma3-4b", "tpu-v5e:32", None, None),
    ("llama3-8b", "tpu-v5e:16", 256, None),
    ("moe-10b", "p3.16xlarge:2", None, None),
    ("qwen3-30b-a3b", "dgx-h100:4", None, None),
    ("wresnet-4b", "p3.16xlarge:2", None, None),
    ("unet-1b", "p3.16xlarge:1", None, None),
)


def name_of(request: tuple[str, str, int | None, float | None]) -> str:
    """As in `golden_plans.py`, with the memory where it is given."""
    target, cluster, batch, memory = request
    return f"{target}/{cluster}/{batch or 'own'}" + (f"/{memory / 1e9:g}GB" if memory else "")


def measured(request: tuple[str, str, int | None, float | None], seconds: float) -> dict[str, Any]:
    """The plans of one request, in this process."""
    from meshwright import zoo
    from meshwright.cluster import load_cluster
    from meshwright.errors import PlanError
    from meshwright.planning.plan_for import plan_without_advice
    from meshwright.planning.refine import held_bytes, usable_bytes
    from meshwright.planning.request import PlanOptions
    from meshwright.program.traces import traces_of

    target, cluster, batch, memory = request
    built = zoo.build(target, global_batch=batch)
    args, traces = (built.example_state, built.example_batch), traces_of(built.step)
    found: dict[str, Any] = {}
    for remat in ("none", "layer", "selective", None):
        options = PlanOptions(
            cluster=load_cluster(cluster), stages=None, remat=remat, memory_per_device=memory,
            time_limit_seconds=seconds,
        )  # fmt: skip
        try:
            planning = plan_without_advice(traces, args, options)
        except PlanError as error:
            found[remat or "chosen"] = {"refused": str(error)[:200]}
            continue
        plan = planning.plan
        assert plan.predicted is not None
        model = plan.predicted.tflops_per_device * 1e12 * planning.step_seconds
        found[remat or "chosen"] = {
            "step_seconds": planning.step_seconds, "microbatches": plan.microbatches, "stages": len(plan.stages),
            "rematerialised": sorted({stage.remat for stage in plan.stages}),
            "memory_share": max(map(truediv, held_bytes(plan), usable_bytes(plan))),
            "computed_again": max(0.0, plan.predicted.flops_per_device / model - 1),
            "planning_seconds": round(planning.seconds, 1),
        }  # fmt: skip
    before = [found[name]["step_seconds"] for name in ("none", "layer") if "step_seconds" in found[name]]
    if before and "step_seconds" in found["chosen"]:
        found["ratio"] = found["chosen"]["step_seconds"] / min(before)
    return found


def main() -> int:
    """Plan all requests, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or patterns of names, comma-separated")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each plan")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measured(REQUESTS[given.one], given.time_limit)))
        return 0
    rows = each(__file__, [*map(name_of, REQUESTS)], given.only, "--time-limit", str(given.time_limit))
    ratios = {name: row["ratio"] for name, row in rows.items() if "ratio" in row}
    failed = [name for name, row in rows.items() if "failed" in row or "refused" in row["chosen"]]
    mean = geometric_mean(ratios.values()) if ratios else None
    document = {"machine": planning_time.machine(), "mean_ratio": mean, "failed": failed, "rows": rows}
    print(json.dumps(document, indent=1))
    return 1 if failed or max(ratios.values(), default=0.0) > MOST_RATIO else 0


if __name__ == "__main__":
    sys.exit(main())
