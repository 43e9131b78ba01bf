"""Is a plan ever worse than what people set by hand? Every shape of Megatron-LM and DeepSpeed, under the same costs.

    python benchmarks/quality.py
    python benchmarks/quality.py --only gpt3-39b --time-limit 600

For each case (a model on a cluster) every *shape* is planned as a preset, in the microbatches and with the
rematerialisation that are best for it: tensor, pipeline and data parallelism that the devices, layers and batch divide,
every number of stages a device (interleaved 1F1B), ZeRO stages 0, 1 and 3 (1 and 2 are one plan here), sequence
parallel or not. Left out is only what provably cannot hold its parameters, gradients and optimizer state.

A shape is asked for a plan that is faster than the best one so far, at first than `MOST_RATIO` times ours. For most
shapes there is soon seen to be none, as far as estimates are bounds (docs/stages.md, *The gap*). Interleaved stages
are tried, not bounded.

Prints one JSON object: for each case how many shapes there are and what became of them, the best of those that were
planned, our plan, and our seconds over those of the best; null if all take more than `MOST_RATIO` times ours. Exit
status 1 if ours takes longer than a shape that fits, or if not all were looked at before the time was over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.plan import Plan
from meshwright.planning.checks import request_of
from meshwright.planning.one_or_several import plan_in_stages
from meshwright.planning.plan_for import plan_without_advice
from meshwright.planning.refine import MARGIN, held_bytes
from meshwright.planning.request import Planning, PlanOptions
from meshwright.presets import Preset
from meshwright.presets.families import three_dimensional
from meshwright.program.batch import batch_extents
from meshwright.program.equal_stages import main_scan
from meshwright.program.trace import Program
from meshwright.program.traces import Traces, traces_of
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.result import NothingFaster
from meshwright.targets import load_target

# Shapes that take longer than this times our plan are not planned to the end.
MOST_RATIO = 1.1

# The search leaves out numbers of microbatches that promise less than this share of what is known: so much slower a
# plan is asked for, that none is left out which is faster.
WORTH_SEARCHING = 0.005

# So many shapes are shown.
SHOWN = 10

# A plan is faster by more than rounding.
ROUNDING = 1e-9

# What became of a preset: its best plan, what its plans take at least where that is slower than others, or why there is
# none.
Fate = Planning | float | PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster.

    Args:
      target: as of `meshwright plan`.
      cluster: as of `meshwright plan`.
      batch: samples a step; None for the target's own.
    """

    target: str
    cluster: str
    batch: int | None = None


