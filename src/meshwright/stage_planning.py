"""Plans of several stages: the step traced for each number of microbatches, cut into layers, and searched."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from math import prod
from typing import Any

from .errors import MemoryExceeded, PlanError, size_words
from .one_stage_planning import MARGIN
from .plan import Collective, Plan, Stage
from .plan_request import Planning, PlanRequest
from .program.batch import batch_extents
from .program.graph import Graph, Value
from .program.staged import StagedProgram
from .runtime.pipeline.local_stages import LocalStages
from .search.parameters import parameter_infos
from .search.pipeline import SIMULATED, StageRequest, search_stages
from .sharding import Spec, convert
from .simulate import simulate_plan

# Microbatches tried where the user names none: more cost more launches than they save in bubbles.
_MOST_MICROBATCHES = 64

# How often a plan whose traced peak is too high is searched again with less memory.
_ATTEMPTS = 5

# Schedules that are not searched under their own name, and those that stand for them in the search.
_SEARCHED: Mapping[str, tuple[str, ...]] = {"pipedream": ("one_f_one_b",), "inference": ("one_f_one_b",)}


def plan_stages(asked: PlanRequest, stages: int | None, *, faster_than_seconds: float = float("inf")) -> Planning:
    """The fastest plan with so many stages, or with any number of them.

    A found plan is written out (nothing is compiled), and what its stages hold is counted from their programs and the
    schedule. Where that is too much, the search is repeated with less memory.

    Args:
      asked: the request.
      stages: how many; None to choose.
      faster_than_seconds: a plan whose step takes longer is not wanted.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
      NothingFaster: if no plan is that fast.
    """
    cluster, preset, pins = asked.cluster, asked.preset, asked.pins
    begun = time.perf_counter()
    programs = _programs(asked, stages)
    trace_seconds = time.perf_counter() - begun
    source = programs[0].source
    pins.check(source.input_names, [programs[0].graph.values[v].name for v in programs[0].graph.inputs])
    submeshes = None
    if preset is not None:
        roles = preset.roles_in(source, asked.traces, asked.args, batch_axis=asked.batch_axis)
        pins, submeshes = replace(pins, roles=roles), (cluster.num_devices // preset.stages,) * preset.stages
    schedules = SIMULATED if asked.schedule is None else _SEARCHED.get(asked.schedule, (asked.schedule,))
    usable = limit = cluster.device.usable_memory_bytes
    solve_seconds = peak = 0.0
    for _ in range(_ATTEMPTS):
        asked.tell("searching stages")
        result = search_stages(StageRequest(
            programs=programs, parameters=parameter_infos(source), cluster=cluster.with_memory_limit(limit), pins=pins,
            remat=asked.remat, submeshes=submeshes, stages=stages, mesh=asked.mesh,
            schedules=schedules,
            time_limit_seconds=max(asked.left_seconds, 1.0), faster_than_seconds=faster_than_seconds,
        ))  # fmt: skip
        solve_seconds += result.seconds
        plan = replace(result.plan, cluster_fingerprint=cluster.fingerprint())
        plan = replace(plan, stages=tuple(replace(stage, memory_limit_bytes=usable) for stage in plan.stages))
        counted = peak = max(stage.memory.total for stage in plan.stages)
        if len(plan.stages) > 1:
            if asked.schedule == "pipedream":
                plan = _asynchronous(plan, programs[0].graph)
            elif asked.schedule == "inference":
                plan = _forward_only(plan)
            asked.tell("predicting memory")
            plan = LocalStages(result.program.source, plan, platform=cluster.device.platform).plan_with_memory()
            peak = max(stage.memory.total for stage in plan.stages)
        if peak * (MARGIN if len(plan.stages) > 1 else 1.0) <= usable:
            return Planning(
                program=result.program.source, plan=plan, cluster=cluster,
                seconds=time.perf_counter() - asked.started, trace_seconds=trace_seconds, solve_seconds=solve_seconds,
                considered=result.considered,
            )  # fmt: skip
        # What the search does not see stays about the same: leave room for it.
        limit = min(0.98 * counted, usable / MARGIN - max(peak - counted, 0.0))
        if limit <= 0:
            break
    raise MemoryExceeded(
        refused=f"a plan of several stages for {cluster.num_devices} x {cluster.device.kind}",
        got=f"{size_words(usable)} usable on a device",
        needed=f"about {size_words(MARGIN * peak)} on a device, the predicted peak of the leanest plan found",
        where="the stage search", try_="more devices, a smaller batch, more microbatches",
    )  # fmt: skip


def _programs(asked: PlanRequest, stages: int | None) -> list[StagedProgram]:
    """The step for every number of microbatches to be considered, in layers."""
    found = []
    for count in [asked.microbatches] if asked.microbatches is not None else _counts(asked):
        asked.tell(f"tracing {count} microbatches")
        if asked.schedule == "inference":
            program = asked.traces.inference(asked.args, microbatches=count, batch_axis=asked.batch_axis)
        else:
            program = asked.program(count)
        if not program.marked:
            raise PlanError(
                refused=f"a plan of {stages or 'several'} stages", got="a step without meshwright.value_and_grad",
                needed="a step whose loss function is marked: its forward program is what is cut",
                where=getattr(asked.traces, "__name__", "the step"),
                try_="meshwright.value_and_grad in place of jax.value_and_grad, stages=1, or schedule='inference' for "
                "a step that computes no gradients",
            )  # fmt: skip
        found.append(asked.traces.staged(program))
    return found


def check_stages(stages: Any, schedule: Any) -> None:
    """Refuse a number of stages that is none, and schedules that do not exist.

    Raises:
      PlanError: saying which there are.
    """
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        raise PlanError(
            refused="the number of stages", got=repr(stages), needed="a whole number, at least 1, or None",
            where="stages=", try_="stages=None, for as many as are best",
        )  # fmt: skip
    known = (*SIMULATED, *_SEARCHED)
    if schedule is not None and schedule not in known:
        near = get_close_matches(str(schedule), known, n=2)
        raise PlanError(
            refused="the schedule", got=repr(schedule), needed=f"one of {', '.join(known)}, or None",
            where="schedule=", try_=" or ".join(near) or "schedule=None, for the best of them",
        )  # fmt: skip
    if schedule is not None and stages == 1:
        raise PlanError(
            refused="the schedule", got=f"{schedule!r} for one stage", needed="several stages to be scheduled",
            where="schedule=", try_="stages=2, or stages=None for as many as are best",
        )  # fmt: skip


def _forward_only(plan: Plan) -> Plan:
    """The stages of a plan without gradients under the schedule for forwards alone."""
    if plan.predicted is None:
        return plan
    found = replace(plan, schedule="inference", schedule_options=())
    timeline = simulate_plan(found)
    predicted = replace(
        plan.predicted, step_seconds=timeline.step_seconds, bubble_fraction=timeline.bubble_fraction,
        tflops_per_device=plan.predicted.tflops_per_device * plan.predicted.step_seconds / timeline.step_seconds,
    )  # fmt: skip
    return replace(found, predicted=predicted)


def _asynchronous(plan: Plan, graph: Graph) -> Plan:
    """The stages of a plan under 1F1B, never drained: an update for each microbatch, as many weights as microbatches
    in flight, and a step that takes what a step more of them takes in the steady state.

    Raises:
      MemoryExceeded: if the weights do not fit.
    """
    if len(plan.stages) == 1 or plan.predicted is None:
        return plan
    values = {graph.values[v].name: graph.values[v] for v in graph.inputs}
    stages = []
    for number, stage in enumerate(plan.stages, start=1):
        held = stage.memory.parameters
        memory = replace(stage.memory, parameters=held * stage.in_flight)
        if memory.total > stage.memory_limit_bytes:
            raise MemoryExceeded(
                refused="the schedule pipedream", got=f"{size_words(stage.memory_limit_bytes)} usable on a device",
                needed=f"{size_words(memory.total)}, with {stage.in_flight} versions of the weights",
                where=f"stage {number} of {len(plan.stages)}", try_="one_f_one_b, or more devices for each stage",
            )  # fmt: skip
        stages.append(replace(stage, memory=memory, communication=_each_microbatch(stage, plan, values)))
    found = replace(plan, schedule="pipedream", schedule_options=(), stages=tuple(stages))
    once, twice = (
        simulate_plan(replace(found, microbatches=times * plan.microbatches)).step_seconds for times in (1, 2)
    )
    seconds = twice - once
    predicted = replace(
        plan.predicted, step_seconds=seconds, bubble_fraction=0.0,
        tflops_per_device=plan.predicted.tflops_per_device * plan.predicted.step_seconds / seconds,
    )  # fmt: skip
    note = "asynchronous: gradients are of weights some updates old, so numbers differ from those of one device"
    return replace(found, predicted=predicted, notes=(*plan.notes, note))


def _each_microbatch(stage: Stage, plan: Plan, values: Mapping[str, Value]) -> tuple[Collective, ...]:
    """The collectives of a stage whose gradients are synchronised for each microbatch, not once a step."""
    total = {one.kind: one for one in stage.communication}
    for p in stage.parameters:
        size = prod(p.shape) * values[p.name].itemsize
        gradient, fetch = (
            convert(Spec(p.use.dims, partial=p.use.broadcast), p.storage),
            convert(p.storage, Spec(p.use.dims)),
        )
        for move in (*(gradient or ()), *(fetch or ())):
            have = total.get(move.forward or "")
            # A single number is not counted at all.
            if move.forward is not None and have is not None and prod(p.shape) > 1:
                more = plan.microbatches - 1
                moved = more * size * move.buffer_fraction(stage.sizes)
                total[move.forward] = Collective(kind=move.forward, count=have.count + more, bytes=have.bytes + moved)
    return tuple(total[kind] for kind in sorted(total))


def _counts(asked: PlanRequest) -> list[int]:
    """Powers of two that divide the batch; with a preset, enough for its stages, and each to be cut into its blocks."""
    preset, extents = asked.preset, batch_extents(asked.args, asked.batch_axis)
    powers = [2**i for i in range(_MOST_MICROBATCHES.bit_length()) if 2**i <= _MOST_MICROBATCHES]
    blocks = preset.blocks if preset is not None else 1
    found = [m for m in powers if all(extent % (m * blocks) == 0 for extent in extents)] or [1]
    return [m for m in found if preset is None or m >= preset.stages] or found[-1:]
