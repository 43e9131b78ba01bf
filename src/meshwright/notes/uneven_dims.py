"""Dims of a planned program that mesh axes do not divide, and what padding them might save.

A dim is *uneven* to an operator if a mesh axis that does not split it there, though it may, does not divide what is
left of it: a vocabulary of 50257 over 8 devices, a batch of 30 of which 2 of 8 devices have a part. Devices then do
work alike, or another dim is split, and more is moved.

Seconds are the cost model's, of one step, both passes. Work inside rematerialised regions counts once, and what is
around the loss function (the optimizer) not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import lcm, prod
from typing import Any, NamedTuple

from ..cluster import Cluster
from ..cost.efficiency import profile_of
from ..cost.kernels import kernel_seconds
from ..lowering.plan_of_program import algorithms_of
from ..plan import Plan
from ..program.graph import Graph, Operator
from ..program.origins import Origin, dim_origins, indices_of, operator_origins
from ..program.padded_dims import PaddedDim
from ..program.residuals import is_stored
from ..program.staged import staged_program
from ..program.trace import Program
from ..search.prices.kernels import KernelsOf
from ..search.restrictions.roles import Roles

# What is about this share of a step at least is worth a note or a search: about what predictions are off by
# (docs/calibration.md), and enough to change a model or a cluster for.
SHARE = 0.05

# Matrix units take tiles of 128 x 128 elements (the MXU of a TPU; a multiple of those of a GPU). A size of whole tiles
# is taken where it is longer by less than 2 %, less than predictions are off by (docs/calibration.md).
TILE, _HARDLY = 128, 1.02


class Uneven(NamedTuple):
    """A dim that axes do not divide, as a factor of an operator."""

    index: int  # of the dim in the program
    factor: int
    size: int  # of the factor
    split: int  # into how many parts it is
    unit: int  # into how many it would be
    parts: int  # into how many parts the operator's work would be more than now; 1 where devices do none of it alike


class Work(NamedTuple):
    """An operator of a stage."""

    operator: Operator
    line: str  # of the user's, with that of the outermost scan it is in
    taken: Callable[[float], float]  # seconds on a device of so much of its FLOPs and bytes; a launch takes as long
    seconds: float  # of all of it
    alike: int  # how many devices do it alike, against what could be
    whole: bool  # whether no dim of it may be split
    uneven: tuple[Uneven, ...]

    @property
    def saved(self) -> float:
        """Seconds of compute that splitting it over the devices that do it alike saves at most."""
        return self.seconds - self.taken(1 / self.alike)


class UnevenDims(NamedTuple):
    """Uneven dims of a stage that stand for the same (`program.origins`) and are of one size, such as the feed-forward
    widths of all layers, and the operators that have them."""

    stage: int
    graph: Graph  # of the stage
    extent: int  # the smallest that operators have it in: the number of heads, not of all their elements
    works: dict[int, tuple[Work, Uneven]]

    @property
    def indices(self) -> frozenset[int]:
        """Of the dims, in the program."""
        return frozenset(dim.index for _, dim in self.works.values())

    @property
    def worst(self) -> tuple[Work, Uneven]:
        """The operator that takes the longest."""
        return max((one for one in self.works.values() if one[1].size == self.extent), key=lambda one: one[0].seconds)

    def saved(self, work: Work, dim: Uneven) -> float:
        """Seconds of an operator's compute that longer dims save at most; negative where they cost more."""
        return work.seconds - work.taken(padded_extents(self.extent, dim.unit)[1] / self.extent / dim.parts)

    def stake(self, moving: float) -> float:
        """Seconds that longer dims may save, roughly: of compute, and of communication in proportion to it."""
        return sum(self.saved(work, dim) + moving * work.seconds for work, dim in self.works.values())

    def padded(self, program: Program) -> tuple[PaddedDim, ...]:
        """The dims as dims of inputs, longer; of those that no input has, nothing. `program`: as it was planned."""
        unit, found = _multiple(self.extent, self.worst[1].unit), []
        for index in self.indices:
            where = dim_of_input(program, self.graph, index)
            if where is not None and where.extent % self.extent == 0:
                found.append(PaddedDim(where.name, where.dim, unit * (where.extent // self.extent)))
        return tuple(sorted(found))


class InputDim(NamedTuple):
    """A dim of an input, which may be cut into microbatches, as the planned program has it."""

    name: str
    dim: int
    extent: int
    microbatches: int

    def __str__(self) -> str:
        return f"dim {self.dim} ({self.microbatches * self.extent}) of {self.name}"


def padded_extents(extent: int, unit: int) -> tuple[int, int]:
    """The next size that `unit` divides, and the next one of whole tiles where that is hardly larger, or else the same.

    >>> padded_extents(50257, 8), padded_extents(25, 8)
    ((50264, 50304), (32, 32))

    Args:
      extent: of a dim.
      unit: into how many blocks it is to be cut.
    """
    least, tiled = (-(-extent // size) * size for size in (unit, lcm(unit, TILE)))
    return least, tiled if tiled <= _HARDLY * extent else least


def _multiple(extent: int, unit: int) -> int:
    """Of what the padded extent of a dim is the next multiple."""
    tiles = lcm(unit, TILE)
    return tiles if padded_extents(extent, unit)[1] % tiles == 0 else unit


def _batch_dims(program: Program, graph: Graph) -> set[tuple[str, int | None]]:
    """The dims of inputs that microbatches cut, as (name, dim)."""
    names = (graph.values[v].name for v in graph.inputs)
    return set(zip(names, program.split_dims, strict=False)) if program.microbatches > 1 else set()


def dim_of_input(program: Program, graph: Graph, index: int) -> InputDim | None:
    """The first parameter's dim, or else input's, that an index of a program is.

    Args:
      program: as it was planned.
      graph: of it, or of one of its stages.
      index: of the dim.
    """
    graph = _whole(graph)
    indices, batch = indices_of(graph), _batch_dims(program, graph)
    for position in sorted(range(len(graph.inputs)), key=lambda position: position not in graph.parameters):
        value = graph.values[graph.inputs[position]]
        for dim, extent in enumerate(value.shape):
            if indices.of_dim(value.index, dim) == index:
                times = program.microbatches if (value.name, dim) in batch else 1
                return InputDim(value.name, dim, extent, times)
    return None


def vocabularies(program: Program, devices: int) -> tuple[PaddedDim, ...]:
    """The vocabularies of a program that its devices do not divide, longer, where they are hardly so."""
    graph, found = program.graph, []
    for position in graph.parameters:
        value = graph.values[graph.inputs[position]]
        for dim, (extent, origin) in enumerate(zip(value.shape, dim_origins(graph, value.index), strict=True)):
            if origin is not None and origin.kind == "vocabulary" and extent % devices:
                one = PaddedDim(value.name, dim, _multiple(extent, devices))
                if one.extent(value.shape) <= _HARDLY * extent:
                    found.append(one)
    return tuple(found)


def padded_words(program: Program, padded: Sequence[PaddedDim]) -> str:
    """What dims are padded to, those of one size together: "dim 0 of x from 30 to 32 and 1 more"."""
    shapes = {value.name: value.shape for value in (program.graph.values[v] for v in program.graph.inputs)}
    batch = _batch_dims(program, program.graph)
    alike: dict[tuple[int, int, bool], list[PaddedDim]] = {}
    for one in padded:
        sizes = shapes[one.name][one.dim], one.extent(shapes[one.name]), (one.name, one.dim) in batch
        alike.setdefault(sizes, []).append(one)
    words = []
    for (before, after, in_microbatches), (first, *others) in alike.items():
        more = f" and {len(others)} more" if others else ""
        each = f" in each of {program.microbatches} microbatches" if in_microbatches else ""
        words.append(f"{first} from {before} to {after}{more}{each}")
    return ", ".join(words)


class PlannedWork:
    """What the devices of a plan compute.

    Args:
      program: as it was planned.
      plan: of it, priced.
      cluster: it is for.
      roles: of mesh axes, where a preset gives them some.

    Attributes:
      works: the operators of each stage.
    """

    def __init__(self, program: Program, plan: Plan, cluster: Cluster, roles: Roles | None) -> None:
        self._plan, self._graphs = plan, _stage_graphs(program, plan)
        self.works = [list(_works(plan, n, graph, cluster, roles)) for n, graph in enumerate(self._graphs)]

    def uneven_dims(self) -> list[UnevenDims]:
        """The uneven dims with at least `SHARE` of a step at stake, most first."""
        predicted = self._plan.predicted
        assert predicted is not None
        least, found = SHARE * predicted.step_seconds, []
        for number, (stage, graph, works) in enumerate(zip(self._plan.stages, self._graphs, self.works, strict=True)):
            moving = stage.communication_seconds / (sum(work.seconds for work in works) or 1.0)
            uneven = [(work, dim) for work in works for dim in work.uneven]
            extents: dict[int, int] = {}
            for _, dim in uneven:
                extents[dim.index] = min(dim.size, extents.get(dim.index, dim.size))
            dims: dict[tuple[int, Origin], UnevenDims] = {}
            for work, dim in uneven:
                extent, place = extents[dim.index], work.operator.index
                key = extent, operator_origins(graph)[place][dim.factor]
                dims.setdefault(key, UnevenDims(number, graph, extent, {})).works.setdefault(place, (work, dim))
            found += [(one.stake(moving), one) for one in dims.values()]
        return [one for stake, one in sorted(found, key=lambda one: -one[0]) if stake >= least]


def _stage_graphs(program: Program, plan: Plan) -> list[Graph]:
    """The graph of each stage of a plan."""
    ranges = [stage.equations for stage in plan.stages if stage.equations is not None]
    if len(plan.stages) == 1 and not ranges:
        return [program.graph]
    cuts = [] if plan.shares else [first for first, _ in ranges[1:]]
    staged = staged_program(program, layers=1, cuts=cuts, scan_splits=dict(plan.scan_splits))
    return [staged.cutter.cut(*equations).graph for equations in ranges]


def _works(plan: Plan, number: int, graph: Graph, cluster: Cluster, roles: Roles | None) -> Iterator[Work]:
    """The operators of a stage, but for those whose results are known before the step."""
    stage, microbatches = plan.stages[number], plan.microbatches_of(number)
    sizes, device = stage.sizes, cluster.device_at(stage.devices[0])
    profile = profile_of(device)
    scans = {op.path[: op.path.index(-1)]: op.source for op in graph.operators if op.is_link}
    for operator, algorithm in zip(graph.operators, algorithms_of(graph, stage, number), strict=True):
        made = [graph.values[v] for v in operator.results if v is not None]
        if operator.is_link or not made or all(value.constant for value in made):
            continue
        stored = is_stored(graph, operator, joined=profile.joined)
        kernels = KernelsOf(graph, operator, sizes, device, stored=stored)(algorithm)
        runs = [(kernels.forward, 1.0), *((one.kernel, one.runs) for one in kernels.gradients)]

        def taken(share: float, runs: Any = runs, times: float = microbatches * operator.repeats) -> float:
            parts = ((k._replace(flops=share * k.flops, moved_bytes=share * k.moved_bytes), n) for k, n in runs)
            return times * sum(n * kernel_seconds(k, device, profile) for k, n in parts)

        factors = operator.rule.factors
        able = {f for f in operator.rule.splittable if factors[f].size > 1}
        wanted = dict.fromkeys(sizes, able)
        if roles is not None:
            origins = operator_origins(graph)[operator.index]
            wanted = {axis: able & roles.wanted(operator, origins, axis) for axis in sizes}
        free = [axis for axis in sizes if all(axis not in axes for axes in algorithm.axes)]
        uneven = []
        for f in sorted(able):
            split, size = prod(sizes[axis] for axis in algorithm.axes[f]), factors[f].size
            blocked = [a for a in sizes if f in wanted[a] and a not in algorithm.axes[f] and size // split % sizes[a]]
            if blocked:
                # It is to be split over the axes along which devices do the same work, if there are some.
                idle = [axis for axis in blocked if axis in free]
                unit, parts = (prod(sizes[axis] for axis in axes) for axes in (idle or blocked, idle))
                index = _index(graph, operator.index, f)
                uneven.append(Uneven(index, f, size, split, split * unit, parts))
        # Not to be split are single elements, and what a preset has whole.
        meant = all(one.size == 1 for one in factors) or (able and not any(wanted[axis] for axis in free))
        alike = 1 if meant else prod(sizes[axis] for axis in free)
        outer = next((scans[p] for n in range(1, len(operator.path)) if (p := operator.path[:n]) in scans), None)
        line = operator.source if outer is None else f"{operator.source} in the scan at {outer}"
        yield Work(operator, line, taken, taken(1.0), alike, not able, tuple(uneven))


def _whole(graph: Graph) -> Graph:
    """The graph of the whole program, whatever part of it a graph is."""
    return graph.part_of[0] if graph.part_of is not None else graph


def _index(graph: Graph, operator: int, factor: int) -> int:
    """The index (`program.origins`) of an operator's factor in the whole program."""
    place = operator if graph.part_of is None else graph.part_of[1][operator]
    return indices_of(_whole(graph)).of(place, factor)
