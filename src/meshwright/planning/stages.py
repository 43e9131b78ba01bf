"""Plans of several stages: the step traced for each number of microbatches, cut into layers, and searched."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod

from ..cluster import HostOrder, host_orders
from ..errors import MemoryExceeded, PlanError
from ..plan import Collective, Plan, Stage
from ..program.graph import Value
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
from .refine import Missed
from .request import PlanRequest, on_devices

# Schedules that are not searched under their own name, and what stands for them in the search.
SEARCHED_AS: Mapping[str, str] = {"pipedream": "one_f_one_b", "inference": "one_f_one_b"}


def is_large(program: Program) -> bool:
    """Whether a program is one for several stages, unless it fits in few microbatches."""
    return program.graph.runs > SMALL_PROGRAM


class SeveralStages:
    """The search for plans of as many stages as are asked for, or of any number from two on. Where hosts are of several
    kinds, their groups are put in every order: which kind has the first stages, and which the last. What one call
    learns the next one knows.

    Args:
      asked: the request.
    """

    def __init__(self, asked: PlanRequest) -> None:
        self._asked = asked
        given = asked.submeshes is not None or asked.preset is not None
        self._orders = host_orders(asked.cluster)[: 1 if given else None]
        self._searches: dict[tuple[int, ...], StageSearch] = {}

    def find(self, missed: Missed, faster_than_seconds: float, seconds: float) -> SearchResult:
        """The fastest plan.

        Args:
          missed: what may not be counted on a device, by order of the hosts.
          faster_than_seconds: a plan whose step takes longer is not wanted.
          seconds: that the search may take.

        Raises:
          PlanError: if the request makes no sense, or nothing fits.
          NothingFaster: if no plan is that fast.
        """
        until = time.perf_counter() + seconds
        parts = [
            Part(words=words, search=partial(self._in_order, order, words, missed(words)))
            for order in self._orders
            for words in [f"hosts in the order {', '.join(map(str, order.devices))}"]
        ]
        if len(parts) == 1:
            return parts[0].search(faster_than_seconds, seconds)
        return best_of_parts(
            parts, left_seconds=lambda: until - time.perf_counter(), floor=lambda: self._asked.least_work_seconds,
            faster_than_seconds=faster_than_seconds, worth=0.0,
        )  # fmt: skip

    def _in_order(
        self, order: HostOrder, words: str, missed: MissedMemory, faster_than_seconds: float, seconds: float
    ) -> SearchResult:
        """The fastest plan whose stages follow the hosts in an order, on the cluster as it was given."""
        asked, until = replace(self._asked, cluster=order.cluster), time.perf_counter() + seconds
        counts = microbatch_counts(asked)
        while True:
            asked.tell("searching stages")
            search = self._searches.get(order.devices)
            if search is None:
                request = stage_request(asked, StepPrograms(asked, counts))
                search = self._searches[order.devices] = StageSearch(replace(request, several=asked.stages is None))
            try:
                found = search.run(
                    missed, time_limit_seconds=max(until - time.perf_counter(), 0.0),
                    faster_than_seconds=faster_than_seconds,
                )  # fmt: skip
                break
            except MemoryExceeded:
                counts = finer_counts(asked, max(search.costs.counts))
                if not counts:
                    raise
                del self._searches[order.devices]
        as_asked = replace(found, plan=_under_schedule(asked.schedule, found)).bounded(found.least_seconds)
        if as_asked.counted_seconds >= faster_than_seconds:
            raise NothingFaster(found.least_seconds, found.considered)
        return replace(as_asked, plan=on_devices(as_asked.plan, order.devices, self._asked.cluster), part=words)


def stage_request(asked: PlanRequest, programs: StepPrograms) -> StageRequest:
    """What is asked of the stage search.

    Raises:
      PlanError: if pins or meshes are not of the step and the cluster.
    """
    source, preset, submeshes, stages = programs.any.source, asked.preset, asked.submeshes, asked.stages
    constraints = asked.constraints_in(source)
    _check_mesh(asked)
    schedules = SIMULATED if asked.schedule is None else (SEARCHED_AS.get(asked.schedule, asked.schedule),)
    if preset is not None and preset.chunks > 1:
        stages, schedules = preset.stages * preset.chunks, (INTERLEAVED,)
    elif preset is not None:
        submeshes = (asked.cluster.num_devices // preset.stages,) * preset.stages
    if stages is not None and stages > 1 and submeshes is None:
        Submeshes(asked.cluster).check_stages(stages, most=len(programs.any.layers))
    return StageRequest(
        programs=programs, parameters=parameter_infos(source), cluster=asked.cluster, constraints=constraints,
        remat=asked.remat, submeshes=submeshes, stages=stages, mesh=asked.mesh, schedules=schedules,
        time_limit_seconds=asked.time_limit_seconds, faster_than_seconds=asked.faster_than_seconds,
    )  # fmt: skip


def _check_mesh(asked: PlanRequest) -> None:
    """Refuse logical meshes that no stage can have, or that do not add up to the cluster.

    Raises:
      PlanError: saying how many devices a stage can have.
    """
    devices, stages = asked.cluster.num_devices, asked.stages
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


def _under_schedule(schedule: str | None, found: SearchResult) -> Plan:
    """A plan that was found, under a schedule that is searched under another name, with the seconds that simulating it
    gives. Under PipeDream there is an update for each microbatch, and the pipeline is drained after the last."""
    plan, before = found.plan, found.plan.predicted
    if schedule not in SEARCHED_AS or len(plan.stages) == 1:
        return plan
    if schedule == "pipedream":
        assert isinstance(found.program, StagedProgram)
        graph = found.program.graph
        values = {graph.values[v].name: graph.values[v] for v in graph.inputs}
        stages = tuple(replace(stage, communication=_each_microbatch(stage, plan, values)) for stage in plan.stages)
        note = "asynchronous: gradients are of weights some updates old, so numbers differ from those of one device"
        plan = replace(plan, stages=stages, notes=(*plan.notes, note))
    assert before is not None  # the search prices what it finds
    plan = replace(plan, schedule=schedule, schedule_options=())
    timeline = simulate_plan(plan)
    predicted = replace(
        before, step_seconds=timeline.step_seconds, bubble_fraction=timeline.bubble_fraction,
        tflops_per_device=before.tflops_per_device * before.step_seconds / timeline.step_seconds,
    )  # fmt: skip
    return replace(plan, predicted=predicted)


def _each_microbatch(stage: Stage, plan: Plan, values: Mapping[str, Value]) -> tuple[Collective, ...]:
    """The collectives of a stage whose gradients are synchronised for each microbatch, not once a step."""
    total, more = {one.kind: one for one in stage.communication}, plan.microbatches - 1
    for p in stage.parameters:
        gradient = () if p.scattered else convert(Spec(p.use.dims, partial=p.use.broadcast), p.storage)
        fetch = convert(p.storage, Spec(p.use.dims))
        for move in (*(gradient or ()), *(fetch or ())):
            have = total.get(move.forward or "")
            # A single number is not counted at all.
            if move.forward is not None and have is not None and prod(p.shape) > 1:
                moved = more * prod(p.shape) * values[p.name].itemsize * move.buffer_fraction(stage.sizes)
                total[move.forward] = Collective(kind=move.forward, count=have.count + more, bytes=have.bytes + moved)
    return tuple(total[kind] for kind in sorted(total))
