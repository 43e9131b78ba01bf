"""What a device holds while the backward pass of a microbatch runs, beside what it keeps for it.

Three things: what a rematerialised segment computes again, one segment at a time; around an operator, the cotangents of
what it reads and makes, and what of that nobody keeps; and the gradient of a weight before it is added to those of
earlier microbatches. The largest of each counts, of several that are as large their mean, since layers are laid out
alike. How much that is on a device follows from how values are split, like all else that is held.

Known limits: what is largest is that of the whole arrays, and something else may be once they are split; what passes
between two segments, and what collectives need, is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..program.graph import Graph
from ..program.residuals import kept_values, regions

# What a weight passes through on its way to a matrix product.
_SAME_WEIGHT = frozenset(
    {"convert_element_type", "copy", "reshape", "scan_const", "scan_slice", "squeeze", "transpose"}
)  # fmt: skip


# Segments and operators that are this much smaller than the largest are as large.
_AS_LARGE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Values of a stage that its backward pass makes.

    Args:
      again: values that segments compute again, and how much each counts; of a loop's body, in one trip.
      around: of operators, by their indices, the values they read and make, and how much each counts.
      weight: the input with the largest gradient, by its value; None where nothing has to be added to it.
      gradient_bytes: of that gradient, of all devices together.
      bytes: of it all, of all devices together.
    """

    again: Mapping[int, float]
    around: Mapping[int, Mapping[int, float]]
    weight: int | None
    gradient_bytes: float
    bytes: float


def held_together(held: Iterable[tuple[float, float]]) -> float:
    """Bytes of stages that share a device: they run in turn, and the largest workspace does for all.

    >>> held_together([(3.0, 1.0), (2.0, 2.0)])
    7.0

    Args:
      held: of each what is there without its workspace, and that.
    """
    own, workspaces = zip(*held, strict=True)
    return sum(own) + max(workspaces)


def workspace_of(graph: Graph, *, microbatches: int) -> Workspace:
    """The workspace of a stage.

    Args:
      graph: of the stage, with what is rematerialised marked.
      microbatches: in a step.
    """
    again, around = computed_again(graph), _around(graph)
    weight, gradient_bytes = _largest_gradient(graph) if microbatches > 1 else (None, 0.0)
    total = gradient_bytes + _size(graph, again) + sum(_size(graph, values) for values in around.values())
    return Workspace(again=again, around=around, weight=weight, gradient_bytes=gradient_bytes, bytes=total)


def computed_again(graph: Graph) -> dict[int, float]:
    """The values that the largest rematerialised segments of a graph compute again, and how much each counts."""
    inside = regions(graph)
    if not inside:
        return {}
    kept = kept_values(graph, rematerialised=False) - kept_values(graph)
    segments = [{v: 1.0 for operator in region for v in operator.results if v in kept} for region in inside.values()]
    return {v: share for _, values in _largest(graph, enumerate(segments)) for v, share in values.items()}


def _around(graph: Graph) -> dict[int, dict[int, float]]:
    """The operators around which the most bytes are there, and how much of each value."""
    kept, parameters = (
        kept_values(graph, rematerialised=False),
        {graph.inputs[position] for position in graph.parameters},
    )
    found = []
    for operator in graph.operators:
        if operator.differentiated and not operator.is_link:
            values = {v for v in (*operator.operands, *operator.results) if v is not None and v not in parameters}
            moving = sorted(v for v in values if graph.values[v].differentiated)
            found.append((operator.index, {v: 1.0 if v in kept else 2.0 for v in moving}))
    return dict(_largest(graph, found))


def _largest(graph: Graph, found: Iterable[tuple[int, dict[int, float]]]) -> list[tuple[int, dict[int, float]]]:
    """Of these groups of values the largest, their mean in all."""
    sizes = [(number, values, _size(graph, values)) for number, values in found]
    most = max((size for _, _, size in sizes), default=0.0)
    large = [(number, values) for number, values, size in sizes if size > 0 and size >= _AS_LARGE * most]
    return [(number, {v: times / len(large) for v, times in values.items()}) for number, values in large]


def _size(graph: Graph, values: Mapping[int, float]) -> float:
    return sum(times * graph.values[value].bytes for value, times in values.items())


def _largest_gradient(graph: Graph) -> tuple[int | None, float]:
    """The weight with the largest gradient that a microbatch makes, and its bytes: of what a matrix product reads, be
    it a slice or a cast of a parameter. Rows that are looked up are added where they belong."""
    inputs = {graph.inputs[position] for position in graph.parameters}
    weights = {value: value for value in inputs if graph.values[value].differentiated}
    most, found = 0.0, None
    for operator in graph.operators:
        read = [v for v in operator.operands if v is not None and v in weights]
        if operator.matmul:
            for value in read:
                if graph.values[value].bytes > most:
                    most, found = float(graph.values[value].bytes), weights[value]
        elif read and operator.name in _SAME_WEIGHT:
            weights |= {value: weights[read[0]] for value in operator.results if value is not None}
    return found, most
