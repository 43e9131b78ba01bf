"""Better assignments from good ones, without proof: crossing two over, and moving one node at a time.

Prices alone miss the assignments that use the last bytes of memory. Two moves find most of them: taking the first
nodes from an assignment that is over the limit and the rest from one that is within it (nodes come in the order of the
program, so only the edges across the cut pay for the change), and then moving single nodes while it helps.
Everything is deterministic. Cost: nodes plus edges, times a few sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.solve.problem import Problem

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
    # Indexed by the cut: how the total changes when the cut passes each node; infinities are counted, not added.
    cost, forbidden, memory = np.zeros(nodes + 1), np.zeros(nodes + 1), np.zeros(nodes + 1)

    def add(where: int, seconds: float, sign: int) -> None:
        if np.isfinite(seconds):
            cost[where] += sign * seconds
        else:
            forbidden[where] += sign

    for v, vector in enumerate(problem.costs):
        add(0, vector[rest[v]], 1)
        add(v + 1, vector[rest[v]], -1)
        add(v + 1, vector[first[v]], 1)
        if problem.memory is not None:
            memory[0] += problem.memory[v][rest[v]]
            memory[v + 1] += problem.memory[v][first[v]] - problem.memory[v][rest[v]]
    for (u, v), table in problem.edges.items():
        neither, mixed, both = table[rest[u], rest[v]], table[first[u], rest[v]], table[first[u], first[v]]
        add(0, neither, 1)
        add(u + 1, neither, -1)
        add(u + 1, mixed, 1)
        add(v + 1, mixed, -1)
        add(v + 1, both, 1)
    allowed = (np.cumsum(forbidden) < 0.5) & (np.cumsum(memory) <= problem.memory_limit)
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
