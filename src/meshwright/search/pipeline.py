"""The stage search: stages, their submeshes, logical meshes and rematerialisation, microbatches and schedule, jointly.

For each number of microbatches and each order of a pipeline, `inter_op` finds the best stages under the costs of
`stage_costs`, which are estimates at first. The ranges that the best of all plans uses are solved, and it is searched
again, until the best plan consists of solved ranges: it is then the best under costs that are exact for it and, but for
conversions between layers, too low for all others. The best plans found on the way are simulated under every schedule
they fit in memory with, the adaptive one included, and the one with the shortest simulated step is taken.

Nothing here needs a device: the cluster is a description, and programs are shapes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np

from ..cluster import Cluster
from ..errors import MemoryExceeded, PlanError
from ..plan import Plan
from ..program.layers import equation_flops
from ..program.staged import StagedProgram, merge_scans
from .inter_op import ORDERS, Crossing, Found, InterOpProblem, Order, PlacedStage, solve_inter_op
from .intra_op import ParameterInfo
from .pins import Pins
from .stage_costs import StageCosts
from .staged_plan import assemble
from .staged_timing import Scheduled, StagedTiming, best_schedule, staged_timing
from .submeshes import Submesh, Submeshes

# Schedules tried on the best plans, the preferred first where steps are equal.
SIMULATED = ("one_f_one_b", "adaptive", "eager_one_f_one_b", "gpipe")

# Plans whose objective is this much longer than the best may still be the best simulated.
_WORTH_SIMULATING = 1.05

_POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64)

# An estimated plan may turn out to take this much longer.
_ESTIMATE_SLACK = 1.5

# Rounds of solving and searching again for one number of microbatches and one order.
_MOST_ROUNDS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What to plan.

    Args:
      programs: the program in layers, one for each number of microbatches to be considered.
      parameters: by position in the programs' `graph.parameters`.
      cluster: where it runs; no device need be present.
      pins: what is fixed.
      remat: "none", "layer", or None to choose for each stage.
      schedules: schedules to choose from, names of `SIMULATED`.
      stages: how many stages there are to be; None to choose.
      submeshes: how many devices each stage has, in order; None to choose.
      mesh: logical meshes to consider on submeshes of so many devices, as (names, sizes); none for all.
      time_limit_seconds: after it, the best plan found by then is taken.
    """

    programs: Sequence[StagedProgram]
    parameters: Sequence[ParameterInfo]
    cluster: Cluster
    pins: Pins = field(default_factory=Pins)
    remat: str | None = None
    schedules: Sequence[str] = SIMULATED
    stages: int | None = None
    submeshes: Sequence[int] | None = None
    mesh: Sequence[tuple[tuple[str, ...], tuple[int, ...]]] = ()
    time_limit_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSearchResult:
    """A plan and what finding it took.

    Args:
      plan: the plan.
      program: the program its equations count in: the core with scans split as the plan says.
      seconds: of the search.
      solves: integer programs solved.
      considered: the best plan of each number of microbatches and order, a line each.
      scheduled: the schedule and its simulation.
    """

    plan: Plan
    program: StagedProgram
    seconds: float
    solves: int
    considered: tuple[str, ...]
    scheduled: Scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    seconds: float
    costs: StageCosts
    stages: tuple[PlacedStage, ...]
    staged: StagedTiming
    scheduled: Scheduled


def search_stages(request: StageRequest) -> StageSearchResult:
    """The fastest staged plan that fits memory.

    Raises:
      PlanError: for a request that makes no sense: more stages than layers or devices, no microbatches, a submesh that
        is none of the cluster, an unknown schedule.
      MemoryExceeded: if no plan fits.
    """
    _check(request)
    return _StageSearch(request).run()


