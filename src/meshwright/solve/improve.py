"""Better assignments from good ones, without proof: crossing two over, and moving one node at a time.

Prices alone miss the assignments that use the last bytes of memory. Two moves find most of them: taking the first
nodes from an assignment that is over the limit and the rest from one that is within it (nodes come in the order of the
program, so only the edges across the cut pay for the change), and then moving single nodes while it helps.
Everything is deterministic. Cost: nodes plus edges, times a few sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.solve.problem import MEMORY_ROUNDING, Problem

_MOST_SWEEPS = 20


def improve(problem: Problem, *, heavy: tuple[int, ...] | None, light: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The best assignment within the limit that crossing over and single moves find.

    Args:
        problem: the problem.
        heavy: an assignment over the limit, or `None`.
        light: assignments within the limit; at least one.
    """
    found = [descend(problem, choices) for choices in light]
    if heavy is not None:
        for first, rest in [(heavy, light[0]), (light[0], heavy)]:
            crossed = cross_over(problem, first, rest)
            if crossed is not None:
                found.append(descend(problem, crossed))
    return min(found, key=lambda choices: (problem.objective(choices), choices))


def cross_over(problem: Problem, first: Sequence[int], rest: Sequence[int]) -> tuple[int, ...] | None:
    """The cheapest assignment within the limit that takes nodes below some number from `first` and others from `rest`.

    Returns:
        The assignment, or `None` when no cut gives one.
    """
    nodes = len(problem.costs)
    v = np.arange(nodes)
    pairs = np.array(list(problem.edges), dtype=int).reshape(-1, 2)
    edges = [(table, first[u], rest[u], first[w], rest[w]) for (u, w), table in problem.edges.items()]
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
        memory[1:] = held[0] - held[1]
    allowed = (np.cumsum(forbidden) < 0.5) & (np.cumsum(memory) <= problem.memory_limit * (1 + MEMORY_ROUNDING))
    if not allowed.any():
        return None
    cut = int(np.where(allowed, np.cumsum(cost), np.inf).argmin())
    crossed = (*first[:cut], *rest[cut:])
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
