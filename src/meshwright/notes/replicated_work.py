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

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from ..cluster import Cluster
from ..cost.efficiency import profile_of
from ..cost.kernels import kernel_seconds
from ..errors import PlanError
from ..lowering.plan_of_program import algorithms_of
from ..plan import Plan, Prediction
from ..program.graph import Graph, Operator
from ..program.origins import Origin, operator_origins
from ..program.residuals import is_stored
from ..program.rules import ReplicationWarning
from ..program.trace import Program
from ..report.table import format_seconds
from ..search.prices.kernels import KernelsOf
from ..search.restrictions.constraints import Constraints
from ..search.restrictions.roles import Roles
from .padded_dims import TILE, dim_index, dim_names, padded_extents, padded_graph, solved_seconds, stage_graphs

# A note is due where it is about this share of a step at least: about what predictions are off by
# (docs/calibration.md), and enough to change a model or a cluster for.
SHARE = 0.05

# A size that is longer by more than this is told by how much: its seconds are of more work.
_MUCH = 1.1

# Work that devices do alike though splitting it gains nothing is noted where it is most of the compute: then more
# devices are of no use.
_MOST = 0.5


class _Uneven(NamedTuple):
    """A dim that axes do not divide, as a factor of an operator."""

    index: int  # of the dim in the program
    factor: int
    size: int  # of the factor
    split: int  # into how many parts it is
    unit: int  # into how many it would be
    parts: int  # into how many parts the operator's work would be more than now; 1 where devices do none of it alike


class _Work(NamedTuple):
    """An operator of a stage."""

    operator: Operator
    line: str  # of the user's, with that of the outermost scan it is in
    taken: Callable[[float], float]  # seconds on a device of so much of its FLOPs and bytes; a launch takes as long
    seconds: float  # of all of it
    alike: int  # how many devices do it alike, against what could be
    whole: bool  # whether no dim of it may be split
    uneven: tuple[_Uneven, ...]

    @property
    def saved(self) -> float:
        """Seconds of compute that splitting it over the devices that do it alike saves at most."""
        return self.seconds - self.taken(1 / self.alike)


class _Dims(NamedTuple):
    """Uneven dims of a stage that stand for the same (`program.origins`) and are of one size, such as the feed-forward
    widths of all layers, and the operators that have them."""

    stage: int
    extent: int  # the smallest that operators have it in: the number of heads, not of all their elements
    works: dict[int, tuple[_Work, _Uneven]]

    def saved(self, work: _Work, dim: _Uneven) -> float:
        """Seconds of an operator's compute that longer dims save at most; negative where they cost more."""
        return work.seconds - work.taken(padded_extents(self.extent, dim.unit)[1] / self.extent / dim.parts)

    def stake(self, moving: float) -> float:
        """Seconds that longer dims may save, roughly: of compute, and of communication in proportion to it."""
        return sum(self.saved(work, dim) + moving * work.seconds for work, dim in self.works.values())


def replicated_work(
    program: Program, plan: Plan, cluster: Cluster, constraints: Constraints, *, seconds: float
) -> tuple[str, ...]:
    """Notes on what hinders a plan from splitting work.

    Args:
      program: as it was planned.
      plan: of it, priced.
      cluster: it is for.
      constraints: that it satisfies, with the roles of mesh axes where a preset gives them some.
      seconds: that solving again may take.

    Warns:
      ReplicationWarning: for operators without a dim that could be split.
    """
    if plan.predicted is None or plan.num_devices == 1:
        return ()
    until = time.perf_counter() + seconds
    graphs = stage_graphs(program, plan)
    works = [list(_works(plan, n, graph, cluster, constraints.roles)) for n, graph in enumerate(graphs)]
    step, compute = plan.predicted.step_seconds, sum(work.seconds for each in works for work in each)

    def solved(number: int, graph: Graph) -> float:
        return solved_seconds(program, plan, number, graph, cluster, constraints, until - time.perf_counter())

    notes, noted = _uneven_notes(program, plan, graphs, works, step, solved if seconds > 0 else None)
    rest = [(n, w) for n, each in enumerate(works) for w in each if w.alike > 1 and (n, w.operator.index) not in noted]
    for whole in (True, False):
        notes += _other_notes(plan.predicted, [work for _, work in rest if work.whole is whole], compute, whole=whole)
    return tuple(notes)


def _uneven_dims(plan: Plan, graphs: list[Graph], works: list[list[_Work]]) -> Iterator[tuple[float, _Dims]]:
    """All uneven dims with what is at stake."""
    for number, graph in enumerate(graphs):
        moving = plan.stages[number].communication_seconds / (sum(w.seconds for w in works[number]) or 1.0)
        uneven = [(work, dim) for work in works[number] for dim in work.uneven]
        extents: dict[int, int] = {}
        for _, dim in uneven:
            extents[dim.index] = min(dim.size, extents.get(dim.index, dim.size))
        dims: dict[tuple[int, Origin], _Dims] = {}
        for work, dim in uneven:
            extent, place = extents[dim.index], work.operator.index
            key = extent, operator_origins(graph)[place][dim.factor]
            dims.setdefault(key, _Dims(number, extent, {})).works.setdefault(place, (work, dim))
        yield from ((one.stake(moving), one) for one in dims.values())


