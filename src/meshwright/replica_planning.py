"""Plans of replicas: on a cluster of several kinds of device a copy of the program for each kind, and shares of the
batch by their speed."""

from __future__ import annotations

import time
from collections.abc import Hashable
from math import inf, isfinite

from .cluster import Cluster, HostOrder, host_orders
from .errors import MemoryExceeded, PlanError, size_words
from .microbatch_counts import microbatch_counts
from .one_stage_planning import MARGIN
from .plan import Plan
from .plan_request import Planning, PlanRequest, in_cluster
from .presets.written import held_bytes, usable_bytes, written_out
from .program.staged import staged_program
from .program.trace import Program
from .runtime.pipeline.local_stages import check_replicas
from .runtime.pipeline.stage_memory import StageMemory
from .search.parameters import parameter_infos
from .search.replicas import ReplicaRequest, Replicas, like_groups
from .search.stage_result import NothingFaster

REPLICAS = "replicas"

# How often a plan whose traced peak is too high is solved again in less memory.
_ATTEMPTS = 4

# The fewest microbatches by whose estimate a step takes this much longer than by the best are looked at first.
_AS_GOOD = 1.03


def may_have_replicas(asked: PlanRequest, stages: int | None) -> bool:
    """Whether the cluster has several kinds of device, and the request leaves open what each of them does."""
    kinds = _kinds(asked.cluster)
    free = not asked.mesh and asked.submeshes is None and asked.preset is None
    return kinds > 1 and free and stages in (None, kinds)


def plan_replicas(asked: PlanRequest, stages: int | None, *, faster_than_seconds: float = inf) -> Planning:
    """The fastest plan of replicas.

    The estimates of the fewest microbatches say how many balance the devices and fit; from there numbers are tried
    until a finer one is slower.

    Args:
      asked: the request.
      stages: how many replicas; None for as many as there are kinds of device.
      faster_than_seconds: a plan whose step takes longer is not wanted.

    Raises:
      MemoryExceeded: if some kind of device cannot hold the program.
      NothingFaster: if no plan is that fast.
      PlanError: if there can be no replicas of this step on this cluster.
    """
    begun, kinds = time.perf_counter(), _kinds(asked.cluster)
    order = next((one for one in host_orders(asked.cluster) if len(like_groups(one.cluster)) == kinds), None)
    if order is None or not may_have_replicas(asked, stages):
        raise PlanError(
            refused="the schedule replicas", got=f"cluster {asked.cluster.name} of {asked.cluster.device_kinds}",
            needed="several kinds of device, each with leaf switches of its own, a replica for each, and no mesh, "
            "submeshes or preset", where="schedule=", try_="schedule=None, for the best of the others",
        )  # fmt: skip
    counts = [count for count in microbatch_counts(asked) if count >= kinds]
    if not counts:
        raise PlanError(
            refused="the schedule replicas", got=f"at most {max(microbatch_counts(asked))} microbatches",
            needed=f"one for each of {kinds} kinds of device", where="microbatches=", try_="a larger batch",
        )  # fmt: skip
    asked.tell("sharing microbatches out")
    coarsest = _replicas(asked, order, asked.program(counts[0]))
    expected = {count: coarsest.expected(count)[0] for count in counts}
    least = min(expected.values())
    if not isfinite(least):
        raise _over(asked, coarsest, counts[-1])
    if least >= faster_than_seconds:
        raise NothingFaster(least, (f"replicas: not searched, {least:.6g} s at the very least",))
    known: dict[Hashable, StageMemory] = {}
    best: tuple[Program, Plan, float] | None = None
    over: MemoryExceeded | None = None
    considered: list[str] = []
    for count in counts[next(n for n, c in enumerate(counts) if expected[c] <= _AS_GOOD * least) :]:
        asked.tell(f"sharing out {count} microbatches")
        program = asked.program(count)
        try:
            plan = _fitting(asked, coarsest if count == counts[0] else _replicas(asked, order, program), known)
        except MemoryExceeded as error:
            over = over or error
            considered.append(f"{count} microbatches, replicas: {error}")
            continue
        assert plan.predicted is not None  # the search prices what it finds
        seconds = plan.predicted.step_seconds
        considered.append(f"{count} microbatches, replicas: {seconds:.6g} s with {', '.join(map(str, plan.shares))}")
        if best is not None and seconds >= best[2]:
            break
        best = program, plan, seconds
        if asked.left_seconds < 0:
            break
    if best is None:
        assert over is not None  # some number was tried
        raise over
    program, plan, seconds = best
    if seconds >= faster_than_seconds:
        raise NothingFaster(seconds, tuple(considered))
    return Planning(
        program=program, plan=in_cluster(plan, order, asked.cluster), cluster=asked.cluster,
        seconds=time.perf_counter() - asked.started, trace_seconds=0.0, solve_seconds=time.perf_counter() - begun,
        considered=tuple(considered),
    )  # fmt: skip


def _kinds(cluster: Cluster) -> int:
    return len({host.device for host in cluster.hosts})


def _replicas(asked: PlanRequest, order: HostOrder, program: Program) -> Replicas:
    """Of a traced step.

    Raises:
      PlanError: if it is one that replicas cannot share.
    """
    check_replicas(program)
    staged = staged_program(program, layers=1, scan_splits={})
    infos = parameter_infos(program)
    return Replicas(
        ReplicaRequest(program=staged, parameters=infos, cluster=order.cluster, pins=asked.pins, remat=asked.remat)
    )


def _fitting(asked: PlanRequest, replicas: Replicas, known: dict[Hashable, StageMemory]) -> Plan:
    """The best plan whose written-out replicas fit."""
    program, usable = replicas.request.program, replicas.usable_bytes
    limits = [room / MARGIN for room in usable]
    for _ in range(_ATTEMPTS):
        plan = replicas.plan(limits)
        if plan is None:
            break
        counted = held_bytes(plan)
        plan = written_out(plan, program, asked.cluster.device.platform, known=known)
        peaks = held_bytes(plan)
        if all(MARGIN * peak <= most for peak, most in zip(peaks, usable_bytes(plan), strict=True)):
            return plan
        # What is not counted stays about the same: gradients that arrive, and what the update takes.
        missed = [max(peak - count, 0.0) for peak, count in zip(peaks, counted, strict=True)]
        limits = [min(limit, room / MARGIN - more) for limit, room, more in zip(limits, usable, missed, strict=True)]
    raise _over(asked, replicas, program.microbatches)


def _over(asked: PlanRequest, replicas: Replicas, microbatches: int) -> MemoryExceeded:
    return MemoryExceeded(
        refused=f"replicas on the {len(replicas.groups)} kinds of device of cluster {asked.cluster.name}",
        got=f"{size_words(min(replicas.usable_bytes))} usable on a device of the least memory",
        needed=f"the whole program on each kind of device, in {microbatches} microbatches", where="schedule=",
        try_="stages, which need not be alike; more microbatches, or more devices of the smaller kind",
    )  # fmt: skip
