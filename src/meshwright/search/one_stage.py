"""The search for a plan of one stage: microbatches, logical meshes and rematerialisation, best first.

A queue holds what is known of each way to run the step, the one that may be the fastest first. It takes at least what
the fastest layouts take, whatever they hold; then what prices of memory prove (`limited`); then what a solution takes.
The first solution that comes out of the queue is the best plan. More microbatches never take less, if memory is left
aside: their kernels and messages are smaller. So a number of them is not looked at before the fewer ones promise no
better plan than it may have.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf, isfinite
from typing import Literal, get_args

from ..cluster import LogicalMesh
from ..errors import MemoryExceeded, PlanError, size_words
from ..plan import Plan
from ..program.graph import Graph
from ..program.residuals import kept_values
from ..program.segments import Segments, layer_segments, rematerialise
from ..solve import Infeasible
from .alternative import Alternative, nearest, one_stage_words
from .best_known import gap_of
from .choices import values_of_parameters
from .intra_op import IntraOpSolution, trips_of
from .least_work import least_work_seconds
from .limited import LimitedProblem
from .one_stage_plan import SearchRequest, one_stage_plan
from .stage_result import NothingFaster
from .stage_solver import meshes_of
from .workspace import AS_BAD, Workspace, workspace_of

# Three-axis meshes are tried for programs of up to this many operators; a larger program's user names the ones to try.
_SMALL_PROGRAM = 150

# What a problem gets at least when the time is over, so that there is a plan at all.
_LEAST_SECONDS = 1.0

# The relative gap to which problems are solved, and what each axis of a mesh beyond the first has to gain, relative:
# less than the cost model knows.
_GAP, _WORTH_AN_AXIS = 2e-3, 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A plan and what finding it took."""

    plan: Plan
    considered: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()


_Known = Literal["nothing", "fastest", "prices"]
_KNOWN: tuple[_Known, ...] = get_args(_Known)


class _Variant:
    """A step in a number of microbatches, rematerialised or not.

    Args:
      request: the step.
      remat: "none" or "layer".
    """

    def __init__(self, request: SearchRequest, remat: str) -> None:
        self.request, self.remat = request, remat

    @cached_property
    def segments(self) -> Segments:
        """What is rematerialised."""
        return layer_segments(self.request.graph) if self.remat == "layer" else {}

    @cached_property
    def graph(self) -> Graph:
        """The program with that marked."""
        return rematerialise(self.request.graph, self.segments) if self.segments else self.request.graph

    @cached_property
    def workspace(self) -> Workspace:
        """What its backward pass makes beside what is kept."""
        return workspace_of(self.graph, microbatches=self.request.microbatches)

    def least_bytes(self, microbatches: int) -> float:
        """What a device holds at least in so many microbatches, this number of the request or a larger one: the state,
        what the backward pass keeps and its workspace, all of it split over all devices. The latter two are half as
        much in half a microbatch at best."""
        return self._state_bytes + self._kept_bytes * self.request.microbatches / microbatches

    @cached_property
    def _state_bytes(self) -> float:
        graph, infos = self.graph, self.request.parameters
        values = [graph.values[graph.inputs[position]] for position in graph.parameters]
        held = sum(2 * value.bytes + info.optimizer_bytes for value, info in zip(values, infos, strict=True))
        return held / self.request.cluster.num_devices

    @cached_property
    def _kept_bytes(self) -> float:
        graph = self.graph
        made = [v for v in kept_values(graph) - values_of_parameters(graph) if v in graph.producer]
        makers = [graph.operators[graph.producer[v][0]] for v in made]
        kept = sum(graph.values[v].bytes * trips_of(maker, v) for v, maker in zip(made, makers, strict=True))
        return (kept + AS_BAD * self.workspace.bytes) / self.request.cluster.num_devices


