"""Forbid what no better assignment can use (reduced-cost fixing with exact min-marginals).

At a price of memory, the min-marginal of a choice minus the price of the whole limit bounds from below every assignment
within the limit that makes the choice. Above the cost of a known assignment, the choice is of no use. Cost: two
eliminations.
"""

from __future__ import annotations

import numpy as np

from meshwright.solve.eliminate import Elimination
from meshwright.solve.lagrange import priced
from meshwright.solve.problem import Problem

# Min-marginals are differences of sums; what is this close (relative) to the known assignment stays.
_MARGIN = 1e-9


def tighten(
    problem: Problem, relaxation: Problem, elimination: Elimination, *, price: float, upper_bound: float
) -> Problem:
    """The problem with every choice and pair forbidden that costs more than a known assignment.

    Every assignment within the memory limit that costs less than `upper_bound` survives.

    Args:
        problem: the problem.
        relaxation: the problem itself, or one with the same nodes that never costs more.
        elimination: the elimination of the relaxation.
        price: the price of memory, in seconds per byte.
        upper_bound: the cost of a known assignment, in seconds.
    """
    marginals = elimination.min_marginals(priced(relaxation, price))
    paid = price * problem.memory_limit if price > 0 else 0.0
    most = upper_bound + paid + _MARGIN * (upper_bound + paid)
    return Problem(
        costs=tuple(np.where(m > most, np.inf, c) for m, c in zip(marginals.nodes, problem.costs, strict=True)),
        edges={
            pair: np.where(marginals.edges[pair] > most, np.inf, table) if pair in marginals.edges else table
            for pair, table in problem.edges.items()
        },
        memory=problem.memory,
        memory_limit=problem.memory_limit,
    )
