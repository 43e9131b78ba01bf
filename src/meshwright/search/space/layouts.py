"""The layouts of one stage as numbers, for searches over layouts.

A node is an operator with those merged into it, an input, a parameter or a shared value; it has a few choices, each
with seconds and bytes, and pairs of choices on edges have seconds (`intra.problem`). The literature builds on two ways
to choose: greedily, node by node in program order, and exactly for all nodes that are not decided.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np

from ...sharding import Spec
from ...solve import Infeasible, Problem, Unsolved, solve
from ..prices.choices import OperatorChoice, ParameterChoice
from ..stages.problem import StageProblem
from .choice import LayoutNumbers

# To this relative gap the nodes that are left open are solved.
_GAP = 1e-2


class Layouts:
    """The choices of a stage's nodes, with their seconds and bytes.

    Args:
      problem: of the stage.
      in_flight: microbatches that it keeps.
      limit_bytes: that may be counted on a device.
    """

    def __init__(self, problem: StageProblem, in_flight: int, limit_bytes: float) -> None:
        self.problem, self.in_flight, self.limit_bytes = problem, in_flight, limit_bytes

    @cached_property
    def numbers(self) -> Problem:
        """Seconds of a step by node and edge, and bytes on a device with these microbatches in flight."""
        with self.problem.keeping(self.in_flight):
            return self.problem.problem(self.limit_bytes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each node has."""
        return self.numbers.sizes

    @cached_property
    def parameter_nodes(self) -> tuple[int, ...]:
        """Nodes of parameters that have a choice, the largest first."""
        memory = self.numbers.memory
        assert memory is not None  # every stage counts its bytes
        nodes = [node for node in self.problem.parameter_prices if self.sizes[node] > 1]
        return tuple(sorted(nodes, key=lambda node: (-float(memory[node].max()), node)))

    @cached_property
    def neighbours(self) -> list[list[tuple[int, np.ndarray]]]:
        """Of each node those that it has an edge with, and the edge's seconds `[own choice, other's choice]`."""
        found: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.sizes]
        for (u, v), table in self.numbers.edges.items():
            found[u].append((v, table))
            found[v].append((u, table.T))
        return found

    def seconds(self, layouts: LayoutNumbers) -> float:
        """Seconds of a step in these layouts; infinite where an edge forbids a pair of them."""
        costs, edges = self.numbers.costs, self.numbers.edges
        total = sum(cost.item(one) for cost, one in zip(costs, layouts, strict=True))
        return total + sum(table.item(layouts[u], layouts[v]) for (u, v), table in edges.items())

    def around(self, layouts: Sequence[int], node: int) -> np.ndarray:
        """Seconds of each choice of a node with its edges to other nodes, in these layouts; -1 for a node without."""
        total = self.numbers.costs[node]
        for other, table in self.neighbours[node]:
            if layouts[other] >= 0:
                total = total + table[:, layouts[other]]
        return total

    def greedy(self) -> LayoutNumbers | None:
        """Greedy layouts, node by node in program order, each the fastest after those before it; inputs and parameters,
        which have no operator before them, last. None where an edge forbids the result."""
        decided = [-1] * len(self.sizes)
        inputs = set(self.problem.input_node.values())
        for node in sorted(range(len(self.sizes)), key=lambda node: (node in inputs, node)):
            total = self.around(decided, node)
            decided[node] = int(np.argmin(total))
            if not isfinite(total[decided[node]]):
                return None
        return tuple(decided)

    def complete(
        self, kept: Mapping[int, Sequence[int]], *, limit_bytes: float | None = None, gap: float = _GAP,
        time_limit_seconds: float = 5.0,
    ) -> LayoutNumbers | None:  # fmt: skip
        """The fastest layouts within memory, with some nodes restricted to some of their choices.

        Args:
          kept: by node the numbers of its choices that stay; the others have all of theirs.
          limit_bytes: on a device; None for that of the stage.
          gap: relative, at which to stop.
          time_limit_seconds: for the solver.

        Returns:
          None where there are none, or none was found in time.
        """
        numbers, limit = self.numbers, self.limit_bytes if limit_bytes is None else limit_bytes
        rows = [np.array(kept.get(node, range(size)), dtype=int) for node, size in enumerate(self.sizes)]
        limited = Problem.unchecked(
            costs=numbers.costs, edges=numbers.edges, memory=numbers.memory, memory_limit=max(limit, 0.0)
        )
        try:
            found = solve(limited.restricted(rows), gap=gap, time_limit_seconds=time_limit_seconds)
        except (Infeasible, Unsolved):
            return None
        return tuple(int(row[one]) for row, one in zip(rows, found.choices, strict=True))

    def on_axis(self, node: int, axis: str) -> list[Hashable]:
        """Of each choice of a node what it does over one axis of the mesh; None where it leaves the axis unused."""
        return [_on_axis(one, axis) for one in self.problem.choices[node]]


def _on_axis(choice: Any, axis: str) -> Hashable:
    if isinstance(choice, OperatorChoice):
        factor = next((n for n, axes in enumerate(choice.algorithm.axes) if axis in axes), None)
        marked = axis in choice.broadcast
        return None if factor is None and not marked else (factor, marked)
    if isinstance(choice, ParameterChoice):
        use, storage = _on_axis(choice.use, axis), _on_axis(choice.storage, axis)
        return None if use is None and storage is None else (use, storage, choice.scattered and use != storage)
    assert isinstance(choice, Spec)  # of an input or a shared value
    dim = next((n for n, axes in enumerate(choice.dims) if axis in axes), None)
    if axis in choice.partial:
        return "partial"
    return "broadcast" if axis in choice.broadcast else dim
