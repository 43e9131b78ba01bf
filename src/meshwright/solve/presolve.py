"""Make a problem smaller without changing its optimum.

Five reductions, repeated until none applies:

* a choice is dropped when it is forbidden, when every pair it takes part in on some edge is forbidden, or when it alone
  takes more memory than the limit leaves (arc consistency);
* a choice is dropped when another one looks the same to all neighbours, costs no more and takes no more memory;
* a choice is dropped when another one of the same node is no worse whatever the neighbours choose, and takes no more
  memory ("dead-end elimination", Goldstein 1994);
* a node with one choice left is folded into its neighbours;
* a node whose choices all take the same memory and that has at most `fold_degree` neighbours is eliminated: what
  remains of it is a cost on its neighbour or an edge between its two neighbours.

Cost: per node, choices squared times choices of each neighbour, up to an allowance; what is left then stays larger
than it could be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.solve.deadline import NEVER, Deadline
from meshwright.solve.dominance import among_equals, undominated
from meshwright.solve.problem import Infeasible, Problem
from meshwright.solve.tables import min_sum

# Comparisons of all pairs of choices, for one node and for all: about a second. Merging equal ones is always cheap.
_MOST_COMPARED_AT_ONCE = 1 << 24
_MOST_COMPARED = 1 << 28
# A node is not eliminated when that means more additions than this: after other reductions it takes fewer.
_MOST_FOLDED = 1 << 20
# Relative slack on the limit: subtracting fixed memory from it rounds, and must not lose an assignment that just fits.
_SLACK = 1e-13


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Removed:
    """A node that left the problem: its best choice follows from those of its neighbours."""

    node: int
    cost: np.ndarray
    tables: tuple[tuple[int, np.ndarray], ...]

    def best(self, choices: Sequence[int]) -> int:
        vector = self.cost
        for u, table in self.tables:
            vector = vector + table[:, choices[u]]
        return int(vector.argmin())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """A smaller problem and the way back.

    Args:
        problem: the smaller problem; its optimum plus `offset_seconds` is the optimum of the original.
        offset_seconds: the cost that was folded out, in seconds.
        nodes: for each node of the smaller problem, its number in the original.
        choices: for each node of the smaller problem, the original numbers of its choices.
    """

    problem: Problem
    offset_seconds: float
    nodes: tuple[int, ...]
    choices: tuple[np.ndarray, ...]
    removed: tuple[_Removed, ...]
    started: tuple[np.ndarray, ...]

    def restore(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The original's assignment for an assignment of the smaller problem."""
        full = [0] * len(self.started)
        for v, names, s in zip(self.nodes, self.choices, choices, strict=True):
            full[v] = int(np.searchsorted(self.started[v], names[s]))
        for gone in reversed(self.removed):
            full[gone.node] = gone.best(full)
        return tuple(int(names[s]) for names, s in zip(self.started, full, strict=True))


def presolve(
    problem: Problem, *, held: Sequence[np.ndarray] | None = None, dominance: bool = True, fold_degree: int = 2,
    deadline: Deadline = NEVER,
) -> Reduction:  # fmt: skip
    """Reduce a problem.

    >>> presolve(Problem(costs=([1.0, 0.0], [0.0, 4.0]))).restore(())
    (1, 0)

    Args:
        problem: the problem.
        held: memory of several kinds in place of the problem's, shape (k_v, kinds) for each node, on which any prices
            may be put later: the optimum under these is that of the smaller problem.
        dominance: whether to drop dominated choices.
        fold_degree: eliminate nodes of indifferent memory with at most this many neighbours (0, 1 or 2).
        deadline: when to give up.

    Raises:
        Infeasible: some node has no choice left. The least memory is not worked out here.
        OutOfTime: the deadline has passed.
    """
    started = tuple(np.flatnonzero(np.isfinite(c)) for c in problem.costs)
    for v, names in enumerate(started):
        if names.size == 0:
            raise Infeasible.no_finite(f"node {v}, whose every choice is forbidden")
    kinds = None if held is None else [np.asarray(row)[names] for row, names in zip(held, started, strict=True)]
    work = _Work(problem.restricted(started), kinds, deadline)
    pending = set(range(len(problem.costs)))
    while pending:
        work.forbid(pending)
        for v in sorted(pending):
            if dominance:
                work.drop_dominated(v)
        work.forbid_heavy()
        pending = work.fold(fold_degree)
        if not dominance:
            break
    return work.result(started)


