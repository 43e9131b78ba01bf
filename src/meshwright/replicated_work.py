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
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from .cost.efficiency import profile_of
from .cost.kernels import Kernel, kernel_seconds
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
from .plan import Stage
from .plan_request import Planning, PlanRequest
from .program.graph import Graph, Operator
from .program.origins import operator_origins
from .program.residuals import is_stored
from .program.rules import ReplicationWarning
from .report.table import format_seconds
from .runtime.plan_fits import algorithms_of
from .search.operator_kernels import KernelsOf, parts_of
from .search.roles import Roles
from .sharding import Algorithm

# A note is due where it is about this share of a step at least: more than two plans of like speed differ by
# (`search.hierarchical`), and enough to change a model or a cluster for.
SHARE = 0.05

# Where layouts that split work are no faster, it is noted if it is most of the compute: more devices are of no use then.
_MOST = 0.5


class _Uneven(NamedTuple):
    """A dim that axes do not divide, in an operator.

    Args:
      index: of the dim in the program.
      factor: of the operator's rule.
      split: into how many parts it is.
      unit: into how many it would be.
      idle: whether devices do the operator's work alike in place of splitting it.
      saved: seconds of compute that the longer dim saves at most; negative where it costs more.
    """

    index: int
    factor: int
    split: int
    unit: int
    idle: bool
    saved: float


class _Work(NamedTuple):
    """An operator of a stage.

    Args:
      operator: of the graph.
      seconds: of it on a device.
      idle: how many devices do it alike.
      saved: seconds of compute that splitting it over these saves at most.
      whole: whether no dim of it may be split.
      uneven: its uneven dims.
    """

    operator: Operator
    seconds: float
    idle: int
    saved: float
    whole: bool
    uneven: tuple[_Uneven, ...]


# Operators of a stage that have an uneven dim; the key is the stage and the dim.
_Places = dict[tuple[int, int], list[tuple[_Work, _Uneven]]]


def replicated_work(asked: PlanRequest, found: Planning, roles: Roles | None) -> tuple[str, ...]:
    """Notes on what hinders a plan from splitting work.

    Args:
      asked: the request.
      found: its plan, priced.
      roles: of the mesh axes, where a preset gives them some.

    Warns:
      ReplicationWarning: for operators without a dim that could be split.
    """
    plan = found.plan
    if plan.predicted is None or plan.num_devices == 1:
        return ()
    graphs = list(stage_graphs(found.program, plan))
    works = [list(_work(asked, found, n, graph, roles)) for n, (_, graph) in enumerate(graphs)]
    places: _Places = defaultdict(list)
    stake: dict[tuple[int, int], float] = defaultdict(float)
    for number, (stage, _) in enumerate(graphs):
        moving = stage.communication_seconds / (sum(work.seconds for work in works[number]) or 1.0)
        for work in works[number]:
            for dim in work.uneven:
                places[number, dim.index].append((work, dim))
                stake[number, dim.index] += dim.saved + moving * work.seconds
    notes, noted = _uneven_notes(asked, found, [graph for _, graph in graphs], roles, places, stake)
    rest = [w for each in works for w in each if w.idle > 1 and noted.isdisjoint(d.index for d in w.uneven if d.idle)]
    compute = sum(work.seconds for each in works for work in each)
    notes += _other_notes(found, [work for work in rest if work.whole], compute, whole=True)
    notes += _other_notes(found, [work for work in rest if not work.whole], compute, whole=False)
    return tuple(notes)


def _uneven_notes(
    asked: PlanRequest, found: Planning, graphs: list[Graph], roles: Roles | None, places: _Places,
    stake: dict[tuple[int, int], float],
) -> tuple[list[str], set[int]]:  # fmt: skip
    """Notes on uneven dims, and these dims: that with the most at stake solved again, others by what is bounded."""
    plan, step, names = found.plan, found.step_seconds, DimNames(found.program)
    notes: list[str] = []
    noted: set[int] = set()
    for rank, key in enumerate(sorted(places, key=lambda key: (-stake[key], key))):
        number, index = key
        graph = graphs[number]
        worst, dim = max(places[key], key=lambda one: (one[0].seconds, -one[0].operator.index))
        if index in noted or stake[key] < SHARE * step:
            continue
        extent = worst.operator.rule.factors[dim.factor].size
        work = "a step" if len(plan.stages) == 1 else f"of a step of {format_seconds(step)} for stage {number + 1}"
        gain = ""
        if rank == 0 and asked.left_seconds > 0:
            longer = padded_graph(graph, index, extent, padded_extent(extent, dim.unit))
            try:
                before, after = (solved_seconds(asked, found, number, one, roles) for one in (graph, longer))
            except PlanError:
                pass  # pins, or memory
            else:
                if before - after < SHARE * step:
                    continue
                times = f"{format_seconds(after)} in place of {format_seconds(before)}"
                gain = f"would take {times} {work}, on the same mesh"
        bound = sum(one.saved for _, one in places[key] if one.idle)
        if not gain and bound < SHARE * step:
            continue
        gain = gain or f"would save at most {format_seconds(bound)} of {format_seconds(step)} a step, of compute"
        name, times = names.of(graph, worst.operator, dim.factor)
        split = "not split over" if dim.split == 1 else f"split over {dim.split} of"
        part = f", its part in each of {times} microbatches" if times > 1 else ""
        notes.append(
            f"{name} is {split} {dim.unit} devices ({worst.operator.source}): {dim.unit} does not divide "
            f"{extent}{part}; {padded_words(extent, dim.unit, times)} {gain}"
        )
        noted.add(index)
    return notes, noted


