"""Ranges of layers as problems on logical meshes, each built and solved once for all of its places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from ...program.cut import Cut
from ...program.graph import Graph
from ...program.ladder import ALL, Ladder
from ...program.parameter_values import values_of_parameters
from ...program.residuals import kept_in_one_program
from ...program.segments import Segments
from ...program.staged import StagedProgram
from ...solve import Infeasible, Unsolved
from ..inter.logical_meshes import Kinds
from ..inter.submeshes import Submeshes
from ..intra.priced import Priced
from ..intra.problem import IntraOpSolution, ParameterInfo, trips_of
from ..intra.workspace import AS_BAD, Workspace
from ..restrictions.constraints import Constraints
from .problem import StageProblem
from .ranges import Ranges
from .solved import SolvedStage

# The relative gap to which ranges are solved: more than the cost model knows; and a stage that is the whole plan, where
# there is but one range.
RANGE_GAP, GAP = 1e-2, 2e-3

# What one problem may take, and what it gets at least where the time is over, so that there is a plan at all. Chosen,
# not measured.
_SECONDS_PER_SOLVE, _LEAST_SECONDS = 20.0, 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Layers `first` to before `last` on the logical mesh number `mesh` of the submeshes of kind `kind`."""

    first: int
    last: int
    kind: int
    mesh: int


