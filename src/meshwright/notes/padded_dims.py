"""A dim made longer so that mesh axes divide it: what it is called, its next size, and what a step takes with it.

The graph of a program is data, in which a dim is made longer wherever it is. The layouts on the mesh of a finished
plan are then solved again, under the same constraints: of a plan of several stages those of one stage, twice, with
the dim as it is and longer; of a plan of one stage once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import lcm, prod

from ..cluster import Cluster
from ..plan import Plan
from ..program.graph import Graph
from ..program.origins import indices_of
from ..program.staged import staged_program, whole_program
from ..program.trace import Program
from ..search.inter.submeshes import Submesh, Submeshes
from ..search.intra.parameters import parameter_infos
from ..search.pipelines.driver import StageSearch
from ..search.pipelines.request import StageRequest
from ..search.restrictions.constraints import Constraints

# Matrix units take tiles of 128 x 128 elements (the MXU of a TPU; a multiple of those of a GPU). A size of whole tiles
# is named too where it is longer by less than 2 %, less than predictions are off by (docs/calibration.md).
TILE, _HARDLY = 128, 1.02


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


def _whole(graph: Graph) -> Graph:
    """The graph of the whole program, whatever part of it a graph is."""
    return graph.part_of[0] if graph.part_of is not None else graph


def dim_index(graph: Graph, operator: int, factor: int) -> int:
    """The index (`program.origins`) of an operator's factor in the whole program."""
    place = operator if graph.part_of is None else graph.part_of[1][operator]
    return indices_of(_whole(graph)).of(place, factor)


def dim_names(program: Program, graph: Graph) -> dict[int, tuple[int, str, int]]:
    """What users call the indices of a program: for each the extent and the name of the first parameter's, or else
    input's, dim that it is, and into how many microbatches that is cut.

    Args:
      program: as it was planned.
      graph: of it, or of one of its stages.
    """
    names = [program.graph.values[v].name for v in program.graph.inputs]
    batch = set(zip(names, program.split_dims, strict=False)) if program.microbatches > 1 else set()
    found: dict[int, tuple[int, str, int]] = {}
    whole = _whole(graph)
    for position in sorted(range(len(whole.inputs)), key=lambda position: position not in whole.parameters):
        value = whole.values[whole.inputs[position]]
        for dim, extent in enumerate(value.shape):
            index = indices_of(whole).of_dim(value.index, dim)
            if index is not None:
                times = program.microbatches if (value.name, dim) in batch else 1
                found.setdefault(index, (extent, f"dim {dim} ({times * extent}) of {value.name}", times))
    return found


def stage_graphs(program: Program, plan: Plan) -> list[Graph]:
    """The graph of each stage of a plan.

    Args:
      program: it is for.
      plan: the plan.
    """
    ranges = [stage.equations for stage in plan.stages if stage.equations is not None]
    if len(plan.stages) == 1 and not ranges:
        return [program.graph]
    cuts = [] if plan.shares else [first for first, _ in ranges[1:]]
    staged = staged_program(program, layers=1, cuts=cuts, scan_splits=dict(plan.scan_splits))
    return [staged.cutter.cut(*equations).graph for equations in ranges]


def solved_seconds(
    program: Program, plan: Plan, number: int, graph: Graph, cluster: Cluster, constraints: Constraints, seconds: float
) -> float:
    """What the work of a stage takes in a step with the best layouts of a graph on the stage's mesh.

    Args:
      program: as it was planned.
      plan: of it, priced.
      number: of the stage.
      graph: of the stage, or that with a dim made longer.
      cluster: it is for.
      constraints: that the plan satisfies.
      seconds: that solving may take.

    Raises:
      PlanError: if nothing fits, or no layout satisfies the constraints.
    """
    stage, one = plan.stages[number], len(plan.stages) == 1
    if graph is program.graph and plan.predicted is not None:
        return plan.predicted.step_seconds
    known = {
        info.name: (info, prod(program.graph.values[program.graph.inputs[position]].shape))
        for info, position in zip(parameter_infos(program), program.graph.parameters, strict=True)
    }
    parameters = [
        # Of a stacked parameter, the rows of the stage.
        replace(info, optimizer_bytes=info.optimizer_bytes * prod(planned.shape) / elements)
        for planned in stage.parameters
        for info, elements in (known[planned.name],)
    ]
    where = Submesh(min(stage.devices), max(stage.devices) + 1)
    whole = replace(
        whole_program(program), graph=graph, layers=((0, 1 + max(operator.path[0] for operator in graph.operators)),),
        microbatches=plan.microbatches_of(number), split_dims=program.split_dims if one else (),
    )  # fmt: skip
    request = StageRequest(
        programs=[whole], parameters=parameters, cluster=cluster if one else Submeshes(cluster).part(where),
        mesh=[(tuple(axis for axis, _ in stage.mesh), tuple(size for _, size in stage.mesh))],
        constraints=replace(constraints, gradient_exchange=stage.gradient_exchange),
        remat=None if stage.rematerialised else "none", alone=True, time_limit_seconds=max(seconds, 0.0),
    )  # fmt: skip
    predicted = StageSearch(request).run().plan.predicted
    assert predicted is not None  # the search prices what it finds
    return predicted.step_seconds


def padded_graph(graph: Graph, indices: Collection[int], extent: int, longer: int) -> Graph:
    """A graph with dims made longer, wherever they are.

    Args:
      graph: of a program or a stage.
      indices: of the dims (`dim_index`).
      extent: of them; dims of these indices that are a multiple of it (merged with others) grow in proportion.
      longer: their new extent.
    """
    shapes = [list(value.shape) for value in graph.values]
    grown: set[tuple[int, int]] = set()
    operators = []
    for op in graph.operators:
        sizes = [one.size for one in op.rule.factors]
        mine = {f for f, n in enumerate(sizes) if n % extent == 0 and dim_index(graph, op.index, f) in indices}
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
        flops = op.flops * (longer / extent) ** len(mine)
        operators.append(replace(op, rule=replace(op.rule, factors=factors), flops=flops))
    values = tuple(replace(v, shape=tuple(shape)) for v, shape in zip(graph.values, shapes, strict=True))
    return replace(graph, values=values, operators=tuple(operators))