def _uneven_notes(
    program: Program, plan: Plan, graphs: list[Graph], works: list[list[_Work]], step: float,
    solved: Callable[[int, Graph], float] | None,
) -> tuple[list[str], set[tuple[int, int]]]:  # fmt: skip
    """Notes on uneven dims, and the operators they are about: for the dims with the most at stake of what the search
    finds, where there is time, for others of what is bounded."""
    names = dim_names(program, graphs[0])
    most, least = _MOST * sum(work.seconds for each in works for work in each), SHARE * step
    notes: dict[int, str] = {}
    noted: set[tuple[int, int]] = set()
    ranked = sorted(_uneven_dims(plan, graphs, works), key=lambda one: -one[0])
    for rank, dims in enumerate(dims for stake, dims in ranked if stake >= least):
        number, extent, places = dims
        graph, indices = graphs[number], {dim.index for _, dim in places.values()}
        alike = {(number, place): one for place, one in places.items() if one[1].parts > 1}
        worst, dim = max((one for one in places.values() if one[1].size == extent), key=lambda one: one[0].seconds)
        if dim.index in notes:  # of another stage
            noted |= alike.keys()
            continue
        padded, tiled = padded_extents(extent, dim.unit)
        saved = sum(dims.saved(*one) for place, one in alike.items() if place not in noted)
        gain = f"save at most {format_seconds(saved)} of {format_seconds(step)} a step, of compute"
        if rank == 0 and solved is not None:
            longer = padded_graph(graph, indices, extent, tiled)
            with suppress(PlanError):  # pins, or memory
                before, after = solved(number, graph), solved(number, longer)
                work = "a step" if len(graphs) == 1 else f"of a step of {format_seconds(step)} for stage {number + 1}"
                gain = f"take {format_seconds(after)} in place of {format_seconds(before)} {work}, on the same mesh"
                gain += f", with {tiled / extent:.2g} times the size" if tiled > _MUCH * extent else ""
                saved = before - after if sum(one.seconds for one, _ in alike.values()) < most else least
        if saved < least:
            continue
        whole, name, times = names.get(dim.index, (dim.size, f"a dim of {dim.size}", 1))
        times = times if whole == extent else 1
        blocks = f" in {extent} blocks" if whole != extent else ""
        more = f" (and {len(indices) - 1} more)" if len(indices) > 1 else ""
        split = "not split over" if dim.split == 1 else f"split over {dim.split} of"
        part = f", its part in each of {times} microbatches" if times > 1 else ""
        tiles = f", or {times * tiled} for whole tiles of {TILE}," if tiled > padded else ""
        notes[dim.index] = (
            f"{name}{blocks}{more} is {split} {dim.unit} devices ({worst.operator.source}): {dim.unit} does not "
            f"divide {extent}{part}; {times * padded}{tiles} would {gain}"
        )
        noted |= alike.keys()
    return list(notes.values()), noted


def _other_notes(predicted: Prediction, works: list[_Work], compute: float, *, whole: bool) -> list[str]:
    """A note on the work that devices do alike though no uneven dim is why, if it is worth one."""
    seconds, saved = sum(work.seconds for work in works), sum(work.saved for work in works)
    if not works or (saved < SHARE * predicted.step_seconds if whole else seconds < _MOST * compute):
        return []
    worst = max(works, key=lambda work: work.saved)
    less = f"it would take at most {format_seconds(saved)} of {format_seconds(predicted.step_seconds)} a step less"
    if whole:
        text = f"{worst.operator.name} at {worst.operator.source} runs whole on"
        warnings.warn(f"{text} every device: no dim of it can be split", ReplicationWarning, stacklevel=5)
        return [f"{text} {worst.alike} devices: no dim of it can be split; split, {less}"]
    gap = predicted.optimality_gap
    known = "the search did not find out whether a layout that splits it is faster"
    if gap < SHARE:
        known = (
            f"the search proved that no layout that was asked for is faster by more than {100 * max(gap, 1e-3):.1f} %"
        )
    return [
        f"{worst.alike} devices do the same work: {100 * seconds / compute:.0f} % of the compute, most of it at "
        f"{worst.line}; {known} by the cost model, with what moving data takes; without that, {less}"
    ]


def _works(plan: Plan, number: int, graph: Graph, cluster: Cluster, roles: Roles | None) -> Iterator[_Work]:
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
                # Where devices idle their axes are what is to split it, else all that could.
                idle = [axis for axis in blocked if axis in free]
                unit, parts = (prod(sizes[axis] for axis in axes) for axes in (idle or blocked, idle))
                index = dim_index(graph, operator.index, f)
                uneven.append(_Uneven(index, f, size, split, split * unit, parts))
        # Not to be split are single elements, and what a preset has whole.
        meant = all(one.size == 1 for one in factors) or (able and not any(wanted[axis] for axis in free))
        alike = 1 if meant else prod(sizes[axis] for axis in free)
        outer = next((scans[p] for n in range(1, len(operator.path)) if (p := operator.path[:n]) in scans), None)
        line = operator.source if outer is None else f"{operator.source} in the scan at {outer}"
        yield _Work(operator, line, taken, taken(1.0), alike, not able, tuple(uneven))
