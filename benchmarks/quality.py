"""Is a plan ever worse than what people set by hand? Every Megatron-LM and DeepSpeed setting, under the same costs.

    python benchmarks/quality.py
    python benchmarks/quality.py --only gpt3-39b --time-limit 600

For each case (a model on a cluster) every setting of tensor, pipeline and data parallelism that the devices, layers and
batch divide, with every size of a microbatch, every number of stages a device (interleaved 1F1B), ZeRO stages 0 to 3
(1 and 2 are one plan here), each layer rematerialised or none, sequence parallel or not. All are priced by the costs
that the planner's own plans have (`meshwright.presets.prices`). Left out is only what provably does not fit or cannot
be among the best ten or beat our plan: by the bounds of `meshwright.presets.least`, from one trace in as few
microbatches as there can be.

What beats our plan by these costs is written out, and its memory counted from the traced programs, as is done with our
own plans: the search's count is nearly always too low. Only then does it count as a better setting.

Prints one JSON object: for each case the settings, how many of them do not apply, do not fit and cannot win, the best
ten, our plan, and our seconds over those of the best. Exit status 1 if ours takes longer than a setting that fits, or
if not all settings were looked at before the time was over.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from meshwright.presets.least import Floor
from meshwright.presets.priced import PricedPreset
from meshwright.presets.prices import PresetPrices

from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.plan import Plan
from meshwright.planning.plan_for import plan_for
from meshwright.planning.refine import held_bytes, written_out
from meshwright.presets import Preset
from meshwright.presets.families import three_dimensional
from meshwright.program.batch import batch_extents
from meshwright.program.equal_stages import main_scan
from meshwright.program.traces import Traces, traces_of
from meshwright.targets import load_target

# Predicted peaks are a few percent off at times: as in planning, this much of a device stays free.
MARGIN = 1.04

# So many settings are shown.
SHOWN = 10


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Settings that differ in their microbatches alone.

    Args:
      preset: the rest.
      remat: "none" or "layer".
      counts: numbers of microbatches, ascending.
    """

    preset: Preset
    remat: str
    counts: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of the settings.

    Args:
      settings: how many there are.
      not_applicable: that the model or the cluster does not allow.
      not_fitting: that do not fit, by the search's count.
      not_winning: that cannot be among the best, or are not.
      unknown: that were not looked at before the time was over.
      best: those that may be, ascending; all that beat our plan, and ten besides.
    """

    settings: int = 0
    not_applicable: int = 0
    not_fitting: int = 0
    not_winning: int = 0
    unknown: int = 0
    best: list[PricedPreset] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def groups(devices: int, layers: int, batch: int) -> Iterator[Group]:
    """All settings.

    Args:
      devices: of the cluster.
      layers: of the model.
      batch: samples of a step.
    """
    for pipeline in divisors(devices):
        for tensor in divisors(devices // pipeline):
            data = devices // (pipeline * tensor)
            if batch % data or layers % pipeline:
                continue
            counts = tuple(divisors(batch // data))
            for chunks in divisors(layers // pipeline) if pipeline > 1 else [1]:
                mine = tuple(n for n in counts if chunks == 1 or n % pipeline == 0)
                for zero in (0, 1, 3) if data > 1 else (0,):
                    for together in (False, True) if tensor > 1 else (False,):
                        preset = three_dimensional(
                            "setting", tensor, pipeline, data, stage=zero, chunks=chunks, sequence_parallel=together
                        )
                        for remat in ("none", "layer"):
                            if mine:
                                yield Group(preset=preset, remat=remat, counts=mine)


class Search:
    """The search of all settings of one case.

    Args:
      prices: of presets.
      ours_seconds: of our plan.
      deadline: when to stop, by `time.perf_counter`.
    """

    def __init__(self, prices: PresetPrices, ours_seconds: float, deadline: float) -> None:
        self.prices, self.ours_seconds, self.deadline = prices, ours_seconds, deadline
        self.limit = prices.cluster.device.usable_memory_bytes
        self.outcome = Outcome()

    @property
    def bar(self) -> float:
        """What takes longer is neither better than ours nor among the best."""
        best = self.outcome.best
        return max(best[SHOWN - 1].step_seconds if len(best) >= SHOWN else inf, self.ours_seconds)

    def run(self, all_groups: Sequence[Group]) -> Outcome:
        """Look at all settings, the most promising first."""
        outcome = self.outcome
        outcome.settings = sum(len(group.counts) for group in all_groups)
        queue: list[tuple[float, int, int]] = []
        for number, group in enumerate(all_groups):
            floor = self._floor(group)
            if floor is None:
                continue
            for count in group.counts:
                least = floor.step_seconds(count, self.prices.limits(group.preset))
                if least == inf:
                    outcome.not_fitting += 1
                else:
                    queue.append((least, number, count))
        heapq.heapify(queue)
        too_few: dict[int, int] = {}
        while queue:
            seconds, number, count = heapq.heappop(queue)
            if seconds >= self.bar:
                outcome.not_winning += 1 + len(queue)
                break
            if time.perf_counter() > self.deadline:
                outcome.unknown += 1 + len(queue)
                break
            # Fewer microbatches keep more.
            if count < too_few.get(number, 0):
                outcome.not_fitting += 1
                continue
            self._price(all_groups[number], number, count, too_few)
        return outcome

    def _floor(self, group: Group) -> Floor | None:
        """What the settings of a group take at least; None where none applies or fits, or the time is over."""
        outcome, count = self.outcome, len(group.counts)
        if self.prices.least_bytes(group.preset) > self.limit:
            outcome.not_fitting += count
            return None
        if time.perf_counter() > self.deadline:
            outcome.unknown += count
            return None
        try:
            return self.prices.floor(group.preset, 1, remat=group.remat)
        except PlanError as error:
            outcome.not_applicable += count
            outcome.reasons[str(error)] += count
            return None

    def _price(self, group: Group, number: int, count: int, too_few: dict[int, int]) -> None:
        outcome = self.outcome
        try:
            priced = self.prices.priced(group.preset, count, remat=group.remat, below_seconds=self.bar)
        except MemoryExceeded:
            outcome.not_fitting += 1
            too_few[number] = max(count, too_few.get(number, 0))
        except PlanError as error:
            outcome.not_applicable += 1
            outcome.reasons[str(error)] += 1
        else:
            if priced is None:
                outcome.not_winning += 1
                return
            outcome.best.append(priced)
            outcome.best.sort(key=lambda one: one.step_seconds)
            worse = [one for one in outcome.best[SHOWN:] if one.step_seconds >= self.ours_seconds]
            outcome.not_winning += len(worse)
            del outcome.best[len(outcome.best) - len(worse) :]


def described(priced: PricedPreset, *, held_bytes: float | None) -> dict[str, Any]:
    """A setting and what it takes; with `held_bytes` by its traced programs, if that was counted."""
    preset = priced.preset
    return {
        "tensor": preset.size("tensor"), "pipeline": preset.stages, "data": preset.size("batch"),
        "chunks": preset.chunks, "zero": preset.zero, "sequence_parallel": preset.sequence_parallel,
        "microbatches": priced.microbatches, "remat": priced.remat, "step_seconds": priced.step_seconds,
        "counted_bytes": max(priced.counted_bytes), "written_out_bytes": held_bytes,
    }  # fmt: skip


def plan_described(plan: Plan) -> dict[str, Any]:
    """Our plan in a few words."""
    assert plan.predicted is not None
    return {
        "step_seconds": plan.predicted.step_seconds,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "schedule_options": dict(plan.schedule_options),
        "stages": [
            f"{len(stage.devices)} devices ({'x'.join(str(size) for _, size in stage.mesh)})"
            f"{' R' if stage.rematerialised else ''}"
            for stage in plan.stages
        ],
        "bytes": max(held_bytes(plan)),
    }


def run(case: Case, *, plan_seconds: float, time_limit: float) -> dict[str, Any]:
    """One case."""
    begun = time.perf_counter()
    target, cluster = load_target(case.target, global_batch=case.batch), load_cluster(case.cluster)
    traces = traces_of(target.step)
    planning = plan_for(
        traces, target.example_args, cluster=cluster, stages=None, time_limit_seconds=plan_seconds
    )  # fmt: skip
    planned = time.perf_counter()
    print(f"{case.target} on {case.cluster}: ours {planning.step_seconds:.6g} s", file=sys.stderr)
    prices = PresetPrices(traces, target.example_args, cluster)
    (batch,) = batch_extents(target.example_args, 0)
    every = list(groups(cluster.num_devices, layers_of(traces, target.example_args), batch))
    outcome = Search(prices, planning.step_seconds, planned + time_limit).run(every)
    searched = time.perf_counter()
    rows, best, known = [], None, {}
    usable = cluster.device.usable_memory_bytes
    for number, priced in enumerate(outcome.best):
        held = None
        # Whether a slower one fits is of no interest once one does.
        if best is None:
            plan = priced.plan(prices.submeshes)
            held = max(held_bytes(written_out(plan, priced.program, cluster.device.platform, known=known)))
            best = priced.step_seconds if MARGIN * held <= usable else None
        if number < SHOWN or best is None or priced.step_seconds == best:
            rows.append(described(priced, held_bytes=held))
    return {
        **asdict(case),
        "devices": cluster.num_devices,
        "settings": outcome.settings,
        "do_not_apply": outcome.not_applicable,
        "do_not_fit": outcome.not_fitting,
        "cannot_be_best": outcome.not_winning,
        "not_looked_at": outcome.unknown,
        "beat_ours_before_they_are_written_out": sum(
            one.step_seconds < planning.step_seconds * (1 - 1e-9) for one in outcome.best
        ),
        "best": rows,
        "ours": plan_described(planning.plan),
        "best_seconds": best,
        "ratio": None if best is None else planning.step_seconds / best,
        "never_worse": outcome.unknown == 0 and (best is None or planning.step_seconds <= best * (1 + 1e-9)),
        "refusals": dict(outcome.reasons.most_common(5)),
        "seconds": {"plan": planned - begun, "settings": searched - planned, "all": time.perf_counter() - begun},
    }


def layers_of(traces: Traces, args: Sequence[Any]) -> int:
    """The layers of the model: trips of its scan, or else as many as it is cut into."""
    program = traces.program(args)
    scan = main_scan(program)
    return scan[1] if scan is not None else len(traces.staged(program).layers)


def main() -> int:
    """Run the cases asked for and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="targets, comma-separated; all if none")
    parser.add_argument("--target", help="another case: its target, with --cluster")
    parser.add_argument("--cluster", help="of --target")
    parser.add_argument("--batch", type=int, help="of --target; else its own")
    parser.add_argument("--plan-seconds", type=float, default=60.0, help="time limit of our own search")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for the settings of a case")
    given = parser.parse_args()
    only = {name for name in given.only.split(",") if name}
    cases: Sequence[Case] = [case for case in CASES if not only or case.target in only]
    if given.target:
        cases = [Case(target=given.target, cluster=given.cluster, batch=given.batch)]
    found = []
    for case in cases:
        found.append(run(case, plan_seconds=given.plan_seconds, time_limit=given.time_limit))
        print(f"{case.target} on {case.cluster}: ratio {found[-1]['ratio']}", file=sys.stderr)
    document = {
        "what": "our plan beside every Megatron-LM and DeepSpeed setting, under the same costs",
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "cases": found,
    }
    print(json.dumps(document, indent=1))
    return 0 if all(one["never_worse"] for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