class StageSolver:
    """Solves ranges of layers of one program.

    Args:
      program: in layers, at the size of one microbatch.
      parameters: by position in the program's `graph.parameters`.
      submeshes: of the cluster.
      constraints: what the user has fixed.
      kinds: of submeshes; who shares them can share numbers.
      alone: whether each range is to be the only stage of its plan (`StageProblem`).
      gap: relative, to which ranges are solved.
      left_seconds: of the time limit.

    Attributes:
      alone: the same.
      gap: the same.
      left_open: whether the solver found nothing for the last range in the time that it had.
      platform: of the devices, as `Device.compiler`.
      adopted: of solutions of another program what they are here.
    """

    def __init__(
        self,
        program: StagedProgram,
        *,
        parameters: Sequence[ParameterInfo],
        submeshes: Submeshes,
        constraints: Constraints,
        kinds: Kinds,
        alone: bool = False,
        gap: float = RANGE_GAP,
        left_seconds: Callable[[], float] = lambda: inf,
    ) -> None:
        self.program, self.alone, self.gap = program, alone, gap
        self.platform = submeshes.cluster.device.compiler
        self._ranges = Ranges(program, alone=alone, platform=self.platform)
        self.submeshes = submeshes
        self.parameters = parameters
        self.solves, self.left_open, self._left_seconds = 0, False, left_seconds
        self.kind_of, self.meshes = kinds, kinds.meshes
        self._constraints = constraints
        self._numbers: dict[Any, int] = {}
        self._identity: dict[tuple[int, int], int] = {}
        self._alike: dict[int, tuple[int, int]] = {}
        self._problems: dict[tuple[int, int, int, int], tuple[StageProblem, Segments, Cut]] = {}
        self._free: dict[tuple[int, int, int, int], SolvedStage | None] = {}
        self._same: dict[tuple[int, int, int, int, tuple[int, ...]], SolvedStage] = {}
        self.adopted: dict[SolvedStage, SolvedStage] = {}
        # Ranges on meshes that cannot have their ZeRO stage in its strict form (`Constraints.strict`).
        self._lenient: set[tuple[int, int, int]] = set()

    def cut(self, first: int, last: int) -> Cut:
        """The layers `first` to before `last` as a graph."""
        return self._ranges.cut(first, last)

    def parameters_of(self, cut: Cut) -> list[ParameterInfo]:
        """What belongs to each parameter of a cut; of rows their share."""
        graph, found = self.program.graph, []
        for held in cut.parameters:
            info = self.parameters[held.parameter]
            if held.rows is not None:
                whole = graph.values[graph.inputs[graph.parameters[held.parameter]]].shape[held.rows.dim]
                share = (held.rows.last - held.rows.first) / whole
                info = replace(info, optimizer_bytes=info.optimizer_bytes * share)
            found.append(info)
        return found

    @cached_property
    def least_state_bytes(self) -> float:
        """Parameters, gradients and optimizer state on a device, if they are spread over all devices of the cluster: no
        plan holds less on every one."""
        graph = self.program.graph
        total = sum(2 * graph.values[graph.inputs[p]].bytes for p in graph.parameters)
        total += sum(info.optimizer_bytes for info in self.parameters)
        return total / self.submeshes.cluster.num_devices

    def least_bytes_alone(self, microbatches: int) -> float:
        """A lower bound on the bytes of a device where the program is one stage and computes nothing again, in this
        number of microbatches or a larger one: the state, the activations kept and the workspace, all split over all
        devices. Activations and workspace at best halve with the microbatch."""
        graph, workspace = self.graph(0, len(self.program.layers), 0)
        kept = kept_in_one_program(graph, self.platform)
        made = [v for v in kept - values_of_parameters(graph) if v in graph.producer]
        held = sum(graph.values[v].bytes * trips_of(graph.operators[graph.producer[v][0]], v) for v in made)
        held = (held + AS_BAD * workspace.bytes) / self.submeshes.cluster.num_devices
        return self.least_state_bytes + held * self.program.microbatches / microbatches

    def number(self, first: int, last: int) -> int:
        """The number of a range of layers. Ranges share one if they are the same program with the same optimizer
        state (and the same names, where layouts are pinned, and the same origins, where axes have roles)."""
        if self.program.is_whole:
            return 0  # there is no other
        if (first, last) not in self._identity:
            cut = self.cut(first, last)
            infos = self.parameters_of(cut)
            names = [info.name for info in infos] if self._constraints.layouts else []
            inputs = [self.program.split_dims[i] for i in cut.program_inputs if i < len(self.program.split_dims)]
            origins = cut.origins if self._constraints.roles is not None else ()
            sizes = [info.optimizer_bytes for info in infos]
            key = (cut.fingerprint, *map(tuple, (sizes, names, inputs, origins)))
            self._identity[first, last] = self._numbers.setdefault(key, len(self._numbers))
        return self._identity[first, last]

    def _first_alike(self, first: int, last: int) -> tuple[int, int]:
        """The first range met that is the same program: cached results are in its equations."""
        return self._alike.setdefault(self.number(first, last), (first, last))

    def segments(self, first: int, last: int, remat: int = ALL) -> Segments:
        """What a range rematerialises in one of the ways, by the places of the first that is alike."""
        return self._ranges.segments(*self._first_alike(first, last), remat)

    def ladder(self, first: int, last: int) -> Ladder:
        """The ways to rematerialise a range, by the places of the first that is alike."""
        return self._ranges.ladder(*self._first_alike(first, last))

    def ladder_of(self, cut: Cut, first: int, last: int) -> Ladder:
        """As `Ranges.ladder_of`."""
        return self._ranges.ladder_of(cut, first, last)

    def graph(self, first: int, last: int, remat: int) -> tuple[Graph, Workspace]:
        """As `Ranges.graph`."""
        return self._ranges.graph(*self._first_alike(first, last), remat)

    def kept_bytes(self, first: int, last: int, remat: int) -> float:
        """What a range keeps for each microbatch, all devices together."""
        return self._ranges.kept_bytes(*self._first_alike(first, last), remat)

    def problem(self, place: Place, remat: int) -> tuple[StageProblem, Segments, Cut]:
        """The problem of a range, built once for all ranges that are the same program, with what it rematerialises and
        the cut it was built from."""
        key = self._key(place, remat)
        if key not in self._problems:
            cut = self.cut(*self._first_alike(place.first, place.last))
            segments = self.segments(place.first, place.last, remat)
            graph, workspace = self.graph(place.first, place.last, remat)
            problem = StageProblem(
                cut,
                graph,
                self.meshes[place.kind][place.mesh],
                self.kind_of.devices[place.kind],
                parameters=self.parameters_of(cut),
                microbatches=self.program.microbatches,
                constraints=replace(self._constraints, strict=False) if key[:3] in self._lenient else self._constraints,
                split_dims=self.program.split_dims,
                workspace=workspace,
                alone=self.alone,
                carried=self.program.carried if self.program.is_whole else 0,
            )
            self._problems[key] = problem, segments, cut
        return self._problems[key]

    def release(self, *, problems: bool = False) -> None:
        """Free what solving ranges has prepared; `problems`: and their problems, which few ask for again."""
        for problem, _, _ in self._problems.values():
            problem.release()
        if problems:
            self._problems.clear()

    def _key(self, place: Place, remat: int) -> tuple[int, int, int, int]:
        if remat:
            remat = self.ladder(place.first, place.last).number(remat)
        return self.number(place.first, place.last), place.kind, place.mesh, remat

    def relax(self, place: Place) -> bool:
        """Whether the ZeRO stage that a range cannot satisfy has a less strict form; from now on that is used."""
        key = self._key(place, 0)[:3]
        if self._constraints.zero not in (1, 2) or not self._constraints.strict or key in self._lenient:
            return False
        self._lenient.add(key)
        for known in (self._problems, self._free):
            for one in [one for one in known if one[:3] == key]:
                del known[one]
        self._same = {one: stage for one, stage in self._same.items() if one[:3] != key}
        return True

    def free(self, place: Place, remat: int, *, loosely: bool = False) -> SolvedStage | None:
        """The best solution whatever its memory, or None if no layout exists; `loosely` as of `within`."""
        key = self._key(place, remat)
        if key not in self._free and loosely and (found := self._freely(place, remat)) is not None:
            if found.certain_share < 1 - self.gap:
                return found
            self._free[key] = found
        if key not in self._free:
            (one,) = self.priced(place, remat, [(0.0, 1)], gap=self.gap)
            found = one[0].certain(one[1]) if one is not None else None
            if (found is None or found.certain_share < 1 - self.gap) and self._left_seconds() < 0:
                return found  # cut short: a later run, with time of its own, is to solve it to the end
            self._free[key] = found
        return self._free[key]

    def _freely(self, place: Place, remat: int) -> SolvedStage | None:
        """The best layouts of a forest without a memory limit; None if it finds none."""
        built = self.problem(place, remat)
        try:
            found = built[0].fastest
        except Infeasible:
            return None  # who solves it to the end may ask for less
        if found.choices is None:
            return None
        self.solves += 1
        return self._once(place, remat, built, found.choices, found.share).certain(found.share)

    def priced(
        self, place: Place, remat: int, prices: Sequence[tuple[float, float]], *, gap: float
    ) -> list[tuple[SolvedStage, float] | None]:
        """The best solutions where memory has no limit but a price, each with the share of its seconds that is certain
        to be needed there; None for none.

        Args:
          place: the range and where it runs.
          remat: the way to rematerialise it (`program.ladder`).
          prices: in seconds per byte, each with the microbatches in flight.
          gap: at which to stop, relative to the seconds.
        """
        found = self.choices_at(place, remat, prices, gap=gap)
        built = self.problem(place, remat)
        return [
            None
            if one is None or one.choices is None
            else (self._once(place, remat, built, one.choices, one.share), one.share)
            for one in found
        ]

    def choices_at(
        self, place: Place, remat: int, prices: Sequence[tuple[float, float]], *, gap: float
    ) -> list[Priced | None]:
        """The best choices of layouts for a range where memory has a price; arguments as of `priced`."""
        built = self.problem(place, remat)
        self.solves += len(prices)
        try:
            return [*built[0].priced(prices, gap=gap, time_limit_seconds=self._seconds_per_solve)]
        except Infeasible:
            return self.choices_at(place, remat, prices, gap=gap) if self.relax(place) else [None] * len(prices)

    def _once(
        self, place: Place, remat: int, built: tuple[StageProblem, Segments, Cut], choices: tuple[int, ...],
        share: float,
    ) -> SolvedStage:  # fmt: skip
        """Many prices have the same answer: it is looked at once."""
        key = (*self._key(place, remat), choices)
        if key not in self._same:
            self._same[key] = self._solved(place, remat, built, built[0].chosen(choices, share))
        return self._same[key]

    def proven(
        self, place: Place, remat: int, in_flight: int, limit: float, *, gap: float, time_limit_seconds: float
    ) -> SolvedStage | None:
        """As `within`, solved to a gap of one's own; None also where nothing was found in time.

        Args:
          place: the range and where it runs.
          remat: the way to rematerialise it (`program.ladder`).
          in_flight: microbatches.
          limit: bytes on a device.
          gap: relative, at which to stop.
          time_limit_seconds: for what prices of memory leave open.
        """
        built = self.problem(place, remat)
        self.solves += 1
        try:
            with built[0].keeping(in_flight):
                chosen = built[0].proven(limit, gap=gap, time_limit_seconds=time_limit_seconds)
        except Infeasible as error:
            if error.least_memory is None and self.relax(place):
                return self.proven(place, remat, in_flight, limit, gap=gap, time_limit_seconds=time_limit_seconds)
            return None
        except Unsolved:
            return None
        return self._solved(place, remat, built, chosen)

    def laid_out(self, place: Place, remat: int, layouts: tuple[int, ...]) -> SolvedStage:
        """A range in given layouts, whatever they take and hold.

        Args:
          place: the range and where it runs.
          remat: the way to rematerialise it (`program.ladder`).
          layouts: of each node of its problem the number of the choice.
        """
        built = self.problem(place, remat)
        return self._solved(place, remat, built, built[0].chosen(layouts, 0.0, proven=False))

    def within(
        self, place: Place, remat: int, in_flight: int, limit: float, *, loosely: bool = False,
        enough_seconds: float = inf,
    ) -> SolvedStage | None:  # fmt: skip
        """The best solution that needs no more bytes on a device with so many microbatches in flight, or None.

        Args:
          place: the range and where it runs.
          remat: the way to rematerialise it (`program.ladder`).
          in_flight: microbatches.
          limit: bytes on a device.
          loosely: whether what forests find will do, wherever they find anything; the bound is then as far as it is.
          enough_seconds: of a step, a lower bound with which to stop.
        """
        self.left_open = False
        if not self._exceeds(place, remat, in_flight, limit):
            free = self.free(place, remat, loosely=loosely)
            if free is None or free.held_bytes(in_flight) <= limit:
                return free
        return self._limited(place, remat, in_flight, limit, loosely=loosely, enough_seconds=enough_seconds)

    def around(self, place: Place, remat: int, in_flight: int, limit: float, stages: int) -> list[SolvedStage]:
        """Solutions that hold about its share of the bytes of a device with so many stages, some more and some less.

        Args:
          place: the range and where it runs.
          remat: the way to rematerialise it (`program.ladder`).
          in_flight: microbatches.
          limit: bytes on a device.
          stages: of the device: they run in turn, and share a workspace.
        """
        built = self.problem(place, remat)
        problem = built[0]
        self.solves += 1
        try:
            free = problem.fastest.choices
            workspace = min(problem.seconds(free).workspace_bytes, limit) if free is not None else 0.0
            with problem.keeping(in_flight):
                found = problem.around((limit - workspace) / stages + workspace, gap=self.gap)
        except Infeasible:
            return self.around(place, remat, in_flight, limit, stages) if self.relax(place) else []
        return [self._once(place, remat, built, choices, share).certain(share) for choices, share in found]

    def _exceeds(self, place: Place, remat: int, in_flight: int, limit: float) -> bool:
        """Whether the fastest layouts plainly need more: they need not be found to the end then. (What contradicts a
        ZeRO stage is found out where they are.)"""
        if self._key(place, remat) in self._free or self._constraints.zero is not None:
            return False
        try:
            return self.problem(place, remat)[0].needs_at_best(in_flight) > limit
        except Infeasible:
            return False

    @property
    def _seconds_per_solve(self) -> float:
        return min(max(self._left_seconds(), _LEAST_SECONDS), _SECONDS_PER_SOLVE)

    def _limited(
        self, place: Place, remat: int, in_flight: int, limit: float, *, loosely: bool, enough_seconds: float
    ) -> SolvedStage | None:
        built = self.problem(place, remat)
        problem = built[0]
        if problem.least_bytes.held(in_flight) > limit:
            return None
        self.solves += 1
        try:
            with problem.keeping(in_flight):
                chosen = problem.within(limit, gap=self.gap) if loosely else None
                if chosen is None:
                    chosen = problem.proven(
                        limit, gap=self.gap, time_limit_seconds=self._seconds_per_solve, enough_seconds=enough_seconds
                    )
        except Infeasible:
            return None
        except Unsolved:
            self.left_open = True
            return None
        return self._solved(place, remat, built, chosen)

    def _solved(
        self, place: Place, remat: int, built: tuple[StageProblem, Segments, Cut], chosen: IntraOpSolution
    ) -> SolvedStage:
        problem, segments, cut = built
        return SolvedStage(
            cut=cut, problem=problem, chosen=chosen, mesh=self.meshes[place.kind][place.mesh],
            remat=self._key(place, remat)[-1], segments=segments,
            seconds=problem.seconds(chosen.solution.choices, chosen.solution.objective),
        )  # fmt: skip