class _StageSearch:
    def __init__(self, request: StageRequest) -> None:
        self.request = request
        self.start = time.perf_counter()
        self.submeshes = Submeshes(request.cluster)
        self.places = _placements(request, self.submeshes)
        self.costs = [self._costs(program) for program in request.programs]
        self.best_objective = float("inf")
        self.finished: dict[tuple[int, tuple[PlacedStage, ...]], float] = {}
        self.considered: list[str] = []

    def _costs(self, program: StagedProgram) -> StageCosts:
        request = self.request
        return StageCosts(
            program, parameters=request.parameters, submeshes=self.submeshes, pins=request.pins, remat=request.remat,
            meshes=request.mesh,
        )  # fmt: skip

    @property
    def late(self) -> bool:
        return time.perf_counter() - self.start > self.request.time_limit_seconds

    def run(self) -> StageSearchResult:
        self._search(bounded=True)
        best = self._simulate()
        if best is None:
            # What was thought possible was not: nothing is left out then.
            self._search(bounded=False)
            best = self._simulate()
        if best is None:
            raise self._nothing_fits()
        merged = self._merged(best)
        best = merged if merged is not None else best
        plan = assemble(best.costs, best.stages, best.staged, best.scheduled, self.request.cluster)
        solves = sum(costs.solver.solves for costs in self.costs) + (
            merged.costs.solver.solves if merged is not None else 0
        )
        return StageSearchResult(
            plan=plan, program=best.costs.program, seconds=time.perf_counter() - self.start, solves=solves,
            considered=tuple(self.considered), scheduled=best.scheduled,
        )  # fmt: skip

    def _search(self, *, bounded: bool) -> None:
        for number, costs in enumerate(self.costs):
            crossings = costs.crossings()
            if not bounded:
                costs.forget_estimates()
            for order in ORDERS:
                if _is_asked(order, self.request.schedules) and not (self.late and self.finished):
                    self._refine(number, costs, order, crossings, bounded=bounded)

    def _refine(
        self, number: int, costs: StageCosts, order: Order, crossings: Sequence[Crossing], *, bounded: bool
    ) -> None:
        """Search, solve what the best plan uses, and search again until it uses nothing else."""
        problem = self._problem(costs, order, crossings)
        name = f"{costs.program.microbatches} microbatches, {order}"
        if bounded:
            self._bound(costs, problem)
        for _ in range(_MOST_ROUNDS):
            found = solve_inter_op(problem, upper_bound=self.best_objective * _WORTH_SIMULATING)
            if found is None:
                self.considered.append(f"{name}: nothing that fits or is as fast")
                return
            left = self._solve(costs, problem, found.stages)
            for stages in (found.stages, *found.others):
                self._keep(number, costs, problem, stages)
            if not left:
                self.best_objective = min(self.best_objective, found.seconds)
                sizes = " ".join(f"{s.last - s.first}x{s.submesh.size}" for s in found.stages)
                self.considered.append(f"{name}: {found.seconds:.6g} s with layers x devices {sizes}")
                return
            if self.late:
                self.considered.append(f"{name}: {found.seconds:.6g} s by estimates, out of time")
                return

    def _bound(self, costs: StageCosts, problem: InterOpProblem) -> None:
        """What is known to be possible bounds what is worth a look: first plans whose memory does not bind, or else
        those of equal stages."""
        if self.best_objective == float("inf") and costs.bound_seconds == float("inf"):
            costs.only_easy = True
            easy = solve_inter_op(problem, beam=1)
            costs.only_easy = False
            plain = [easy] if easy is not None else [self._equal_stages(costs, problem, n) for n in _POWERS_OF_TWO]
            known = [found.seconds for found in plain if found is not None]
            costs.bound_seconds = min([costs.bound_seconds, *(_ESTIMATE_SLACK * seconds for seconds in known)])
        costs.bound_seconds = min(costs.bound_seconds, self.best_objective * _WORTH_SIMULATING)

    def _equal_stages(self, costs: StageCosts, problem: InterOpProblem, count: int) -> Found | None:
        """The plan of `count` stages of like work on as many devices each, by estimates; None if there is none."""
        layers, devices = problem.layers, problem.devices
        if count > layers or devices % count or problem.num_stages not in (None, count):
            return None
        program, size = costs.program, devices // count
        work = equation_flops(program.graph, program.equations)
        done = np.cumsum([work[first:last].sum() for first, last in program.layers])
        ends = np.searchsorted(done, done[-1] * np.arange(1, count) / count) + 1
        bounds = [0, *(int(end) for end in ends), layers]
        chain = {(first, last, Submesh(n * size, (n + 1) * size)) for n, (first, last) in enumerate(pairwise(bounds))}
        if any(first >= last or submesh not in problem.submeshes for first, last, submesh in chain):
            return None
        return solve_inter_op(_restricted(problem, chain, count))

    def _problem(self, costs: StageCosts, order: Order, crossings: Sequence[Crossing]) -> InterOpProblem:
        request = self.request
        return InterOpProblem(
            layers=len(costs.program.layers),
            devices=request.cluster.num_devices,
            submeshes=self.places,
            options=costs.options,
            crossings=crossings,
            transfer_seconds=self.submeshes.transfer_seconds,
            microbatches=costs.program.microbatches,
            memory_limit_bytes=request.cluster.device.usable_memory_bytes,
            order=order,
            num_stages=len(request.submeshes) if request.submeshes is not None else request.stages,
        )

    def _solve(self, costs: StageCosts, problem: InterOpProblem, stages: Sequence[PlacedStage]) -> int:
        """Solve what is not; how many there were."""
        count = 0
        for place, stage in enumerate(reversed(stages), start=1):
            in_flight = problem.in_flight(place)
            if not costs.is_solved(stage.first, stage.last, stage.submesh, in_flight):
                costs.solve(stage.first, stage.last, stage.submesh, in_flight)
                count += 1
        return count

    def _keep(self, number: int, costs: StageCosts, problem: InterOpProblem, stages: Sequence[PlacedStage]) -> None:
        """Remember the best way to run these stages, if all of them are solved."""
        chain = {(s.first, s.last, s.submesh) for s in stages}
        if any(
            not costs.is_solved(s.first, s.last, s.submesh, problem.in_flight(place))
            for place, s in enumerate(reversed(stages), start=1)
        ):
            return
        fixed = _restricted(problem, chain, len(stages))
        found: Found | None = solve_inter_op(fixed, upper_bound=self.best_objective * _WORTH_SIMULATING)
        if found is not None:
            self.best_objective = min(self.best_objective, found.seconds)
            self.finished[number, found.stages] = found.seconds

    def _simulate(self) -> _Candidate | None:
        """The best of the finished plans by simulation."""
        best: _Candidate | None = None
        for (number, stages), seconds in sorted(self.finished.items(), key=lambda one: one[1]):
            if seconds > self.best_objective * _WORTH_SIMULATING:
                break
            candidate = self._scheduled(self.costs[number], stages)
            if candidate is not None and (best is None or candidate.seconds < best.seconds * (1 - 1e-9)):
                best = candidate
        return best

    def _scheduled(self, costs: StageCosts, stages: tuple[PlacedStage, ...]) -> _Candidate | None:
        staged = staged_timing(costs.program, stages, self.submeshes)
        orders = [name for name in SIMULATED if name in self.request.schedules]
        scheduled = best_schedule(staged, costs.program.microbatches, orders if len(stages) > 1 else ["one_f_one_b"])
        if scheduled is None:
            return None
        return _Candidate(
            seconds=scheduled.timeline.step_seconds, costs=costs, stages=stages, staged=staged, scheduled=scheduled
        )

    def _merged(self, best: _Candidate) -> _Candidate | None:
        """The same plan with the pieces of a scan that lie in one stage made one scan again."""
        program = best.costs.program
        bounds = [program.layers[stage.first][0] for stage in best.stages[1:]]
        whole = merge_scans(program, bounds) if program.scan_splits else None
        if whole is None:
            return None
        costs = self._costs(whole)
        stages = []
        for layer, (stage, in_flight) in enumerate(zip(best.stages, best.scheduled.schedule.in_flight, strict=True)):
            options = costs.solve(layer, layer + 1, stage.submesh, in_flight)
            if not options:
                return None
            option = min(options, key=lambda o: whole.microbatches * o.seconds + o.once_seconds)
            stages.append(PlacedStage(layer, layer + 1, stage.submesh, option))
        return self._scheduled(costs, tuple(stages))

    def _nothing_fits(self) -> MemoryExceeded:
        request = self.request
        usable = request.cluster.device.usable_memory_bytes
        counts = ", ".join(str(program.microbatches) for program in request.programs)
        least = min(costs.least_bytes() for costs in self.costs)
        return MemoryExceeded(
            refused=f"a staged plan for {request.cluster.num_devices} x {request.cluster.device.kind}",
            got=f"{usable / 2**20:.1f} MiB usable on a device",
            needed=f"at least {least / 2**20:.1f} MiB on a device for parameters, gradients and optimizer state alone, "
            f"and what {counts} microbatches keep",
            where="the stage search",
            try_="more microbatches, more devices" + ("" if request.remat == "layer" else ', or remat="layer"'),
        )