CASES = (
    Case(target="gpt3-39b", cluster="p3.16xlarge:8", batch=1024),
    Case(target="gpt3-175b", cluster="dgx-a100-80:128"),
    Case(target="llama3-8b", cluster="dgx-h100:4", batch=512),
    Case(target="llama3-70b", cluster="dgx-h100:16", batch=1024),
)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def shapes(devices: int, layers: int, batch: int, *, scanned: bool = True) -> Iterator[Preset]:
    """All shapes; those that split the model least come first, and interleaved ones last.

    Args:
      devices: of the cluster.
      layers: of the model.
      batch: samples of a step.
      scanned: whether the model is a scan over these layers, whose stages have as many each. Others are cut by work.
    """
    found = []
    for pipeline in divisors(devices):
        for tensor in divisors(devices // pipeline):
            data = devices // (pipeline * tensor)
            if batch % data or pipeline > layers or (scanned and layers % pipeline):
                continue
            for chunks in divisors(layers // pipeline) if pipeline > 1 else [1]:
                if chunks > 1 and batch // data % pipeline:
                    continue
                found += [(chunks, tensor * pipeline, tensor, pipeline, data)]
    for chunks, _, tensor, pipeline, data in sorted(found):
        for zero in (0, 1, 3) if data > 1 else (0,):
            for together in (False, True) if tensor > 1 else (False,):
                yield three_dimensional(
                    "shape", tensor, pipeline, data, stage=zero, chunks=chunks, sequence_parallel=together
                )


def least_bytes(program: Program, preset: Preset) -> float:
    """Bytes of parameters, optimizer state and gradients that some device holds at least under a preset: as many as all
    hold on average, everything split as far as it can be.

    Args:
      program: the step.
      preset: with all its sizes.
    """
    graph = program.graph
    parameters = float(sum(graph.values[graph.inputs[p]].bytes for p in graph.parameters))
    optimizer = sum(info.optimizer_bytes for info in parameter_infos(program))
    model, data = preset.size("tensor") * preset.stages, preset.size("batch")
    # Stages have several microbatches, whose gradients are summed: ZeRO 1 and 2 keep the whole sums until the update.
    gradients = parameters if preset.stages > 1 and preset.zero != 3 else 0.0
    stored = parameters / data if preset.zero == 3 else parameters
    return (stored + gradients + optimizer / (data if preset.zero else 1)) / model


def fates(
    presets: Sequence[Preset],
    plan: Callable[[Preset, float, float], Planning],
    *,
    most_seconds: float = inf,
    deadline: float = inf,
) -> dict[Preset, Fate]:
    """What becomes of presets, in their order. Those that are not looked at before the time is over are left out.

    Args:
      presets: to be planned.
      plan: of a preset, if its step takes less than so many seconds, within so many seconds (`faster`).
      most_seconds: of a step: what takes longer is of no interest.
      deadline: by `time.perf_counter`.
    """
    best, found = most_seconds, dict[Preset, Fate]()
    for preset in presets:
        if (left := deadline - time.perf_counter()) <= 0:
            break
        try:
            planning = plan(preset, best / (1 - WORTH_SEARCHING), left)
        except NothingFaster as nothing:
            if time.perf_counter() < deadline:
                found[preset] = min(nothing.least_seconds, best)
        except PlanError as refused:
            found[preset] = refused
        else:
            found[preset] = planning
            best = min(best, planning.step_seconds)
    return found


def faster(traces: Traces, args: Sequence[Any], options: PlanOptions, *, than_seconds: float) -> Planning:
    """The best plan under a preset, if it is fast enough.

    Args:
      traces: of the step.
      args: of the step.
      options: with the preset.
      than_seconds: of a step: what takes longer is not wanted.

    Raises:
      NothingFaster: if it has no plan that is as fast.
      PlanError: if the preset does not apply, or nothing fits.
    """
    asked = request_of(traces, args, options, started=time.perf_counter())
    return Planning.of(plan_in_stages(replace(asked, faster_than_seconds=than_seconds)), asked.cluster)


def described(preset: Preset, planning: Planning) -> dict[str, Any]:
    """A shape and its best plan."""
    return {
        "tensor": preset.size("tensor"), "pipeline": preset.stages, "data": preset.size("batch"),
        "chunks": preset.chunks, "zero": preset.zero, "sequence_parallel": preset.sequence_parallel,
        **plan_described(planning.plan),
    }  # fmt: skip


def plan_described(plan: Plan) -> dict[str, Any]:
    """A plan in a few words."""
    assert plan.predicted is not None
    stages = Counter(
        f"{len(stage.devices)} devices ({'x'.join(str(size) for _, size in stage.mesh)})"
        f"{' R' if stage.rematerialised else ''}"
        for stage in plan.stages
    )
    return {
        "step_seconds": plan.predicted.step_seconds, "microbatches": plan.microbatches, "schedule": plan.schedule,
        "schedule_options": dict(plan.schedule_options), "stages": dict(stages), "bytes": max(held_bytes(plan)),
    }  # fmt: skip


def run(case: Case, *, plan_seconds: float, time_limit: float) -> dict[str, Any]:
    """One case."""
    begun = time.perf_counter()
    target, cluster = load_target(case.target, global_batch=case.batch), load_cluster(case.cluster)
    traces, args = traces_of(target.step), target.example_args
    options = PlanOptions(cluster=cluster, stages=None, time_limit_seconds=plan_seconds)
    ours = plan_without_advice(traces, args, options)
    planned = time.perf_counter()
    print(f"{case.target} on {case.cluster}: ours {ours.step_seconds:.6g} s", file=sys.stderr)

    def plan(preset: Preset, than_seconds: float, left_seconds: float) -> Planning:
        changed = replace(options, preset=preset, time_limit_seconds=min(left_seconds, plan_seconds))
        return faster(traces, args, changed, than_seconds=than_seconds)

    program = traces.program(args)
    scan = main_scan(program)
    layers = scan[1] if scan is not None else len(traces.staged(program).layers)
    (batch,) = batch_extents(args, 0)
    every = list(shapes(cluster.num_devices, layers, batch, scanned=scan is not None))
    usable = cluster.device.usable_memory_bytes
    may_fit = [preset for preset in every if MARGIN * least_bytes(program, preset) <= usable]
    found = fates(may_fit, plan, most_seconds=MOST_RATIO * ours.step_seconds, deadline=planned + time_limit)
    plans = [described(preset, fate) for preset, fate in found.items() if isinstance(fate, Planning)]
    plans.sort(key=lambda one: one["step_seconds"])
    best = plans[0]["step_seconds"] if plans else None
    refused = [fate for fate in found.values() if isinstance(fate, PlanError)]
    not_fitting = sum(isinstance(fate, MemoryExceeded) for fate in refused)
    not_looked_at = len(may_fit) - len(found)
    return {
        **asdict(case),
        "devices": cluster.num_devices,
        "shapes": len(every),
        "cannot_hold_their_parameters": len(every) - len(may_fit),
        "no_plan_found_that_fits": not_fitting,
        "do_not_apply": len(refused) - not_fitting,
        "slower_than_others": len(found) - len(refused) - len(plans),
        "not_looked_at": not_looked_at,
        "best": plans[:SHOWN],
        "ours": plan_described(ours.plan),
        "best_seconds": best,
        "ratio": None if best is None else ours.step_seconds / best,
        "never_worse": not_looked_at == 0 and (best is None or ours.step_seconds <= best * (1 + ROUNDING)),
        "refusals": dict(Counter(str(e) for e in refused if not isinstance(e, MemoryExceeded)).most_common(5)),
        "seconds": {"plan": planned - begun, "all": time.perf_counter() - begun},
    }


def main() -> int:
    """Run the cases asked for and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="targets, comma-separated; all if none")
    parser.add_argument("--target", help="another case: its target, with --cluster")
    parser.add_argument("--cluster", help="of --target")
    parser.add_argument("--batch", type=int, help="of --target; else its own")
    parser.add_argument("--plan-seconds", type=float, default=60.0, help="time limit of our own search, and of a shape")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for all shapes of a case")
    given = parser.parse_args()
    only = {name for name in given.only.split(",") if name}
    cases: Sequence[Case] = [case for case in CASES if not only or case.target in only]
    if given.target:
        cases = [Case(target=given.target, cluster=given.cluster, batch=given.batch)]
    found = []
    for case in cases:
        found.append(run(case, plan_seconds=given.plan_seconds, time_limit=given.time_limit))
        words = f"ratio {found[-1]['ratio']}, {found[-1]['not_looked_at']} shapes not looked at"
        print(f"{case.target} on {case.cluster}: {words}", file=sys.stderr)
    document = {
        "what": "our plan beside every shape of Megatron-LM and DeepSpeed, under the same costs",
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "cases": found,
    }
    print(json.dumps(document, indent=1))
    return 0 if all(one["never_worse"] for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
