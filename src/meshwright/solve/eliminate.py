"""Exact minimisation by eliminating nodes one by one (Bertele and Brioschi, "Nonserial dynamic programming", 1972).

Eliminating a node sums all tables that mention it, minimises over its choices and leaves a table (its *message*) over
the nodes that were around it. The cost is the size of the largest table: exponential in the treewidth of the graph, but
linear in the number of nodes for graphs that look like chains. A backward pass gives the min-marginal of every choice:
the least total cost of any assignment that makes it.

Tables are built in pieces and minimised at once: only messages are held. Known limits: graphs of large treewidth are
refused (`Unsolved`), and a memory limit is not seen at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.solve.deadline import NEVER, Deadline
from meshwright.solve.order import elimination_order
from meshwright.solve.problem import Infeasible, Problem, Solution, Unsolved
from meshwright.solve.tables import min_sum

# Entries of the largest table and of all tables of one pass; an entry takes about a nanosecond and is not held.
_LARGEST_TABLE = 1 << 32
_MOST_ENTRIES = 1 << 33
# Entries of all messages, which are held: half a gigabyte.
_MOST_HELD = 1 << 26
# Min-marginals hold each table as a whole, one after another, in a few copies.
LARGEST_HELD = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The elimination of one node.

    A table of this step has the node as its dim 0 and the separator as its other dims.

    Args:
        node: the eliminated node.
        separator: the nodes of its message, first eliminated first.
        shape: the number of choices of the node and of its separator.
        edges: the nodes at the other end of the edges summed here.
        tables: their tables, shape (k_node, k_other).
        children: earlier steps whose messages are summed here.
        dims: for each edge and then each child, the dims of this step's table that it spans.
    """

    node: int
    separator: tuple[int, ...]
    shape: tuple[int, ...]
    edges: tuple[int, ...]
    tables: tuple[np.ndarray, ...]
    children: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marginals:
    """What each choice costs at least.

    Args:
        optimum: the least total, in seconds.
        nodes: per node, the least total of any assignment that makes each choice, shape (k_v,).
        edges: per edge, the least total of any assignment that makes each pair of choices, shape (k_u, k_v).
    """

    optimum: float
    nodes: tuple[np.ndarray, ...]
    edges: dict[tuple[int, int], np.ndarray]


