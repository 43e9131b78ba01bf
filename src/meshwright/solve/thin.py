"""A relaxation of a graph that is too wide: leave out edges until elimination can do it.

An edge that is left out still charges each choice of its lower-numbered end the least it could cost there, so the
relaxed problem bounds the whole one from below, and its optimum is an assignment to start from. The edges that matter
most stay: a spanning forest of the largest spreads first, then the others by spread. Cost: some dozen elimination
orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from meshwright.solve.order import elimination_order
from meshwright.solve.problem import Problem

# Far below what elimination allows: the relaxed problem is solved some dozen times only to prepare MILP.
_LARGEST_TABLE = 1 << 18
_MOST_ENTRIES = 1 << 24


def thin(problem: Problem) -> Problem:
    """The problem with the least important edges replaced by what they cost at least.

    Args:
        problem: the problem.
    """
    forest, others = _by_importance(problem)
    pairs = forest + others
    fewest, most = 0, len(pairs)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        order = elimination_order(problem.sizes, pairs[:middle])
        if order.largest <= _LARGEST_TABLE and order.entries <= _MOST_ENTRIES:
            fewest = middle
        else:
            most = middle - 1
    return relaxed(problem, pairs[:fewest])


def spanning_forest(problem: Problem, first: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Edges without a cycle that touch every node with an edge, those of large spread first.

    Args:
        problem: the problem.
        first: edges that come before all others.
    """
    return _by_importance(problem, first)[0]


def relaxed(problem: Problem, kept: Iterable[tuple[int, int]]) -> Problem:
    """The problem with only some edges, the others replaced by what they cost at least.

    Args:
        problem: the problem.
        kept: the edges that stay.
    """
    edges = {pair: problem.edges[pair] for pair in kept}
    costs = list(problem.costs)
    for (u, v), table in problem.edges.items():
        if (u, v) not in edges:
            costs[u] = costs[u] + table.min(axis=1)
    return Problem.unchecked(costs=tuple(costs), edges=edges, memory=problem.memory, memory_limit=problem.memory_limit)


def _by_importance(
    problem: Problem, first: Sequence[tuple[int, int]] = ()
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The edges of a spanning forest, and the others; both by importance, after those that come first."""
    spread = {}
    known: dict[int, tuple[bool, float]] = {}  # many edges have the same table
    for pair, table in problem.edges.items():
        if id(table) not in known:
            most = float(table.max())
            forbids = most == np.inf
            most = float(table.max(where=np.isfinite(table), initial=0.0)) if forbids else most
            known[id(table)] = forbids, most - min(float(table.min()), most)
        spread[pair] = known[id(table)]
    ranked = sorted(problem.edges.keys() - set(first), key=lambda pair: (not spread[pair][0], -spread[pair][1], pair))
    part = list(range(len(problem.costs)))

    def find(v: int) -> int:
        while part[v] != v:
            part[v] = part[part[v]]
            v = part[v]
        return v

    forest, others = [], []
    for u, v in (*first, *ranked):
        a, b = find(u), find(v)
        (others if a == b else forest).append((u, v))
        part[a] = b
    return forest, others
