"""Better assignments from good ones, without proof: crossing two over, and moving one node at a time.

Prices alone miss the assignments that use the last bytes of memory. Two moves find most of them: taking the first
nodes of the program from an assignment that is over the limit and the rest from one that is within it (only the edges
across the cut pay for the change), and then moving single nodes while it helps.
Everything is deterministic. Cost: nodes plus edges, times a few sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from meshwright.solve.flat import FlatEdges, FlatNodes
from meshwright.solve.problem import MEMORY_ROUNDING, Problem

# Sweeps of moving single nodes; and how often what crossing over has found is crossed over again.
_MOST_SWEEPS, _MOST_CROSSINGS = 20, 3


def improve(
    problem: Problem, *, heavy: Sequence[tuple[int, ...]], light: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:  # fmt: skip
    """As `Improvement.of`, of a problem that is asked for once."""
    return Improvement(problem).of(heavy=heavy, light=light)


class Improvement:
    """One problem made ready to improve assignments of it.

    Args:
        problem: the problem.
        edges: of the problem, where somebody has laid them end to end already.
    """

    def __init__(self, problem: Problem, edges: FlatEdges | None = None) -> None:
        self._problem = problem
        self._costs = FlatNodes(problem.costs)
        self._held = FlatNodes(problem.memory) if problem.memory is not None else None
        self._edges = edges if edges is not None else FlatEdges.of(problem.edges)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where each node stands in the program; of each edge whether its first node comes first, and both places."""
        place = places(self._problem)
        ends = place[np.array(list(self._problem.edges), dtype=int).reshape(-1, 2)]
        return place, ends[:, 0] < ends[:, 1], np.sort(ends, axis=1)

    def of(self, *, heavy: Sequence[tuple[int, ...]], light: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The best assignment within the limit that crossing over and single moves find.

        Args:
            heavy: assignments over the limit.
            light: assignments within the limit; at least one.
        """

        def weight(choices: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
            at = np.array(choices, dtype=int)
            return float(self._costs.sum(at) + self._edges.sum(at)), choices

        found = min((self.descended(choices) for choices in light), key=weight)
        for _ in range(_MOST_CROSSINGS if heavy else 0):
            pairs = [pair for over in heavy for one in (*light, found) for pair in ((over, one), (one, over))]
            crossed = [one for pair in pairs if (one := self.crossed_over(*pair)) is not None]
            best = min((self.descended(min(crossed, key=weight)), found), key=weight) if crossed else found
            if weight(best) >= weight(found):
                break
            found = best
        return found

    def crossed_over(self, first: Sequence[int], rest: Sequence[int]) -> tuple[int, ...] | None:
        """The cheapest assignment within the limit that takes nodes before some place in the program from `first` and
        others from `rest`.

        Returns:
            The assignment, or `None` when no cut gives one.
        """
        problem, edges = self._problem, self._edges
        place, in_order, ends = self._places
        nodes = len(place)
        a, b = np.array(first, dtype=int), np.array(rest, dtype=int)
        own, other = (self._costs.numbers[self._costs.starts + one] for one in (a, b))
        across = np.where(in_order, edges.between(a, b), edges.between(b, a))
        # What is paid while the cut is from one place on to before another: indexed by the cut, how the total changes
        # when it passes each node; infinities are counted, not added.
        begin, end = np.zeros(len(ends), dtype=int), np.full(len(ends), nodes + 1)
        spans = [
            (np.zeros(nodes, dtype=int), place + 1, other),
            (place + 1, np.full(nodes, nodes + 1), own),
            (begin, ends[:, 0] + 1, edges.between(b, b)),
            (ends[:, 0] + 1, ends[:, 1] + 1, across),
            (ends[:, 1] + 1, end, edges.between(a, a)),
        ]
        cost, forbidden, memory = np.zeros(nodes + 2), np.zeros(nodes + 2), np.zeros(nodes + 1)
        for start, stop, seconds in spans:
            finite = np.isfinite(seconds)
            for into, what in ((cost, np.where(finite, seconds, 0.0)), (forbidden, (~finite).astype(float))):
                np.add.at(into, start, what)
                np.subtract.at(into, stop, what)
        cost, forbidden = cost[:-1], forbidden[:-1]
        if self._held is not None:
            held = [self._held.numbers[self._held.starts + one] for one in (a, b)]
            memory[0] = held[1].sum()
            memory[place + 1] = held[0] - held[1]
        most = problem.memory_limit * (1 + MEMORY_ROUNDING)
        allowed = (np.cumsum(forbidden) < 0.5) & (np.cumsum(memory) <= most)
        if not allowed.any():
            return None
        cut = int(np.where(allowed, np.cumsum(cost), np.inf).argmin())
        crossed = tuple(np.where(place < cut, a, b).tolist())
        return crossed if problem.fits(problem.memory_of(crossed)) else None

    @cached_property
    def _around(self) -> list[list[tuple[int, np.ndarray]]]:
        """Of each node its neighbours, each with the table (own choices, theirs)."""
        around: list[list[tuple[int, np.ndarray]]] = [[] for _ in self._problem.costs]
        for (u, v), table in self._problem.edges.items():
            around[u].append((v, table))
            around[v].append((u, table.T))
        return around

    def _restless(self, choices: Sequence[int]) -> set[int]:
        """Nodes of which another choice costs less beside these choices of their neighbours."""
        at, starts = np.array(choices, dtype=int), self._costs.starts
        seconds = self._costs.numbers + self._edges.beside(at, self._costs)
        least = np.minimum.reduceat(seconds, starts) if len(starts) else seconds
        return set(np.flatnonzero(least < seconds[starts + at]).tolist())

    def descended(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Move single nodes to cheaper choices within the limit until none helps.

        Args:
            choices: an assignment of finite cost within the limit.
        """
        problem, around = self._problem, self._around
        current, memory = list(choices), problem.memory_of(choices)
        waiting, full = self._restless(choices), set[int]()  # and those that want more memory than there is
        for _ in range(_MOST_SWEEPS):
            moved: set[int] = set()
            for v in sorted(waiting):
                vector = problem.costs[v]
                for u, table in around[v]:
                    vector = vector + table[:, current[u]]
                old = current[v]
                least = vector[old] * (1 - 1e-12)
                if problem.memory is not None and vector.min() < least:
                    room = problem.memory_limit - memory + problem.memory[v][old]
                    fitting = np.where(problem.memory[v] <= room, vector, np.inf)
                    (full.add if fitting.min() > vector.min() else full.discard)(v)
                    vector = fitting
                new = int(vector.argmin())
                if vector[new] < least and new != old:
                    if problem.memory is not None:
                        memory += problem.memory[v][new] - problem.memory[v][old]
                    current[v] = new
                    moved.add(v)
            if not moved:
                break
            waiting = {u for v in moved for u, _ in around[v]} | full
        final = tuple(current)
        return final if problem.fits(problem.memory_of(final)) else tuple(choices)


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
