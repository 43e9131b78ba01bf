"""One problem at many prices of memory: what is forbidden and the order of elimination are found once.

The stage search asks of every layer what it would do if a byte cost so and so much, a thousand times over few problems.
A price changes the costs of nodes and nothing else: not which choices have no finite edge, and not the order in which
nodes are best eliminated. One question is then one pass of elimination, a tenth of what solving anew takes.

Known limit: graphs too wide for elimination are solved anew for every price, to a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..solve import Infeasible, Problem, Unsolved, solve
from ..solve.eliminate import Elimination
from ..solve.presolve import presolve

# Elimination of more table entries than these takes longer than what `solve` does instead.
_MOST_ENTRIES = 1 << 26


class PricedProblem:
    """A problem without a limit, made ready for many prices.

    >>> bytes = ([8.0, 1.0], [8.0, 1.0])
    >>> priced = PricedProblem(Problem(costs=([0.0, 3.0], [0.0, 4.0])), constant=bytes, kept=([0.0] * 2,) * 2)
    >>> priced.choices(0.0, 1), priced.choices(0.5, 1), priced.choices(1.0, 1)
    ((0, 0), (1, 0), (1, 1))

    Args:
      problem: seconds of nodes and edges.
      constant: bytes of each choice of each node, held once.
      kept: bytes of each choice of each node, held for each microbatch in flight.

    Raises:
      Infeasible: some node has no choice left.
    """

    def __init__(self, problem: Problem, *, constant: Sequence[np.ndarray], kept: Sequence[np.ndarray]) -> None:
        # Nothing that depends on the costs of nodes, since prices change them: nodes stay, but those of one choice.
        self._allowed = presolve(problem, dominance=False, fold_degree=-1)
        self._small = self._allowed.problem
        self._constant, self._kept = (
            [np.asarray(rows[v])[names] for v, names in zip(self._allowed.nodes, self._allowed.choices, strict=True)]
            for rows in (constant, kept)
        )
        try:
            elimination = Elimination(self._small)
        except Unsolved:
            elimination = None
        self._elimination = elimination if elimination is not None and elimination.entries <= _MOST_ENTRIES else None

    def choices(
        self, price: float, in_flight: int, *, gap: float = 0.0, time_limit_seconds: float = 60.0
    ) -> tuple[int, ...]:
        """The best choice of each node.

        Args:
          price: of memory, in seconds per byte.
          in_flight: how many microbatches are kept.
          gap: relative, at which to stop where the graph is too wide for elimination.
          time_limit_seconds: the same.

        Raises:
          Infeasible: every assignment is forbidden.
          Unsolved: too wide, and the time ran out.
        """
        held = zip(self._small.costs, self._constant, self._kept, strict=True)
        costs = tuple(seconds + price * (once + in_flight * each) for seconds, once, each in held)
        if self._elimination is None:
            priced = Problem(costs=costs, edges=self._small.edges)
            found = solve(priced, gap=gap, time_limit_seconds=time_limit_seconds)
            return self._allowed.restore(found.choices)
        choices, total = self._elimination.minimise(costs)
        if not np.isfinite(total):
            raise Infeasible.no_finite("exact elimination")
        return self._allowed.restore(choices)
