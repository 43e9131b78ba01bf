"""From a step and a cluster to the fastest plan that fits: one stage or several, whichever is asked for or faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import devices as devices_of_jax, process_count

from .._jax.context import no_mesh
from .._jax.devices import named_devices
from .._jax.jitted import bound_to_static
from ..cluster import Cluster
from ..errors import MemoryExceeded, PlanError
from ..notes.device_memory import memory_notes
from ..notes.replicated_work import replicated_work
from ..notes.storage import storage_notes
from ..plan.row_notes import row_notes
from ..presets import Preset
from ..program.effects import effect_notes
from ..program.padded_dims import PaddedDim
from ..program.traces import Traces, traces_of
from .advice import with_advice
from .checks import as_traced_for, check_trials, cluster_asked, request_of
from .microbatch_counts import microbatch_counts
from .padding import PaddedPlanning
from .refine import MARGIN, held_bytes
from .request import DEFAULT_METHOD, Planning as Planning, PlanOptions, PlanRequest


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
    padding: bool = True,
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
      remat: "none", "selective", "layer", or None to choose.
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
      padding: whether dims that mesh axes do not divide (a vocabulary of 50257, a batch of 30 over 8 devices) may be
        padded inside the program, where that is faster. Numbers, arguments and results stay what they are. Not with
        `method` or the schedule inference.
      devices: a sequence of `jax.Device` or a mesh: what `cluster="local"` stands for, and what a step is run on. None
        for all; a step that is run takes those that its arguments lie on (`parallelize`).
      time_limit_seconds: when it is over, the best plan found so far is taken; the search goes on until there is one.
        Where no time is left to count the memory of the plan's programs, a note says so: the plan fits by what the
        search counts. Tracing comes on top, and for devices of several kinds a tenth for plans for each kind alone.
      refine: "measure": the best few plans are run on the devices at hand, and the one that is the fastest there is
        taken (docs/calibration.md); in a run of many processes all have to ask for it. "compile": the best few plans
        are compiled as by `check`, and the fastest by what the compiler says of those that fit is taken. None for
        predictions alone.
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
        check=check, time_limit_seconds=time_limit_seconds, method=method, padding=padding,
    )  # fmt: skip
    bound = bound_to_static(step, args)
    traces, started = traces_of(bound.step, bound.donate(donate)), time.perf_counter()
    try:
        found = plan_without_advice(traces, bound.args, options, tell=tell)
        if check is not None or refine == "compile":
            return found  # it says so of what was compiled
        ranks = dict.fromkeys(one.devices for one in found.plan.stages)
        held = dict(zip(ranks, held_bytes(found.plan), strict=True))
        needed = [MARGIN * held[one.devices] for one in found.plan.stages]
        return found.noted(*memory_notes(found.plan, needed, cluster_asked(options)))
    except MemoryExceeded as refused:
        tell("looking for what fits")
        raise with_advice(
            refused, lambda changed: plan_without_advice(traces, bound.args, changed), options,
            cluster_asked(options).num_devices, time_limit_seconds - (time.perf_counter() - started),
        ) from refused  # fmt: skip


def plan_without_advice(
    step: Callable[..., Any], args: Sequence[Any], options: PlanOptions, *,
    tell: Callable[[str], None] = lambda text: None,
) -> Planning:  # fmt: skip
    """As `plan_for`, whose arguments these are; refusals for memory do not say what would fit instead."""
    with as_traced_for(options):
        return _planned(step, args, options, tell)


def _planned(
    step: Callable[..., Any], args: Sequence[Any], options: PlanOptions, tell: Callable[[str], None]
) -> Planning:
    start, traces = time.perf_counter(), traces_of(step)
    traced = traces.seconds
    check_trials(options)
    asked = request_of(traces, args, options, started=start, tell=tell)
    if options.refine is not None or options.check is not None:
        found = _tried(traces, args, options, asked)
    elif options.method in (None, DEFAULT_METHOD):
        search = PaddedPlanning(asked)
        found = _with_notes(asked, Planning.of(search.run(), asked.cluster), search.tried)
    else:
        from .method import plan_by_method  # what most never need

        found = _with_notes(asked, Planning.of(plan_by_method(asked, options.method), asked.cluster))
    seconds, trace_seconds = time.perf_counter() - start, traces.seconds - traced
    # What is no tracing is for the search.
    return replace(found, seconds=seconds, trace_seconds=trace_seconds, solve_seconds=seconds - trace_seconds)


def _tried(traces: Traces, args: Sequence[Any], options: PlanOptions, asked: PlanRequest) -> Planning:
    """The best plan by the devices or by the compiler, beside by prediction."""
    predicted = replace(options, devices=None, refine=None, check=None)

    def plan(changed: PlanOptions) -> Planning:
        return plan_without_advice(traces, args, changed, tell=asked.tell)

    if options.refine == "measure":
        from ..calibrate.origin import check_origin  # a tenth of a second, which most never need
        from .measured import measured_best

        check_origin(asked.cluster)
        predicted = replace(predicted, cluster=asked.cluster, memory_per_device=None)
        return measured_best(plan, predicted, asked, devices=options.devices)
    from .compiled import checked_plan, compiled_best  # a runtime, which most never need

    # The devices to plan for, where they are those of this process.
    named = options.devices
    here = (options.cluster == "local" or named is not None) and process_count() == 1
    devices = (devices_of_jax() if named is None else named_devices(named)) if here else None
    whole = cluster_asked(options)
    if options.refine == "compile":
        predicted = replace(predicted, cluster=asked.cluster, memory_per_device=None)
        return compiled_best(plan, predicted, asked, whole=whole, devices=devices)
    return checked_plan(plan, predicted, cluster=asked.cluster, tell=asked.tell, whole=whole, devices=devices)


def _with_notes(asked: PlanRequest, found: Planning, padded: Collection[PaddedDim] = ()) -> Planning:
    """A plan with what there is to say of it; `padded` are dims that were padded in a search."""
    preset, plan = asked.preset, found.plan
    notes = (*found.program.notes, *([f"held to the preset {preset}"] if preset is not None else []))
    notes += storage_notes(plan, asked.constraints.zero, preset)
    notes += replicated_work(found.program, plan, asked.cluster, asked.constraints_in(found.program), tried=padded)
    if asked.schedule is not None and len(plan.stages) == 1:
        searched = any(one.what == "several stages" for one in found.considered)
        why = "one stage is faster than several (stages=2 for two)" if searched else "the plan can have one stage only"
        notes += (f"the schedule {asked.schedule} is not used: {why}",)
    notes += effect_notes(found.program, plan.schedule)
    notes += row_notes(plan)
    if asked.microbatches is None and plan.microbatches == 1 and len(plan.stages) > 1:
        notes += _why_one_microbatch(asked)
    if plan.microbatches in asked.traced():
        asked.program(plan.microbatches, warn=True)
    return found.noted(*notes)


def _why_one_microbatch(asked: PlanRequest) -> tuple[str, ...]:
    """Why stages that wait for each other have no more microbatches, if it is the step that allows no other number."""
    counts = [count for count in microbatch_counts(asked) if count > 1]
    if not counts or not asked.traced().isdisjoint(counts):
        return ()
    try:
        asked.program(counts[0])
    except PlanError as error:
        return (f"1 microbatch, since no others are possible: {error}",)
    return ()
