"""From a step and a cluster to a plan whose memory is checked against the traced program.

The solver's memory row is linear: what is kept, by the spec it is kept in. The peak of the step it would run is known
only once the step is written out; so the found plan is traced (nothing is compiled) and its predicted peak compared
with what a device has. A plan that exceeds it is refused and the search repeated under a tighter row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .cluster import Cluster, load_cluster
from .errors import MemoryExceeded, PlanError, size_words
from .plan import Memory, Plan
from .presets import Preset, check_free, parse_preset
from .program.batch import batch_extents
from .program.trace import Program
from .program.traces import traces_of
from .runtime.local_step import LocalStep
from .search.hierarchical import HierarchicalSearch, SearchRequest, SearchResult, mesh_argument
from .search.parameters import parameter_infos
from .search.pins import Pins
from .stage_planning import plan_stages

# How often a plan whose traced peak is too high is searched again with less memory.
_ATTEMPTS = 6

# The predicted peak is a few percent off at times: this much of a device stays free.
_MARGIN = 1.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A plan and what finding it took.

    Args:
      program: the traced step.
      plan: the plan.
      cluster: it is for.
      seconds: in all.
      trace_seconds: for tracing and analysing the step.
      solve_seconds: for the search.
      considered: the candidates, a line each.
    """

    program: Program
    plan: Plan
    cluster: Cluster
    seconds: float
    trace_seconds: float
    solve_seconds: float
    considered: tuple[str, ...]


def plan_for(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    cluster: Cluster | str = "local",
    microbatches: int | None = None,
    mesh: Any = None,
    pins: Mapping[str, Sequence[Any]] | None = None,
    zero: int | None = None,
    remat: str | None = None,
    memory_per_device: float | None = None,
    batch_axis: int = 0,
    reduction: str | None = None,
    stages: int | None = 1,
    schedule: str | None = None,
    preset: Preset | str | None = None,
    time_limit_seconds: float = 60.0,
    tell: Callable[[str], None] = lambda text: None,
) -> Planning:
    """Find the fastest plan that fits memory. No device is touched unless `cluster` is "local".

    Args:
      step: a train step `(state, batch, ...) -> (state, metrics)`, or any function of arrays.
      args: its arguments, as arrays or `jax.ShapeDtypeStruct`s.
      cluster: a Cluster, "local", "preset:hosts" or a TOML file.
      microbatches: into how many parts the batch is cut; None for the fewest that fit.
      mesh: logical mesh: a shape such as (2, 4), axis names with sizes, or a list of those; None to try all.
      pins: layouts of parameters and inputs by path pattern: for each dim None, an axis or several; the rest is
        optimised around them. A parameter's optimizer state follows it.
      zero: ZeRO stage for every parameter that is not pinned, None to choose for each.
      remat: "none", "layer", or None to choose.
      memory_per_device: bytes a device may use; None for what it has.
      batch_axis: which axis of every array outside the state is the batch.
      reduction: "mean" or "sum": how losses of microbatches combine; None to read it from the program.
      stages: into how many parts, each on its own devices, the program is cut; None to choose.
      schedule: of the microbatches over several stages, a name of `search.pipeline.SIMULATED`; None to choose.
      preset: one of `meshwright.presets`, or its text: the search is held to plans of this kind. It decides mesh, zero,
        stages and schedule, some also remat, which then cannot be given.
      time_limit_seconds: for the search; when it is over, every further problem gets a second.
      tell: called with a few words at each part of the work.

    Raises:
      PlanError: if something is wrong with the request, or nothing fits.
    """
    start = time.perf_counter()
    where = load_cluster(cluster) if isinstance(cluster, str) else cluster
    _check_types(where, pins)
    if memory_per_device is not None:
        where = where.with_memory_limit(_positive(memory_per_device, "memory_per_device"))
    meshes, traces = mesh_argument(mesh), traces_of(step)
    if preset is not None:
        preset = (parse_preset(preset) if isinstance(preset, str) else preset).on(where.num_devices)
        check_free(preset, mesh=mesh, zero=zero, remat=remat, stages=None if stages == 1 else stages, schedule=schedule)
        meshes, zero, remat = [preset.mesh], preset.zero, preset.remat or remat
        stages, schedule = preset.stages, preset.schedule
    pinned = Pins(layouts={path: _layout(path, dims) for path, dims in (pins or {}).items()}, zero=zero)
    if stages != 1:
        staged = plan_stages(
            traces, args, cluster=where, stages=stages, schedule=schedule, microbatches=microbatches, mesh=meshes,
            pins=pinned, remat=remat, batch_axis=batch_axis, reduction=reduction, preset=preset,
            time_limit_seconds=time_limit_seconds, tell=tell,
        )  # fmt: skip
        return Planning(
            program=staged.program, plan=_noted(staged.result.plan, preset), cluster=where,
            seconds=time.perf_counter() - start, trace_seconds=staged.trace_seconds,
            solve_seconds=staged.result.seconds, considered=staged.result.considered,
        )  # fmt: skip
    blocks = preset.blocks if preset is not None else 1
    count = microbatches if microbatches is not None else 1
    trace_seconds = solve_seconds = 0.0
    short: MemoryExceeded | None = None
    while True:
        begun = time.perf_counter()
        words = "" if count == 1 else f" with {count} microbatches"
        tell(f"tracing{words}")
        try:
            program = traces.program(args, microbatches=count, batch_axis=batch_axis, reduction=reduction)
        except PlanError as error:
            if short is None:
                raise
            # More microbatches were our idea: the user asked for a plan that fits.
            raise short.but(f"more microbatches are out of the question: {error}") from error
        trace_seconds += time.perf_counter() - begun
        if preset is not None:
            roles = preset.roles_in(program, traces, args, batch_axis=batch_axis)
            pinned = replace(pinned, roles=roles, gradient_exchange=preset.gradient_exchange)
        request = SearchRequest(
            graph=program.graph, fingerprint=program.fingerprint, parameters=parameter_infos(program), cluster=where,
            microbatches=count, mesh=meshes, pins=pinned, remat=remat,
            carried=0 if program.marked else program.state_inputs,
            split_dims=program.split_dims,
            time_limit_seconds=max(time_limit_seconds - (time.perf_counter() - start), 0.0),
        )  # fmt: skip
        pinned.check(program.input_names, [program.graph.values[v].name for v in program.graph.inputs])
        begun = time.perf_counter()
        try:
            result = _search_within_memory(program, request, lambda text, words=words: tell(f"{text}{words}"))
        except MemoryExceeded as error:
            short = error
            solve_seconds += time.perf_counter() - begun
            # No layout needs less than in proportion to the microbatch.
            least = max(2 * count, math.ceil(count * error.least_bytes / where.device.usable_memory_bytes))
            more = _more_microbatches(program, args, least, batch_axis, blocks)
            if microbatches is not None or more is None:
                raise
            count = more
            continue
        solve_seconds += time.perf_counter() - begun
        return Planning(
            program=program, plan=_noted(result.plan, preset), cluster=where, seconds=time.perf_counter() - start,
            trace_seconds=trace_seconds, solve_seconds=solve_seconds, considered=result.considered,
        )  # fmt: skip


