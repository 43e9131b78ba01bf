"""What a program's values depend on: data, or parameters alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .graph import Graph


def values_of_data(graph: Graph) -> set[int]:
    """Values that depend on an input that is no parameter."""
    data = {v for i, v in enumerate(graph.inputs) if i not in graph.parameters}
    changed = True
    while changed:  # loop-carried values can make earlier ones depend on later ones
        changed = False
        for operator in graph.operators:
            if any(v in data for v in operator.operands):
                fresh = {v for v in operator.results if v is not None} - data
                data |= fresh
                changed |= bool(fresh)
    return data
