"""Plans of several stages: the step traced for each number of microbatches, cut into layers, and searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from math import inf, isfinite, prod
from typing import Any

from ..cluster import HostOrder, host_orders
from ..errors import MemoryExceeded, PlanError
from ..plan import Collective, Plan, Stage
from ..presets.leaner import leaner_words
from ..program.expected import Unexpected
from ..program.graph import Graph, Value
from ..program.staged import StagedProgram
from ..program.trace import Program
from ..search.driver import Part, best_of_parts
from ..search.inter.submeshes import Submeshes
from ..search.intra.parameters import parameter_infos
from ..search.pipelines.driver import SIMULATED, NothingFaster, SearchResult, StageRequest, StageSearch
from ..search.pipelines.request import INTERLEAVED, SMALL_PROGRAM
from ..search.stages.reserve import MissedMemory
from ..sharding import Spec, convert
from ..simulate import simulate_plan
from .microbatch_counts import finer_counts, microbatch_counts
from .programs import StepPrograms
from .refine import Refinement
from .replicas import REPLICAS
from .request import PlanRequest, in_cluster

# Schedules that are not searched under their own name, and those that stand for them in the search.
_SEARCHED: Mapping[str, tuple[str, ...]] = {"pipedream": ("one_f_one_b",), "inference": ("one_f_one_b",)}


def is_large(program: Program) -> bool:
    """Whether a program is one for several stages, unless it fits in few microbatches."""
    return program.graph.runs > SMALL_PROGRAM


def plan_stages(asked: PlanRequest, stages: int | None, *, faster_than_seconds: float = inf) -> SearchResult:
    """The fastest plan with so many stages, or with any number of them. Where hosts are of several kinds, their groups
    are put in every order: which kind has the first stages, and which the last. Where the step is in some number of
    microbatches another program than was expected, all begins again.

    Args:
      asked: the request.
      stages: how many; None to choose.
      faster_than_seconds: a plan whose step counts for more is not wanted.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
      NothingFaster: if no plan is that fast.
    """
    given = asked.submeshes is not None or asked.preset is not None
    orders = host_orders(asked.cluster)[: 1 if given else None]
    parts = [
        Part(
            words=f"hosts in the order {', '.join(map(str, order.devices))}",
            search=partial(_in_order, asked, stages, order),
        )
        for order in orders
    ]
    try:
        try:
            found = parts[0].search(faster_than_seconds, asked.left_seconds) if len(parts) == 1 else best_of_parts(
                parts, left_seconds=lambda: asked.left_seconds, floor=lambda: asked.least_work_seconds,
                faster_than_seconds=faster_than_seconds, worth=0.0,
            )  # fmt: skip
        except (NothingFaster, MemoryExceeded):
            asked.expectations.check()
            raise
        asked.expectations.check()
    except Unexpected:
        asked.expectations.give_up()
        return plan_stages(asked, stages, faster_than_seconds=faster_than_seconds)
    except MemoryExceeded as error:
        if asked.preset is None:
            raise
        devices = asked.cluster.num_devices
        refused = f"the preset {asked.preset} on {devices} x {asked.cluster.device.kind}"
        raise error.named(refused, leaner_words(asked.preset, devices)) from error
    return found


def stage_request(asked: PlanRequest, stages: int | None, programs: StepPrograms) -> StageRequest:
    """What is asked of the stage search.

    Args:
      asked: the request.
      stages: how many; None to choose.
      programs: the step in each number of microbatches.

    Raises:
      PlanError: if pins or meshes are not of the step and the cluster.
    """
    source, preset, submeshes = programs.any.source, asked.preset, asked.submeshes
    constraints = asked.constraints_in(source)
    _check_mesh(asked, stages)
    schedules = SIMULATED if asked.schedule is None else _SEARCHED.get(asked.schedule, (asked.schedule,))
    if preset is not None and preset.chunks > 1:
        stages, schedules = preset.stages * preset.chunks, (INTERLEAVED,)
    elif preset is not None:
        submeshes = (asked.cluster.num_devices // preset.stages,) * preset.stages
    if stages is not None and stages > 1 and submeshes is None:
        Submeshes(asked.cluster).check_stages(stages)
    return StageRequest(
        programs=programs, parameters=parameter_infos(source), cluster=asked.cluster, constraints=constraints,
        remat=asked.remat, submeshes=submeshes, stages=stages, mesh=asked.mesh, schedules=schedules,
        time_limit_seconds=asked.time_limit_seconds, several=asked.several,
    )  # fmt: skip


def _in_order(
    asked: PlanRequest, stages: int | None, order: HostOrder, faster_than_seconds: float, seconds: float
) -> SearchResult:
    """The fastest plan whose stages follow the hosts in an order, on the cluster as it was given."""
    whole, asked = asked.cluster, replace(asked.within(seconds), cluster=order.cluster)
    programs = StepPrograms(asked, stages, microbatch_counts(asked))
    request = replace(stage_request(asked, stages, programs), faster_than_seconds=faster_than_seconds)
    search = StageSearch(request)

    def find(missed: MissedMemory, seconds: float) -> SearchResult:
        nonlocal search
        while True:
            asked.tell("searching stages")
            try:
                found = search.run(missed, time_limit_seconds=min(seconds, asked.left_seconds))
            except MemoryExceeded:
                finer = finer_counts(asked, max(search.counts))
                if not finer:
                    raise
                programs = StepPrograms(asked, stages, finer)
                search = StageSearch(replace(request, programs=programs))
                continue
            if asked.schedule == "inference" and len(found.plan.stages) == 1:
                raise NothingFaster(0.0, found.considered)  # than the step in one piece, which is no pipeline
            as_asked = replace(found, plan=_under_schedule(asked.schedule, found)).bounded(found.least_seconds)
            if as_asked.counted_seconds >= faster_than_seconds:
                raise NothingFaster(found.least_seconds, found.considered)
            return as_asked

    found = Refinement(asked).run(
        find, what=f"a plan of several stages for {asked.cluster.num_devices} x {asked.cluster.device.kind}",
        where="the stage search", try_="more devices, a smaller batch", known=isfinite(faster_than_seconds),
    )  # fmt: skip
    return replace(found, plan=in_cluster(found.plan, order, whole))


def _under_schedule(schedule: str | None, found: SearchResult) -> Plan:
    """A plan that was found, under a schedule that is searched under another name."""
    plan = found.plan
    if schedule == "inference" and len(plan.stages) > 1:
        return _timed(replace(plan, schedule="inference", schedule_options=()))
    if schedule == "pipedream" and len(plan.stages) > 1:
        assert isinstance(found.program, StagedProgram)
        return _asynchronous(plan, found.program.graph)
    return plan


def _check_mesh(asked: PlanRequest, stages: int | None) -> None:
    """Refuse logical meshes that no stage can have, or that do not add up to the cluster.

    Raises:
      PlanError: saying how many devices a stage can have.
    """
    devices = asked.cluster.num_devices
    most = devices - ((stages or 1) - 1)
    sizes = {prod(sizes) for _, sizes in asked.mesh}
    sums = {0}  # of stages with these meshes, their devices
    for total in range(1, devices + 1):
        if any(total - size in sums for size in sizes):
            sums.add(total)
    if sizes and (min(sizes) > most or devices not in sums):
        raise PlanError(
            refused="the logical mesh", got=" or ".join("x".join(map(str, sizes)) for _, sizes in asked.mesh),
            needed=f"that of a stage, of which there are {stages or 'several'}: of at most {most} devices each, and of "
            f"{devices} devices together",
            where="mesh=", try_=f"a mesh of all {devices} devices, which is one stage",
        )  # fmt: skip


def check_stages(stages: Any, schedule: Any, devices: int) -> None:
    """Refuse a number of stages that is none or that the schedule cannot have, and schedules that do not exist.

    Args:
      stages: as the user said it.
      schedule: the same.
      devices: of the cluster.

    Raises:
      PlanError: saying which there are.
    """
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        raise PlanError(
            refused="the number of stages", got=repr(stages), needed="a whole number, at least 1, or None",
            where="stages=", try_="stages=None, for as many as are best",
        )  # fmt: skip
    known = (*SIMULATED, *_SEARCHED, REPLICAS)
    if schedule is not None and schedule not in known:
        near = get_close_matches(str(schedule), known, n=2)
        raise PlanError(
            refused="the schedule", got=repr(schedule), needed=f"one of {', '.join(known)}, or None",
            where="schedule=", try_=" or ".join(near) or "schedule=None, for the best of them",
        )  # fmt: skip
    ranks = [n for n in range(2, devices + 1) if devices % n == 0]
    if schedule == INTERLEAVED and stages is not None and all(stages <= n or stages % n for n in ranks):
        raise PlanError(
            refused="the schedule", got=f"{INTERLEAVED} of {stages} stages on {devices} devices",
            needed="several stages for each of several equal ranks", where="stages=",
            try_=f"stages={2 * ranks[0]}, or another schedule" if ranks else "several devices",
        )  # fmt: skip
    if schedule is not None and stages == 1:
        raise PlanError(
            refused="the schedule", got=f"{schedule!r} for one stage", needed="several stages to be scheduled",
            where="schedule=", try_="stages=2, or stages=None for as many as are best",
        )  # fmt: skip


def _timed(plan: Plan) -> Plan:
    """The plan with the seconds that simulating it gives."""
    assert plan.predicted is not None  # the search prices what it finds
    timeline, before = simulate_plan(plan), plan.predicted
    predicted = replace(
        before, step_seconds=timeline.step_seconds, bubble_fraction=timeline.bubble_fraction,
        tflops_per_device=before.tflops_per_device * before.step_seconds / timeline.step_seconds,
    )  # fmt: skip
    return replace(plan, predicted=predicted)


def _asynchronous(plan: Plan, graph: Graph) -> Plan:
    """The stages of a plan under PipeDream: an update for each microbatch, the pipeline drained after the last."""
    values = {graph.values[v].name: graph.values[v] for v in graph.inputs}
    stages = tuple(replace(stage, communication=_each_microbatch(stage, plan, values)) for stage in plan.stages)
    note = "asynchronous: gradients are of weights some updates old, so numbers differ from those of one device"
    return _timed(replace(plan, schedule="pipedream", schedule_options=(), stages=stages, notes=(*plan.notes, note)))


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
