"""The search for a plan of one stage: microbatches, logical meshes and rematerialisation, best first.

A queue holds what is known of each way to run the step, the one that may be the fastest first. It takes at least what
the fastest layouts take, whatever they hold; then what prices of memory prove (`limited`); then what a solution takes.
The first solution that comes out of the queue is the best plan. More microbatches never take less, if memory is left
aside: their kernels and messages are smaller. So a number of them is not looked at before the fewer ones promise no
better plan than it may have.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, get_args

from ...cluster import LogicalMesh
from ...errors import MemoryExceeded, PlanError, room_words, size_words, smaller_words
from ...program.graph import Graph
from ...solve import Infeasible, Unsolved
from ..alternative import nearest
from ..considered import Considered
from ..inter.problem import PlacedStage
from ..inter.submeshes import Submesh
from ..intra.problem import IntraOpSolution
from ..pipelines.assembly import plan_of_one
from ..pipelines.request import StageRequest
from ..prices.least_work import least_work_seconds
from ..result import NothingFaster, SearchResult
from ..stages.costs import option_of
from ..stages.solved import SolvedStage
from .ways import Variant, Way, ways_of, whole_solver

# What a problem gets at least when the time is over, so that there is a plan at all; and at most. Chosen, not measured.
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 20.0

# The relative gap to which problems are solved, and what each axis of a mesh beyond the first has to gain, relative:
# less than the error of the cost model.
GAP, _WORTH_AN_AXIS = 2e-3, 2e-3


_Known = Literal["nothing", "fastest", "prices"]
_KNOWN: tuple[_Known, ...] = get_args(_Known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """A solution of a way to run the step."""

    way: Way
    chosen: IntraOpSolution
    stage: SolvedStage

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
    what: int | Way = field(compare=False)
    known: _Known = field(compare=False, default="nothing")


class OneStageSearch:
    """The search over one step, for as many limits of memory as are asked: problems are built, and what they take
    whatever they hold is found, once.

    Args:
      request: the step in each number of microbatches to be considered, not cut (`program.staged.whole_program`), with
        what is fixed.
      time_limit_seconds: from now on.
      tell: called with a few words at each part of the work.
      gap: to which problems are solved, relative.

    Attributes:
      deadline: when the time is over, by `time.perf_counter`. The search goes on until there is a plan.
    """

    def __init__(
        self, request: StageRequest, *, time_limit_seconds: float = inf,
        tell: Callable[[str], None] = lambda text: None, gap: float = GAP,
    ) -> None:  # fmt: skip
        for names, sizes in request.mesh:
            request.cluster.logical_mesh(sizes, names)  # which refuses what is none of these devices
        self.request, self._tell, self.gap = request, tell, gap
        self.counts = sorted(request.by_microbatches)
        self.deadline = time.perf_counter() + time_limit_seconds
        self._ways: dict[int, tuple[Way, ...]] = {}

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
            raise NothingFaster(min(run.least_seconds, faster_than_seconds), tuple(run.considered(None)))
        if best is None:
            raise run.nothing()
        way, solver = best.way, best.way.variant.solver
        placed = PlacedStage(0, 1, Submesh(0, self.request.cluster.num_devices), option_of(best.stage))
        seconds = {one.way.words: one.seconds for one in run.solved}
        return SearchResult(
            plan=plan_of_one(solver, placed, best.seconds), considered=tuple(run.considered(best)),
            alternatives=nearest(seconds, but=way.words),
        ).bounded(run.least_seconds)  # fmt: skip

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() > self.deadline

    @property
    def left_seconds(self) -> float:
        """What one problem may take now."""
        return max(self.deadline - time.perf_counter(), _LEAST_SECONDS)

    @property
    def known_counts(self) -> tuple[int, ...]:
        """The numbers of microbatches that were looked at."""
        return tuple(self._ways)

    def next_count(self, count: int) -> int | None:
        """The next number of microbatches."""
        return next((more for more in self.counts if more > count), None)

    def ways(self, count: int) -> tuple[Way, ...]:
        """To run the step in so many microbatches, the simplest first.

        Raises:
          PlanError: if the step cannot be cut so.
        """
        if count not in self._ways:
            request = self.request
            solver = whole_solver(request, request.by_microbatches[count])
            wanted = ("none", "layer") if request.remat is None else (request.remat,)
            if request.remat == "layer" and not solver.segments(0, 1):
                raise PlanError(
                    refused='remat="layer"', got="a program in which no cut into layers saves memory",
                    needed="several layers whose results are kept for the backward pass", where="the loss function",
                    try_='remat="none"',
                )  # fmt: skip
            variants = [Variant(solver, remat) for remat in wanted]
            self._ways[count] = ways_of(solver, [one for one in variants if one.remat == "none" or one.segments])
        return self._ways[count]

    def tell(self, way: Way) -> None:
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
        self._numbers = itertools.count()
        self.solved: list[_Solved] = []
        self._refused: PlanError | None = None
        self._left_open = inf  # what those take at least that were looked at and have no solution that is wanted
        self._floors: dict[int, float] = {}
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
                done = self._most_seconds <= min(one.least_seconds for one in self._queue)
            if done or (search.late and (known is not None or isfinite(self._most_seconds))):
                break
            entry = heapq.heappop(self._queue) if not search.late else self._nearest()
            if isinstance(entry.what, int):
                self._look_at_count(entry.what, entry.least_seconds)
            else:
                self._look_at_way(entry.what, entry)
                entry.what.problem.release()
        return min(self.solved, key=_weight, default=None)

    def _nearest(self) -> _Entry:
        """Out of the queue, what has been looked at most: it is soon a plan."""
        entry = min(self._queue, key=lambda one: (-_KNOWN.index(one.known), one))
        self._queue.remove(entry)
        heapq.heapify(self._queue)
        return entry

    def _push(self, least_seconds: float, what: int | Way | None, known: _Known = "nothing") -> None:
        if what is None or not isfinite(least_seconds):
            return
        weight = least_seconds * (1 + _WORTH_AN_AXIS * (len(what.mesh.axes) - 1 if isinstance(what, Way) else 0))
        heapq.heappush(self._queue, _Entry(weight, next(self._numbers), least_seconds, what, known))

    def _look_at_count(self, count: int, least_seconds: float) -> None:
        """What a number of microbatches promises: of each mesh, what the fastest layouts take.

        Raises:
          PlanError: if the step cannot be planned in the first number.
        """
        search = self._search
        try:
            ways = search.ways(count)
            variants, graph = dict.fromkeys(way.variant for way in ways), ways[0].variant.solver.program.graph
            self._floors[count] = max(least_seconds, least_work_seconds(graph, count, search.request.cluster))
            fitting = [one for one in variants if self._fits(one, count)]
            if fitting:
                self._look_at_meshes(ways, fitting)
                return
        except PlanError as error:
            if count == search.counts[0]:
                raise
            # More microbatches were our idea.
            self._refused = self._refused or error
            return
        for more in (one for one in search.counts if one >= count):
            if more > count and any(self._fits(one, more) for one in variants):
                break
            self._least_bytes[more] = min(one.least_bytes(more) for one in variants)
        else:
            # What holds less in proportion than in a coarser microbatch is only seen in the finest.
            more = search.counts[-1]
        if more > count:
            self._push(self._floors[count], more)

    def _look_at_meshes(self, ways: Sequence[Way], fitting: Sequence[Variant]) -> None:
        """The fastest layouts of the first variant that may fit, on each mesh: others take no less."""
        count, late = ways[0].microbatches, False
        floors: dict[LogicalMesh, float] = {}
        for way in ways:
            if way.variant not in fitting:
                self._needs(way, way.variant.least_bytes(count))
            elif way.variant is fitting[0] and not (floors and self._search.late):
                floors[way.mesh] = max(self._fastest(way), self._floors[count])
                self._push(floors[way.mesh], way, "fastest")
            else:
                late = late or way.variant is fitting[0]
                self._push(floors.get(way.mesh, self._floors[count]), way)
        if floors and not late and not any(map(isfinite, floors.values())):
            raise _contradiction(self._search.request)
        floor = self._floors[count]
        if fitting[0] is ways[0].variant and not late:
            floor = min(floors.values())
        # Else a finer number may fit without rematerialisation, and be faster than what was looked at.
        self._push(floor, self._search.next_count(count))

    def _fits(self, variant: Variant, count: int) -> bool:
        return variant.least_bytes(count) <= self._limit_bytes(count)

    def _look_at_way(self, way: Way, entry: _Entry) -> None:
        """Find out the next thing about a way to run the step."""
        search, count = self._search, way.microbatches
        limit = self._limit_bytes(count)
        search.tell(way)
        if entry.known == "nothing":
            self._push(max(self._fastest(way), entry.least_seconds), way, "fastest")
            return
        if way.problem.least_held > limit:
            self._needs(way, way.problem.least_held)
            return
        try:
            if entry.known == "fastest":
                chosen, least_seconds = way.problem.bounded_within(limit, gap=search.gap)
                if chosen is None or not chosen.solution.proven:
                    self._push(max(least_seconds, entry.least_seconds), way, "prices")
            else:
                seconds = min(search.left_seconds, _MOST_SECONDS)
                chosen = way.problem.proven(limit, gap=search.gap, time_limit_seconds=seconds)
        except Infeasible as error:
            if error.least_memory is not None and isfinite(error.least_memory):
                self._needs(way, error.least_memory)
            elif way.relax():
                self._push(self._floors[count], way)
            return
        except Unsolved:
            self._left_open = min(self._left_open, entry.least_seconds)
            return
        if chosen is None:
            return
        found = _Solved(way=way, chosen=chosen, stage=way.solved(chosen))
        if found.seconds < self._most_seconds:
            self.solved = [one for one in self.solved if one.way is not way]
            self.solved.append(found)
        else:
            self._left_open = min(self._left_open, found.least_seconds)

    def _fastest(self, way: Way) -> float:
        """What any layouts take at least; infinite if there are none."""
        try:
            bound = way.problem.fastest.bound
            # Few are looked at again, and what is freed is soon made again.
            way.problem.release()
            return bound
        except Infeasible:
            return self._fastest(way) if way.relax() else inf

    def _needs(self, way: Way, least_bytes: float) -> None:
        count = way.microbatches
        self._least_bytes[count] = min(least_bytes, self._least_bytes.get(count, inf))

    @property
    def least_seconds(self) -> float:
        """What every plan takes at least."""
        return min(self._left_open, *(one.least_seconds for one in (*self.solved, *self._queue)), inf)

    def considered(self, best: _Solved | None) -> Iterator[Considered]:
        """Each solution, the `best` of which was chosen, and what was not searched."""
        for one in sorted(self.solved, key=lambda one: one.seconds):
            why = ""
            if one is best:
                why = "(chosen)"
            elif best is not None and one.seconds < best.seconds:
                why = "(hardly faster: the simpler mesh is taken)"
            yield Considered(one.way.words, why, seconds=one.seconds)
        late = "out of time" if self._search.late else ""
        for entry in sorted(self._queue):
            if isinstance(entry.what, int):
                what = f"{entry.what} microbatches and more"
            elif any(one.way is entry.what for one in self.solved):
                continue
            else:
                what = entry.what.words
            yield Considered(what, late, searched=False, least_seconds=entry.least_seconds)

    def nothing(self) -> PlanError:
        """Why there is no plan; a refusal for memory has the bound of what was left open."""
        if not self._least_bytes:
            request = self._search.request
            return _unsolved(request, self._left_open) if isfinite(self._left_open) else _contradiction(request)
        count = min(self._least_bytes, key=lambda count: (self._least_bytes[count], count))
        (way, *_) = self._search.ways(min(self._search.known_counts, key=lambda known: abs(known - count)))
        graph, limit = way.variant.solver.program.graph, self._limit_bytes(count)
        error = _nothing_fits(self._search.request, graph, count, self._least_bytes[count], limit)
        error.least_seconds = self._left_open
        if self._refused is not None:
            return error.but(f"more microbatches are out of the question: {self._refused}")
        return error


def _weight(one: _Solved) -> float:
    return one.seconds * (1 + _WORTH_AN_AXIS * (len(one.way.mesh.axes) - 1))


def _words(request: StageRequest) -> str:
    """What is refused where there is no plan."""
    return f"a plan for {request.cluster.num_devices} x {request.cluster.device.kind}"


def _nothing_fits(
    request: StageRequest, graph: Graph, count: int, least: float, limit_bytes: float
) -> MemoryExceeded:  # fmt: skip
    largest = max((graph.values[graph.inputs[p]] for p in graph.parameters), key=lambda v: v.bytes, default=None)
    what = f", largest parameter {largest.name} {largest.shape} of {size_words(largest.bytes)}" if largest else ""
    return MemoryExceeded(
        refused=_words(request), got=room_words(request.cluster.device.usable_memory_bytes, limit_bytes),
        needed=f"at least {size_words(least)} on a device, with {count} microbatches{what}", where="stage 1 of 1",
        try_=smaller_words(request.remat),
    )  # fmt: skip


def _unsolved(request: StageRequest, least_seconds: float) -> MemoryExceeded:
    error = MemoryExceeded(
        refused=_words(request), got="layouts of which the solver found none that fit in the time that it had",
        needed="more time, or more memory", where="time_limit_seconds=", try_="a longer time limit, or more devices",
    )  # fmt: skip
    error.least_seconds = least_seconds
    return error


def _contradiction(request: StageRequest) -> PlanError:
    return PlanError(
        refused=_words(request), got="pins or a ZeRO stage that no choice of layouts satisfies, whatever the memory",
        needed="wishes that some layouts satisfy", where="pins=, zero=", try_="leaving one of them out",
    )  # fmt: skip
