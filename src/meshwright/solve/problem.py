"""The optimisation problem as numbers, its answer, and the two ways an answer can fail to exist.

Nodes 0..n-1 each pick one choice. A choice costs seconds, a pair of choices on an edge costs seconds, a choice takes
bytes of memory; the sum of the seconds is minimised while the sum of the bytes stays within a limit. This is a pairwise
discrete energy (a "weighted constraint network") with one knapsack row. `inf` seconds means forbidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Sums of the same bytes in another order differ in their last bits; a limit met with equality must still count as met.
MEMORY_ROUNDING = 1e-12


class Infeasible(ValueError):
    """No assignment satisfies the problem.

    Attributes:
        least_memory: the least memory of any assignment of finite cost, in bytes; `None` when there is no such
            assignment at all.
        memory_limit: the limit that was asked for, in bytes; `None` when memory is not the cause.
        reason: one sentence saying why.
    """

    def __init__(self, reason: str, *, least_memory: float | None = None, memory_limit: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.least_memory = least_memory
        self.memory_limit = memory_limit

    @classmethod
    def over_memory(cls, *, least_memory: float, memory_limit: float) -> Infeasible:
        """The error for a limit (bytes) that even the assignment of least memory (bytes) exceeds."""
        return cls(
            f"refused the problem: got a memory limit of {memory_limit:.6g} bytes; needed at least {least_memory:.6g} "
            "bytes, the least memory of any assignment of finite cost; try a higher limit or smaller choices",
            least_memory=least_memory,
            memory_limit=memory_limit,
        )

    @classmethod
    def no_finite(cls, where: str) -> Infeasible:
        """The error for a problem whose every assignment costs infinity; `where` names the place it was noticed."""
        return cls(
            "refused the problem: got infinite cost for every assignment; needed one of finite cost; "
            f"where: {where}; try allowing more choices"
        )


class Unsolved(RuntimeError):
    """A method gave up: the problem is outside what it can do, or no assignment was found in its limits.

    It says nothing about whether the problem has a solution.

    Attributes:
        lower_bound: what was learned all the same: no assignment costs less than this many seconds.
    """

    def __init__(self, reason: str, *, lower_bound: float = 0.0) -> None:
        super().__init__(reason)
        self.lower_bound = lower_bound


class OutOfTime(Unsolved):
    """A method gave up because of the clock, and for no other reason."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One choice per node, least total seconds, within a memory limit.

    >>> p = Problem(costs=([1.0, 0.0], [0.0, 0.0]), edges={(0, 1): [[0.0, 2.0], [3.0, 3.0]]})
    >>> p.objective((0, 0))
    1.0

    Args:
        costs: per node, the seconds of each choice, shape (k_v,); `inf` forbids the choice.
        edges: per pair (u, v) with u < v, the seconds of each pair of choices, shape (k_u, k_v); `inf` forbids it.
        memory: per node, the bytes of each choice, shape (k_v,), finite; `None` means no choice takes memory.
        memory_limit: the most bytes that all choices together may take; `inf` means no limit.

    Raises:
        ValueError: a shape does not fit, or a number is NaN, negative, or (bytes) infinite.
    """

    costs: tuple[np.ndarray, ...]
    edges: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)
    memory: tuple[np.ndarray, ...] | None = None
    memory_limit: float = math.inf

    def __post_init__(self) -> None:
        costs = tuple(_numbers(c, f"costs[{v}]") for v, c in enumerate(self.costs))
        for v, cost in enumerate(costs):
            if cost.ndim != 1 or cost.size == 0:
                raise ValueError(
                    _refusal(f"costs[{v}] of shape {cost.shape}", "shape (k,) with k >= 1", "give each node a choice")
                )
        edges = {}
        for pair in sorted(self.edges):
            u, v = pair
            if not 0 <= u < v < len(costs):
                raise ValueError(
                    _refusal(f"edge {pair}", f"(u, v) with 0 <= u < v < {len(costs)}", "transposing the table")
                )
            table = _numbers(self.edges[pair], f"edges[{pair}]")
            wanted = (costs[u].size, costs[v].size)
            if table.shape != wanted:
                raise ValueError(
                    _refusal(
                        f"edges[{pair}] of shape {table.shape}",
                        f"shape {wanted}, choices of {u} by choices of {v}",
                        "the other order",
                    )
                )
            edges[(int(u), int(v))] = table
        memory = self.memory
        if memory is not None:
            memory = tuple(_numbers(m, f"memory[{v}]", finite=True) for v, m in enumerate(memory))
            shapes = [m.shape for m in memory]
            if shapes != [c.shape for c in costs]:
                first = next(
                    (v for v, (m, c) in enumerate(zip(memory, costs, strict=False)) if m.shape != c.shape), None
                )
                got = (
                    f"memory for {len(memory)} nodes"
                    if first is None
                    else f"memory[{first}] of shape {memory[first].shape}"
                )
                needed = f"{len(costs)} nodes" if first is None else f"shape {costs[first].shape}"
                raise ValueError(_refusal(got, needed, "one number of bytes per choice"))
        limit = float(self.memory_limit)
        if math.isnan(limit) or limit < 0:
            raise ValueError(_refusal(f"memory_limit {limit}", "bytes >= 0, or inf", "memory_limit=inf for no limit"))
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "memory_limit", limit)

    @classmethod
    def unchecked(
        cls,
        *,
        costs: tuple[np.ndarray, ...],
        edges: Mapping[tuple[int, int], np.ndarray],
        memory: tuple[np.ndarray, ...] | None = None,
        memory_limit: float = math.inf,
    ) -> Problem:
        """The problem of arrays that come from a problem, or were made like one's: float64, nothing is looked at."""
        made = object.__new__(cls)
        for name, value in (("costs", costs), ("edges", edges), ("memory", memory), ("memory_limit", memory_limit)):
            object.__setattr__(made, name, value)
        return made

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of choices of each node."""
        return tuple(c.size for c in self.costs)

    @property
    def limited(self) -> bool:
        """Whether there is a memory limit at all."""
        return self.memory is not None and math.isfinite(self.memory_limit)

    def objective(self, choices: Sequence[int]) -> float:
        """The total seconds of an assignment; `inf` when it is forbidden.

        Raises:
            ValueError: not one choice per node, or a choice that the node does not have.
        """
        self._check(choices)
        terms = [c[s] for c, s in zip(self.costs, choices, strict=True)]
        terms += [table[choices[u], choices[v]] for (u, v), table in self.edges.items()]
        return math.fsum(terms)

    def memory_of(self, choices: Sequence[int]) -> float:
        """The total bytes of an assignment; 0 when no memory is given.

        Raises:
            ValueError: not one choice per node, or a choice that the node does not have.
        """
        self._check(choices)
        if self.memory is None:
            return 0.0
        return math.fsum(m[s] for m, s in zip(self.memory, choices, strict=True))

    def fits(self, memory_bytes: float) -> bool:
        """Whether this many bytes are within the limit, up to the rounding of a sum (1e-12 of the limit)."""
        return memory_bytes <= self.memory_limit * (1 + MEMORY_ROUNDING)

    def of_memory(self) -> Problem:
        """The problem of least memory: bytes take the place of seconds, what is forbidden stays so, no limit."""
        memory = self.memory if self.memory is not None else tuple(np.zeros(k) for k in self.sizes)
        return Problem(
            costs=tuple(np.where(np.isfinite(c), m, np.inf) for c, m in zip(self.costs, memory, strict=True)),
            edges={pair: np.where(np.isfinite(table), 0.0, np.inf) for pair, table in self.edges.items()},
        )

    def restricted(self, kept: Sequence[np.ndarray]) -> Problem:
        """The problem with only some choices of each node.

        Args:
            kept: per node, the numbers of the choices that stay.
        """
        return Problem.unchecked(
            costs=tuple(c[k] for c, k in zip(self.costs, kept, strict=True)),
            edges={(u, v): table[np.ix_(kept[u], kept[v])] for (u, v), table in self.edges.items()},
            memory=None if self.memory is None else tuple(m[k] for m, k in zip(self.memory, kept, strict=True)),
            memory_limit=self.memory_limit,
        )

    def _check(self, choices: Sequence[int]) -> None:
        if len(choices) != len(self.costs):
            raise ValueError(
                _refusal(f"{len(choices)} choices", f"{len(self.costs)}, one per node", "the choices of a Solution")
            )
        for v, (s, cost) in enumerate(zip(choices, self.costs, strict=True)):
            if not 0 <= s < cost.size:
                raise ValueError(
                    _refusal(f"choice {s} of node {v}", f"0 <= choice < {cost.size}", "the choices of a Solution")
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An assignment within the memory limit, and how good it certainly is.

    >>> Solution(choices=(0,), objective=2.0, memory=0.0, lower_bound=1.5, method="m", proven=False, seconds=0.1).gap
    0.25

    Args:
        choices: the choice of each node.
        objective: its total, in seconds.
        memory: its total, in bytes.
        lower_bound: no assignment within the limit costs less than this many seconds (up to 1e-9 of it, and 1e-6 where
            the method names "milp": those are the tolerances of floating-point sums and of HiGHS).
        method: the methods that produced it.
        proven: whether the gap is as small as was asked for.
        seconds: wall-clock time spent, in seconds.
    """

    choices: tuple[int, ...]
    objective: float
    memory: float
    lower_bound: float
    method: str
    proven: bool
    seconds: float

    @property
    def gap(self) -> float:
        """(objective - lower bound) / objective: 0 when optimal."""
        return (self.objective - self.lower_bound) / max(self.objective, float(np.finfo(float).tiny))


def _numbers(values: object, name: str, *, finite: bool = False) -> np.ndarray:
    """A private read-only float64 copy, refused when it holds NaN, negatives or (if `finite`) infinities."""
    array = np.array(values, dtype=np.float64, order="C")
    if array.size and not array.min() >= 0:  # NaN fails this comparison too
        raise ValueError(
            _refusal(f"{name} with NaN or a negative number", "numbers >= 0", "inf for a forbidden choice")
        )
    if finite and array.size and not np.isfinite(array).all():
        raise ValueError(
            _refusal(f"{name} with an infinite number", "finite bytes", "an infinite cost for a forbidden choice")
        )
    array.setflags(write=False)
    return array


def _refusal(got: str, needed: str, hint: str) -> str:
    return f"refused the problem: got {got}; needed {needed}; try {hint}"
