"""Mixed-integer programming with HiGHS, through SciPy: for graphs too wide for elimination, and the last resort.

One binary variable per choice, one continuous variable per allowed pair on an edge, whose sums over either end equal
the choice at the other (the "local marginal polytope"): its relaxation is exact on trees and nearly so in practice. The
memory limit is one row.

Known limits: numbers are held to HiGHS's tolerances (1e-6), so a bound is good to about 1e-6 of the objective; a run
that is cut off by the clock may differ from the next one.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from meshwright.solve.improve import Improvement
from meshwright.solve.problem import Infeasible, OutOfTime, Problem, Solution, Unsolved

# HiGHS stops at an absolute gap of 1e-6, so objectives are scaled far above it.
_OBJECTIVE = 1e4
# HiGHS may exceed a row by 1e-6; a limit tightened by twice that is kept for certain.
_ROW_MARGIN = 2e-6
# HiGHS looks at its time limit only between pieces of work, which take long for large programs.
_COLUMNS_PER_SECOND = 50_000
_FEW_COLUMNS = 20_000
_OPTIMAL, _LIMIT, _INFEASIBLE = 0, 1, 2


def solve_by_milp(
    problem: Problem, *, gap: float = 0.0, time_limit_seconds: float = 60.0, incumbent: Solution | None = None
) -> Solution:
    """Branch and cut with HiGHS.

    Args:
        problem: the problem.
        gap: stop when (objective - bound) / objective is at most this.
        time_limit_seconds: stop after this many seconds.
        incumbent: a known assignment; returned when nothing better is found, and its bound is kept when it is better.

    Raises:
        Infeasible: no assignment is allowed, or none fits.
        Unsolved: the time ran out before any assignment was found, or is too short for a problem of this size.
    """
    start = time.perf_counter()
    columns = sum(problem.sizes) + sum(int(np.isfinite(table).sum()) for table in problem.edges.values())
    if columns > max(_COLUMNS_PER_SECOND * time_limit_seconds, _FEW_COLUMNS):
        raise OutOfTime(
            f"refused MILP: got {columns} variables and {max(time_limit_seconds, 0.0):.3g} s; needed at least a second "
            f"for {_COLUMNS_PER_SECOND} of them; try a longer time limit or fewer choices"
        )
    program = _Program(problem)
    scale = _OBJECTIVE / (incumbent.objective if incumbent and incumbent.objective > 0 else program.typical)
    bound, found = -math.inf, None
    for margin in (0.0, _ROW_MARGIN):
        left = max(time_limit_seconds - (time.perf_counter() - start), 0.1)
        result = program.run(scale=scale, gap=gap, seconds=left, margin=margin)
        if margin == 0.0:
            if result.status == _INFEASIBLE:
                if incumbent is None:
                    raise _why_infeasible(problem, max(time_limit_seconds - (time.perf_counter() - start), 1.0))
                bound = incumbent.objective
                break
            if result.mip_dual_bound is not None and math.isfinite(result.mip_dual_bound):
                bound = result.mip_dual_bound / scale
        if result.x is not None:
            found = program.choices(result.x)
            if math.isfinite(problem.objective(found)) and problem.fits(problem.memory_of(found)):
                found = Improvement(problem).descended(found)
                break
            found = None
    if found is None or (incumbent is not None and incumbent.objective <= problem.objective(found)):
        if incumbent is None:
            raise Unsolved(
                f"refused MILP: got no assignment of {len(problem.costs)} nodes in {time_limit_seconds:.3g} s; "
                "needed one; try a longer time limit or fewer choices",
                lower_bound=max(bound, 0.0),
            )
        found = incumbent.choices
    objective = problem.objective(found)
    bound = max(bound, 0.0 if incumbent is None else incumbent.lower_bound, 0.0)
    bound = min(bound, objective)
    return Solution(
        choices=found,
        objective=objective,
        memory=problem.memory_of(found),
        lower_bound=bound,
        method="milp",
        proven=objective - bound <= max(gap, 1e-6) * objective,
        seconds=time.perf_counter() - start,
    )


class _Program:
    """The linearised problem: columns are the choices of all nodes, then the allowed pairs of all edges."""

    def __init__(self, problem: Problem) -> None:
        from scipy.sparse import csr_array  # a sixth of a second, which most never need

        sizes = problem.sizes
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        flat = np.concatenate([np.zeros(0), *problem.costs])
        self.binary = flat.size
        rows: list[np.ndarray] = [np.repeat(np.arange(len(sizes)), sizes)]
        columns: list[np.ndarray] = [np.arange(flat.size)]
        values: list[np.ndarray] = [np.ones(flat.size)]
        costs = [flat]
        row, column = len(sizes), flat.size
        for (u, v), table in problem.edges.items():
            a, b = np.nonzero(np.isfinite(table))
            pairs = column + np.arange(a.size)
            costs.append(table[a, b])
            for end, picked, size in ((u, a, sizes[u]), (v, b, sizes[v])):
                rows += [row + picked, row + np.arange(size)]
                columns += [pairs, self.first[end] + np.arange(size)]
                values += [np.ones(a.size), -np.ones(size)]
                row += size
            column += a.size
        self.cost = np.concatenate(costs)
        self.allowed = np.isfinite(self.cost)
        self.rows, self.columns = row, column
        self.matrix = csr_array(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(row, column)
        )
        self.right = np.zeros(row)
        self.right[: len(sizes)] = 1.0
        self.memory: np.ndarray | None = None
        if problem.limited and problem.memory is not None:
            # Measured from the least of each node and in units of what is left, so that HiGHS's tolerance is small.
            least = math.fsum(float(m.min()) for m in problem.memory)
            left = problem.memory_limit - least
            above = np.concatenate([np.zeros(0), *(m - m.min() for m in problem.memory)])
            unit = left if left > 0 else max(float(above.max(initial=0.0)), 1.0)
            self.memory = above / unit
            self.room = left / unit
        finite = self.cost[self.allowed]
        self.typical = float(finite.max(initial=0.0)) or 1.0

    def run(self, *, scale: float, gap: float, seconds: float, margin: float) -> Any:
        from scipy import optimize  # a third of a second, which most never need
        from scipy.sparse import csr_array

        if self.columns == 0:
            return optimize.OptimizeResult(status=_OPTIMAL, x=np.zeros(0), mip_dual_bound=0.0)
        constraints = [optimize.LinearConstraint(self.matrix, self.right, self.right)]
        if self.memory is not None:
            row = csr_array(np.concatenate([self.memory, np.zeros(self.columns - self.binary)])[None])
            constraints.append(optimize.LinearConstraint(row, -np.inf, self.room - margin))
        integral = np.zeros(self.columns)
        integral[: self.binary] = 1
        return optimize.milp(
            np.where(self.allowed, self.cost, 0.0) * scale,
            integrality=integral,
            bounds=optimize.Bounds(0.0, self.allowed.astype(float)),
            constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )

    def choices(self, x: np.ndarray) -> tuple[int, ...]:
        return tuple(int(x[a:b].argmax()) for a, b in zip(self.first[:-1], self.first[1:], strict=True))


def _why_infeasible(problem: Problem, seconds: float) -> Infeasible:
    if not problem.limited:
        return Infeasible.no_finite("MILP")
    try:
        least = solve_by_milp(problem.of_memory(), time_limit_seconds=seconds)
    except Infeasible as error:
        return error
    return Infeasible.over_memory(least_memory=least.objective, memory_limit=problem.memory_limit)
