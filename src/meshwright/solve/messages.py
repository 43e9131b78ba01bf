"""A lower bound without tables: costs moved between nodes and edges until little is left to move.

Tree-reweighted message passing, sequential (Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", 2006). Moving cost from a node to an edge, or back, changes no total; what every assignment then pays at
least is the bound, and what remains (the *rest*) is a problem of costs >= 0 whose min-marginals say which choices
matter. On a tree the bound is the optimum; elsewhere it approaches the linear relaxation from below.

Cost: one addition and one comparison per entry of every edge and sweep. Known limit: it may stop short of the
relaxation's best bound, slowly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshwright.solve.deadline import NEVER, Deadline
from meshwright.solve.problem import Problem


class Messages:
    """The messages on every edge of one problem, kept between calls so that a change of node costs starts warm.

    Every choice must have an allowed partner on each of its edges; `presolve` sees to that.

    >>> p = Problem(costs=([1.0, 0.0], [0.0, 0.0]), edges={(0, 1): [[0.0, 2.0], [3.0, 3.0]]})
    >>> Messages(p).bound(p.costs, passes=1)[0]
    1.0
    """

    __slots__ = ("after", "before", "problem", "sent")

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        nodes = range(len(problem.costs))
        # Of each node the edges to lower and to higher numbers, their tables with the node's own choices first.
        self.before: list[list[tuple[int, np.ndarray]]] = [[] for _ in nodes]
        self.after: list[list[tuple[int, np.ndarray]]] = [[] for _ in nodes]
        self.sent: dict[tuple[int, int], np.ndarray] = {}
        for (u, v), table in problem.edges.items():
            self.after[u].append((v, table))
            self.before[v].append((u, table.T))
            self.sent[(u, v)] = np.zeros(table.shape[1])
            self.sent[(v, u)] = np.zeros(table.shape[0])

    def bound(self, costs: Sequence[np.ndarray], *, passes: int, deadline: Deadline = NEVER) -> tuple[float, Problem]:
        """A lower bound and what is left above it.

        Args:
            costs: per node, the seconds of each choice, shape (k_v,), all finite.
            passes: how often messages go forth and back.
            deadline: when to give up.

        Returns:
            The bound, and a problem with the same nodes and edges: of any assignment its cost there plus the bound is
            its cost here (up to rounding).

        Raises:
            OutOfTime: the deadline has passed.
        """
        rest: list[np.ndarray] = []
        credits: dict[tuple[int, int], np.ndarray] = {}
        for _ in range(passes):
            self._sweep(costs, deadline, forth=True)
            rest, credits = self._sweep(costs, deadline, forth=False)
        bound = math.fsum(float(r.min()) for r in rest)
        edges = {}
        for (u, v), table in self.problem.edges.items():
            deadline.check("message passing")
            left = table + credits[(v, u)][None, :]
            left -= self.sent[(v, u)][:, None]
            # Rounding may leave a little less than nothing.
            edges[(u, v)] = np.maximum(left, 0.0, out=left)
        return bound, Problem.unchecked(costs=tuple(r - r.min() for r in rest), edges=edges)

    def decode(self, costs: Sequence[np.ndarray]) -> tuple[int, ...]:
        """An assignment, chosen node by node for what went before and what messages say of the rest."""
        choices: list[int] = []
        for v, cost in enumerate(costs):
            for u, table in self.before[v]:
                cost = cost + table[:, choices[u]]
            for w, _ in self.after[v]:
                cost = cost + self.sent[(w, v)]
            choices.append(int(cost.argmin()))
        return tuple(choices)

    def _sweep(
        self, costs: Sequence[np.ndarray], deadline: Deadline, *, forth: bool
    ) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
        """Pass on from every node in order; what each node keeps, and what it credits to each edge it passes on to."""
        nodes = range(len(costs)) if forth else range(len(costs) - 1, -1, -1)
        kept: list[np.ndarray] = [np.empty(0)] * len(costs)
        credits: dict[tuple[int, int], np.ndarray] = {}
        for v in nodes:
            deadline.check("message passing")
            belief = costs[v]
            for u, _ in (*self.before[v], *self.after[v]):
                belief = belief + self.sent[(u, v)]
            onward = self.after[v] if forth else self.before[v]
            # As many chains of growing numbers pass a node as it has edges on the side with more of them.
            share = 1.0 / max(len(self.before[v]), len(self.after[v]), 1)
            for w, table in onward:
                credit = share * belief - self.sent[(w, v)]
                credits[(v, w)] = credit
                self.sent[(v, w)] = (credit[:, None] + table).min(axis=0)
            kept[v] = (1.0 - share * len(onward)) * belief
        return kept, credits
