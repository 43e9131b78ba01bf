"""Values that are made of parameters alone, and which of them the backward pass reads."""

from __future__ import annotations

from .dependence import values_of_data
from .graph import Graph, Operator, once_for_each
from .residuals import read_by_backward


@once_for_each
def values_of_parameters(graph: Graph) -> frozenset[int]:
    """Values that depend on parameters and on no other input."""
    return frozenset(v.index for v in graph.values if not v.constant) - values_of_data(graph)


def is_read_again(graph: Graph, value: int, operator: Operator, *, one_program: bool, in_line: bool) -> bool:
    """Whether what is moved of parameters for an operator is moved again for the backward pass, which keeps none of it
    (`_jax.gathered_again`, `lowering.loop_residuals`, `_jax.passes`).

    Args:
      graph: of a stage.
      value: that the operator reads or makes.
      operator: which.
      one_program: whether forward and backward pass are one program: there the weight that the backward pass reads
        first stays.
      in_line: whether the compiler of one program keeps two equal collectives apart that are not in loops.
    """
    if value not in _read_again(graph) or operator.region is not None:
        return False
    if one_program and ((len(operator.path) == 1 and not in_line) or value in _read_first(graph)):
        return False
    makes_weights = values_of_parameters(graph).issuperset(v for v in operator.results if v is not None)
    return makes_weights or value in read_by_backward(graph, operator)


@once_for_each
def _read_again(graph: Graph) -> frozenset[int]:
    """Of the values of parameters those that derivatives read, and what they are made of."""
    read = {v for operator in graph.operators if operator.region is None for v in read_by_backward(graph, operator)}
    return _with_sources(graph, read)


@once_for_each
def _read_first(graph: Graph) -> frozenset[int]:
    """The same of the last operator outside loops whose derivative reads any."""
    for operator in reversed(graph.operators):
        outside = len(operator.path) == 1 and operator.region is None
        if outside and (found := _with_sources(graph, read_by_backward(graph, operator))):
            return found
    return frozenset()


def _with_sources(graph: Graph, values: set[int]) -> frozenset[int]:
    of_parameters = values_of_parameters(graph)
    found = set(of_parameters.intersection(values))
    for operator in reversed(graph.operators):
        if not found.isdisjoint(operator.results):
            found |= of_parameters.intersection(operator.operands)
    return frozenset(found)