class _Work:
    """The problem while it is being reduced; choices keep their numbers, dead ones cost infinity."""

    def __init__(self, problem: Problem, held: Sequence[np.ndarray] | None, deadline: Deadline) -> None:
        self.deadline = deadline
        self.allowance = _MOST_COMPARED
        self.costs = {v: np.array(c) for v, c in enumerate(problem.costs)}
        memory = problem.memory if problem.limited and problem.memory is not None and held is None else None
        self.limited = memory is not None
        self.limit = problem.memory_limit * (1 + _SLACK) if self.limited else math.inf
        # Of each node a row for each choice and a column for each kind; the limit is that of the only one.
        self.memory = [np.zeros((c.size, 0)) for c in problem.costs] if held is None else list(held)
        if memory is not None:
            self.memory = [row[:, None] for row in memory]
        self.around: dict[int, dict[int, np.ndarray]] = {v: {} for v in self.costs}
        for (u, v), table in problem.edges.items():
            self.around[u][v] = table
            self.around[v][u] = table.T
        self.offset: list[float] = []
        self.removed: list[_Removed] = []
        self.changed: set[int] = set()

    def alive(self, v: int) -> np.ndarray:
        names = np.flatnonzero(np.isfinite(self.costs[v]))
        if names.size == 0:
            raise Infeasible.no_finite(f"node {v}, which has no choice left that its neighbours and the memory allow")
        return names

    def forbid(self, nodes: Iterable[int]) -> None:
        """Drop choices that have no allowed partner on some edge, and follow the consequences."""
        queue = sorted(nodes)
        waiting = set(queue)
        while queue:
            self.deadline.check("presolve")
            v = queue.pop()
            waiting.discard(v)
            names = self.alive(v)
            for u, table in self.around[v].items():
                hopeless = np.isinf(table[names].min(axis=0)) & np.isfinite(self.costs[u])
                if hopeless.any():
                    self.costs[u][hopeless] = np.inf
                    self.changed.add(u)
                    if u not in waiting:
                        waiting.add(u)
                        queue.append(u)

    def forbid_heavy(self) -> None:
        """Drop choices that do not fit even when all other nodes take their least memory."""
        if not self.limited:
            return
        least = {v: float(self.memory[v][self.alive(v)].min()) for v in self.around}
        slack = self.limit * (1 + 1e-12) - math.fsum(least.values())
        touched = []
        for v, base in least.items():
            heavy = (self.memory[v][:, 0] - base > slack) & np.isfinite(self.costs[v])
            if heavy.any():
                self.costs[v][heavy] = np.inf
                touched.append(v)
        self.changed.update(touched)
        self.forbid(touched)

    def drop_dominated(self, v: int) -> None:
        self.deadline.check("presolve")
        names = self.alive(v)
        if names.size == 1:
            return
        tables = [table[np.ix_(names, self.alive(u))] for u, table in self.around[v].items()]
        keep = among_equals(self.costs[v][names], self.memory[v][names], tables)
        self._keep(v, names, keep)
        names, tables = names[keep], [table[keep] for table in tables]
        compared = names.size**2 * sum(table.shape[1] for table in tables)
        if compared <= min(_MOST_COMPARED_AT_ONCE, self.allowance):
            self.allowance -= compared
            self._keep(v, names, undominated(self.costs[v][names], self.memory[v][names], tables))

    def _keep(self, v: int, names: np.ndarray, keep: np.ndarray) -> None:
        if not keep.all():
            self.costs[v][names[~keep]] = np.inf
            self.changed.add(v)

    def fold(self, degree: int) -> set[int]:
        """Remove what can be removed; the nodes whose surroundings changed."""
        queue = sorted(self.around, reverse=True)
        waiting = set(queue)
        changed, self.changed = self.changed, set()
        pending = {u for v in changed if v in self.around for u in (v, *self.around[v])}
        while queue:
            v = queue.pop()
            waiting.discard(v)
            names = self.alive(v)
            memory = self.memory[v][names]
            neighbours = sorted(self.around[v])
            additions = math.prod((names.size, *(self.costs[u].size for u in neighbours)))
            if names.size > 1 and (len(neighbours) > degree or (memory != memory[0]).any() or additions > _MOST_FOLDED):
                continue
            self.deadline.check("presolve")
            self._remove(v, names, neighbours)
            pending.discard(v)
            for u in neighbours:
                pending.add(u)
                if u not in waiting:
                    waiting.add(u)
                    queue.append(u)
        return pending

    def _remove(self, v: int, names: np.ndarray, neighbours: list[int]) -> None:
        tables = [self.around[v][u] for u in neighbours]
        self.removed.append(_Removed(node=v, cost=self.costs[v], tables=tuple(zip(neighbours, tables, strict=True))))
        if self.limited:
            self.limit -= float(self.memory[v][names[0], 0])
        cost = self.costs[v][names]
        if not neighbours:
            self.offset.append(float(cost.min()))
        elif names.size == 1:
            self.offset.append(float(cost[0]))
            for u, table in zip(neighbours, tables, strict=True):
                self.costs[u] = self.costs[u] + table[names[0]]
        elif len(neighbours) == 1:
            (u,) = neighbours
            self.costs[u] = self.costs[u] + (cost[:, None] + tables[0][names]).min(axis=0)
        else:
            u, w = neighbours
            first, second = (cost[:, None] + tables[0][names])[:, :, None], tables[1][names][:, None, :]
            shape = (names.size, first.shape[1], second.shape[2])
            new = min_sum([first, second], shape, self.deadline)
            if w in self.around[u]:
                new = new + self.around[u][w]
            self.around[u][w] = new
            self.around[w][u] = new.T
        for u in neighbours:
            del self.around[u][v]
        del self.around[v], self.costs[v]

    def result(self, started: tuple[np.ndarray, ...]) -> Reduction:
        nodes = tuple(sorted(self.around))
        names = tuple(self.alive(v) for v in nodes)
        number = {v: i for i, v in enumerate(nodes)}
        edges = {
            (number[u], number[v]): table[np.ix_(names[number[u]], names[number[v]])]
            for u in nodes
            for v, table in self.around[u].items()
            if u < v
        }
        limit = self.limit
        if limit < 0:
            raise Infeasible.no_finite("the memory of the nodes that have one choice left, which exceeds the limit")
        return Reduction(
            problem=Problem.unchecked(
                costs=tuple(self.costs[v][n] for v, n in zip(nodes, names, strict=True)),
                edges=edges,
                memory=tuple(self.memory[v][n, 0] for v, n in zip(nodes, names, strict=True)) if self.limited else None,
                memory_limit=limit,
            ),
            offset_seconds=math.fsum(self.offset),
            nodes=nodes,
            choices=tuple(started[v][n] for v, n in zip(nodes, names, strict=True)),
            removed=tuple(self.removed),
            started=started,
        )
