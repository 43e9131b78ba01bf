"""Every assignment, one block after another: the truth the other methods are tested against.

Cost: the product of all numbers of choices. Refused above 2**24 assignments.
"""

from __future__ import annotations

import math
import time

import numpy as np

from meshwright.solve.problem import MEMORY_ROUNDING, Infeasible, Problem, Solution, Unsolved

_MOST_ASSIGNMENTS = 1 << 24


def solve_by_brute_force(
    problem: Problem, *, gap: float = 0.0, time_limit_seconds: float = 60.0, incumbent: Solution | None = None
) -> Solution:
    """The optimum by trying everything; ties go to the first assignment in lexicographic order.

    Args:
        problem: the problem, of at most 2**24 assignments.
        gap: not used: the answer is optimal.
        time_limit_seconds: not used: the number of assignments is bounded instead.
        incumbent: not used.

    Raises:
        Infeasible: no assignment has finite cost and fits.
        Unsolved: there are too many assignments.
    """
    del gap, time_limit_seconds, incumbent
    start = time.perf_counter()
    sizes = problem.sizes
    count = math.prod(sizes)
    if count > _MOST_ASSIGNMENTS:
        raise Unsolved(
            f"refused brute force: got {count:.3g} assignments; needed at most {_MOST_ASSIGNMENTS}; try solve()"
        )
    cost = np.zeros(sizes)
    memory = np.zeros(sizes)
    rank = len(sizes)
    for v, vector in enumerate(problem.costs):
        shape = tuple(sizes[v] if d == v else 1 for d in range(rank))
        cost += vector.reshape(shape)
        if problem.memory is not None:
            memory += problem.memory[v].reshape(shape)
    for (u, v), table in problem.edges.items():
        cost += table.reshape(tuple(sizes[d] if d in (u, v) else 1 for d in range(rank)))
    if not np.isfinite(cost).any():
        raise Infeasible.no_finite("brute force")
    fits = memory <= problem.memory_limit * (1 + MEMORY_ROUNDING)
    if not np.isfinite(cost[fits]).any():
        raise Infeasible.over_memory(
            least_memory=float(memory[np.isfinite(cost)].min()), memory_limit=problem.memory_limit
        )
    best = int(np.where(fits, cost, np.inf).argmin())
    choices = tuple(int(s) for s in np.unravel_index(best, sizes)) if sizes else ()
    objective = problem.objective(choices)
    return Solution(
        choices=choices,
        objective=objective,
        memory=problem.memory_of(choices),
        lower_bound=objective,
        method="brute force",
        proven=True,
        seconds=time.perf_counter() - start,
    )
