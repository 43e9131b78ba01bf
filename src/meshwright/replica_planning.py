"""Plans of replicas: on a cluster of several kinds of device a copy of the program for each kind, and shares of the
batch by their speed."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
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

# So many numbers in a row that are no faster end the search on their side.
_PATIENCE = 2


def may_have_replicas(asked: PlanRequest, stages: int | None) -> bool:
    """Whether the cluster has several kinds of device, and the request leaves open what each of them does."""
    kinds = _kinds(asked.cluster)
    free = not asked.mesh and asked.submeshes is None and asked.preset is None
    return kinds > 1 and free and stages in (None, kinds)


def plan_replicas(asked: PlanRequest, stages: int | None, *, faster_than_seconds: float = inf) -> Planning:
    """The fastest plan of replicas.

    The estimates of the fewest microbatches say how many balance the devices and fit; from there finer and coarser
    numbers are tried until two of them in a row are no faster.

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
    tries = _Tries(asked, order)
    coarsest = tries.coarsest(counts)
    counts = [count for count in counts if count >= coarsest.request.program.microbatches]
    expected = {count: coarsest.expected(count)[0] for count in counts}
    least = min(expected.values())
    if not isfinite(least):
        raise _over(asked, coarsest, counts[-1])
    if least >= faster_than_seconds:
        raise NothingFaster(least, (f"replicas: not searched, {least:.6g} s by estimates at best",))
    first = next(number for number, count in enumerate(counts) if expected[count] <= _AS_GOOD * least)
    # Finer ones balance better and fit sooner, coarser ones start fewer kernels, which no estimate knows.
    for run in (counts[first:], [count for count in reversed(counts[:first]) if isfinite(expected[count])]):
        worse = 0
        for count in run:
            if worse == _PATIENCE or (asked.left_seconds < 0 and (tries.best or isfinite(faster_than_seconds))):
                break
            worse = 0 if tries.look_at(count) else worse + 1
    if tries.best is None:
        assert tries.refused is not None  # some number was tried
        raise tries.refused
    program, plan, seconds = tries.best
    if seconds >= faster_than_seconds:
        raise NothingFaster(seconds, tuple(tries.considered))
    return Planning(
        program=program, plan=in_cluster(plan, order, asked.cluster), cluster=asked.cluster,
        seconds=time.perf_counter() - asked.started, trace_seconds=0.0, solve_seconds=time.perf_counter() - begun,
        considered=tuple(tries.considered),
    )  # fmt: skip


class _Tries:
    """Numbers of microbatches that were looked at.

    Args:
      asked: the request.
      order: of the hosts, those of a kind together.

    Attributes:
      best: the fastest plan, with its program and its seconds.
      refused: why the first number without a plan has none.
      considered: a line for each.
    """

    def __init__(self, asked: PlanRequest, order: HostOrder) -> None:
        self._asked, self._order = asked, order
        self._known: dict[Hashable, StageMemory] = {}
        self._made: dict[int, Replicas] = {}
        self.best: tuple[Program, Plan, float] | None = None
        self.refused: PlanError | None = None
        self.considered: list[str] = []

    def coarsest(self, counts: Sequence[int]) -> Replicas:
        """Of the fewest microbatches into which the step can be cut.

        Raises:
          PlanError: if there are none, or replicas cannot share the step.
        """
        refused: PlanError | None = None
        for count in counts:
            try:
                return self._replicas(count)
            except PlanError as error:
                refused = refused or error
        assert refused is not None  # there is a number
        raise refused

    def look_at(self, count: int) -> bool:
        """Find a plan in so many microbatches; whether it is the best so far, or the first fits yet to come."""
        self._asked.tell(f"sharing out {count} microbatches")
        try:
            replicas = self._replicas(count)
            plan = _fitting(self._asked, replicas, self._known)
        except PlanError as error:
            self.refused = self.refused or error
            self.considered.append(f"{count} microbatches, replicas: {error}")
            return self.best is None
        assert plan.predicted is not None  # the search prices what it finds
        seconds = plan.predicted.step_seconds
        shares = ", ".join(map(str, plan.shares))
        self.considered.append(f"{count} microbatches, replicas: {seconds:.6g} s with {shares}")
        if self.best is not None and seconds >= self.best[2]:
            return False
        self.best = replicas.request.program.source, plan, seconds
        return True

    def _replicas(self, count: int) -> Replicas:
        if count not in self._made:
            asked, program = self._asked, self._asked.program(count)
            asked.pins.check(program.input_names, [program.graph.values[v].name for v in program.graph.inputs])
            check_replicas(program)
            self._made[count] = Replicas(
                ReplicaRequest(
                    program=staged_program(program, layers=1, scan_splits={}), parameters=parameter_infos(program),
                    cluster=self._order.cluster, pins=asked.pins, remat=asked.remat,
                )
            )  # fmt: skip
        return self._made[count]


def _kinds(cluster: Cluster) -> int:
    return len({host.device for host in cluster.hosts})


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
