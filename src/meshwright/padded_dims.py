"""What a dim that nothing divides costs a plan of one stage: the search once more, as if the dim were padded.

A product over a dim that no axis divides (a vocabulary of 50257) can be split along its other dims, so that no device
idles, and yet be slower than it had to be: what is summed or gathered instead is as large as the dim is long. No bound
tells by how much, so the search says: the graph of the program is data, in which the dim is made longer, and the
layouts on the plan's own mesh are solved again, of several stages those of one. One or two solutions of one mesh, for
the dim with the most FLOPs alone, and only where it has a good part of them.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from .errors import PlanError
from .plan import Stage
from .plan_request import Planning, PlanRequest
from .program.graph import Graph, Operator
from .program.origins import Indices
from .replicated_work import SHARE, DimNames, padded_extent, padded_words, stage_graphs
from .report.table import format_seconds
from .search.one_stage import OneStageSearch, SearchRequest
from .search.parameters import parameter_infos
from .search.submeshes import Submesh, Submeshes


def padding_note(asked: PlanRequest, found: Planning) -> tuple[str, ...]:
    """A note on the dim with the most FLOPs that no axis divides, if the step were faster with a longer one.

    Args:
      asked: the request.
      found: its plan; of several stages the costliest is looked at.
    """
    plan, program = found.plan, found.program
    if plan.num_devices == 1 or asked.preset is not None or asked.left_seconds <= 0:
        return ()
    dims = [
        (flops, -number, graph, operator, factor)
        for number, (stage, graph) in enumerate(stage_graphs(program, plan))
        for flops, operator, factor in _indivisible(graph, [size for _, size in stage.mesh if size > 1])
    ]
    flops, number, graph, operator, factor = max(dims, key=lambda one: one[:2], default=(0.0, 0, None, None, 0))
    if graph is None or operator is None or flops < SHARE * program.graph.flops:
        return ()
    stage = plan.stages[-number]
    extent, devices = operator.rule.factors[factor].size, prod(stage.sizes.values())
    longer = _padded(graph, operator, factor, padded_extent(extent, devices))
    try:
        before, after = (_seconds(asked, found, stage, one) for one in (graph, longer))
    except PlanError:
        return ()  # pins, or memory
    step = found.step_seconds
    if before - after < SHARE * step:
        return ()
    name = DimNames(graph).of(operator, factor)
    work = "a step" if len(plan.stages) == 1 else f"of a step of {format_seconds(step)} for stage {1 - number}"
    return (
        f"{name} is not split ({operator.source}): no axis of the {devices} devices divides {extent}; "
        f"{padded_words(extent, devices)} would take {format_seconds(after)} in place of {format_seconds(before)} "
        f"{work}, on the same mesh",
    )


def _seconds(asked: PlanRequest, found: Planning, stage: Stage, graph: Graph) -> float:
    """What the work of a stage takes in a step, its layouts solved for this graph."""
    plan, program = found.plan, found.program
    if len(plan.stages) == 1 and graph is program.graph:
        return found.step_seconds
    known = {
        info.name: (info, prod(program.graph.values[program.graph.inputs[position]].shape))
        for info, position in zip(parameter_infos(program), program.graph.parameters, strict=True)
    }
    parameters = []
    for planned in stage.parameters:
        info, elements = known[planned.name]
        share = prod(planned.shape) / elements  # of a stacked parameter, the rows of the stage
        parameters.append(replace(info, optimizer_bytes=info.optimizer_bytes * share))
    one = len(plan.stages) == 1
    where = Submesh(min(stage.devices), max(stage.devices) + 1)
    request = SearchRequest(
        graph=graph, fingerprint=program.fingerprint, parameters=parameters,
        cluster=asked.cluster if one else Submeshes(asked.cluster).part(where), microbatches=plan.microbatches,
        mesh=[(tuple(axis for axis, _ in stage.mesh), tuple(size for _, size in stage.mesh))], pins=asked.pins,
        remat="layer" if stage.rematerialised else "none",
        carried=0 if program.marked else program.state_inputs, split_dims=program.split_dims if one else (),
    )  # fmt: skip
    search = OneStageSearch({plan.microbatches: request}, time_limit_seconds=max(asked.left_seconds, 0.0))
    predicted = search.run(lambda count: stage.memory_limit_bytes).plan.predicted
    assert predicted is not None  # the search prices what it finds
    return predicted.step_seconds


def _indivisible(graph: Graph, axes: list[int]) -> list[tuple[float, Operator, int]]:
    """The factors of products that none of these axes divides: FLOPs of all products that have it, and one of them."""
    indices = Indices(graph)
    flops: dict[tuple[int, int], float] = {}
    places: dict[tuple[int, int], tuple[Operator, int]] = {}
    for operator in graph.operators:
        for factor in operator.rule.splittable if operator.matmul and axes else ():
            size = operator.rule.factors[factor].size
            if all(size % axis for axis in axes):
                key = indices.of(operator.index, factor), size
                flops[key] = flops.get(key, 0.0) + operator.repeats * operator.flops
                places.setdefault(key, (operator, factor))
    return [(found, *places[key]) for key, found in flops.items()]


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