class _Way:
    """A way to run the step: a variant of it on a logical mesh. Its problem is built when it is first asked for.

    Args:
      variant: the step.
      mesh: logical mesh.
    """

    def __init__(self, variant: _Variant, mesh: LogicalMesh) -> None:
        self.variant, self.mesh = variant, mesh
        self._pins = variant.request.pins
        self._problem: LimitedProblem | None = None

    @property
    def request(self) -> SearchRequest:
        return self.variant.request

    @property
    def words(self) -> str:
        axes = [(axis.name, axis.size) for axis in self.mesh.axes]
        return one_stage_words(self.request.microbatches, axes, rematerialised=self.variant.remat == "layer")

    @property
    def problem(self) -> LimitedProblem:
        if self._problem is None:
            request = self.request
            self._problem = LimitedProblem(
                self.variant.graph, self.mesh, request.cluster.device, parameters=request.parameters,
                microbatches=request.microbatches, pins=self._pins, carried=request.carried,
                split_dims=request.split_dims if request.microbatches > 1 else (), workspace=self.variant.workspace,
            )  # fmt: skip
        return self._problem

    def relax(self) -> bool:
        """Whether a ZeRO stage that no layout has can be asked for less strictly; from now on it is."""
        if self._pins.zero not in (1, 2) or not self._pins.strict:
            return False
        self._pins, self._problem = replace(self._pins, strict=False), None
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """A solution of a way to run the step."""

    way: _Way
    chosen: IntraOpSolution

    @property
    def seconds(self) -> float:
        return self.chosen.solution.objective

    @property
    def least_seconds(self) -> float:
        return self.seconds * (1 - self.chosen.solution.gap)


@dataclass(order=True, slots=True)
class _Entry:
    """What is known of a way to run the step, or of a number of microbatches.

    Args:
      weight: its least seconds, with what further axes have to gain.
      number: of two of the same weight the first is the simpler one.
      least_seconds: it takes so long at least.
      what: a number of microbatches, or a way to run the step in one.
      known: of a way, how far it has been looked at: what the fastest layouts take, what prices of memory prove.
    """

    weight: float
    number: int
    least_seconds: float = field(compare=False)
    what: int | _Way = field(compare=False)
    known: _Known = field(compare=False, default="nothing")


class OneStageSearch:
    """The search over one step, for as many limits of memory as are asked: problems are built, and what they take
    whatever they hold is found, once.

    Args:
      requests: the step in each number of microbatches to be considered; made when first asked for.
      time_limit_seconds: for all runs together. The search goes on until there is a plan.
      tell: called with a few words at each part of the work.
      gap: to which problems are solved, relative.
    """

    def __init__(
        self, requests: Mapping[int, SearchRequest], *, time_limit_seconds: float = inf,
        tell: Callable[[str], None] = lambda text: None, gap: float = _GAP,
    ) -> None:  # fmt: skip
        self._requests, self._tell, self.gap = requests, tell, gap
        self.counts = sorted(requests)
        self._deadline = time.perf_counter() + time_limit_seconds
        self._ways: dict[int, tuple[_Way, ...]] = {}

    def run(self, limit_bytes: Callable[[int], float], *, faster_than_seconds: float = inf) -> SearchResult:
        """The fastest plan within limits of memory.

        Args:
          limit_bytes: what the search may count on a device, for each number of microbatches.
          faster_than_seconds: a plan whose step takes longer is not wanted.

        Raises:
          PlanError: if the request makes no sense, or the step cannot be cut into any of these numbers.
          MemoryExceeded: if nothing fits, with the least memory that would do.
          NothingFaster: if no plan is that fast.
        """
        run = _Run(self, limit_bytes, faster_than_seconds)
        best = run.best()
        if best is None and isfinite(faster_than_seconds):
            raise NothingFaster(min(run.least_seconds, faster_than_seconds), ())
        if best is None:
            raise run.nothing()
        way = best.way
        gap = gap_of(best.seconds, run.least_seconds)
        plan = one_stage_plan(way.request, way.problem, best.chosen, way.variant.segments, gap=gap)
        seconds = {one.way.words: one.seconds for one in run.solved}
        alternatives = nearest(seconds, but=way.words)
        return SearchResult(plan=plan, considered=tuple(run.considered(best)), alternatives=alternatives)

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() > self._deadline

    @property
    def left_seconds(self) -> float:
        """What one problem may take now."""
        return max(self._deadline - time.perf_counter(), _LEAST_SECONDS)

    def next_count(self, count: int) -> int | None:
        """The next number of microbatches."""
        return next((more for more in self.counts if more > count), None)

    def ways(self, count: int) -> tuple[_Way, ...]:
        """To run the step in so many microbatches, the simplest first.

        Raises:
          PlanError: if the step cannot be cut so.
        """
        if count not in self._ways:
            request = self._requests[count]
            wanted = ("none", "layer") if request.remat is None else (request.remat,)
            if request.remat == "layer" and not layer_segments(request.graph):
                raise PlanError(
                    refused='remat="layer"', got="a program in which no cut into layers saves memory",
                    needed="several layers whose results are kept for the backward pass", where="the loss function",
                    try_='remat="none"',
                )  # fmt: skip
            variants = [_Variant(request, remat) for remat in wanted]
            self._ways[count] = tuple(_Way(one, mesh) for mesh in _meshes(request) for one in variants)
        return self._ways[count]

    def tell(self, way: _Way) -> None:
        """Tell what is looked at."""
        self._tell(f"solving {way.words}")


