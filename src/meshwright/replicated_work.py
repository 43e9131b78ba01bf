"""What hinders a finished plan from splitting work: notes that say where, why, and what another size would gain.

A dim is *uneven* to an operator if a mesh axis that does not split it there, though it may, does not divide what is
left of it: a vocabulary of 50257 over 8 devices, a batch of 30 of which 2 of 8 devices have a part. Devices then do
work alike, or another dim is split, and more is moved. The search says how much that costs: it is solved again with the
uneven dim that has the most at stake made longer (`padded_dims`), once or twice. What it does not get to is said as a
bound, on the compute alone.

Work that all devices along an axis do alike for other reasons is noted too: an operator without a dim that may be split
(a factorisation, a loop, a kernel without a rule), with a `ReplicationWarning` as such operators get elsewhere; and
where it is most of the compute, work that layouts could split which are no faster, as far as the search knows.

Seconds are the cost model's, of one step, both passes. Work inside rematerialised regions counts once, and what is
around the loss function (the optimizer) not at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

from .cost.efficiency import profile_of
from .cost.kernels import kernel_seconds
from .errors import PlanError
from .padded_dims import (
    DimNames,
    dim_index,
    padded_extent,
    padded_graph,
    padded_words,
    solved_seconds,
    stage_graphs,
)
from .plan_request import Planning, PlanRequest
from .program.graph import Graph, Operator
from .program.origins import Origin, operator_origins
from .program.residuals import is_stored
from .program.rules import ReplicationWarning
from .report.table import format_seconds
from .runtime.plan_fits import algorithms_of
from .search.operator_kernels import KernelsOf
from .search.roles import Roles

# A note is due where it is about this share of a step at least: more than two plans of like speed differ by
# (`search.hierarchical`), and enough to change a model or a cluster for.
SHARE = 0.05

# Work that devices do alike though splitting it gains nothing is noted where it is most of the compute: then more
# devices are of no use.
_MOST = 0.5


class _Uneven(NamedTuple):
    """A dim that axes do not divide, in an operator.

    Args:
      index: of the dim in the program.
      factor: of the operator's rule.
      size: of that.
      split: into how many parts it is.
      unit: into how many it would be.
      parts: into how many parts the operator's work would be more than now: 1 where devices do none of it alike.
    """

    index: int
    factor: int
    size: int
    split: int
    unit: int
    parts: int


class _Work(NamedTuple):
    """An operator of a stage.

    Args:
      operator: of the graph.
      taken: seconds on a device of so much of its FLOPs and bytes; a launch takes as long.
      seconds: of all of it.
      alike: how many devices do it alike, against what could be.
      whole: whether no dim of it may be split.
      uneven: its uneven dims.
    """

    operator: Operator
    taken: Callable[[float], float]
    seconds: float
    alike: int
    whole: bool
    uneven: tuple[_Uneven, ...]

    @property
    def saved(self) -> float:
        """Seconds of compute that splitting it over the devices that do it alike saves at most."""
        return self.seconds - self.taken(1 / self.alike)


class _Dims:
    """Uneven dims of a stage that stand for the same (`program.origins`) and are of one size, such as the feed-forward
    widths of all layers.

    Args:
      stage: its number.
      extent: of the dims; of one that operators have in blocks too (heads), the number of these.
    """

    def __init__(self, stage: int, extent: int) -> None:
        self.stage, self.extent = stage, extent
        self.stake = 0.0  # seconds of compute and communication that are saved if they are divided, a rough estimate
        self.works: dict[int, tuple[_Work, _Uneven]] = {}

    def saved(self, work: _Work, dim: _Uneven) -> float:
        """Seconds of an operator's compute that longer dims save at most; negative where they cost more."""
        return work.seconds - work.taken(padded_extent(self.extent, dim.unit) / self.extent / dim.parts)

    @property
    def worst(self) -> tuple[_Work, _Uneven]:
        """The costliest operator, and the dim there."""
        mine = (one for one in self.works.values() if one[1].size == self.extent)
        return max(mine, key=lambda one: (one[0].seconds, -one[0].operator.index))


