"""Work that devices of a finished plan do alike: notes that say where, why, and what would split it.

An operator that a mesh axis does not split is run whole by all devices along it. Much of that is meant: it is little,
or moving its operands would take longer. A note is due where it is a good part of the step, for one of these reasons:

* a dim that no remaining axis divides (a vocabulary of 50257 over 8 devices): the note names the dim, and the next size
  that would do;
* an operator without a dim that may be split (a factorisation, a loop, a kernel without a rule): a `ReplicationWarning`
  besides, as such operators get elsewhere;
* nothing at all: layouts that split it were looked at, and none is faster. That is noted where most of the work is done
  by all devices alike.

Seconds are the cost model's, of the compute of one device in one step, both passes; what moving operands would take is
not in them, so that a gain is said to be one *at most*. Work inside rematerialised regions counts once, and what is
around the loss function (the optimizer) not at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod

from .cluster import Cluster, Device
from .cost.efficiency import profile_of
from .cost.kernels import kernel_seconds
from .plan import Plan, Stage
from .program.graph import Graph, Operator
from .program.origins import Indices, operator_origins
from .program.residuals import is_stored
from .program.rules import ReplicationWarning
from .program.staged import staged_program
from .program.trace import Program
from .report.table import format_seconds
from .runtime.pipeline.stage_jaxpr import stage_algorithms
from .search.operator_kernels import KernelsOf, parts_of
from .search.roles import Roles
from .sharding import Algorithm

# A note is due where splitting the work would save this share of a step at least: more than two plans of like speed
# differ by (`search.hierarchical`), and enough to change a model or a cluster for.
SHARE = 0.05

# Notes of one plan at most, the costliest first.
_MOST = 3

# Where most of the compute is done by all devices alike, whatever the reason.
_MOSTLY = 0.5

# Matrix units take tiles of so many; a padded dim that has whole ones is named too, where that is hardly larger.
_TILE, _HARDLY = 128, 1.01


@dataclass(frozen=True, slots=True)
class _Place:
    """What notes are about: work with one reason, in one place.

    Args:
      reason: "dim", "whole", or "choice".
      name: of the dim, or of the operator.
      extent: of the dim; 0 for what is no dim.
      unit: what has to divide it.
      source: the user's line.
      devices: that do it alike.
    """

    reason: str
    name: str
    extent: int
    unit: int
    source: str
    devices: int


def replicated_work(program: Program, plan: Plan, cluster: Cluster, roles: Roles | None = None) -> tuple[str, ...]:
    """Notes on the work that devices do alike, the costliest first.

    Args:
      program: as it was planned.
      plan: for it, priced.
      cluster: it is for.
      roles: of the mesh axes, where a preset gives them some.
    """
    if plan.predicted is None or plan.num_devices == 1:
        return ()
    step = plan.predicted.step_seconds
    saved: dict[_Place, float] = {}
    lines: dict[_Place, dict[str, float]] = {}
    compute = alike = 0.0
    for number, graph in enumerate(_graphs(program, plan)):
        stage = plan.stages[number]
        if prod(stage.sizes.values()) == 1:
            compute += stage.compute_seconds
            continue
        device = cluster.device_at(stage.devices[0])
        for operator, place, seconds, idle in _work(graph, stage, plan.microbatches_of(number), device, roles):
            compute += seconds
            alike += idle
            if place is not None:
                saved[place] = saved.get(place, 0.0) + idle
                of = lines.setdefault(place, {})
                of[operator.source] = of.get(operator.source, 0.0) + idle
    mostly = alike >= _MOSTLY * compute
    notes = []
    for place, seconds in sorted(saved.items(), key=lambda one: (-one[1], one[0].reason, one[0].name, one[0].source)):
        if seconds < SHARE * step or (place.reason == "choice" and not mostly) or len(notes) == _MOST:
            continue
        where = place.source or max(lines[place].items(), key=lambda one: (one[1], one[0]))[0]
        if place.reason == "whole":
            warnings.warn(f"{place.name} at {where} runs whole on every device", ReplicationWarning, stacklevel=3)
        notes.append(_note(place, where, seconds, step, alike / compute))
    return tuple(notes)


def _note(place: _Place, where: str, seconds: float, step: float, share: float) -> str:
    gain = f"at most {format_seconds(seconds)} of {format_seconds(step)} a step"
    match place.reason:
        case "dim":
            return (
                f"{place.name} is not split over {place.devices} devices, which do the same work there ({where}): "
                f"{place.unit} does not divide {place.extent}; {padded_words(place.extent, place.unit)} would save "
                f"{gain}"
            )
        case "whole":
            return (
                f"{place.name} at {where} runs whole on {place.devices} devices: no dim of it can be split; if it "
                f"could, that would save {gain}"
            )
    inside = f"{place.name}, " if place.name else ""
    return (
        f"{place.devices} devices do the same work ({100 * share:.0f} % of the compute is done alike; {inside}most at "
        f"{where}): no layout that splits it is faster by the cost model; without what moving data takes it would "
        f"save {gain}"
    )


def padded_extent(extent: int, unit: int) -> int:
    """The next size that `unit` divides, a multiple of whole tiles where that is hardly larger.

    >>> padded_extent(50257, 8), padded_extent(25, 8)
    (50304, 32)

    Args:
      extent: of a dim.
      unit: into how many blocks it is to be cut.
    """
    tiled = -(-extent // lcm(unit, _TILE)) * lcm(unit, _TILE)
    return tiled if tiled <= _HARDLY * extent else -(-extent // unit) * unit


def padded_words(extent: int, unit: int) -> str:
    """The sizes that `unit` divides, for a note.

    >>> padded_words(50257, 8), padded_words(25, 8)
    ('50264, or 50304 for whole tiles of 128,', '32')

    Args:
      extent: as of `padded_extent`.
      unit: the same.
    """
    least, padded = -(-extent // unit) * unit, padded_extent(extent, unit)
    return f"{least}" if least == padded else f"{least}, or {padded} for whole tiles of {_TILE},"


def _graphs(program: Program, plan: Plan) -> Iterator[Graph]:
    """The graph of each stage."""
    if len(plan.stages) == 1 and plan.stages[0].equations is None:
        yield program.graph
        return
    cuts = [stage.equations[0] for stage in plan.stages[1:] if stage.equations is not None and not plan.shares]
    staged = staged_program(program, layers=1, cuts=cuts, scan_splits=dict(plan.scan_splits))
    for stage in plan.stages:
        assert stage.equations is not None  # plans of several stages have them
        yield staged.cutter.cut(*stage.equations).graph


def _work(
    graph: Graph, stage: Stage, microbatches: int, device: Device, roles: Roles | None
) -> Iterator[tuple[Operator, _Place | None, float, float]]:
    """For each operator its place if devices do it alike, its seconds on a device, and what a split would save."""
    sizes, profile = stage.sizes, profile_of(device)
    devices = prod(sizes.values())
    names = DimNames(graph)
    scans = {op.path[: op.path.index(-1)]: op.source for op in graph.operators if op.is_link}
    for operator, algorithm in zip(graph.operators, stage_algorithms(graph, stage), strict=True):
        made = [graph.values[v] for v in operator.results if v is not None]
        if operator.is_link or not made or all(value.constant for value in made):
            continue
        kernels = KernelsOf(graph, operator, sizes, device, stored=is_stored(graph, operator))(algorithm)
        once = kernel_seconds(kernels.forward, device, profile) + sum(
            one.runs * kernel_seconds(one.kernel, device, profile) for one in kernels.gradients
        )
        seconds = microbatches * operator.repeats * once
        parts = parts_of(algorithm, sizes)
        place = _place(graph, operator, algorithm, stage, roles, names, scans) if parts < devices else None
        yield operator, place, seconds, seconds * (1 - parts / devices)


def _place(
    graph: Graph, operator: Operator, algorithm: Algorithm, stage: Stage, roles: Roles | None, names: DimNames,
    scans: dict[tuple[int, ...], str],
) -> _Place | None:  # fmt: skip
    """Why devices do an operator alike; None where a preset has it so, or there is one element alone."""
    sizes = stage.sizes
    split = {axis for axes in algorithm.axes for axis in axes}
    free = [axis for axis in sizes if axis not in split]
    alike = prod(sizes[axis] for axis in free)
    if all(factor.size == 1 for factor in operator.rule.factors):
        return None
    able = set(operator.rule.splittable)
    if not able:
        return _Place("whole", operator.name, 0, 0, operator.source, alike)
    wanted = dict.fromkeys(free, able)
    if roles is not None:
        wanted = {axis: able & roles.wanted(operator, operator_origins(graph)[operator.index], axis) for axis in free}
        if not any(wanted.values()):
            return None
    left = {f: operator.rule.factors[f].size // prod(sizes[a] for a in algorithm.axes[f]) for f in able}
    if any(left[f] % sizes[axis] == 0 for axis in free for f in wanted[axis]):
        loop = next((p for n in range(len(operator.path)) if (p := operator.path[:n]) in scans), None)
        name = f"inside the scan at {scans[loop]}" if loop is not None else ""
        return _Place("choice", name, 0, 0, "", alike)
    # The longest dim is what is most easily padded.
    factor = max(set().union(*wanted.values()), key=lambda f: (left[f], -f))
    unit = prod(sizes[axis] for axis in (*algorithm.axes[factor], *(a for a in free if factor in wanted[a])))
    extent = operator.rule.factors[factor].size
    return _Place("dim", names.of(operator, factor), extent, unit, "", alike)


class DimNames:
    """What users call the dims of a graph's operators.

    Args:
      graph: of a program or a stage.
    """

    def __init__(self, graph: Graph) -> None:
        self._indices = Indices(graph)
        self._known: dict[int, str] = {}
        inputs = sorted(range(len(graph.inputs)), key=lambda position: position not in graph.parameters)
        for position in inputs:
            value = graph.values[graph.inputs[position]]
            for dim, extent in enumerate(value.shape):
                index = self._indices.of_dim(value.index, dim)
                if index is not None:
                    self._known.setdefault(index, f"dim {dim} ({extent}) of {value.name}")

    def of(self, operator: Operator, factor: int) -> str:
        """The first parameter's, or else input's, dim that a factor is; or its size."""
        index = self._indices.of(operator.index, factor)
        return self._known.get(index, f"a dim of {operator.rule.factors[factor].size}")