class _Run:
    """One run of a search.

    Args:
      search: whose problems these are.
      limit_bytes: as of `OneStageSearch.run`.
      most_seconds: more is not wanted.

    Attributes:
      solved: the solutions that were found.
    """

    def __init__(self, search: OneStageSearch, limit_bytes: Callable[[int], float], most_seconds: float) -> None:
        self._search, self._limit_bytes, self._most_seconds = search, limit_bytes, most_seconds
        self._queue: list[_Entry] = []
        self._pushed = 0
        self.solved: list[_Solved] = []
        self._refused: PlanError | None = None
        self._least_bytes: dict[int, float] = {}

    def best(self) -> _Solved | None:
        """The best solution; None if there is none."""
        search = self._search
        self._push(0.0, search.next_count(0))
        while self._queue:
            known = min(self.solved, key=_weight, default=None)
            if known is not None:
                done = (1 - search.gap) * _weight(known) <= self._queue[0].weight
            else:
                done = self._most_seconds <= self.least_seconds
            if done or (search.late and (known is not None or isfinite(self._most_seconds))):
                break
            entry = heapq.heappop(self._queue) if not search.late else self._nearest()
            if isinstance(entry.what, int):
                self._look_at_count(entry.what, entry.least_seconds)
            else:
                self._look_at_way(entry.what, entry)
        return min(self.solved, key=_weight, default=None)

    def _nearest(self) -> _Entry:
        """Out of the queue, what has been looked at most: it is soon a plan."""
        entry = min(self._queue, key=lambda one: (-_KNOWN.index(one.known), one))
        self._queue.remove(entry)
        heapq.heapify(self._queue)
        return entry

    def _push(self, least_seconds: float, what: int | _Way | None, known: _Known = "nothing") -> None:
        if what is None:
            return
        axes = len(what.mesh.axes) if isinstance(what, _Way) else 1
        self._pushed += 1
        heapq.heappush(
            self._queue,
            _Entry(least_seconds * (1 + _WORTH_AN_AXIS * (axes - 1)), self._pushed, least_seconds, what, known),
        )

    def _look_at_count(self, count: int, least_seconds: float) -> None:
        """What a number of microbatches promises: of each mesh, what the fastest layouts take."""
        search = self._search
        try:
            ways = search.ways(count)
        except PlanError as error:
            if count == search.counts[0]:
                raise
            # More microbatches were our idea.
            self._refused = self._refused or error
            return
        request, variants = ways[0].request, dict.fromkeys(way.variant for way in ways)
        floor = max(least_seconds, least_work_seconds(request.graph, count, request.cluster))
        fitting = [one for one in variants if self._fits(one, count)]
        if not fitting:
            self._least_bytes[count] = min(one.least_bytes(count) for one in variants)
            finer = [more for more in search.counts if more > count]
            self._push(floor, next((more for more in finer if any(self._fits(one, more) for one in variants)), None))
            return
        floors: dict[LogicalMesh, float] = {}
        for way in ways:
            if way.variant not in fitting:
                self._needs(way, way.variant.least_bytes(count))
            elif way.variant is not fitting[0] or (floors and search.late):
                # Rematerialised it takes no less.
                self._push(floors.get(way.mesh, floor), way)
            elif isfinite(fastest := self._fastest(way)):
                floors[way.mesh] = max(fastest, floor)
                self._push(floors[way.mesh], way, "fastest")
        if fitting[0] is ways[0].variant:  # else finer microbatches may do without computing anything again
            floor = min(floors.values(), default=floor)
        self._push(floor, search.next_count(count))

    def _fits(self, variant: _Variant, count: int) -> bool:
        return variant.least_bytes(count) <= self._limit_bytes(count)

    def _look_at_way(self, way: _Way, entry: _Entry) -> None:
        """Find out the next thing about a way to run the step."""
        limit = self._limit_bytes(way.request.microbatches)
        self._search.tell(way)
        if entry.known == "nothing":
            if way.variant.remat == "none" or way.variant.segments:
                self._push(max(self._fastest(way), entry.least_seconds), way, "fastest")
            return
        try:
            if entry.known == "fastest":
                chosen, least_seconds = way.problem.bounded_within(limit, gap=self._search.gap)
                if chosen is None or not chosen.solution.proven:
                    self._push(max(least_seconds, entry.least_seconds), way, "prices")
            else:
                seconds = self._search.left_seconds
                chosen = way.problem.proven(limit, gap=self._search.gap, time_limit_seconds=seconds)
        except Infeasible as error:
            if error.least_memory is not None and isfinite(error.least_memory):
                self._needs(way, error.least_memory)
            elif way.relax():
                self._push(entry.least_seconds, way)
            return
        if chosen is not None and chosen.solution.objective < self._most_seconds:
            self.solved = [one for one in self.solved if one.way is not way]
            self.solved.append(_Solved(way=way, chosen=chosen))

    def _fastest(self, way: _Way) -> float:
        """What any layouts take at least; infinite if there are none."""
        try:
            return way.problem.fastest.bound
        except Infeasible:
            return self._fastest(way) if way.relax() else inf

    def _needs(self, way: _Way, least_bytes: float) -> None:
        count = way.request.microbatches
        self._least_bytes[count] = min(least_bytes, self._least_bytes.get(count, inf))

    @property
    def least_seconds(self) -> float:
        """What every plan takes at least."""
        return min((one.least_seconds for one in (*self.solved, *self._queue)), default=inf)

    def considered(self, best: _Solved) -> Iterator[str]:
        """A line for each solution, and for each that was not searched."""
        for one in sorted(self.solved, key=lambda one: one.seconds):
            why = ""
            if one is best:
                why = " (chosen)"
            elif one.seconds < best.seconds:
                why = f" (faster by less than {_WORTH_AN_AXIS:.1%}: the simpler mesh is taken)"
            yield f"{one.way.words}: {one.seconds:.6g} s{why}"
        late = ", out of time" if self._search.late else ""
        for entry in sorted(self._queue):
            if isinstance(entry.what, int):
                what = f"{entry.what} microbatches and more"
            elif any(one.way is entry.what for one in self.solved):
                continue
            else:
                what = entry.what.words
            yield f"{what}: not searched{late}, {entry.least_seconds:.6g} s at the very least"

    def nothing(self) -> PlanError:
        """Why there is no plan."""
        if not self._least_bytes:
            return _contradiction(self._search.ways(self._search.counts[0])[0].request)
        count = min(self._least_bytes, key=lambda count: (self._least_bytes[count], count))
        (way, *_) = self._search.ways(count)
        error = _nothing_fits(way.request, self._limit_bytes(count), self._least_bytes[count])
        if self._refused is not None:
            return error.but(f"more microbatches are out of the question: {self._refused}")
        return error