def replicated_work(asked: PlanRequest, found: Planning, roles: Roles | None) -> tuple[str, ...]:
    """Notes on what hinders a plan from splitting work.

    Args:
      asked: the request.
      found: its plan, priced.
      roles: of the mesh axes, where a preset gives them some.

    Warns:
      ReplicationWarning: for operators without a dim that could be split.
    """
    if found.plan.predicted is None or found.plan.num_devices == 1:
        return ()
    graphs = [graph for _, graph in stage_graphs(found.program, found.plan)]
    works = [list(_works(asked, found, number, graph, roles)) for number, graph in enumerate(graphs)]
    notes, noted = _uneven_notes(asked, found, graphs, roles, works)
    rest = [(n, w) for n, each in enumerate(works) for w in each if w.alike > 1 and (n, w.operator.index) not in noted]
    compute = sum(work.seconds for each in works for work in each)
    for whole in (True, False):
        notes += _other_notes(found, [work for _, work in rest if work.whole is whole], compute, whole=whole)
    return tuple(notes)


def _uneven_dims(found: Planning, graphs: list[Graph], works: list[list[_Work]]) -> list[_Dims]:
    """All uneven dims, those with the most at stake first."""
    dims: dict[tuple[int, int, Origin], _Dims] = {}
    for number, graph in enumerate(graphs):
        moving = found.plan.stages[number].communication_seconds / (sum(w.seconds for w in works[number]) or 1.0)
        extents: dict[int, int] = {}
        for dim in [dim for one in works[number] for dim in one.uneven]:
            extents[dim.index] = min(dim.size, extents.get(dim.index, dim.size))
        for work, dim in [(one, dim) for one in works[number] for dim in one.uneven]:
            extent, place = extents[dim.index], work.operator.index
            key = number, extent, operator_origins(graph)[place][dim.factor]
            same = dims.setdefault(key, _Dims(number, extent))
            if same.works.setdefault(place, (work, dim))[1] is dim:
                same.stake += same.saved(work, dim) + moving * work.seconds
    return sorted(dims.values(), key=lambda one: -one.stake)


def _uneven_notes(
    asked: PlanRequest, found: Planning, graphs: list[Graph], roles: Roles | None, works: list[list[_Work]]
) -> tuple[list[str], set[tuple[int, int]]]:
    """Notes on uneven dims, and the operators they are about: for the dims with the most at stake of what the search
    finds, for others of what is bounded."""
    step, names = found.step_seconds, DimNames(found.program)
    most, least = _MOST * sum(work.seconds for each in works for work in each), SHARE * step
    notes: dict[str, str] = {}
    noted: set[tuple[int, int]] = set()
    for rank, dims in enumerate(_uneven_dims(found, graphs, works)):
        if dims.stake < least:
            break
        number, graph, gain = dims.stage, graphs[dims.stage], ""
        worst, dim = dims.worst
        indices = {one.index for _, one in dims.works.values()}
        alike = {(number, place): one for place, one in dims.works.items() if one[1].parts > 1}
        name, times = names.of(graph, worst.operator, dim.factor)
        if name in notes:  # of another stage
            noted |= alike.keys()
            continue
        if rank == 0 and asked.left_seconds > 0:
            longer = padded_graph(graph, indices, dims.extent, padded_extent(dims.extent, dim.unit))
            try:
                before, after = (solved_seconds(asked, found, number, one, roles) for one in (graph, longer))
            except PlanError:
                pass  # pins, or memory
            else:
                if before - after < least and sum(one.seconds for one, _ in alike.values()) < most:
                    continue
                work = "a step" if len(graphs) == 1 else f"of a step of {format_seconds(step)} for stage {number + 1}"
                gain = f"take {format_seconds(after)} in place of {format_seconds(before)} {work}, on the same mesh"
        bound = sum(dims.saved(*one) for place, one in alike.items() if place not in noted)
        if not gain and bound < least:
            continue
        gain = gain or f"save at most {format_seconds(bound)} of {format_seconds(step)} a step, of compute"
        more = f" (and {len(indices) - 1} more)" if len(indices) > 1 else ""
        split = "not split over" if dim.split == 1 else f"split over {dim.split} of"
        part = f", its part in each of {times} microbatches" if times > 1 else ""
        notes[name] = (
            f"{name}{more} is {split} {dim.unit} devices ({worst.operator.source}): {dim.unit} does not divide "
            f"{dims.extent}{part}; {padded_words(dims.extent, dim.unit, times)} would {gain}"
        )
        noted |= alike.keys()
    return list(notes.values()), noted


