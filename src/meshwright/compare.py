"""The search beside the parallelisms of the literature: one table, every plan priced by the same cost model.

Each preset is the same search under restrictions (`presets`), so all of its plans are in the space of the search alone.
That search stops at a gap, prefers simpler meshes and runs against a clock; should a preset's plan be faster all the
same, a note on the plan of the search says by how much.

Which presets: for each family every shape that makes sense for the devices (sizes in powers of two, tensor axes inside
a host; `presets.candidates`); of what is feasible the fastest few of each family are kept. What does not apply is kept
with the reason. All share one time limit, and once it is over only families of which nothing was tried
are, for half as long; a step is traced once for each number of microbatches. A preset takes one to four CPU seconds
(gpt3-1.3b on 16 V100).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from ._jax.context import no_mesh
from .cluster import Cluster, load_cluster
from .errors import MemoryExceeded, PlanError
from .plan import Plan
from .planning.plan_for import plan_without_advice
from .planning.refine import NOT_COUNTED
from .planning.request import Planning, PlanOptions
from .presets import Preset
from .presets.candidates import candidates_for
from .program.traces import Traces, traces_of
from .report.table import format_bytes, format_flops_rate, format_seconds, format_table

# Of a family this many feasible plans are shown.
_SHOWN = 3

# What every plan is given at least: seconds, and traces of the step. A preset of gpt3-1.3b is searched in 0.7 s,
# written out in 2 s and traced in 0.6 s: eight leave room for a first plan that is too large.
_LEAST_SECONDS, _LEAST_TRACES = 2.0, 8.0

# The search alone may use this share of the time.
_AUTO_SHARE = 0.4

# Families of which nothing was tried may go on for this share of the time limit after it.
_GRACE = 0.5

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One plan of a comparison.

    Args:
      name: "auto" or the preset's.
      planning: the plan and how it was found; None where there is none.
      reason: why there is none, "" where there is one.
    """

    name: str
    planning: Planning | None
    reason: str = ""

    @property
    def plan(self) -> Plan | None:
        """The plan, or None."""
        return self.planning.plan if self.planning is not None else None

    @property
    def step_seconds(self) -> float:
        """Predicted, of one step; infinite where there is no plan."""
        predicted = self.plan.predicted if self.plan is not None else None
        return predicted.step_seconds if predicted is not None else float("inf")