def _weight(one: _Solved) -> float:
    return one.seconds * (1 + _WORTH_AN_AXIS * (len(one.way.mesh.axes) - 1))


def _meshes(request: SearchRequest) -> tuple[LogicalMesh, ...]:
    if request.mesh:
        return tuple(request.cluster.logical_mesh(sizes, names) for names, sizes in request.mesh)
    return meshes_of(request.cluster, (), max_axes=3 if len(request.graph.operators) <= _SMALL_PROGRAM else 2)


def _nothing_fits(request: SearchRequest, limit: float, least: float) -> MemoryExceeded:
    device = request.cluster.device
    graph = request.graph
    largest = max((graph.values[graph.inputs[p]] for p in graph.parameters), key=lambda v: v.bytes, default=None)
    what = f", largest parameter {largest.name} {largest.shape} of {size_words(largest.bytes)}" if largest else ""
    error = MemoryExceeded(
        refused=f"a plan for {request.cluster.num_devices} x {device.kind}",
        got=f"{size_words(limit)} usable on a device",
        needed=f"at least {size_words(least)} on a device, with {request.microbatches} microbatches{what}",
        where="stage 1 of 1",
        try_="more devices, a smaller batch" + (', or remat="layer"' if request.remat == "none" else ""),
    )
    # No layout needs less than in proportion to the microbatch.
    error.fewest_microbatches = ceil(request.microbatches * least / device.usable_memory_bytes)
    return error


def _contradiction(request: SearchRequest) -> PlanError:
    return PlanError(
        refused=f"a plan for {request.cluster.num_devices} x {request.cluster.device.kind}",
        got="pins or a ZeRO stage that no choice of layouts satisfies, whatever the memory",
        needed="wishes that some layouts satisfy",
        where="pins=, zero=",
        try_="leaving one of them out",
    )