def _other_notes(found: Planning, works: list[_Work], compute: float, *, whole: bool) -> list[str]:
    """A note on the work that devices do alike though no uneven dim is why, if it is worth one."""
    seconds, saved = sum(work.seconds for work in works), sum(work.saved for work in works)
    if not works or (saved < SHARE * found.step_seconds if whole else seconds < _MOST * compute):
        return []
    worst = max(works, key=lambda work: (work.saved, -work.operator.index))
    operator = worst.operator
    less = f"it would take at most {format_seconds(saved)} of {format_seconds(found.step_seconds)} a step less"
    if whole:
        text = f"{operator.name} at {operator.source} runs whole on"
        warnings.warn(f"{text} every device: no dim of it can be split", ReplicationWarning, stacklevel=4)
        return [f"{text} {worst.alike} devices: no dim of it can be split; split, {less}"]
    assert found.plan.predicted is not None
    gap = found.plan.predicted.optimality_gap
    known = "the search did not find out whether a layout that splits it is faster"
    if gap < SHARE:
        known = (
            f"the search proved that no layout that was asked for is faster by more than {100 * max(gap, 1e-3):.1f} %"
        )
    return [
        f"{worst.alike} devices do the same work: {100 * seconds / compute:.0f} % of the compute, most of it at "
        f"{_with_scan(found, operator)}; {known} by the cost model, with what moving data takes; without that, {less}"
    ]


def _with_scan(found: Planning, operator: Operator) -> str:
    """The line of an operator, with that of the outermost scan it is in."""
    scans = {op.path[: op.path.index(-1)]: op.source for op in found.program.graph.operators if op.is_link}
    outer = next((p for n in range(1, len(operator.path)) if (p := operator.path[:n]) in scans), None)
    return operator.source if outer is None else f"{operator.source} in the scan at {scans[outer]}"


def _works(asked: PlanRequest, found: Planning, number: int, graph: Graph, roles: Roles | None) -> Iterator[_Work]:
    """The operators of a stage, but for those whose results are known before the step."""
    stage, microbatches = found.plan.stages[number], found.plan.microbatches_of(number)
    sizes, device = stage.sizes, asked.cluster.device_at(stage.devices[0])
    profile = profile_of(device)
    for operator, algorithm in zip(graph.operators, algorithms_of(graph, stage, number), strict=True):
        made = [graph.values[v] for v in operator.results if v is not None]
        if operator.is_link or not made or all(value.constant for value in made):
            continue
        kernels = KernelsOf(graph, operator, sizes, device, stored=is_stored(graph, operator))(algorithm)
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
                # Where devices idle their axes are what is to split it, else all that could.
                idle = [axis for axis in blocked if axis in free]
                unit, parts = (prod(sizes[axis] for axis in axes) for axes in (idle or blocked, idle))
                index = dim_index(graph, operator.index, f)
                uneven.append(_Uneven(index, f, size, split, split * unit, parts))
        # Not to be split are single elements, and what a preset has whole.
        meant = all(one.size == 1 for one in factors) or (able and not any(wanted[axis] for axis in free))
        alike = 1 if meant else prod(sizes[axis] for axis in free)
        yield _Work(operator, taken, taken(1.0), alike, not able, tuple(uneven))
