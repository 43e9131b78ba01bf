"""Replicas on unlike devices: each kind of device runs the whole program, on a share of the microbatches by its speed.

The variables are, for each group of like devices, a plan of the whole program (the one-stage problem, for the group's
own number of microbatches), and the shares. With seconds s_i of a microbatch and o_i once a step, handing microbatches
out one by one, each to the group that finishes it first, minimises max(a_i s_i + o_i): the time of each group grows
with its share. The first shares come from estimates of the program's parts (`stages.estimates`); plans are solved for
them, and once more where the solved plans change the shares.

After its last microbatch each group sends its gradients to all others, and each updates its own copy.

Numbers of microbatches are looked at in the order of what they promise: as the estimates of the fewest say, then as
their own do, then by a plan.

Known limits: one replica for each kind of device; results of the loss function that grow with the batch are not
gathered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from math import inf, isfinite

import numpy as np

from ...cluster import Cluster
from ...errors import MemoryExceeded, PlanError, size_words
from ...plan import Plan
from ...program.staged import StagedProgram
from ...schedule import replicas
from ...simulate import Timing, simulate
from ..considered import Considered
from ..inter.problem import Option, PlacedStage
from ..inter.submeshes import Submesh, Submeshes
from ..intra.parameters import ParameterInfo
from ..restrictions.constraints import Constraints
from ..result import NothingFaster, SearchResult
from ..stages.costs import StageCosts
from ..stages.reserve import MissedMemory
from .assembly import plan_of, planned_stage
from .timing import stage_timing

# The schedule, by name.
REPLICAS = replicas.__name__

# Rounds of solving replicas for their shares and sharing out again, at most. Chosen, not measured.
_MOST_ROUNDS = 2

# What is known of a number of microbatches; of equal seconds the most certain comes first.
_SOLVED, _EXPECTED, _TOLD = range(3)

# Of numbers known by estimates alone and within this factor of the best, the fewest come first. Chosen, not measured.
_AS_GOOD = 1.1


def like_groups(cluster: Cluster) -> tuple[Submesh, ...]:
    """The runs of hosts of one kind.

    >>> from meshwright.cluster import load_cluster
    >>> [group.size for group in like_groups(load_cluster("p4d.24xlarge:2+p3.16xlarge:1"))]
    [16, 8]
    """
    sizes = [sum(host.devices for host in run) for _, run in groupby(cluster.hosts, key=lambda host: host.device)]
    return tuple(Submesh(first, stop) for first, stop in pairwise(accumulate(sizes, initial=0)))


def shared_out(microbatches: int, seconds: Sequence[float], once: Sequence[float]) -> tuple[int, ...]:
    """How many microbatches each group runs so that the last one finishes as early as possible, at least one each.

    >>> shared_out(8, (1.0, 3.0), (0.0, 0.0))
    (6, 2)

    Args:
      microbatches: in all, no fewer than there are to share them.
      seconds: of one, by who runs it.
      once: seconds of each besides.
    """
    shares = [1] * len(seconds)
    for _ in range(microbatches - len(shares)):
        done = [(count + 1) * each + more for count, each, more in zip(shares, seconds, once, strict=True)]
        shares[done.index(min(done))] += 1
    return tuple(shares)


class Replicas:
    """Plans of replicas of one program in one number of microbatches.

    Args:
      program: as one stage, at the size of one microbatch.
      parameters: of the source program.
      cluster: in which hosts of a kind are together.
      constraints: what is fixed.
      remat: as the user asked.
    """

    def __init__(
        self, program: StagedProgram, *, parameters: Sequence[ParameterInfo], cluster: Cluster,
        constraints: Constraints, remat: str | None,
    ) -> None:  # fmt: skip
        self.program, self.groups = program, like_groups(cluster)
        self._submeshes = submeshes = Submeshes(cluster)
        self._costs_of = partial(
            StageCosts, parameters=parameters, submeshes=submeshes, constraints=constraints, remat=remat
        )
        self._costs: dict[int, StageCosts] = {}

    @property
    def usable_bytes(self) -> list[float]:
        """The usable bytes of a device of each group."""
        return [self._submeshes.part(group).device.usable_memory_bytes for group in self.groups]

    @property
    def exchange_seconds(self) -> list[float]:
        """The seconds in which each group sends its gradients to all others."""
        graph = self.program.graph
        size = sum(graph.values[graph.inputs[p]].bytes for p in graph.parameters)
        seconds = self._submeshes.transfer_seconds
        return [sum(seconds(one, other, size) for other in self.groups if other != one) for one in self.groups]

    def nothing_fits(self, microbatches: int) -> MemoryExceeded:
        """The error for a number of microbatches in which some kind of device cannot hold the program."""
        return MemoryExceeded(
            refused=f"replicas on the {len(self.groups)} kinds of device of cluster {self._submeshes.cluster.name}",
            got=f"{size_words(min(self.usable_bytes))} usable on a device of the least memory",
            needed=f"the whole program on each kind of device, in {microbatches} microbatches", where="schedule=",
            try_="stages, which need not be alike; more microbatches, or more devices of the smaller kind",
        )  # fmt: skip

    def expected(self, microbatches: int) -> tuple[float, tuple[int, ...]]:
        """Seconds of a step in so many microbatches by the estimates of this program's parts, each microbatch taking
        and keeping its share, and how they are shared out; infinite where nothing fits. What smaller microbatches lose
        is left out, and so is what parts of the program lose together."""
        here, whole, one = self.program.microbatches, np.array([0, len(self.program.layers)]), np.ones(1)
        costs = self._run(here)
        each = [float(costs.shared(whole, one, 1, group, here / microbatches)[0]) for group in self.groups]
        if not all(map(isfinite, each)):
            return inf, ()
        once = self.exchange_seconds
        shares = shared_out(microbatches, each, once)
        return max(n * s + o for n, s, o in zip(shares, each, once, strict=True)), shares

    def plan(self, limit_bytes: Sequence[float]) -> Plan | None:
        """The plan with the best shares of the microbatches; None if a replica does not fit.

        Args:
          limit_bytes: of each group what may be counted on a device.
        """
        count = self.program.microbatches
        _, shares = self.expected(count)
        if not shares or min(limit_bytes) <= 0:
            return None
        for _ in range(_MOST_ROUNDS):
            solved = [self._solved(*one) for one in zip(self.groups, shares, limit_bytes, strict=True)]
            found = [one for one in solved if one is not None]
            if len(found) < len(self.groups):
                return None
            # A replica's best layouts depend on its share, and shares on what the layouts take.
            exchanged = zip(found, self.exchange_seconds, strict=True)
            once = [option.per_step_seconds + seconds for (_, option), seconds in exchanged]
            better = shared_out(count, [option.seconds for _, option in found], once)
            if better == shares:
                break
            shares = better
        else:
            found = [one for one in map(self._solved, self.groups, shares, limit_bytes) if one is not None]
        return self._assembled(shares, found) if len(found) == len(self.groups) else None

    def _solved(self, group: Submesh, share: int, limit_bytes: float) -> tuple[StageCosts, Option] | None:
        """The fastest option of a group for its share, with its costs; None where nothing fits."""
        costs = self._run(share)
        option = costs.solve_within(0, len(self.program.layers), group, 1, limit_bytes)
        return (costs, option) if option is not None else None

    def _run(self, times: int) -> StageCosts:
        """The costs of the program where a step runs it so many times."""
        if times not in self._costs:
            self._costs[times] = self._costs_of(replace(self.program, microbatches=times))
        return self._costs[times]

    def _assembled(self, shares: tuple[int, ...], solved: Sequence[tuple[StageCosts, Option]]) -> Plan:
        program, groups, tags = self.program, self.groups, [option.tag for _, option in solved]
        timings = [stage_timing(*one) for one in zip(tags, self.exchange_seconds, strict=True)]
        stages = [
            planned_stage(
                costs.solver, PlacedStage(0, len(program.layers), group, option), 1, 0, timing, timing.workspace_bytes
            )
            for group, (costs, option), timing in zip(groups, solved, timings, strict=True)
        ]
        schedule = replicas(len(groups), program.microbatches, shares=shares)
        timeline = simulate(schedule, Timing(stages=tuple(timings), updates_wait_for_all=True))
        return plan_of(
            program, self._submeshes.cluster, stages, tags, schedule=schedule.name, options=(("shares", shares),),
            step_seconds=timeline.step_seconds, bubble_fraction=timeline.bubble_fraction,
        )  # fmt: skip


class ReplicaSearch:
    """The search over numbers of microbatches, run once for each memory limit: what does not depend on memory is kept
    between runs.

    Args:
      made: the replicas in a number of microbatches; raises PlanError where the step cannot be cut so.
      counts: numbers of microbatches, ascending.
      tell: called with a few words at each part of the work.

    Attributes:
      refusal: the error where nothing fits.

    Raises:
      MemoryExceeded: if some kind of device cannot hold the program.
      PlanError: if the step can be cut into none of them, or replicas cannot share it.
    """

    def __init__(self, made: Callable[[int], Replicas], counts: Sequence[int], tell: Callable[[str], None]) -> None:
        self._made, self._tell = cache(made), tell
        self._looked_at: dict[int, Considered] = {}
        self._lost: dict[int, float] = {}  # by number, what its own estimates are beyond those of the fewest
        coarsest = self._coarsest(counts)
        mine = [count for count in counts if count >= coarsest.program.microbatches]
        self._told = {count: coarsest.expected(count)[0] for count in mine}
        # By number its seconds, and what they are known by.
        self._left = {count: (least, _TOLD) for count, least in self._told.items() if isfinite(least)}
        self.refusal = coarsest.nothing_fits(counts[-1])
        if not self._left:
            raise self.refusal

    def _coarsest(self, counts: Sequence[int]) -> Replicas:
        """Of the fewest microbatches into which the step can be cut."""
        refused: PlanError | None = None
        for count in counts:
            try:
                return self._made(count)
            except PlanError as error:
                refused = refused or error
        assert refused is not None  # there is a number
        raise refused

    def run(self, missed: MissedMemory, *, seconds: float, faster_than_seconds: float) -> SearchResult:
        """The fastest plan.

        Args:
          missed: what may not be counted on a device.
          seconds: after which the best plan so far is taken, or none where one is known before.
          faster_than_seconds: a plan whose step takes longer is not wanted.

        Raises:
          NothingFaster: if no plan is that fast, or none is known to be when the time is over.
          MemoryExceeded: if nothing fits.
        """
        until, plans, refused = time.perf_counter() + seconds, dict[int, SearchResult](), None
        left = dict(self._left)
        while left:
            late, count = time.perf_counter() > until, self._most_promising(left)
            if late and plans:
                count = min(plans, key=lambda one: plans[one].step_seconds)
            out_of_time = late and not plans and isfinite(faster_than_seconds)
            if out_of_time or self._bound(left, count) >= faster_than_seconds:
                break
            if count in plans:
                others = [plans[n].least_seconds if n in plans else left[n][0] for n in left if n != count]
                return plans[count].beside_candidates(self._considered(left)).beside(min(others, default=inf))
            try:
                if left[count][1] == _TOLD:
                    self._left[count] = left[count] = self._expected(count), _EXPECTED
                else:
                    plans[count] = self._planned(count, missed)
                    left[count] = plans[count].step_seconds, _SOLVED
            except PlanError as error:
                del left[count]
                refused = refused or error
                self._looked_at[count] = Considered(count, str(error), schedule=REPLICAS)
        if refused is not None and not left and not isfinite(faster_than_seconds):
            raise refused
        raise NothingFaster(min((least for least, _ in left.values()), default=inf), self._considered(left))

    def _bound(self, left: Mapping[int, tuple[float, int]], count: int) -> float:
        """What a number promises: what coarser microbatches lose finer ones lose too. (That decides what is looked at,
        and is not told for certain.)"""
        seconds, known = left[count]
        lost = max((one for n, one in self._lost.items() if n < count), default=0.0) if known == _TOLD else 0.0
        return seconds + lost

    def _most_promising(self, left: Mapping[int, tuple[float, int]]) -> int:
        bounds = {count: (self._bound(left, count), known, count) for count, (_, known) in left.items()}
        least, known, first = min(bounds.values())
        if known != _TOLD:
            return first
        # What fewer microbatches lose says more of finer ones than the other way round.
        return min(n for n, (seconds, known, _) in bounds.items() if known == _TOLD and seconds <= _AS_GOOD * least)

    def _considered(self, left: Mapping[int, tuple[float, int]]) -> tuple[Considered, ...]:
        """Each number that was looked at, and all others as one."""
        others = [seconds for seconds, known in left.values() if known == _TOLD]
        rest = [Considered("replicas in other numbers", searched=False, least_seconds=min(others))] if others else []
        return *self._looked_at.values(), *rest

    def _expected(self, count: int) -> float:
        """Seconds by a number's own estimates.

        Raises:
          PlanError: if there are no replicas in so many microbatches.
        """
        self._tell(f"sharing out {count} microbatches")
        replicas = self._made(count)
        seconds, shares = replicas.expected(count)
        if not isfinite(seconds):
            raise replicas.nothing_fits(count)
        self._lost[count] = seconds - self._told[count]
        self._note(count, seconds, shares, "by estimates")
        return seconds

    def _planned(self, count: int, missed: MissedMemory) -> SearchResult:
        """The best plan in so many microbatches; it takes as long as it does.

        Raises:
          MemoryExceeded: if it does not fit.
        """
        replicas = self._made(count)
        rooms = enumerate(replicas.usable_bytes)
        found = replicas.plan([missed.limit_of_rank(count, group, room) for group, room in rooms])
        if found is None:
            raise replicas.nothing_fits(count)
        result = SearchResult(plan=found, program=replicas.program, considered=())
        self._note(count, result.step_seconds, found.shares)
        return result

    def _note(self, count: int, seconds: float, shares: Sequence[int], *certainty: str) -> None:
        words = ", ".join([*map(str, shares), *certainty])
        self._looked_at[count] = Considered(count, f"with {words}", schedule=REPLICAS, seconds=seconds)
