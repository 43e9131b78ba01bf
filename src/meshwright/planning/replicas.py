"""Plans of replicas: on a cluster of several kinds of device a copy of the program for each kind, and shares of the
batch by their speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite

from ..cluster import Cluster, HostOrder, host_orders
from ..errors import MemoryExceeded, PlanError, size_words
from ..lowering.pipeline.local_stages import check_replicas
from ..program.staged import staged_program
from ..search.considered import Considered
from ..search.intra.parameters import parameter_infos
from ..search.pipelines.replicas import Replicas, like_groups
from ..search.result import NothingFaster, SearchResult
from ..search.stages.reserve import MissedMemory
from .microbatch_counts import microbatch_counts
from .refine import Refinement
from .request import PlanRequest, on_devices

REPLICAS = "replicas"

# What is known of a number of microbatches; of equal seconds the most certain comes first.
_FITS, _SOLVED, _EXPECTED, _TOLD = range(4)

# Of numbers of which little is known, and that by as much as this are as good as the best, the fewest come first.
_AS_GOOD = 1.1


def may_have_replicas(asked: PlanRequest) -> bool:
    """Whether the cluster has several kinds of device, and the request leaves open what each of them does."""
    kinds = _kinds(asked.cluster)
    free = not asked.mesh and asked.submeshes is None and asked.preset is None
    return kinds > 1 and free and asked.stages in (None, kinds)


def plan_replicas(asked: PlanRequest) -> SearchResult:
    """The fastest plan of replicas, as many as there are kinds of device.

    Numbers of microbatches are looked at in the order of what they promise: as the estimates of the fewest say, then as
    their own do, then by a plan, which is written out only if nothing else promises to be as fast.

    Raises:
      MemoryExceeded: if some kind of device cannot hold the program.
      NothingFaster: if no plan is as fast as asked for.
      PlanError: if there can be no replicas of this step on this cluster.
    """
    kinds = _kinds(asked.cluster)
    order = next((one for one in host_orders(asked.cluster) if len(like_groups(one.cluster)) == kinds), None)
    if order is None or not may_have_replicas(asked):
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
    tries = _Tries(asked, order, counts)
    count = tries.best()
    if count is None:
        if not tries.found and tries.refused is not None and not isfinite(asked.faster_than_seconds):
            if isinstance(tries.refused, MemoryExceeded):
                tries.refused.least_seconds = tries.least_seconds
            raise tries.refused
        raise NothingFaster(tries.least_seconds, tries.considered)
    found = tries.found[count]
    found = replace(found, plan=on_devices(found.plan, order.devices, asked.cluster), considered=tries.considered)
    return found.beside(tries.least_seconds)


class _Tries:
    """Numbers of microbatches, and what is known of each, with the hosts of a kind together.

    Attributes:
      found: by number a plan that fits.
      refused: why the first number without a plan has none.

    Raises:
      MemoryExceeded: if some kind of device cannot hold the program.
      PlanError: if the step can be cut into none of them, or replicas cannot share it.
    """

    def __init__(self, asked: PlanRequest, order: HostOrder, counts: Sequence[int]) -> None:
        self._asked, self._order = asked, order
        self._refinement = Refinement(asked)
        self._made: dict[int, Replicas] = {}
        self._looked_at: dict[int, Considered] = {}
        self._lost: dict[int, float] = {}  # by number, what its own estimates are beyond those of the fewest
        self._bounds: dict[int, float] = {}  # by number that was solved, a lower bound in all of the memory
        self.found: dict[int, SearchResult] = {}
        self.refused: PlanError | None = None
        coarsest = self._coarsest(counts)
        mine = [count for count in counts if count >= coarsest.program.microbatches]
        self._told = {count: coarsest.expected(count)[0] for count in mine}
        # By number its seconds, and what they are known by.
        self._left = {count: (least, _TOLD) for count, least in self._told.items() if isfinite(least)}
        if not self._left:
            raise _over(asked, coarsest, counts[-1])

    @property
    def least_seconds(self) -> float:
        """What any takes at least, by what is known now; infinite where nothing is left. That finer microbatches lose
        what coarser ones do decides what is looked at, and is not told for certain. What memory was reserved rules out
        may fit all the same, and counts."""
        bounds = {count: seconds for count, (seconds, _) in self._left.items()} | self._bounds
        return min(bounds.values(), default=inf)

    @property
    def considered(self) -> tuple[Considered, ...]:
        """Each number that was looked at, and all others as one."""
        others = [seconds for seconds, known in self._left.values() if known == _TOLD]
        rest = [Considered("replicas in other numbers", searched=False, least_seconds=min(others))] if others else []
        return *self._looked_at.values(), *rest

    def best(self) -> int | None:
        """The number with the fastest plan; None if none is as fast, or is known to be when the time is over."""
        while (count := self._next()) is not None:
            bound, known = self._left[count]
            if known == _FITS:
                return count
            try:
                self._left[count] = self._look(count, known), known - 1
            except NothingFaster:
                continue  # the time is over
            except PlanError as error:
                del self._left[count]
                if self._refinement.leanest is not None:
                    self._bounds.setdefault(count, bound)
                self.refused = self.refused or error
                self._looked_at[count] = Considered(count, str(error), schedule=REPLICAS)
        return None

    @property
    def _is_known(self) -> bool:
        """Whether a plan is known, here or before."""
        return bool(self.found) or isfinite(self._asked.faster_than_seconds)

    def _next(self) -> int | None:
        """The number that promises most; when the time is over and a plan is known, of those with a plan that fits."""
        late = self._refinement.spare_seconds < 0 and self._is_known
        bounds = {
            count: (self._bound(count), known, count)
            for count, (_, known) in self._left.items()
            if not late or known == _FITS
        }
        if not bounds or min(bounds.values())[0] >= self._asked.faster_than_seconds:
            return None
        least, known, first = min(bounds.values())
        if known != _TOLD:
            return first
        # What fewer microbatches lose says more of finer ones than the other way round.
        return min(n for n, (seconds, known, _) in bounds.items() if known == _TOLD and seconds <= _AS_GOOD * least)

    def _bound(self, count: int) -> float:
        """What a number promises: what coarser microbatches lose finer ones lose too."""
        seconds, known = self._left[count]
        lost = max((one for n, one in self._lost.items() if n < count), default=0.0) if known == _TOLD else 0.0
        return seconds + lost

    def _look(self, count: int, known: int) -> float:
        """Find out the next thing about a number, beyond what is known: its seconds.

        Raises:
          PlanError: if there is no plan in so many microbatches.
        """
        replicas, certainty = self._replicas(count), ""
        over = _over(self._asked, replicas, count)

        def plan(missed: MissedMemory, seconds: float) -> SearchResult:
            """The best plan in the memory that is left; it takes as long as it does, whatever `seconds` there are."""
            rooms = enumerate(replicas.usable_bytes)
            found = replicas.plan([missed.limit_of_rank(count, group, room) for group, room in rooms])
            if found is None:
                raise over
            return SearchResult(plan=found, program=replicas.program, considered=())

        if known == _TOLD:
            self._asked.tell(f"sharing out {count} microbatches")
            seconds, shares = replicas.expected(count)
            if not isfinite(seconds):
                raise over
            self._lost[count], certainty = seconds - self._told[count], "by estimates"
        else:
            if known == _EXPECTED:
                found, certainty = plan(self._refinement.missed, 0.0), "if it fits"
                reserved = self._refinement.leanest is not None
                self._bounds[count] = self._left[count][0] if reserved else found.least_seconds
            else:
                found = self.found[count] = self._refinement.run(
                    plan, what=over.refused, where=over.where, try_=over.try_, known=self._is_known
                )
            seconds, shares = found.step_seconds, found.plan.shares
        words = ", ".join(filter(None, [*map(str, shares), certainty]))
        self._looked_at[count] = Considered(count, f"with {words}", schedule=REPLICAS, seconds=seconds)
        return seconds

    def _coarsest(self, counts: Sequence[int]) -> Replicas:
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

    def _replicas(self, count: int) -> Replicas:
        if count not in self._made:
            asked, program = self._asked, self._asked.program(count)
            asked.constraints.check(program.input_names, [program.graph.values[v].name for v in program.graph.inputs])
            check_replicas(program)
            self._made[count] = Replicas(
                staged_program(program, layers=1, scan_splits={}), parameters=parameter_infos(program),
                cluster=self._order.cluster, constraints=asked.constraints, remat=asked.remat,
            )  # fmt: skip
        return self._made[count]


def _kinds(cluster: Cluster) -> int:
    return len({host.device for host in cluster.hosts})


def _over(asked: PlanRequest, replicas: Replicas, microbatches: int) -> MemoryExceeded:
    return MemoryExceeded(
        refused=f"replicas on the {len(replicas.groups)} kinds of device of cluster {asked.cluster.name}",
        got=f"{size_words(min(replicas.usable_bytes))} usable on a device of the least memory",
        needed=f"the whole program on each kind of device, in {microbatches} microbatches", where="schedule=",
        try_="stages, which need not be alike; more microbatches, or more devices of the smaller kind",
    )  # fmt: skip
