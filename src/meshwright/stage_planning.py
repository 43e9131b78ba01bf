"""Plans of several stages: the step traced for each number of microbatches, cut into layers, and searched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from .cluster import Cluster
from .errors import MemoryExceeded, PlanError, size_words
from .plan import Collective, Plan, Stage
from .presets import Preset
from .program.batch import batch_extents
from .program.graph import Graph, Value
from .program.trace import Program
from .program.traces import Traces
from .search.parameters import parameter_infos
from .search.pins import Pins
from .search.pipeline import SIMULATED, StageRequest, StageSearchResult, search_stages
from .sharding import Spec, convert
from .simulate.of_plan import simulate_plan

# Microbatches tried where the user names none: more cost more launches than they save in bubbles.
_MOST_MICROBATCHES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlanning:
    """A staged plan and what finding it took.

    Args:
      program: the step traced with the plan's microbatches.
      result: of the search.
      trace_seconds: for tracing and analysing the step, for all numbers of microbatches.
    """

    program: Program
    result: StageSearchResult
    trace_seconds: float


def plan_stages(
    traces: Traces,
    args: Sequence[Any],
    *,
    cluster: Cluster,
    stages: int | None,
    schedule: str | None,
    microbatches: int | None,
    mesh: Sequence[tuple[tuple[str, ...], tuple[int, ...]]],
    pins: Pins,
    remat: str | None,
    batch_axis: int,
    reduction: str | None,
    preset: Preset | None = None,
    time_limit_seconds: float,
    tell: Callable[[str], None],
) -> StagePlanning:
    """The fastest plan with so many stages, or with any number of them.

    Args: as of `planning.plan_for`.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
    """
    start = time.perf_counter()
    _check(stages, schedule)
    programs = []
    for count in [microbatches] if microbatches is not None else _counts(args, batch_axis, preset):
        tell(f"tracing {count} microbatches")
        program = traces.program(args, microbatches=count, batch_axis=batch_axis, reduction=reduction)
        if not program.marked:
            raise PlanError(
                refused=f"a plan of {stages or 'several'} stages", got="a step without meshwright.value_and_grad",
                needed="a step whose loss function is marked: its forward program is what is cut",
                where=getattr(traces, "__name__", "the step"),
                try_="meshwright.value_and_grad in place of jax.value_and_grad, or stages=1",
            )  # fmt: skip
        programs.append(traces.staged(program))
    traced = time.perf_counter() - start
    pins.check(programs[0].source.input_names, [programs[0].graph.values[v].name for v in programs[0].graph.inputs])
    flushed = "one_f_one_b" if schedule == "pipedream" else schedule
    submeshes = None
    if preset is not None:
        pins = replace(pins, roles=preset.roles_in(programs[0].source, traces, args, batch_axis=batch_axis))
        submeshes = (cluster.num_devices // preset.stages,) * preset.stages
    tell("searching stages")
    request = StageRequest(
        programs=programs, parameters=parameter_infos(programs[0].source), cluster=cluster, pins=pins, remat=remat,
        submeshes=submeshes,
        schedules=SIMULATED if flushed is None else (flushed,), stages=stages, mesh=mesh,
        time_limit_seconds=max(time_limit_seconds - traced, 1.0),
    )  # fmt: skip
    result = search_stages(request)
    if schedule == "pipedream":
        result = replace(result, plan=_asynchronous(result.plan, programs[0].graph))
    return StagePlanning(program=result.program.source, result=result, trace_seconds=traced)


def _check(stages: Any, schedule: Any) -> None:
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        raise PlanError(
            refused="the number of stages", got=repr(stages), needed="a whole number, at least 1, or None",
            where="stages=", try_="stages=None, for as many as are best",
        )  # fmt: skip
    if schedule is not None and schedule not in (*SIMULATED, "pipedream"):
        raise PlanError(
            refused="the schedule", got=repr(schedule), needed=f"one of {', '.join(SIMULATED)}, pipedream, or None",
            where="schedule=", try_="schedule=None, for the best of them",
        )  # fmt: skip


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


def _counts(args: Sequence[Any], batch_axis: int, preset: Preset | None) -> list[int]:
    """Powers of two that divide the batch; with a preset, enough for its stages, and each to be cut into its blocks."""
    powers = [2**i for i in range(_MOST_MICROBATCHES.bit_length()) if 2**i <= _MOST_MICROBATCHES]
    extents, blocks = batch_extents(args, batch_axis), preset.blocks if preset is not None else 1
    found = [m for m in powers if all(extent % (m * blocks) == 0 for extent in extents)] or [1]
    return [m for m in found if preset is None or m >= preset.stages] or found[-1:]
