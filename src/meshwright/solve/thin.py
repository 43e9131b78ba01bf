"""A relaxation of a graph that is too wide: leave out edges until elimination can do it.

An edge that is left out still charges each choice of its lower-numbered end the least it could cost there, so the
relaxed problem bounds the whole one from below, and its optimum is an assignment to start from. The edges that matter
most stay: a spanning forest of the largest spreads first, then the others by spread. Cost: some dozen elimination
orders.
"""

from __future__ import annotations

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
    pairs = _by_importance(problem)
    fewest, most = 0, len(pairs)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        order = elimination_order(problem.sizes, pairs[:middle])
        if order.largest <= _LARGEST_TABLE and order.entries <= _MOST_ENTRIES:
            fewest = middle
        else:
            most = middle - 1
    costs = list(problem.costs)
    for u, v in pairs[fewest:]:
        costs[u] = costs[u] + problem.edges[(u, v)].min(axis=1)
    return Problem(
        costs=tuple(costs),
        edges={pair: problem.edges[pair] for pair in pairs[:fewest]},
        memory=problem.memory,
        memory_limit=problem.memory_limit,
    )


def _by_importance(problem: Problem) -> list[tuple[int, int]]:
    spread = {}
    for pair, table in problem.edges.items():
        finite = table[np.isfinite(table)]
        forbids = finite.size < table.size
        spread[pair] = (forbids, float(finite.max() - finite.min()) if finite.size else 0.0)
    ranked = sorted(problem.edges, key=lambda pair: (not spread[pair][0], -spread[pair][1], pair))
    part = list(range(len(problem.costs)))

    def find(v: int) -> int:
        while part[v] != v:
            part[v] = part[part[v]]
            v = part[v]
        return v

    forest, others = [], []
    for u, v in ranked:
        a, b = find(u), find(v)
        (others if a == b else forest).append((u, v))
        part[a] = b
    return forest + others
