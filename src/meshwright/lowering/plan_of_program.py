"""What a plan must satisfy beside the program it is for: `plan.check` knows no program.

A plan says of which program it is, but a file may have been edited, or written by hand. Checked are the operators, one
by one (the same ones, split by factors that can be, each axis once), and that every parameter, input and settled value
has a spec of its rank that divides it.
"""

from __future__ import annotations

from math import prod

from ..errors import PlanError
from ..plan import Plan, Stage
from ..program.graph import Graph, Operator
from ..program.segments import Segments
from ..program.trace import Program
from ..sharding import Algorithm, Spec, algorithm_of, with_broadcast


def check_program(program: Program, plan: Plan) -> None:
    """Refuse a plan of another program.

    Raises:
      PlanError: if the plan is not of this program in its number of microbatches.
    """
    if plan.padded != program.padded:
        raise PlanError(
            refused="the plan", got=f"a plan with {len(plan.padded)} padded dims, a program with {len(program.padded)}",
            needed="the program as the plan has it", where="plan=",
            try_="meshwright.parallelize(step, plan=plan), which traces it so",
        )  # fmt: skip
    if plan.program != program.fingerprint:
        raise PlanError(
            refused="the plan", got=f"a plan for program {plan.program} in {plan.microbatches} microbatches",
            needed=f"one for program {program.fingerprint} in {program.microbatches}", where="plan=",
            try_="planning again: a step's code, shapes and microbatches are part of its plan",
        )  # fmt: skip


def algorithms_of(graph: Graph, stage: Stage, number: int) -> list[Algorithm]:
    """The plan's algorithms over the operators of a program, or of a stage of it.

    Args:
      graph: of the program, or of the stage's equations.
      stage: of the plan.
      number: of the stage, from 0.

    Raises:
      PlanError: if the stage is not one of this program.
    """
    place = f"stages[{number}]"
    if len(graph.operators) != len(stage.operators):
        raise _refusal(f"{place}.operators", f"{len(stage.operators)} of them", f"{len(graph.operators)}")
    own, others = [p.use for p in stage.parameters], [p.spec for p in stage.inputs]
    count = len(graph.parameters)
    if len(own) != count or len(others) != len(graph.inputs) - count:
        got = f"{len(own)} parameters and {len(others)} other inputs"
        raise _refusal(place, got, f"{count} and {len(graph.inputs) - count}")
    parameters, rest = iter(own), iter(others)
    for position, value in enumerate(graph.inputs):
        spec = next(parameters if position in graph.parameters else rest)
        _check_spec(graph, stage, value, spec, f"{place}, the spec of {graph.values[value].name}")
    return [
        _algorithm(graph, operator, stage, f"{place}.operators[{index}]")
        for index, operator in enumerate(graph.operators)
    ]


def segments_of(graph: Graph, stage: Stage, number: int) -> Segments:
    """What a stage rematerialises.

    Args:
      graph: of the program, or of the stage's equations.
      stage: of the plan.
      number: of the stage, from 0.

    Raises:
      PlanError: if ranges are empty or overlap, or results are to be kept that are none of an equation in them.
    """
    segments = Segments(dict(stage.rematerialised), frozenset(stage.kept_inside))
    for _, runs in stage.rematerialised:
        bounds = [bound for run in runs for bound in run]
        if bounds != sorted(bounds) or any(first == last for first, last in runs):
            got = " ".join(f"{first}-{last}" for first, last in runs)
            raise _refusal(f"stages[{number}].rematerialised", got, "ranges in order that do not overlap")
    known = {operator.path for operator in graph.operators}
    for path in stage.kept_inside:
        inside = any(
            path[: len(level)] == level and any(first <= path[len(level)] < last for first, last in runs)
            for level, runs in stage.rematerialised
            if len(path) > len(level)
        )
        if path not in known or not inside:
            raise _refusal(f"stages[{number}].kept_inside", f"{list(path)}", "an equation in what is rematerialised")
    return segments


def settled_of(graph: Graph, stage: Stage, number: int) -> dict[int, Spec]:
    """The values that a plan settles, by their index in the graph of the whole program.

    Args:
      graph: of the whole program.
      stage: of the plan.
      number: of the stage, from 0.

    Raises:
      PlanError: if they are not values of this program.
    """
    for value, spec in stage.settled:
        place = f"stages[{number}].settled"
        if not value < len(graph.values):
            raise _refusal(place, f"value {value}", f"one of the {len(graph.values)} of the program")
        _check_spec(graph, stage, value, spec, f"{place}, value {value}")
    return dict(stage.settled)


def _check_spec(graph: Graph, stage: Stage, value: int, spec: Spec, place: str) -> None:
    shape = graph.values[value].shape
    if len(spec.dims) != len(shape) or not spec.divides(shape, stage.sizes):
        raise _refusal(place, f"{spec!r}", f"splits that divide the shape {shape} on the mesh {stage.sizes}")


def _algorithm(graph: Graph, operator: Operator, stage: Stage, place: str) -> Algorithm:
    planned, rule = stage.operators[operator.index], operator.rule
    have = (operator.path, operator.name, len(rule.factors))
    if have != (planned.path, planned.name, len(planned.axes)):
        got = f"{planned.name} of {len(planned.axes)} factors at {planned.path}"
        raise _refusal(place, got, f"{have[1]} of {have[2]} at {have[0]}")
    leaders = [factor.with_factor for factor in rule.factors]
    used = [axis for leader, axes in zip(leaders, planned.axes, strict=True) for axis in axes if leader is None]
    if len(set(used)) != len(used):
        raise _refusal(place, f"{planned.name} split over {' '.join(used)}", "each axis for one factor")
    for index, axes in enumerate(planned.axes):
        factor, blocks = rule.factors[index], prod(stage.sizes[axis] for axis in axes)
        size, leader = factor.size, factor.with_factor
        apart = leader is not None and axes != planned.axes[leader]
        if axes and (index not in rule.splittable or size % (blocks * factor.granule) or apart):
            got = f"factor {index} of {planned.name}, of size {size}, split over {' '.join(axes)}"
            raise _refusal(place, got, f"a factor that can be cut into {blocks} blocks")
    moving = [v is not None and graph.values[v].differentiated for v in operator.operands]
    combines = operator.combine in ("max", "min")
    try:
        algorithm = algorithm_of(rule, planned.axes, moving, combines_at_once=combines)
        return with_broadcast(algorithm, planned.broadcast, moving) if planned.broadcast else algorithm
    except ValueError as error:  # of a spec that cannot be
        raise _refusal(place, f"{planned.name}: {error}", "axes of which each has one state") from error


def _refusal(place: str, got: str, needed: str) -> PlanError:
    return PlanError(
        refused="the plan", got=got, needed=f"{needed}, as in the program", where=f"plan=, {place}",
        try_="planning again, or the file as plan.save wrote it",
    )  # fmt: skip
