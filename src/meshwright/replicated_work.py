"""Work that devices of a finished plan do alike: notes that say where, why, and what would split it.

An operator that a mesh axis does not split is run whole by all devices along it. Much of that is meant: it is little,
or moving its operands would take longer. A note is due where it is a good part of the step, for one of these reasons:

* a dim that no remaining axis divides (a vocabulary of 50257 over 8 devices): the note names the dim, and the next size
  that would do;
* an operator without a dim that may be split (a factorisation, a loop, a kernel without a rule): a `ReplicationWarning`
  besides, as such operators get elsewhere;
* nothing at all: layouts that split it were looked at, and none is faster. That is noted where most of the work is done
  by devices alike, however little a split would save: more devices are of no use then.

Seconds are the cost model's, of the compute of one device in one step, both passes. What a split would save is what
kernels with a share of the FLOPs and bytes take less (a launch takes as long); what moving operands would take is not
in it, so that a gain is said to be one *at most*. Work inside rematerialised regions counts once, and what is
around the loss function (the optimizer) not at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import NamedTuple

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
from .runtime.plan_fits import algorithms_of
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


class _Reason(NamedTuple):
    """Why devices do work alike; work of one reason is one note.

    Args:
      kind: "dim", "whole", or "choice".
      extent: of the dim; 0 where the reason is another.
      unit: what has to divide it.
      source: of what is whole, the user's line.
      devices: that do it alike.
    """

    kind: str
    extent: int
    unit: int
    source: str
    devices: int


class _Alike(NamedTuple):
    """An operator that devices do alike.

    Args:
      reason: why.
      name: of the dim, or of the operator.
      source: the user's line; of an operator in scans, that of the outermost one besides.
    """

    reason: _Reason
    name: str
    source: str


def replicated_work(program: Program, plan: Plan, cluster: Cluster, roles: Roles | None = None) -> tuple[str, ...]:
    """Notes on the work that devices do alike, the costliest first.

    Args:
      program: as it was planned.
      plan: for it, priced.
      cluster: it is for.
      roles: of the mesh axes, where a preset gives them some.

    Warns:
      ReplicationWarning: for operators without a dim that could be split.
    """
    if plan.predicted is None or plan.num_devices == 1:
        return ()
    step = plan.predicted.step_seconds
    saved: dict[_Reason, dict[_Alike, float]] = {}
    compute = alike = 0.0
    for number, (stage, graph) in enumerate(stage_graphs(program, plan)):
        device = cluster.device_at(stage.devices[0])
        algorithms = algorithms_of(graph, stage, number)
        for found, seconds, idle in _work(graph, stage, algorithms, plan.microbatches_of(number), device, roles):
            compute += seconds
            alike += seconds * (found is not None)
            if found is not None:
                of = saved.setdefault(found.reason, {})
                of[found] = of.get(found, 0.0) + idle
    notes = []
    for reason, places in sorted(saved.items(), key=lambda one: (-sum(one[1].values()), one[0])):
        seconds = sum(places.values())
        due = alike >= _MOSTLY * compute if reason.kind == "choice" else seconds >= SHARE * step
        if not due or len(notes) == _MOST:
            continue
        worst = max(places, key=lambda place: (places[place], place))
        if reason.kind == "whole":
            text = f"{worst.name} at {worst.source} runs whole on every device: no dim of it can be split"
            warnings.warn(text, ReplicationWarning, stacklevel=3)
        gain = f"at most {format_seconds(seconds)} of {format_seconds(step)} a step"
        notes.append(_note(worst, gain, alike / compute))
    return tuple(notes)


def _note(worst: _Alike, gain: str, share: float) -> str:
    reason = worst.reason
    match reason.kind:
        case "dim":
            return (
                f"{worst.name} is not split over {reason.devices} devices, which do the same work there "
                f"({worst.source}): {reason.unit} does not divide {reason.extent}; "
                f"{padded_words(reason.extent, reason.unit)} would save {gain}"
            )
        case "whole":
            return (
                f"{worst.name} at {worst.source} runs whole on {reason.devices} devices: no dim of it can be split; "
                f"split, it would take {gain} less"
            )
    return (
        f"{reason.devices} devices do the same work: {100 * share:.0f} % of the compute, most of it at {worst.source}; "
        f"no layout that splits it is faster by the cost model, with what moving data takes; without that it would "
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


def stage_graphs(program: Program, plan: Plan) -> Iterator[tuple[Stage, Graph]]:
    """Each stage of a plan with its graph.

    Args:
      program: it is for.
      plan: the plan.
    """
    if len(plan.stages) == 1 and plan.stages[0].equations is None:
        yield plan.stages[0], program.graph
        return
    cuts = [stage.equations[0] for stage in plan.stages[1:] if stage.equations is not None and not plan.shares]
    staged = staged_program(program, layers=1, cuts=cuts, scan_splits=dict(plan.scan_splits))
    for stage in plan.stages:
        assert stage.equations is not None  # plans of several stages have them
        yield stage, staged.cutter.cut(*stage.equations).graph


def _work(
    graph: Graph, stage: Stage, algorithms: Sequence[Algorithm], microbatches: int, device: Device, roles: Roles | None
) -> Iterator[tuple[_Alike | None, float, float]]:
    """Of each operator, if devices do it alike, why; its seconds on a device, and those that a split would save."""
    sizes, profile = stage.sizes, profile_of(device)
    devices = prod(sizes.values())
    names = DimNames(graph)
    scans = {op.path[: op.path.index(-1)]: op.source for op in graph.operators if op.is_link}
    for operator, algorithm in zip(graph.operators, algorithms, strict=True):
        made = [graph.values[v] for v in operator.results if v is not None]
        if operator.is_link or not made or all(value.constant for value in made):
            continue
        kernels = KernelsOf(graph, operator, sizes, device, stored=is_stored(graph, operator))(algorithm)
        parts = parts_of(algorithm, sizes)
        seconds = saved = 0.0
        for kernel, runs in ((kernels.forward, 1.0), *((one.kernel, one.runs) for one in kernels.gradients)):
            times = microbatches * operator.repeats * runs
            seconds += times * kernel_seconds(kernel, device, profile)
            share = parts / devices  # of what it does now; a launch is none
            shared = kernel._replace(flops=share * kernel.flops, moved_bytes=share * kernel.moved_bytes)
            saved += times * (kernel_seconds(kernel, device, profile) - kernel_seconds(shared, device, profile))
        found = _alike(graph, operator, algorithm, stage, roles, names, scans) if parts < devices else None
        yield found, seconds, saved


def _alike(
    graph: Graph, operator: Operator, algorithm: Algorithm, stage: Stage, roles: Roles | None, names: DimNames,
    scans: dict[tuple[int, ...], str],
) -> _Alike | None:  # fmt: skip
    """Why devices do an operator alike; None where a preset has it so, or there is one element alone."""
    sizes, rule = stage.sizes, operator.rule
    split = {axis for axes in algorithm.axes for axis in axes}
    free = [axis for axis in sizes if axis not in split]
    devices = prod(sizes[axis] for axis in free)
    if all(factor.size == 1 for factor in rule.factors):
        return None
    able = set(rule.splittable)
    if not able:
        return _Alike(_Reason("whole", 0, 0, operator.source, devices), operator.name, operator.source)
    wanted = dict.fromkeys(free, able)
    if roles is not None:
        origins = operator_origins(graph)[operator.index]
        wanted = {axis: able & roles.wanted(operator, origins, axis) for axis in free}
        if not any(wanted.values()):
            return None
    left = {f: rule.factors[f].size // prod(sizes[a] for a in algorithm.axes[f]) for f in able}
    if any(left[f] % sizes[axis] == 0 for axis in free for f in wanted[axis]):
        outer = next((p for n in range(1, len(operator.path)) if (p := operator.path[:n]) in scans), None)
        inside = f" in the scan at {scans[outer]}" if outer is not None else ""
        return _Alike(_Reason("choice", 0, 0, "", devices), operator.name, f"{operator.source}{inside}")
    # The longest dim is what is most easily padded.
    factor = max(set().union(*wanted.values()), key=lambda f: (left[f], -f))
    unit = prod(sizes[axis] for axis in (*algorithm.axes[factor], *(a for a in free if factor in wanted[a])))
    reason = _Reason("dim", rule.factors[factor].size, unit, "", devices)
    return _Alike(reason, names.of(operator, factor), operator.source)


class DimNames:
    """What users call the dims of a graph's operators.

    Args:
      graph: of a program or a stage.
    """

    def __init__(self, graph: Graph) -> None:
        self._indices = Indices(graph)
        self._known: dict[int, tuple[int, str]] = {}
        inputs = sorted(range(len(graph.inputs)), key=lambda position: position not in graph.parameters)
        for position in inputs:
            value = graph.values[graph.inputs[position]]
            for dim, extent in enumerate(value.shape):
                index = self._indices.of_dim(value.index, dim)
                if index is not None:
                    self._known.setdefault(index, (extent, f"dim {dim} ({extent}) of {value.name}"))

    def of(self, operator: Operator, factor: int) -> str:
        """The first parameter's, or else input's, dim that a factor is, or of which it counts the blocks; or its
        size."""
        size = operator.rule.factors[factor].size
        extent, name = self._known.get(self._indices.of(operator.index, factor), (size, f"a dim of {size}"))
        return name if extent == size else f"{name}, {size} blocks,"