def _search_within_memory(program: Program, request: SearchRequest, tell: Callable[[str], None]) -> SearchResult:
    """The best plan whose traced peak fits."""
    usable = request.cluster.device.usable_memory_bytes
    search = HierarchicalSearch(request, tell)
    row = usable
    peak = 0.0
    for _ in range(_ATTEMPTS):
        try:
            result = search.plan(row)
        except MemoryExceeded as error:
            if peak:
                raise _over(request, usable, peak) from error
            raise
        tell("predicting memory")
        predicted = LocalStep(program, result.plan).predicted_memory()
        peak = float(predicted.peak_bytes)
        if peak * _MARGIN <= usable:
            return replace(result, plan=_with_memory(result.plan, peak))
        counted = result.plan.stages[0].memory.total
        # What the row does not see stays about the same: leave room for it.
        row = min(0.98 * counted, usable / _MARGIN - max(peak - counted, 0.0))
        if row <= 0:
            break
    raise _over(request, usable, peak)


def _over(request: SearchRequest, usable: float, peak: float) -> MemoryExceeded:
    return MemoryExceeded(
        refused=f"a plan for {request.cluster.num_devices} x {request.cluster.device.kind}",
        got=f"{size_words(usable)} usable on a device",
        needed=f"about {size_words(_MARGIN * peak)} on a device, the predicted peak of the leanest plan found with "
        f"{request.microbatches} microbatches",
        where="stage 1 of 1",
        try_="more devices, a smaller batch" + (', or remat="layer"' if request.remat == "none" else ""),
    )


def _with_memory(plan: Plan, peak: float) -> Plan:
    """The plan with its activations and workspace as traced."""
    (stage,) = plan.stages
    known = stage.memory.parameters + stage.memory.gradients + stage.memory.optimizer
    held = max(peak - known, 0.0)
    activations = min(stage.memory.activations, held)
    memory = Memory(
        parameters=stage.memory.parameters,
        gradients=min(stage.memory.gradients, max(peak - stage.memory.parameters - stage.memory.optimizer, 0.0)),
        optimizer=stage.memory.optimizer,
        activations=activations,
        workspace=held - activations,
    )
    return replace(plan, stages=(replace(stage, memory=memory),))


def _check_types(cluster: Any, pins: Any) -> None:
    if not isinstance(cluster, Cluster):
        raise PlanError(
            refused="the cluster", got=f"{type(cluster).__name__} {cluster!r:.40}", needed="a name or a Cluster",
            where="cluster=", try_='cluster="local", "p4d.24xlarge:2" or meshwright.load_cluster("cluster.toml")',
        )  # fmt: skip
    if pins is not None and not isinstance(pins, Mapping):
        raise PlanError(
            refused="the pins", got=f"{type(pins).__name__} {pins!r:.40}", needed="layouts by path pattern",
            where="pins=", try_='pins={"*kernel*": (None, "model")}',
        )  # fmt: skip


def _positive(value: float, name: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise PlanError(
            refused=name, got=repr(value), needed="a positive number of bytes", where=f"{name}=", try_=f"{name}=16e9"
        )
    return float(value)


def _layout(path: str, dims: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    layout: list[tuple[str, ...]] = []
    for dim in tuple(dims):
        if dim is None:
            layout.append(())
        elif isinstance(dim, str):
            layout.append((dim,))
        elif isinstance(dim, Sequence) and all(isinstance(axis, str) for axis in dim):
            layout.append(tuple(dim))
        else:
            raise PlanError(
                refused=f"the pin of {path}", got=repr(dim), needed="None, an axis name or a tuple of axis names",
                where="pins=", try_='pins={"*kernel": (None, "model")}',
            )  # fmt: skip
    return tuple(layout)


def _more_microbatches(program: Program, args: Sequence[Any], least: int, batch_axis: int, blocks: int) -> int | None:
    """The next number of microbatches, at least so many, of which each can be cut into `blocks`, or None."""
    extents = batch_extents(args, batch_axis) if program.marked else []
    if not extents:
        return None
    return next((m for m in range(least, min(extents) + 1) if all(e % (m * blocks) == 0 for e in extents)), None)


def _noted(plan: Plan, preset: Preset | None) -> Plan:
    return plan if preset is None else replace(plan, notes=(*plan.notes, f"held to the preset {preset}"))