class Elimination:
    """An elimination order made ready for one graph, to be run with any node costs.

    >>> p = Problem(costs=([1.0, 0.0], [0.0, 0.0]), edges={(0, 1): [[0.0, 2.0], [3.0, 3.0]]})
    >>> Elimination(p).minimise(p.costs)
    ((0, 0), 1.0)

    Raises:
        Unsolved: the tables would have more than 2**33 entries together, or the messages more than 2**26; or, from
            any method, the deadline has passed.
    """

    __slots__ = ("deadline", "entries", "largest", "steps")

    def __init__(self, problem: Problem, *, deadline: Deadline = NEVER) -> None:
        sizes = problem.sizes
        order = elimination_order(sizes, problem.edges)
        if order.largest > _LARGEST_TABLE or order.entries > _MOST_ENTRIES or order.held > _MOST_HELD:
            raise Unsolved(
                f"refused exact elimination: got a largest table of {order.largest:.3g} entries, {order.entries:.3g} "
                f"in all and {order.held:.3g} to be held; needed at most {_LARGEST_TABLE}, {_MOST_ENTRIES} and "
                f"{_MOST_HELD}; try solve(), which turns to bounds and MILP"
            )
        self.deadline = deadline
        self.largest = order.largest
        self.entries = order.entries
        position = {v: i for i, v in enumerate(order.nodes)}
        edges_at: list[list[tuple[int, np.ndarray]]] = [[] for _ in order.nodes]
        for (u, v), table in problem.edges.items():
            if position[u] < position[v]:
                edges_at[position[u]].append((v, table))
            else:
                edges_at[position[v]].append((u, np.ascontiguousarray(table.T)))
        children_at: list[list[int]] = [[] for _ in order.nodes]
        steps = []
        for i, (v, separator) in enumerate(zip(order.nodes, order.separators, strict=True)):
            if separator:
                children_at[position[separator[0]]].append(i)
            dim = {u: d for d, u in enumerate((v, *separator))}
            # Small tables first: their sums stay small until a large one forces the full shape.
            children = sorted(children_at[i], key=lambda c: (len(steps[c].separator), c))
            dims = [(0, dim[u]) for u, _ in edges_at[i]]
            dims += [tuple(dim[u] for u in steps[c].separator) for c in children]
            steps.append(
                Step(
                    node=v,
                    separator=separator,
                    shape=(sizes[v], *(sizes[u] for u in separator)),
                    edges=tuple(u for u, _ in edges_at[i]),
                    tables=tuple(table for _, table in edges_at[i]),
                    children=tuple(children),
                    dims=tuple(dims),
                )
            )
        self.steps = tuple(steps)

    def messages(self, costs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The message of every step: over its separator, the least total of everything eliminated into it."""
        messages: list[np.ndarray] = []
        for step in self.steps:
            self.deadline.check("exact elimination")
            messages.append(min_sum(_spread(step, costs, messages), step.shape, self.deadline))
        return messages

    def minimise(self, costs: Sequence[np.ndarray]) -> tuple[tuple[int, ...], float]:
        """The assignment of least total cost for these node costs; ties go to the lowest choice.

        Args:
            costs: per node, the seconds of each choice, shape (k_v,).

        Returns:
            The choices and their total, which is `inf` when every assignment is forbidden.
        """
        messages = self.messages(costs)
        total = math.fsum(float(m) for m, step in zip(messages, self.steps, strict=True) if not step.separator)
        choices = [0] * len(self.steps)
        for step in reversed(self.steps):
            vector = costs[step.node]
            for u, table in zip(step.edges, step.tables, strict=True):
                vector = vector + table[:, choices[u]]
            for c in step.children:
                picked = tuple(choices[u] for u in self.steps[c].separator[1:])
                vector = vector + messages[c][(slice(None), *picked)]
            choices[step.node] = int(vector.argmin())
        return tuple(choices), total

    def minimise_each(self, costs: Sequence[np.ndarray]) -> list[tuple[tuple[int, ...], float]]:
        """The same for many costs at once, in little more time than for one where tables are small.

        Args:
            costs: per node, the seconds of each choice in each case, shape (k_v, cases).

        Returns:
            For each case the choices and their total.
        """
        cases = costs[0].shape[1] if costs else 1
        messages: list[np.ndarray] = []
        for step in self.steps:
            self.deadline.check("exact elimination")
            parts = [part[..., None] for part in _spread(step, None, ())]
            parts.append(costs[step.node].reshape((step.shape[0],) + (1,) * (len(step.shape) - 1) + (cases,)))
            for child, dims in zip(step.children, step.dims[len(step.edges) :], strict=True):
                parts.append(_placed(messages[child], (*dims, len(step.shape)), len(step.shape) + 1))
            messages.append(min_sum(parts, (*step.shape, cases), self.deadline))
        found = []
        for case in range(cases):
            total = math.fsum(
                float(m[case]) for m, step in zip(messages, self.steps, strict=True) if not step.separator
            )
            choices = [0] * len(self.steps)
            for step in reversed(self.steps):
                vector = costs[step.node][:, case]
                for u, table in zip(step.edges, step.tables, strict=True):
                    vector = vector + table[:, choices[u]]
                for c in step.children:
                    picked = tuple(choices[u] for u in self.steps[c].separator[1:])
                    vector = vector + messages[c][(slice(None), *picked, case)]
                choices[step.node] = int(vector.argmin())
            found.append((tuple(choices), total))
        return found

    def beliefs(self, costs: Sequence[np.ndarray], messages: list[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """Of every step, last first, its number and its whole table of min-marginals; the total must be finite."""
        roots = [i for i, step in enumerate(self.steps) if not step.separator]
        total = math.fsum(float(messages[i]) for i in roots)
        down: dict[int, np.ndarray] = {i: np.asarray(total - float(messages[i])) for i in roots}
        for i in range(len(self.steps) - 1, -1, -1):
            self.deadline.check("min-marginals")
            step = self.steps[i]
            belief = down.pop(i)[None]
            for factor in _spread(step, costs, messages):
                belief = belief + factor
            yield i, belief
            for c, dims in zip(step.children, step.dims[len(step.edges) :], strict=True):
                above = _min_over_others(belief, dims)
                # The child's own message is part of `above`; where it is infinite nothing can be said but that.
                down[c] = np.subtract(
                    above, messages[c], out=np.full_like(above, np.inf), where=np.isfinite(messages[c])
                )

    def min_marginals(self, costs: Sequence[np.ndarray]) -> Marginals:
        """The least total of every choice and of every pair of choices on an edge.

        Args:
            costs: per node, the seconds of each choice, shape (k_v,).

        Raises:
            Infeasible: every assignment is forbidden.
            Unsolved: a table is too large to be held.
        """
        if self.largest > LARGEST_HELD:
            raise Unsolved(
                f"refused min-marginals: got a largest table of {self.largest:.3g} entries; "
                f"needed at most {LARGEST_HELD}; try fewer choices"
            )
        messages = self.messages(costs)
        total = math.fsum(float(m) for m, step in zip(messages, self.steps, strict=True) if not step.separator)
        if not math.isfinite(total):
            raise Infeasible.no_finite("exact elimination")
        nodes: list[np.ndarray] = [np.empty(0)] * len(self.steps)
        edges: dict[tuple[int, int], np.ndarray] = {}
        for i, belief in self.beliefs(costs, messages):
            step = self.steps[i]
            nodes[step.node] = _min_over_others(belief, (0,))
            for u, dims in zip(step.edges, step.dims, strict=False):
                table = _min_over_others(belief, dims)
                edges[(min(step.node, u), max(step.node, u))] = table if step.node < u else table.T
        return Marginals(optimum=total, nodes=tuple(nodes), edges=edges)


def solve_by_elimination(
    problem: Problem, *, gap: float = 0.0, time_limit_seconds: float = 60.0, incumbent: Solution | None = None
) -> Solution:
    """Exact elimination; for problems whose memory limit, if any, does not bind.

    Args:
        problem: the problem.
        gap: not used: the answer is optimal.
        time_limit_seconds: give up after this many seconds.
        incumbent: not used.

    Raises:
        Infeasible: every assignment costs infinity.
        Unsolved: the graph is too wide, the time is out, or the optimum does not fit the memory limit.
    """
    del gap, incumbent
    start = time.perf_counter()
    choices, total = Elimination(problem, deadline=Deadline.after(time_limit_seconds)).minimise(problem.costs)
    if not math.isfinite(total):
        raise Infeasible.no_finite("exact elimination")
    memory = problem.memory_of(choices)
    if not problem.fits(memory):
        raise Unsolved(
            f"refused exact elimination: got an optimum of {memory:.6g} bytes; "
            f"needed at most {problem.memory_limit:.6g}; try solve(), which honours the limit"
        )
    objective = problem.objective(choices)
    return Solution(
        choices=choices,
        objective=objective,
        memory=memory,
        lower_bound=objective,
        method="elimination",
        proven=True,
        seconds=time.perf_counter() - start,
    )


def _spread(step: Step, costs: Sequence[np.ndarray] | None, messages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Everything summed at a step, each with the step's number of dims (1 where it does not depend on that dim).
    Without costs the tables of its edges alone."""
    rank = len(step.shape)
    if costs is None:
        return [_placed(table, dims, rank) for table, dims in zip(step.tables, step.dims, strict=False)]
    sources = (*step.tables, *(messages[c] for c in step.children))
    spread = [_placed(source, dims, rank) for source, dims in zip(sources, step.dims, strict=True)]
    return [costs[step.node].reshape((-1,) + (1,) * (rank - 1)), *spread]


def _placed(source: np.ndarray, dims: Sequence[int], rank: int) -> np.ndarray:
    """`source` with `rank` dims, its own at `dims`."""
    shape = [1] * rank
    for dim, size in zip(dims, source.shape, strict=True):
        shape[dim] = size
    return source.reshape(shape)


def _min_over_others(table: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """The minimum over every dim not in `dims` (which are increasing)."""
    return table.min(axis=tuple(d for d in range(table.ndim) if d not in dims))
