"""What of a stage's layers is computed again in the backward pass, as segments of a scan's body."""

from __future__ import annotations

from itertools import pairwise

from meshwright.program.graph import Graph, Operator
from meshwright.program.segments import Runs

from .plan import Recompute


def recomputed_segments(graph: Graph, recompute: Recompute) -> Runs:
    """What of each scan's body is computed again."""
    bodies: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        if len(operator.path) > 1 and -1 not in operator.path and operator.repeats > 1:
            bodies.setdefault(operator.path[0], []).append(operator)
    if not bodies and graph.operators:
        # A stage of one layer is a scan of one trip, or none.
        for operator in graph.operators:
            if len(operator.path) > 1 and -1 not in operator.path:
                bodies.setdefault(operator.path[0], []).append(operator)
    found: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = {}
    for scan, body in bodies.items():
        end = max(op.path[1] for op in body) + 1
        if recompute == "layer":
            found[scan,] = ((0, end),)
        elif recompute == "attention":
            inner = [op.path[1] for op in body if op.name == "dot_general" and _of_data(graph, op)]
            if len(inner) > 1:
                found[scan,] = ((inner[0], inner[-1] + 1),)
        elif recompute == "alternate":
            products = sorted({op.path[1] for op in body if op.matmul and not _of_data(graph, op)})
            mixed = {op.path[1] for op in body if op.matmul and _of_data(graph, op)}
            bounds = [-1, *sorted({*products[::2], *mixed}), end]
            found[scan,] = tuple((a + 1, b) for a, b in pairwise(bounds) if b - a > 2)
    return found


def _of_data(graph: Graph, operator: Operator) -> bool:
    """Whether neither operand of a product is a parameter, or a cast of one."""
    weighty = {graph.inputs[p] for p in graph.parameters}
    for other in graph.operators:
        operands = [v for v in other.operands if v is not None]
        if operands and not other.matmul and all(v in weighty for v in operands):
            weighty.update(v for v in other.results if v is not None)
    return not any(v in weighty for v in operator.operands)