def _other_notes(found: Planning, works: list[_Work], compute: float, *, whole: bool) -> list[str]:
    """A note on the work that devices do alike though no uneven dim is why, if it is worth one."""
    seconds, saved = sum(work.seconds for work in works), sum(work.saved for work in works)
    if not works or (saved < SHARE * found.step_seconds if whole else seconds < _MOST * compute):
        return []
    worst = max(works, key=lambda work: (work.saved, -work.operator.index))
    operator = worst.operator
    less = f"it would take at most {format_seconds(saved)} of {format_seconds(found.step_seconds)} a step less"
    if whole:
        text = f"{operator.name} at {operator.source} runs whole on every device: no dim of it can be split"
        warnings.warn(text, ReplicationWarning, stacklevel=4)
        return [f"{text.replace('every device', f'{worst.idle} devices')}; split, {less}"]
    assert found.plan.predicted is not None
    gap = found.plan.predicted.optimality_gap
    known = (
        f"no layout is faster by more than {100 * gap:.2g} % by the cost model, with what moving data takes"
        if gap <= SHARE
        else "whether a layout that splits it is faster, the search did not find out (its optimality gap is "
        f"{100 * gap:.0f} %)"
    )
    return [
        f"{worst.idle} devices do the same work: {100 * seconds / compute:.0f} % of the compute, most of it at "
        f"{_with_scan(found, operator)}; {known}; with nothing moved, {less}"
    ]


def _with_scan(found: Planning, operator: Operator) -> str:
    """The line of an operator, with that of the outermost scan it is in."""
    scans = {op.path[: op.path.index(-1)]: op.source for op in found.program.graph.operators if op.is_link}
    outer = next((p for n in range(1, len(operator.path)) if (p := operator.path[:n]) in scans), None)
    return operator.source if outer is None else f"{operator.source} in the scan at {scans[outer]}"


def _work(asked: PlanRequest, found: Planning, number: int, graph: Graph, roles: Roles | None) -> Iterator[_Work]:
    """The operators of a stage, but for those whose results are known before the step."""
    stage, microbatches = found.plan.stages[number], found.plan.microbatches_of(number)
    sizes, device = stage.sizes, asked.cluster.device_at(stage.devices[0])
    devices, profile = prod(sizes.values()), profile_of(device)
    for operator, algorithm in zip(graph.operators, algorithms_of(graph, stage, number), strict=True):
        made = [graph.values[v] for v in operator.results if v is not None]
        if operator.is_link or not made or all(value.constant for value in made):
            continue
        kernels = KernelsOf(graph, operator, sizes, device, stored=is_stored(graph, operator))(algorithm)
        runs: list[tuple[Kernel, float]] = [(kernels.forward, 1.0)]
        runs += [(one.kernel, one.runs) for one in kernels.gradients]

        def taken(share: float, runs: list[tuple[Kernel, float]] = runs, operator: Operator = operator) -> float:
            """Seconds of so much of its FLOPs and bytes; a launch takes as long."""
            parts = ((k._replace(flops=share * k.flops, moved_bytes=share * k.moved_bytes), n) for k, n in runs)
            return microbatches * operator.repeats * sum(n * kernel_seconds(k, device, profile) for k, n in parts)

        seconds = taken(1.0)
        able = {f for f in operator.rule.splittable if operator.rule.factors[f].size > 1}
        wanted = _wanted(graph, operator, stage, able, roles)
        free = [axis for axis in sizes if all(axis not in axes for axes in algorithm.axes)]
        uneven = []
        for f in able:
            blocked = _blocked(operator, algorithm, stage, f, [axis for axis in sizes if f in wanted[axis]])
            if not blocked:
                continue
            # Where devices idle their axes are what is to split it, else all that could.
            idle = [axis for axis in blocked if axis in free]
            split = prod(sizes[axis] for axis in algorithm.axes[f])
            unit = split * prod(sizes[axis] for axis in idle or blocked)
            growth = padded_extent(operator.rule.factors[f].size, unit) / operator.rule.factors[f].size
            saved = seconds - taken(growth / prod(sizes[axis] for axis in free if f in wanted[axis]))
            uneven.append(_Uneven(dim_index(graph, operator.index, f), f, split, unit, bool(idle), saved))
        alone = all(factor.size == 1 for factor in operator.rule.factors)
        idle = 1 if alone or (able and not any(wanted[axis] for axis in free)) else prod(sizes[axis] for axis in free)
        saved = seconds - taken(parts_of(algorithm, sizes) / devices) if idle > 1 else 0.0
        yield _Work(operator, seconds, idle, saved, not able, tuple(uneven))


def _wanted(
    graph: Graph, operator: Operator, stage: Stage, able: set[int], roles: Roles | None
) -> dict[str, set[int]]:
    """For each axis of the mesh the factors of an operator that it may split."""
    if roles is None:
        return dict.fromkeys(stage.sizes, able)
    origins = operator_origins(graph)[operator.index]
    return {axis: able & roles.wanted(operator, origins, axis) for axis in stage.sizes}


def _blocked(operator: Operator, algorithm: Algorithm, stage: Stage, factor: int, axes: list[str]) -> list[str]:
    """Of these axes those that neither split a factor nor divide what is left of it."""
    left = operator.rule.factors[factor].size // prod(stage.sizes[axis] for axis in algorithm.axes[factor])
    return [axis for axis in axes if axis not in algorithm.axes[factor] and left % stage.sizes[axis]]
