"""From a step and a cluster to the fastest plan that fits: one stage or several, whichever is asked for or faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import devices as devices_of_jax, process_count

from .._jax.context import no_mesh
from .._jax.devices import named_devices
from .._jax.jitted import bound_to_static
from ..cluster import Cluster, cluster_of, load_cluster
from ..errors import MemoryExceeded, PlanError
from ..plan.row_notes import row_notes
from ..presets import Preset, check_free, parse_preset
from ..program.effects import effect_notes
from ..program.traces import Traces, traces_of
from ..search.pipelines.request import check_remat
from ..search.restrictions.constraints import Constraints
from .advice import with_advice
from .device_memory import memory_notes, with_given_memory
from .kinds import plan_for_kinds
from .microbatch_counts import microbatch_counts
from .refine import MARGIN, held_bytes
from .replicated_work import replicated_work
from .request import (
    DEFAULT_METHOD,
    Planning as Planning,
    PlanOptions,
    PlanRequest,
    check_batch_axis,
    check_check,
    check_refine,
    check_time_limit,
    checked_submeshes,
    mesh_argument,
)
from .stages import check_stages
from .storage_notes import storage_notes


@no_mesh()
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
    stages: int | None = None,
    schedule: str | None = None,
    submeshes: Sequence[int] | None = None,
    preset: Preset | str | None = None,
    donate: int | Sequence[int] | None = None,
    devices: Any = None,
    time_limit_seconds: float = 60.0,
    refine: str | None = None,
    check: str | None = None,
    method: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Planning:
    """Find the fastest plan that fits memory. No device is touched unless `cluster` is "local".

    Args:
      step: a train step `(state, batch, ...) -> (state, metrics)`, or any function of arrays.
      args: its arguments, as arrays or `jax.ShapeDtypeStruct`s.
      cluster: a Cluster, "local", "preset:hosts" or a TOML file.
      microbatches: into how many parts the batch is cut; None for the fastest number.
      mesh: logical mesh: a shape such as (2, 4), axis names with sizes, or a list of those; None to try all.
      pins: layouts of parameters and inputs by path pattern: for each dim None, an axis or several; the rest is
        optimised around them. A parameter's optimizer state follows it.
      zero: ZeRO stage for every parameter that is not pinned, None to choose for each.
      remat: "none", "layer", or None to choose.
      memory_per_device: bytes a device may use; None for what it has.
      batch_axis: which axis of every array after the first argument is the batch.
      reduction: "mean" or "sum": how losses of microbatches combine; None to read it from the program.
      stages: into how many parts, each on its own devices, the program is cut; None to choose.
      schedule: of the microbatches over several stages (docs/schedules.md); None to choose. Where the number of stages
        is to be chosen and one is faster than several under this schedule, the plan has one, and a note says so.
      submeshes: how many devices each stage has, in order, as many stages as there are numbers; None to choose.
      preset: one of `meshwright.presets`, or its text: the search is held to plans of this kind. It decides mesh, zero,
        stages, submeshes and schedule, some also remat, which then cannot be given.
      donate: the arguments whose buffers the step may take over, as jax.jit's `donate_argnums`: a number or several, ()
        for none. None for what the step says itself: `donate_argnums` of a step that is a jax.jit function, or else the
        first argument, if it comes back as the first result and `value_and_grad` differentiates by what is in it.
      devices: a sequence of `jax.Device` or a mesh: what `cluster="local"` stands for, and what a step is run on. None
        for all; a step that is run takes those that its arguments lie on (`parallelize`).
      time_limit_seconds: when it is over, the best plan found so far is taken; the search goes on until there is one.
        Where no time is left to count the memory of the plan's programs, a note says so: the plan fits by what the
        search counts. Tracing comes on top, and for devices of several kinds a tenth for plans for each kind alone.
      refine: "measure": the best few plans are run on the devices at hand, and the one that is the fastest there is
        taken (docs/calibration.md); in a run of many processes all have to ask for it. None for predictions alone.
      check: "compile": the plan has been compiled by the compiler of these machines, which need not be here, and fits
        (docs/compilers.md): up to four searches, each in the time limit, and compilations. None for predicted memory.
      method: the search method, by name (docs/searches.md); None for the default.
      tell: called with a few words at each part of the work.

    Raises:
      PlanError: if something is wrong with the request, or nothing fits.
    """
    options = PlanOptions(
        cluster=cluster, microbatches=microbatches, mesh=mesh, pins=pins, zero=zero, remat=remat,
        memory_per_device=memory_per_device, batch_axis=batch_axis, reduction=reduction, stages=stages,
        schedule=schedule, submeshes=submeshes, preset=preset, devices=devices, refine=refine,
        check=check, time_limit_seconds=time_limit_seconds, method=method,
    )  # fmt: skip
    bound = bound_to_static(step, args)
    traces, started = traces_of(bound.step, bound.donate(donate)), time.perf_counter()
    args = bound.args
    try:
        found = plan_without_advice(traces, args, options, tell=tell)
        if check is not None:
            return found  # it says so of what was compiled
        ranks = dict.fromkeys(one.devices for one in found.plan.stages)
        held = dict(zip(ranks, held_bytes(found.plan), strict=True))
        needed = [MARGIN * held[one.devices] for one in found.plan.stages]
        notes = memory_notes(found.plan, needed, _cluster(cluster, devices))
        return replace(found, plan=replace(found.plan, notes=(*found.plan.notes, *notes)))
    except MemoryExceeded as refused:
        tell("looking for what fits")
        where = _cluster(cluster, devices)
        given = parse_preset(preset) if isinstance(preset, str) else preset
        raise with_advice(
            refused, lambda changed: plan_without_advice(traces, args, changed), options,
            given.on(where.num_devices) if given is not None else None, where.num_devices,
            time_limit_seconds - (time.perf_counter() - started),
        ) from refused  # fmt: skip


def plan_without_advice(
    step: Callable[..., Any], args: Sequence[Any], options: PlanOptions, *,
    tell: Callable[[str], None] = lambda text: None,
) -> Planning:  # fmt: skip
    """As `plan_for`, whose refusals for memory do not say what would fit instead.

    Args:
      step: as there.
      args: as there.
      options: as there.
      tell: as there.

    Raises:
      PlanError: as there.
    """
    start, traces = time.perf_counter(), traces_of(step)
    traced = traces.seconds
    check_refine(options.refine)
    check_check(options.check)
    if options.refine is not None and options.check is not None:
        raise PlanError(
            refused=f'refine="{options.refine}" and check="{options.check}"', got="both", where="check=",
            needed="one or the other: plans that are measured have been compiled and run", try_="leaving out check=",
        )  # fmt: skip
    if options.method is not None:
        from .method import check_method  # what most never need

        check_method(options)
    asked, stages = request_of(traces, args, options, started=start, tell=tell)
    if options.refine is not None:
        from ..calibrate.origin import check_origin  # a tenth of a second, which most never need
        from .measured import measured_best

        where = asked.cluster
        check_origin(where)
        predicted = replace(options, cluster=where, devices=None, memory_per_device=None, refine=None)
        found = measured_best(
            lambda changed: plan_without_advice(traces, args, changed, tell=tell), predicted,
            traces=traces, args=args, cluster=where, tell=tell, devices=options.devices,
        )  # fmt: skip
        return _timed(found, traces.seconds - traced, time.perf_counter() - start)
    if options.check is not None:
        from .compiled import checked_plan  # a runtime, which most never need

        predicted = replace(options, devices=None, check=None)
        found = checked_plan(
            lambda changed: plan_without_advice(traces, args, changed, tell=tell), predicted, cluster=asked.cluster,
            tell=tell, whole=_cluster(options.cluster, options.devices), devices=_devices_here(options),
        )  # fmt: skip
        return _timed(found, traces.seconds - traced, time.perf_counter() - start)
    preset = asked.preset
    if options.method not in (None, DEFAULT_METHOD):
        from .method import plan_by_method

        found = Planning.of(plan_by_method(asked, stages, options.method), asked.cluster)
    else:
        found = Planning.of(plan_for_kinds(asked, stages), asked.cluster)
    notes = (*found.plan.notes, *found.program.notes, *([f"held to the preset {preset}"] if preset is not None else []))
    notes += storage_notes(found.plan, asked.constraints.zero, preset)
    notes += replicated_work(asked, found, asked.constraints_in(found.program).roles)
    if asked.schedule is not None and len(found.plan.stages) == 1:
        searched = any(one.what == "several stages" for one in found.considered)
        why = "one stage is faster than several (stages=2 for two)" if searched else "the plan can have one stage only"
        notes += (f"the schedule {asked.schedule} is not used: {why}",)
    notes += effect_notes(found.program, found.plan.schedule)
    notes += row_notes(found.plan)
    if options.microbatches is None and found.plan.microbatches == 1 and len(found.plan.stages) > 1:
        notes += _why_one_microbatch(asked)
    if asked.is_traced(found.plan.microbatches):
        asked.program(found.plan.microbatches, warn=True)
    found = replace(found, plan=replace(found.plan, notes=notes))
    return _timed(found, traces.seconds - traced, time.perf_counter() - start)


def request_of(
    traces: Traces, args: Sequence[Any], options: PlanOptions, *, started: float,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[PlanRequest, int | None]:  # fmt: skip
    """What a user asks for, checked, and the number of stages; None to choose.

    Args:
      traces: of the step.
      args: as of `plan_for`.
      options: as there.
      started: when the work began, by `time.perf_counter`.
      tell: as there.

    Raises:
      PlanError: if something is wrong with it.
    """
    where = _cluster(options.cluster, options.devices)
    preset, stages, schedule = options.preset, options.stages, options.schedule
    _check_types(where, options.pins, preset)
    check_time_limit(options.time_limit_seconds)
    check_batch_axis(args, options.batch_axis)
    check_remat(options.remat)
    if options.memory_per_device is not None:
        where = where.with_memory_limit(_positive(options.memory_per_device, "memory_per_device"))
    meshes = mesh_argument(options.mesh)
    zero, remat = options.zero, options.remat
    if preset is not None:
        preset = (parse_preset(preset) if isinstance(preset, str) else preset).on(where.num_devices)
        check_free(
            preset, mesh=options.mesh, zero=zero, remat=remat, stages=stages, schedule=schedule,
        )  # fmt: skip
        if options.submeshes is not None:
            raise PlanError(
                refused="the submeshes", got=f"the preset {preset} as well, whose stages are on equal ones",
                needed="one or the other", where="submeshes=", try_="leaving out submeshes= or preset=",
            )  # fmt: skip
        meshes, zero, remat = [preset.mesh], preset.zero, preset.remat or remat
        stages, schedule = preset.stages, preset.schedule
    layouts = {path: _layout(path, dims) for path, dims in (options.pins or {}).items()}
    submeshes = None
    if options.submeshes is not None:
        submeshes = checked_submeshes(options.submeshes, where, stages)
        stages = len(submeshes)
    if preset is None:  # which has sensible ones
        check_stages(stages, schedule, where.num_devices)
    asked = PlanRequest(
        traces=traces, args=args, cluster=where, microbatches=options.microbatches, mesh=meshes,
        constraints=Constraints(layouts=layouts, zero=zero), remat=remat, batch_axis=options.batch_axis,
        reduction=options.reduction, schedule=schedule, submeshes=submeshes, preset=preset, started=started,
        time_limit_seconds=options.time_limit_seconds, tell=tell,
        may_idle=(options.cluster != "local" and options.devices is None) or process_count() == 1,
    )  # fmt: skip
    return asked, stages


def _cluster(cluster: Any, devices: Any) -> Any:
    """The cluster, as it is called and on these devices. One that is called by name has the memory that the environment
    gives programs; another says itself what they may use."""
    if devices is None:
        return with_given_memory(load_cluster(cluster)) if isinstance(cluster, str) else cluster
    named = named_devices(devices)
    found = cluster
    if isinstance(cluster, str):
        found = with_given_memory(cluster_of(named) if cluster == "local" else load_cluster(cluster))
    if isinstance(found, Cluster) and found.num_devices != len(named):
        raise PlanError(
            refused="the devices", got=str(len(named)), needed=f"the {found.num_devices} of cluster {found.name}",
            where="devices=", try_='cluster="local", or as many devices',
        )  # fmt: skip
    return found


def _devices_here(options: PlanOptions) -> Sequence[Any] | None:
    """The devices to plan for, where they are those of this process."""
    if (options.cluster != "local" and options.devices is None) or process_count() > 1:
        return None
    return devices_of_jax() if options.devices is None else named_devices(options.devices)


def _why_one_microbatch(asked: PlanRequest) -> tuple[str, ...]:
    """Why stages that wait for each other have no more microbatches, if it is the step that allows no other number."""
    counts = [count for count in microbatch_counts(asked) if count > 1]
    if not counts or any(asked.is_traced(count) for count in counts):
        return ()
    try:
        asked.program(counts[0])
    except PlanError as error:
        return (f"1 microbatch, since no others are possible: {error}",)
    return ()


def _timed(planning: Planning, trace_seconds: float, seconds: float) -> Planning:
    """What was found, with all that it took: what is no tracing is for the search."""
    return replace(planning, seconds=seconds, trace_seconds=trace_seconds, solve_seconds=seconds - trace_seconds)


def _check_types(cluster: Any, pins: Any, preset: Any) -> None:
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
    if preset is not None and not isinstance(preset, (str, Preset)):
        raise PlanError(
            refused="the preset", got=f"{type(preset).__name__} {preset!r:.40}", needed="a Preset or its text",
            where="preset=", try_='preset="megatron(tp=2, pp=2)"',
        )  # fmt: skip


def _positive(value: float, name: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise PlanError(
            refused=name, got=repr(value), needed="a positive number of bytes", where=f"{name}=", try_=f"{name}=16e9"
        )
    return float(value)


def _layout(path: str, dims: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    if not isinstance(path, str) or isinstance(dims, str) or not isinstance(dims, Iterable):
        raise PlanError(
            refused=f"the pin {path!r}", got=repr(dims), where="pins=", try_='pins={"*kernel": (None, "model")}',
            needed="a path pattern, and for each dim None, an axis or several",
        )  # fmt: skip
    layout: list[tuple[str, ...]] = []
    for dim in dims:
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
