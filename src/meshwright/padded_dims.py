"""A dim made longer so that mesh axes divide it: what it is called, its next size, and what a step takes with it.

The graph of a program is data, in which a dim is made longer wherever it is. The layouts on the mesh of a finished
plan are then solved again, under the same pins and roles: of a plan of several stages those of one stage, twice, with
the dim as it is and longer; of a plan of one stage once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import lcm, prod

from .plan import Plan, Stage
from .plan_request import Planning, PlanRequest
from .program.graph import Graph, Operator
from .program.origins import indices_of
from .program.staged import staged_program
from .program.trace import Program
from .search.hierarchical import HierarchicalSearch, SearchRequest
from .search.parameters import parameter_infos
from .search.roles import Roles
from .search.submeshes import Submesh, Submeshes

# Matrix units take tiles of 128 x 128 elements (the MXU of a TPU; a multiple of those of a GPU). A size of whole tiles
# is named too where it is longer by less than the 2 % that two plans have to differ by (`search.hierarchical`).
_TILE, _HARDLY = 128, 1.02


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


def padded_words(extent: int, unit: int, times: int = 1) -> str:
    """The sizes that `unit` divides, for a note.

    >>> padded_words(50257, 8), padded_words(25, 8), padded_words(15, 8, times=4)
    ('50264, or 50304 for whole tiles of 128,', '32', '64')

    Args:
      extent: as of `padded_extent`.
      unit: the same.
      times: of a batch, how many microbatches of this extent it is cut into.
    """
    least, padded = (times * size for size in (-(-extent // unit) * unit, padded_extent(extent, unit)))
    return f"{least}" if least == padded else f"{least}, or {padded} for whole tiles of {_TILE},"


def dim_index(graph: Graph, operator: int, factor: int) -> int:
    """The index (`program.origins`) of an operator's factor in the whole program, whatever part of it a graph is."""
    whole, places = graph.part_of or (graph, None)
    return indices_of(whole).of(operator if places is None else places[operator], factor)


class DimNames:
    """What users call the dims of a program's operators.

    Args:
      program: as it was planned.
    """

    def __init__(self, program: Program) -> None:
        self._known: dict[int, dict[int, tuple[int, str, int]]] = {}
        inputs = [program.graph.values[v].name for v in program.graph.inputs]
        self._batch = set(zip(inputs, program.split_dims, strict=False)) if program.microbatches > 1 else set()
        self._microbatches = program.microbatches

    def of(self, graph: Graph, operator: Operator, factor: int) -> tuple[str, int]:
        """The first parameter's, or else input's, dim that a factor is, or of which it counts the blocks, or its size;
        and into how many microbatches that dim is cut.

        Args:
          graph: of the program or a stage of it.
          operator: of the graph.
          factor: of its rule.
        """
        whole = graph.part_of[0] if graph.part_of is not None else graph
        known = self._known.setdefault(id(whole), {})
        for position in sorted(range(len(whole.inputs)), key=lambda p: p not in whole.parameters) if not known else ():
            value = whole.values[whole.inputs[position]]
            for dim, extent in enumerate(value.shape):
                index = indices_of(whole).of_dim(value.index, dim)
                if index is not None:
                    times = self._microbatches if (value.name, dim) in self._batch else 1
                    known.setdefault(index, (extent, f"dim {dim} ({times * extent}) of {value.name}", times))
        size = operator.rule.factors[factor].size
        index = dim_index(graph, operator.index, factor)
        extent, name, times = known.get(index, (size, f"a dim of {size}", 1))
        return (name, times) if extent == size else (f"{name} in {size} blocks", 1)


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


def solved_seconds(asked: PlanRequest, found: Planning, number: int, graph: Graph, roles: Roles | None) -> float:
    """What the work of a stage takes in a step with the best layouts of a graph on the stage's mesh.

    Args:
      asked: the request.
      found: its plan.
      number: of the stage.
      graph: of the stage, or that with a dim made longer.
      roles: of the mesh axes, where a preset gives them some.

    Raises:
      PlanError: if nothing fits, or pins or roles leave no layout.
    """
    plan, program, stage = found.plan, found.program, found.plan.stages[number]
    one = len(plan.stages) == 1
    if graph is program.graph:
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
    where = Submesh(min(stage.devices), max(stage.devices) + 1)
    request = SearchRequest(
        graph=graph, fingerprint=program.fingerprint, parameters=parameters,
        cluster=asked.cluster if one else Submeshes(asked.cluster).part(where),
        microbatches=plan.microbatches_of(number),
        mesh=[(tuple(axis for axis, _ in stage.mesh), tuple(size for _, size in stage.mesh))],
        pins=replace(asked.pins, roles=roles, gradient_exchange=stage.gradient_exchange),
        remat="layer" if stage.rematerialised else "none",
        carried=0 if program.marked else program.state_inputs, split_dims=program.split_dims if one else (),
        time_limit_seconds=max(asked.left_seconds, 0.0),
    )  # fmt: skip
    predicted = HierarchicalSearch(request).plan(stage.memory_limit_bytes).plan.predicted
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
