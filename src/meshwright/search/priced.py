"""One problem at many prices of memory: what is forbidden and the order of elimination are found once.

The stage search asks of every layer what it would do if a byte cost so and so much. A price changes the costs of nodes
and nothing else: not which choices have no finite edge, not the order in which nodes are best eliminated, and nothing
at nodes that hold no memory, most of which are eliminated once for all prices. What is left is eliminated at all prices
at once: for little tables ten prices take hardly longer than one.

Known limit: graphs too wide for elimination are solved anew for every price, to a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..solve import Infeasible, Problem, Unsolved, solve
from ..solve.eliminate import Elimination
from ..solve.presolve import presolve

# Elimination of more table entries than these takes longer than what `solve` does instead.
_MOST_ENTRIES = 1 << 22

# Tells nodes that hold memory from others, whatever mixture of throughout and in flight they hold.
_MIXTURE = 0.7320508


class PricedProblem:
    """A problem without a limit, made ready for many prices.

    >>> bytes = ([8.0, 1.0], [8.0, 1.0])
    >>> priced = PricedProblem(Problem(costs=([0.0, 3.0], [0.0, 4.0])), constant=bytes, kept=([0.0] * 2,) * 2)
    >>> priced.choices([(0.0, 1), (0.5, 1), (1.0, 1)])
    [(0, 0), (1, 0), (1, 1)]

    Args:
      problem: seconds of nodes and edges.
      constant: bytes of each choice of each node, held once.
      kept: bytes of each choice of each node, held for each microbatch in flight.

    Raises:
      Infeasible: some node has no choice left.
    """

    def __init__(self, problem: Problem, *, constant: Sequence[np.ndarray], kept: Sequence[np.ndarray]) -> None:
        constant, kept = ([np.asarray(row, dtype=float) for row in rows] for rows in (constant, kept))
        held = tuple(once + _MIXTURE * each for once, each in zip(constant, kept, strict=True))
        # No limit that could rule anything out: only which nodes hold memory is of interest.
        limit = 2.0 * sum(float(row.max()) for row in held) + 1.0
        marked = Problem.unchecked(costs=problem.costs, edges=problem.edges, memory=held, memory_limit=limit)
        self._allowed = presolve(marked, dominance=False)
        self._small = self._allowed.problem
        self._constant, self._kept = (
            [rows[v][names] for v, names in zip(self._allowed.nodes, self._allowed.choices, strict=True)]
            for rows in (constant, kept)
        )
        try:
            elimination = Elimination(self._small)
        except Unsolved:
            elimination = None
        self._elimination = elimination if elimination is not None and elimination.entries <= _MOST_ENTRIES else None

    @property
    def is_exact(self) -> bool:
        """Whether what is found at a price is the best there."""
        return self._elimination is not None

    def choices(
        self, prices: Sequence[tuple[float, float]], *, gap: float = 0.0, time_limit_seconds: float = 60.0
    ) -> list[tuple[int, ...] | None]:
        """The best choice of each node at each price, None where the time ran out.

        Args:
          prices: of memory, in seconds per byte, each with the microbatches that are kept.
          gap: relative, at which to stop where the graph is too wide for elimination.
          time_limit_seconds: the same, for each price.

        Raises:
          Infeasible: every assignment is forbidden.
        """
        if not self._small.costs:
            return [self._allowed.restore(())] * len(prices)
        at = np.array([price for price, _ in prices])
        times = np.array([price * in_flight for price, in_flight in prices])
        costs = [
            seconds[:, None] + once[:, None] * at + each[:, None] * times
            for seconds, once, each in zip(self._small.costs, self._constant, self._kept, strict=True)
        ]
        if self._elimination is None:
            return [self._solved([cost[:, n] for cost in costs], gap, time_limit_seconds) for n in range(len(prices))]
        found = self._elimination.minimise_each(costs)
        if not all(np.isfinite(total) for _, total in found):
            raise Infeasible.no_finite("exact elimination")
        return [self._allowed.restore(choices) for choices, _ in found]

    def _solved(self, costs: Sequence[np.ndarray], gap: float, time_limit_seconds: float) -> tuple[int, ...] | None:
        priced = Problem(costs=tuple(costs), edges=self._small.edges)
        try:
            return self._allowed.restore(solve(priced, gap=gap, time_limit_seconds=time_limit_seconds).choices)
        except Unsolved:
            return None
