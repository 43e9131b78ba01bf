"""The parameters that a solution stores split and gathers at use (ZeRO-3), with the mesh axes of each gather."""

from __future__ import annotations

from ...program.graph import Graph
from ...program.parameter_values import values_of_parameters
from ...sharding import Spec, convert
from .problem import IntraOpSolution


def gathered_axes(graph: Graph, chosen: IntraOpSolution, sizes: dict[str, int]) -> tuple[tuple[str, ...], ...]:
    """For each of `graph.parameters`, the axes that split it and over which a reader gathers it or a cast of it."""
    made: dict[int, Spec] = dict(zip(graph.inputs, chosen.inputs, strict=True))
    for operator, choice in zip(graph.operators, chosen.operators, strict=True):
        if choice is not None:
            made.update(
                (v, s) for v, s in zip(operator.results, choice.algorithm.results, strict=True) if v is not None
            )
    of_parameters = values_of_parameters(graph)
    found = []
    for position, parameter in zip(graph.parameters, chosen.parameters, strict=True):
        axes: set[str] = set()
        waiting, seen = [graph.inputs[position]], {graph.inputs[position]}
        while waiting:
            value = waiting.pop()
            resharded_once = chosen.resharded_once.get(value, made[value])
            targets = [(made[value], resharded_once)]
            for user, place in graph.consumers.get(value, ()):
                choice = chosen.operators[user]
                if choice is None:
                    continue
                targets.append((resharded_once, choice.algorithm.operands[place]))
                further = [v for v in graph.operators[user].results if v in of_parameters and v not in seen]
                seen.update(v for v in further if v is not None)
                waiting += [v for v in further if v is not None]
            for source, target in targets:
                steps = convert(Spec(source.dims), Spec(target.dims)) or ()
                axes.update(axis for step in steps if step.forward == "all_gather" for axis in step.axes)
        found.append(tuple(axis for axis in sizes if axis in axes and axis in parameter.use.sharded_axes))
    return tuple(found)