@no_mesh()
def compare(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    cluster: Cluster | str = "local",
    candidates: Sequence[Preset] | None = None,
    time_limit_seconds: float = 120.0,
    tell: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> tuple[Compared, ...]:
    """Price the best plan beside those of every preset that applies.

    Args:
      step: as of `plan_for`.
      args: as of `plan_for`.
      cluster: as of `plan_for`.
      candidates: presets to try; None for `candidates_for` the cluster.
      time_limit_seconds: for all searches together; each gets two seconds or eight traces of the step at least, and
        what has not begun half as long again later is not tried.
      tell: called with a few words at each part of the work.
      options: of `plan_for`, for all plans alike: microbatches, memory_per_device, batch_axis, reduction.

    Returns:
      "auto" first, then the feasible ones by predicted step time, then the others.

    Raises:
      PlanError: for a wrong request.
    """
    deadline = time.perf_counter() + time_limit_seconds
    where = load_cluster(cluster) if isinstance(cluster, str) else cluster
    traces = traces_of(step)
    tell("the best plan")
    try:
        planning = plan_without_advice(
            traces, args, PlanOptions(
                cluster=where, stages=None, time_limit_seconds=_AUTO_SHARE * time_limit_seconds, **options
            ), tell=tell,
        )  # fmt: skip
        auto = Compared(name=AUTO, planning=planning)
    except MemoryExceeded as error:
        auto = Compared(name=AUTO, planning=None, reason=str(error))
    tried = candidates_for(where) if candidates is None else candidates
    found: dict[Preset, Compared] = {}
    for number, preset in enumerate(tried):
        late = time.perf_counter() - deadline
        if late > 0 and candidates is None and any(one.family == preset.family for one in found):
            continue
        if late > _GRACE * time_limit_seconds:
            found[preset] = Compared(name=str(preset), planning=None, reason="not tried: the time limit was over")
            continue
        tell(str(preset))
        left = (deadline - time.perf_counter()) / (len(tried) - number)
        least = max(_LEAST_SECONDS, _LEAST_TRACES * traces.longest_seconds)
        found[preset] = _tried(traces, args, where, preset, max(left, least), options)
    kept = _fastest_of_each(found) if candidates is None else list(found.values())
    # PipeDream answers another question: its gradients are of older weights.
    same = [one for one in kept if one.plan is not None and one.plan.schedule != "pipedream"]
    best = min(same, key=lambda one: one.step_seconds, default=auto)
    if auto.planning is not None and best.step_seconds < auto.step_seconds:
        auto = Compared(name=AUTO, planning=_slower(auto.planning, best))
    return (auto, *sorted(kept, key=lambda one: one.step_seconds))


def _tried(
    traces: Traces, args: Sequence[Any], cluster: Cluster, preset: Preset, seconds: float, options: Any
) -> Compared:
    try:
        preset = preset.on(cluster.num_devices)
        planning = plan_without_advice(
            traces, args, PlanOptions(cluster=cluster, preset=preset, time_limit_seconds=seconds, **options)
        )
    except PlanError as error:
        return Compared(name=str(preset), planning=None, reason=str(error))
    if NOT_COUNTED in planning.plan.notes:
        return Compared(name=str(preset), planning=None, reason="out of time before its memory was counted")
    return Compared(name=str(preset), planning=planning)


def _fastest_of_each(found: Mapping[Preset, Compared]) -> list[Compared]:
    """Of every family the fastest few that are feasible; of one that is not at all, each shape with its reason."""
    kept = []
    for family in dict.fromkeys(preset.family for preset in found):
        mine = [one for preset, one in found.items() if preset.family == family]
        feasible = sorted((one for one in mine if one.planning is not None), key=lambda one: one.step_seconds)
        kept += feasible[: len(mine) if family == "zero" else _SHOWN]
        kept += [one for one in mine if one.planning is None]
    return kept


def _slower(planning: Planning, best: Compared) -> Planning:
    """The plan of the search, which any other command finds too, with a note of the preset that is faster."""
    less = 1 - best.step_seconds / planning.step_seconds
    notes = (*planning.plan.notes, f"the preset {best.name} takes {less:.2%} less: the search stopped too early")
    return replace(planning, plan=replace(planning.plan, notes=notes))


def comparison_document(target: str, compared: Sequence[Compared]) -> dict[str, Any]:
    """What `meshwright compare --json` prints.

    Args:
      target: as the user named it.
      compared: from `compare`.
    """
    return {"schema": 1, "target": target, "plans": [_document(one) for one in compared]}


def _document(one: Compared) -> dict[str, Any]:
    plan, predicted = one.plan, None
    if plan is not None and plan.predicted is not None:
        predicted = {
            "step_seconds": plan.predicted.step_seconds,
            "tflops_per_device": plan.predicted.tflops_per_device,
            "flops_per_device": plan.predicted.flops_per_device,
            "bubble_fraction": plan.predicted.bubble_fraction,
            "memory_bytes": _peak(plan),
        }
    return {
        "name": one.name,
        "feasible": plan is not None,
        "reason": one.reason or None,
        "predicted": predicted,
        "microbatches": plan.microbatches if plan is not None else None,
        "schedule": plan.schedule if plan is not None else None,
        "stages": [{"devices": len(s.devices), "mesh": s.sizes} for s in plan.stages] if plan is not None else None,
        "planning_seconds": one.planning.seconds if one.planning is not None else None,
        "notes": list(plan.notes) if plan is not None else [],
    }


def comparison_text(compared: Sequence[Compared]) -> str:
    """A table of the feasible plans, the fastest first, and the reasons of the others."""
    best = compared[0].step_seconds
    rows, reasons = [], []
    for one in compared:
        plan = one.plan
        if plan is None or plan.predicted is None:
            reasons.append(f"{one.name}: {one.reason}")
            continue
        rows.append((
            one.name, format_seconds(one.step_seconds), f"{one.step_seconds / best:.2f}" if isfinite(best) else "-",
            format_flops_rate(1e12 * plan.predicted.tflops_per_device), format_bytes(_peak(plan)), _meshes(plan),
            str(plan.microbatches),
        ))  # fmt: skip
    heads = ("plan", "predicted step", "of auto", "rate of a device", "memory", "stages", "microbatches")
    table = format_table(heads, rows, left=1)
    notes = [note for one in compared[:1] if one.plan is not None for note in one.plan.notes]
    return "\n".join(
        [table, *notes, *(["", "Not feasible:", *(f"  {reason}" for reason in reasons)] if reasons else [])]
    )


def _peak(plan: Plan) -> float:
    return max(stage.memory.total for stage in plan.stages)


def _meshes(plan: Plan) -> str:
    """The mesh of each stage; equal neighbours share a word."""
    words = ["x".join(str(size) for _, size in stage.mesh) for stage in plan.stages]
    runs: list[list[str]] = []
    for word in words:
        if runs and runs[-1][0] == word:
            runs[-1].append(word)
        else:
            runs.append([word])
    return " ".join(f"{len(run)} of {run[0]}" if len(run) > 1 else run[0] for run in runs)