def _restricted(problem: InterOpProblem, chain: set[tuple[int, int, Submesh]], count: int) -> InterOpProblem:
    """The problem whose only plan is the given stages, each with all its options."""
    inner = problem.options
    return replace(
        problem,
        submeshes=sorted({submesh for _, _, submesh in chain}),
        options=lambda first, last, submesh, k: (
            inner(first, last, submesh, k) if (first, last, submesh) in chain else ()
        ),
        num_stages=count,
    )


def _is_asked(order: Order, schedules: Sequence[str]) -> bool:
    return order in schedules or (order == "eager_one_f_one_b" and "adaptive" in schedules)


def _placements(request: StageRequest, submeshes: Submeshes) -> tuple[Submesh, ...]:
    if request.submeshes is None:
        return submeshes.all
    bounds = list(accumulate(request.submeshes, initial=0))
    found = tuple(Submesh(a, b) for a, b in pairwise(bounds))
    for submesh in found:
        submeshes.check(submesh)
    return found


def _check(request: StageRequest) -> None:
    where = "the request for stages"
    if not request.programs:
        raise PlanError(
            refused="a stage search", got="no program", needed="one for each number of microbatches", where=where,
            try_="microbatches=(4, 8, 16)",
        )  # fmt: skip
    for program in request.programs:
        if program.microbatches < 1:
            raise PlanError(
                refused="the number of microbatches", got=str(program.microbatches), needed="at least 1", where=where,
                try_="microbatches=1",
            )  # fmt: skip
    devices = request.cluster.num_devices
    layers = max(len(program.layers) for program in request.programs)
    stages = len(request.submeshes) if request.submeshes is not None else request.stages
    if stages is not None and (isinstance(stages, bool) or not isinstance(stages, int) or stages < 1):
        raise PlanError(
            refused="the number of stages", got=repr(stages), needed="a whole number of at least 1", where=where,
            try_="stages=None",
        )  # fmt: skip
    if stages is not None and stages > min(layers, devices):
        raise PlanError(
            refused=f"{stages} stages", got=f"{layers} layers and {devices} devices",
            needed="a layer and a device for each stage", where=where,
            try_=f"stages={min(layers, devices)}, or more layers",
        )  # fmt: skip
    if request.submeshes is not None and sum(request.submeshes) != devices:
        raise PlanError(
            refused=f"stages on {', '.join(map(str, request.submeshes))} devices",
            got=f"{sum(request.submeshes)} devices in all", needed=f"the {devices} of cluster {request.cluster.name}",
            where=where, try_="submeshes=None",
        )  # fmt: skip
    if request.remat not in (None, "none", "layer"):
        raise PlanError(
            refused="the rematerialisation", got=repr(request.remat), needed='"none", "layer" or None', where="remat=",
            try_="remat=None",
        )  # fmt: skip
    for name in request.schedules or ("",):
        if name not in SIMULATED:
            raise PlanError(
                refused=f"the schedule {name!r}", got="a name that the stage search does not try",
                needed=f"of {', '.join(SIMULATED)}", where=where, try_="schedules=SIMULATED",
            )  # fmt: skip
