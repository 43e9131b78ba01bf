"""Values that are made of parameters alone, and which of them the backward pass reads."""

from __future__ import annotations

from .dependence import values_of_data
from .graph import Graph, Operator, Path, once_for_each
from .residuals import is_cheap, read_by_backward


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
    outside = len(operator.path) == 1
    if one_program and ((outside and not in_line) or value in _read_first(graph)):
        return False
    if not outside and operator.path[:-1] in _loops_left(graph):
        return False
    return not _read_again(graph).isdisjoint(operator.results) or value in read_by_backward(graph, operator)


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


@once_for_each
def _loops_left(graph: Graph) -> frozenset[Path]:
    """Loops with loops, branches or rematerialised parts inside, which keep what they gathered
    (`lowering.loop_residuals`)."""
    found: set[Path] = set()
    for operator in graph.operators:
        path = operator.path[: operator.path.index(-1)] if operator.is_link else operator.path
        if operator.name in ("cond", "while"):
            found.add(path[:-1])
        found.update(path[:depth] for depth in range(1, len(path) - 1))
        if operator.is_link:
            found.update(path[:depth] for depth in range(1, len(path)))
    return frozenset(found)


def _with_sources(graph: Graph, values: set[int]) -> frozenset[int]:
    """With what little work makes them of, of one weight each."""
    of_parameters = values_of_parameters(graph)
    found = set(of_parameters.intersection(values))
    for operator in reversed(graph.operators):
        if not found.isdisjoint(operator.results) and (operator.is_link or is_cheap(operator.name)):
            sources = of_parameters.intersection(operator.operands)
            found |= sources if len(sources) == 1 else set()
    return frozenset(found)
