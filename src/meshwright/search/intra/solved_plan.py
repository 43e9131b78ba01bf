"""The parts of a plan that describe a solved problem: operators, parameters, inputs, bytes by the solver's count."""

from __future__ import annotations

from collections.abc import Sequence

from ...plan import InputPlan, Memory, OperatorPlan, ParameterPlan
from ...program.graph import Graph
from ...program.stacked import StackedRows
from .gathers import gathered_axes
from .problem import IntraOpProblem, IntraOpSolution, ParameterInfo


def operator_plans(graph: Graph, chosen: IntraOpSolution) -> tuple[OperatorPlan, ...]:
    """The split of each operator, located by `graph`, which may be another place than where it was solved."""
    return tuple(
        OperatorPlan(
            path=operator.path,
            name=operator.name,
            axes=choice.algorithm.axes if choice is not None else ((),) * len(operator.rule.factors),
            broadcast=choice.broadcast if choice is not None else frozenset(),
        )
        for operator, choice in zip(graph.operators, chosen.operators, strict=True)
    )


def parameter_plans(
    graph: Graph, chosen: IntraOpSolution, infos: Sequence[ParameterInfo], rows: Sequence[StackedRows | None],
    problem: IntraOpProblem,
) -> tuple[ParameterPlan, ...]:  # fmt: skip
    """How each parameter is used and stored.

    Args:
      graph: the part of the program, at its place.
      chosen: the solution.
      infos: what belongs to each parameter.
      rows: of a stacked parameter the rows that are held, None for all.
      problem: that was solved.
    """
    gathered = gathered_axes(graph, chosen, problem.sizes)
    return tuple(
        ParameterPlan(
            name=info.name, shape=graph.values[graph.inputs[position]].shape, use=choice.use, storage=choice.storage,
            rows=(held.first, held.last) if held is not None else None, rows_dim=held.dim if held is not None else 0,
            gathered=axes, scattered=choice.scattered,
        )
        for info, position, choice, held, axes in zip(
            infos, graph.parameters, chosen.parameters, rows, gathered, strict=True
        )
    )  # fmt: skip


def input_plans(graph: Graph, chosen: IntraOpSolution) -> tuple[InputPlan, ...]:
    """The layout of each input that is no parameter."""
    return tuple(
        InputPlan(name=graph.values[value].name, shape=graph.values[value].shape, spec=chosen.inputs[position])
        for position, value in enumerate(graph.inputs)
        if position not in graph.parameters
    )


def counted_memory(
    graph: Graph, chosen: IntraOpSolution, infos: Sequence[ParameterInfo], problem: IntraOpProblem, own_bytes: float,
    workspace_bytes: float = 0.0,
) -> Memory:  # fmt: skip
    """Bytes on a device by the solver's count, `own_bytes` beside a workspace: what is no parameter, gradient or
    optimizer state is activations."""
    held = summed = optimizer = 0.0
    for info, position, choice in zip(infos, graph.parameters, chosen.parameters, strict=True):
        size, used = graph.values[graph.inputs[position]].bytes, choice.use.shards(problem.sizes)
        stored = choice.storage.shards(problem.sizes)
        held += size / used
        summed += size / (stored if choice.scattered else used)
        optimizer += info.optimizer_bytes / stored
    return Memory(
        parameters=held, gradients=summed, optimizer=optimizer, workspace=workspace_bytes,
        activations=max(own_bytes - held - summed - optimizer, 0.0),
    )  # fmt: skip
