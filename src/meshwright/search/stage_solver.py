"""Ranges of layers as problems on logical meshes, each built once, and solved once for all places that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..cluster import Cluster, LogicalMesh
from ..program.cut import Cut
from ..program.segments import Segments, rematerialise
from ..program.staged import StagedProgram
from ..solve import Infeasible, Unsolved
from .intra_op import IntraOpSolution, ParameterInfo
from .pins import Pins
from .stage_problem import StageProblem, StageSeconds
from .stage_segments import stage_segments
from .submeshes import Submesh, Submeshes

# Ranges are solved to this relative gap: more than the cost model knows.
_GAP = 1e-2
_SECONDS_PER_SOLVE = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SolvedStage:
    """A solved range: what the plan is assembled from.

    Args:
      cut: the range as solved; a range elsewhere with the same fingerprint shares it.
      problem: with its graph.
      chosen: its solution.
      mesh: logical mesh.
      segments: what is rematerialised, by paths of the solved cut.
      seconds: of the solution.
    """

    cut: Cut
    problem: StageProblem
    chosen: IntraOpSolution
    mesh: LogicalMesh
    segments: Segments
    seconds: StageSeconds

    def held_bytes(self, in_flight: int) -> float:
        """On one device, with so many microbatches in flight."""
        return self.seconds.constant_bytes + in_flight * self.seconds.in_flight_bytes


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
      pins: what the user has fixed.
      meshes: logical meshes to consider, as (names, sizes), on submeshes that have so many devices; none for all.
    """

    def __init__(
        self,
        program: StagedProgram,
        *,
        parameters: Sequence[ParameterInfo],
        submeshes: Submeshes,
        pins: Pins,
        meshes: Sequence[tuple[tuple[str, ...], tuple[int, ...]]],
    ) -> None:
        self.program = program
        self.submeshes = submeshes
        self.parameters = parameters
        self.limit_bytes = submeshes.cluster.device.usable_memory_bytes
        self.solves = 0
        self.kind_of: dict[Submesh, int] = {}
        self.meshes: list[tuple[LogicalMesh, ...]] = []
        self._pins = pins
        self._wanted = meshes
        kinds: dict[Any, int] = {}
        for submesh in submeshes.all:
            kind = submeshes.kind(submesh)
            if kind not in kinds:
                kinds[kind] = len(kinds)
                self.meshes.append(self._meshes_of(submeshes.part(submesh)))
            self.kind_of[submesh] = kinds[kind]
        self._cuts: dict[tuple[int, int], Cut] = {}
        self._numbers: dict[Any, int] = {}
        self._identity: dict[tuple[int, int], int] = {}
        self._problems: dict[tuple[int, int, int, str], tuple[StageProblem, Segments, Cut] | None] = {}
        self._free: dict[tuple[int, int, int, str], SolvedStage | None] = {}

    def _meshes_of(self, part: Cluster) -> tuple[LogicalMesh, ...]:
        """Logical meshes of one and two axes; those whose axes differ in their order only give the same plans."""
        wanted = [(names, sizes) for names, sizes in self._wanted if prod(sizes) == part.num_devices]
        if self._wanted:
            return tuple(part.logical_mesh(sizes, names) for names, sizes in wanted)
        found: dict[Any, LogicalMesh] = {}
        for shape in part.logical_shapes(max_axes=2):
            mesh = part.logical_mesh(shape)
            key = tuple(sorted((a.size, a.latency_seconds, a.bandwidth_bytes_per_second) for a in mesh.axes))
            found.setdefault(key, mesh)
        return tuple(found.values())

    def cut(self, first: int, last: int) -> Cut:
        """The layers `first` to before `last` as a graph."""
        if (first, last) not in self._cuts:
            layers = self.program.layers
            self._cuts[first, last] = self.program.cutter.cut(layers[first][0], layers[last - 1][1])
        return self._cuts[first, last]

    def parameters_of(self, cut: Cut) -> list[ParameterInfo]:
        """What belongs to each parameter of a cut; of rows their share."""
        graph, found = self.program.graph, []
        for held in cut.parameters:
            info = self.parameters[held.parameter]
            if held.rows is not None:
                whole = graph.values[graph.inputs[graph.parameters[held.parameter]]].shape[0]
                share = (held.rows[1] - held.rows[0]) / whole
                info = replace(info, optimizer_bytes=info.optimizer_bytes * share)
            found.append(info)
        return found

    def number(self, first: int, last: int) -> int:
        """Equal for ranges that are the same program with the same optimizer state (and, where pins look at them, the
        same names)."""
        if (first, last) not in self._identity:
            cut = self.cut(first, last)
            infos = self.parameters_of(cut)
            names = [info.name for info in infos] if self._pins.layouts else []
            inputs = [self.program.split_dims[i] for i in cut.program_inputs if i < len(self.program.split_dims)]
            key = (cut.fingerprint, tuple(i.optimizer_bytes for i in infos), tuple(names), tuple(inputs))
            self._identity[first, last] = self._numbers.setdefault(key, len(self._numbers))
        return self._identity[first, last]

    def problem(self, place: Place, remat: str) -> tuple[StageProblem, Segments, Cut] | None:
        """The problem of a range, built once for all ranges that are the same program, with the cut it was built of;
        None where there is nothing to rematerialise."""
        key = (self.number(place.first, place.last), place.kind, place.mesh, remat)
        if key not in self._problems:
            cut = self.cut(place.first, place.last)
            mesh = self.meshes[place.kind][place.mesh]
            segments: Segments = {}
            again = 0.0
            if remat == "layer":
                segments, again = stage_segments(cut, self.program.layers[place.first : place.last])
            if remat == "layer" and not segments:
                self._problems[key] = None
                return None
            problem = StageProblem(
                cut,
                rematerialise(cut.graph, segments) if segments else cut.graph,
                mesh,
                self.submeshes.cluster.device,
                parameters=self.parameters_of(cut),
                microbatches=self.program.microbatches,
                pins=self._pins,
                split_dims=self.program.split_dims,
                # At best it is split over all devices.
                workspace_bytes=again / mesh.num_devices,
            )
            self._problems[key] = problem, segments, cut
        return self._problems[key]

    def free(self, place: Place, remat: str) -> SolvedStage | None:
        """The best solution whatever its memory, or None if no layout exists."""
        key = (self.number(place.first, place.last), place.kind, place.mesh, remat)
        if key not in self._free:
            self._free[key] = self.chosen(place, remat, float("inf"))
        return self._free[key]

    def within(self, place: Place, remat: str, in_flight: int) -> SolvedStage | None:
        """The best solution that fits with so many microbatches in flight, or None."""
        free = self.free(place, remat)
        if free is None or free.held_bytes(in_flight) <= self.limit_bytes:
            return free
        constant, kept, _ = free.problem.least_bytes()
        if constant + in_flight * kept > self.limit_bytes:
            return None
        return self.chosen(place, remat, self.limit_bytes, in_flight=in_flight)

    def chosen(
        self, place: Place, remat: str, limit_bytes: float, *, in_flight: int = 1, price: float = 0.0
    ) -> SolvedStage | None:
        """The best solution within a limit of memory, or with a price on it in seconds per byte; None if none is."""
        built = self.problem(place, remat)
        if built is None:
            return None
        problem, segments, cut = built
        self.solves += 1
        problem.in_flight, problem.price = in_flight, price
        try:
            chosen = problem.solve(limit_bytes, gap=_GAP, time_limit_seconds=_SECONDS_PER_SOLVE)
            seconds = problem.seconds(chosen)
        except (Infeasible, Unsolved):
            return None
        finally:
            problem.in_flight, problem.price = 1, 0.0
        return SolvedStage(
            cut=cut, problem=problem, chosen=chosen, mesh=self.meshes[place.kind][place.mesh],
            segments=segments, seconds=seconds,
        )  # fmt: skip
