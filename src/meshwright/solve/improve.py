"""Better assignments from good ones, without proof: crossing two over, and moving one node at a time.

Prices alone miss the assignments that use the last bytes of memory. Two moves find most of them: taking the first
nodes of the program from an assignment that is over the limit and the rest from one that is within it (only the edges
across the cut pay for the change), and then moving single nodes while it helps.
Everything is deterministic. Cost: nodes plus edges, times a few sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.solve.problem import MEMORY_ROUNDING, Problem

_MOST_SWEEPS = 20


def improve(problem: Problem, *, heavy: Sequence[tuple[int, ...]], light: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The best assignment within the limit that crossing over and single moves find.

    Args:
        problem: the problem.
        heavy: assignments over the limit.
        light: assignments within the limit; at least one.
    """

    def weight(choices: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return problem.objective(choices), choices

    found = min((descend(problem, choices) for choices in light), key=weight)
    for over in heavy:
        for within in (*light, found):
            for first, rest in ((over, within), (within, over)):
                crossed = cross_over(problem, first, rest)
                if crossed is not None:
                    found = min(found, descend(problem, crossed), key=weight)
    return found


def places(problem: Problem) -> np.ndarray:
    """Where each node stands in the program, shape (nodes,): their numbers are in its order, but for inputs, which come
    first and belong with the first node that reads them.

    Args:
        problem: the problem.
    """
    first = np.full(len(problem.costs), len(problem.costs))
    before = np.zeros(len(problem.costs), dtype=bool)
    for u, v in problem.edges:
        first[u] = min(first[u], v)
        before[v] = True
    place = np.arange(len(problem.costs), dtype=float)
    inputs = ~before & (first < len(problem.costs))
    place[inputs] = first[inputs] - 0.5
    found = np.empty(len(place), dtype=int)
    found[np.argsort(place, kind="stable")] = np.arange(len(place))
    return found


def cross_over(problem: Problem, first: Sequence[int], rest: Sequence[int]) -> tuple[int, ...] | None:
    """The cheapest assignment within the limit that takes nodes before some place in the program from `first` and
    others from `rest`.

    Returns:
        The assignment, or `None` when no cut gives one.
    """
    nodes = len(problem.costs)
    v = places(problem)
    # Of each edge the end that comes first in the program, with what both take and with what either takes.
    turned = [(u, w, t) if v[u] < v[w] else (w, u, t.T) for (u, w), t in problem.edges.items()]
    edges = [(t, first[u], rest[u], first[w], rest[w]) for u, w, t in turned]
    pairs = np.array([(v[u], v[w]) for u, w, _ in turned], dtype=int).reshape(-1, 2)
    own, other = (np.array([row[c] for row, c in zip(problem.costs, one, strict=True)]) for one in (first, rest))
    # What is paid while the cut is from one place on to before another: indexed by the cut, how the total changes when
    # it passes each node; infinities are counted, not added.
    spans = [
        (np.zeros(nodes, dtype=int), v + 1, other),
        (v + 1, np.full(nodes, nodes + 1), own),
        (np.zeros(len(edges), dtype=int), pairs[:, 0] + 1, np.array([t[b, d] for t, _, b, _, d in edges])),
        (pairs[:, 0] + 1, pairs[:, 1] + 1, np.array([t[a, d] for t, a, _, _, d in edges])),
        (pairs[:, 1] + 1, np.full(len(edges), nodes + 1), np.array([t[a, c] for t, a, _, c, _ in edges])),
    ]
    cost, forbidden, memory = np.zeros(nodes + 2), np.zeros(nodes + 2), np.zeros(nodes + 1)
    for start, stop, seconds in spans:
        finite = np.isfinite(seconds)
        for into, what in ((cost, np.where(finite, seconds, 0.0)), (forbidden, (~finite).astype(float))):
            np.add.at(into, start, what)
            np.subtract.at(into, stop, what)
    cost, forbidden = cost[:-1], forbidden[:-1]
    if problem.memory is not None:
        held = [np.array([row[c] for row, c in zip(problem.memory, one, strict=True)]) for one in (first, rest)]
        memory[0] = held[1].sum()
        memory[v + 1] = held[0] - held[1]
    allowed = (np.cumsum(forbidden) < 0.5) & (np.cumsum(memory) <= problem.memory_limit * (1 + MEMORY_ROUNDING))
    if not allowed.any():
        return None
    cut = int(np.where(allowed, np.cumsum(cost), np.inf).argmin())
    crossed = tuple(a if place < cut else b for a, b, place in zip(first, rest, v.tolist(), strict=True))
    return crossed if problem.fits(problem.memory_of(crossed)) else None


def descend(problem: Problem, choices: Sequence[int]) -> tuple[int, ...]:
    """Move single nodes to cheaper choices within the limit until none helps.

    Args:
        problem: the problem.
        choices: an assignment of finite cost within the limit.
    """
    around: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.costs]
    for (u, v), table in problem.edges.items():
        around[u].append((v, table))
        around[v].append((u, table.T))
    current = list(choices)
    memory = problem.memory_of(current)
    for _ in range(_MOST_SWEEPS):
        moved = False
        for v, vector in enumerate(problem.costs):
            for u, table in around[v]:
                vector = vector + table[:, current[u]]
            old = current[v]
            if problem.memory is not None:
                room = problem.memory_limit - memory + problem.memory[v][old]
                vector = np.where(problem.memory[v] <= room, vector, np.inf)
            new = int(vector.argmin())
            if vector[new] < vector[old] * (1 - 1e-12) and new != old:
                if problem.memory is not None:
                    memory += problem.memory[v][new] - problem.memory[v][old]
                current[v] = new
                moved = True
        if not moved:
            break
    final = tuple(current)
    return final if problem.fits(problem.memory_of(final)) else tuple(choices)
