"""What a dim that nothing divides costs a plan of one stage: the search once more, as if the dim were padded.

A product over a dim that no axis divides (a vocabulary of 50257) can be split along its other dims, so that no device
idles, and yet be slower than it had to be: what is summed or gathered instead is as large as the dim is long. No bound
tells by how much, so the search says: the graph of the program is data, in which the dim is made longer, and the
layouts on the plan's own mesh are solved again. One solution of one mesh, for the dim with the most FLOPs alone, and
only where it has a good part of them.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from .errors import PlanError
from .plan_request import Planning, PlanRequest
from .program.graph import Graph, Operator
from .program.origins import Indices
from .replicated_work import SHARE, DimNames, padded_extent, padded_words
from .report.table import format_seconds
from .search.hierarchical import HierarchicalSearch, SearchRequest
from .search.parameters import parameter_infos


def padding_note(asked: PlanRequest, found: Planning) -> tuple[str, ...]:
    """A note on the dim with the most FLOPs that no axis divides, if the step were faster with a longer one.

    Args:
      asked: the request.
      found: its plan.
    """
    plan, program = found.plan, found.program
    if len(plan.stages) > 1 or plan.num_devices == 1 or asked.preset is not None or asked.left_seconds <= 0:
        return ()
    (stage,) = plan.stages
    graph = program.graph
    devices = prod(stage.sizes.values())
    worst = _worst(graph, [size for _, size in stage.mesh if size > 1])
    if worst is None:
        return ()
    operator, factor = worst
    extent = operator.rule.factors[factor].size
    longer = padded_extent(extent, devices)
    request = SearchRequest(
        graph=_padded(graph, operator, factor, longer), fingerprint=program.fingerprint,
        parameters=parameter_infos(program), cluster=asked.cluster, microbatches=plan.microbatches,
        mesh=[tuple(zip(*stage.mesh, strict=True))], pins=asked.pins,
        remat="layer" if stage.rematerialised else "none", carried=0 if program.marked else program.state_inputs,
        split_dims=program.split_dims, time_limit_seconds=asked.left_seconds,
    )  # fmt: skip
    try:
        other = HierarchicalSearch(request).plan(stage.memory_limit_bytes).plan
    except PlanError:
        return ()  # pins, or memory
    assert other.predicted is not None  # the search prices what it finds
    seconds = other.predicted.step_seconds
    if seconds > (1 - SHARE) * found.step_seconds:
        return ()
    name = DimNames(graph).of(operator, factor)
    return (
        f"{name} is not split ({operator.source}): none of the {devices} devices' axes divides {extent}; "
        f"{padded_words(extent, devices)} would take {format_seconds(seconds)} a step in place of "
        f"{format_seconds(found.step_seconds)}, on the same mesh",
    )


def _worst(graph: Graph, axes: list[int]) -> tuple[Operator, int] | None:
    """The factor with the most FLOPs that none of these axes divides, with an operator it is of; None where it has
    too few for a note."""
    indices = Indices(graph)
    flops: dict[tuple[int, int], float] = {}
    places: dict[tuple[int, int], tuple[Operator, int]] = {}
    for operator in graph.operators:
        for factor in operator.rule.splittable if operator.matmul and not operator.is_link else ():
            size = operator.rule.factors[factor].size
            if all(size % axis for axis in axes):
                key = indices.of(operator.index, factor), size
                flops[key] = flops.get(key, 0.0) + operator.repeats * operator.flops
                places.setdefault(key, (operator, factor))
    worst = max(flops, key=lambda key: (flops[key], key[1]), default=None)
    return places[worst] if worst is not None and flops[worst] >= SHARE * graph.flops else None


def _padded(graph: Graph, operator: Operator, factor: int, longer: int) -> Graph:
    """The graph with a dim made longer, wherever it is."""
    indices = Indices(graph)
    index, extent = indices.of(operator.index, factor), operator.rule.factors[factor].size
    shapes = [list(value.shape) for value in graph.values]
    grown: set[tuple[int, int]] = set()
    operators = []
    for op in graph.operators:
        sizes = [one.size for one in op.rule.factors]
        mine = {f for f, n in enumerate(sizes) if n % extent == 0 and indices.of(op.index, f) == index}
        if not mine:
            operators.append(op)
            continue
        factors = tuple(
            replace(one, size=one.size // extent * longer) if f in mine else one
            for f, one in enumerate(op.rule.factors)
        )
        for values, tensors in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
            for value, tensor in zip(values, tensors, strict=True):
                for dim, those in enumerate(tensor if value is not None else ()):
                    if value is not None and mine.intersection(those) and (value, dim) not in grown:
                        grown.add((value, dim))
                        shapes[value][dim] = shapes[value][dim] // extent * longer
        operators.append(replace(op, rule=replace(op.rule, factors=factors), flops=op.flops / extent * longer))
    longer_values = tuple(replace(v, shape=tuple(shape)) for v, shape in zip(graph.values, shapes, strict=True))
    return replace(graph, values=longer_values, operators=tuple(operators))
