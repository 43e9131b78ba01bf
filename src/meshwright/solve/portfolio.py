"""Which method when: cheap and exact first, and each next one starts from what the last one learned.

1. Elimination without the memory limit. Most problems end here: the limit does not bind.
2. Presolve, then the best price of memory, which gives a lower bound and a good assignment.
3. What cannot be part of a better assignment is forbidden, the rest presolved again, and the price found again.
4. Elimination with labels closes the gap that the price leaves.
5. MILP where the labels became too many, in the time that remains.

Graphs too wide for elimination go from a relaxation that is not (`thin`) to step 5.

Only step 5 looks at the clock, and only to stop: the same input gives the same choices unless MILP ran out of time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from meshwright.solve.eliminate import Elimination, solve_by_elimination
from meshwright.solve.improve import improve
from meshwright.solve.labels import close_gap
from meshwright.solve.lagrange import maximise_dual
from meshwright.solve.milp import solve_by_milp
from meshwright.solve.presolve import Reduction, presolve
from meshwright.solve.problem import Infeasible, Problem, Solution, Unsolved
from meshwright.solve.thin import thin
from meshwright.solve.tighten import tighten

# Tightening pays again only while it shrinks the problem to less than this; it rarely does more often than this.
_SHRUNK = 0.9
_MOST_ROUNDS = 4
# What a proof is worth, relative to the objective: by floating-point sums, and by HiGHS.
_EXACT = 1e-9
_HIGHS = 1e-6
# Labels are asked for half the gap that is needed, so that rounding does not undo the proof.
_SAFE = 0.5
# MILP gets this much even when the other methods used up the time: it may be the only one to find anything.
_LEAST_SECONDS = 1.0


def solve(problem: Problem, *, gap: float = 0.0, time_limit_seconds: float = 60.0) -> Solution:
    """The assignment of least cost within the memory limit.

    >>> from meshwright.solve import Problem, solve
    >>> p = Problem(costs=([0.0, 3.0], [0.0, 4.0]), memory=([8.0, 1.0], [8.0, 1.0]), memory_limit=10.0)
    >>> s = solve(p)
    >>> s.choices, s.objective, s.memory, s.proven
    ((1, 0), 3.0, 9.0, True)

    Args:
        problem: the problem.
        gap: stop when (objective - lower bound) / objective is at most this.
        time_limit_seconds: the wall-clock time after which MILP stops; the work of all other methods is bounded by
            sizes instead.

    Returns:
        The best assignment found, with a lower bound; `proven` says whether the gap was closed.

    Raises:
        Infeasible: no assignment has finite cost, or none fits the memory limit.
        Unsolved: the graph is too wide for elimination and the time ran out before MILP found any assignment.
    """
    start = time.perf_counter()
    answer = _answer(problem, gap, start + time_limit_seconds)
    objective = problem.objective(answer.choices)
    bound = min(max(answer.bound, 0.0), objective)
    return Solution(
        choices=answer.choices,
        objective=objective,
        memory=problem.memory_of(answer.choices),
        lower_bound=objective if objective - bound <= _EXACT * objective else bound,
        method=answer.method,
        proven=objective - bound <= max(gap, answer.accuracy) * objective,
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one way through the portfolio ends with; `accuracy` is what its bound is worth, relative."""

    choices: tuple[int, ...]
    bound: float
    method: str
    accuracy: float = _EXACT


def _answer(problem: Problem, gap: float, deadline: float) -> _Answer:
    try:
        allowed = presolve(problem, dominance=False, fold_degree=0)
        choices = allowed.restore(solve_by_elimination(allowed.problem).choices)
        if problem.fits(problem.memory_of(choices)):
            return _Answer(choices=choices, bound=problem.objective(choices), method="elimination")
    except Unsolved:
        pass  # too wide, or the limit binds: both are what the rest is for
    except Infeasible:
        raise _explain(problem, deadline) from None
    try:
        reduction = presolve(problem)
    except Infeasible:
        raise _explain(problem, deadline) from None
    try:
        return _by_price(problem, reduction, gap, deadline)
    except Infeasible:
        raise _explain(problem, deadline) from None


def _by_price(problem: Problem, reduction: Reduction, gap: float, deadline: float) -> _Answer:
    """Steps 2 to 5. Each further reduction keeps everything better than the best assignment known when it was made."""
    steps = [reduction]
    best: tuple[int, ...] | None = None
    objective, bound = math.inf, 0.0
    method = "presolve"
    for _ in range(_MOST_ROUNDS):
        small = steps[-1].problem
        offset = math.fsum(step.offset_seconds for step in steps)
        try:
            relaxation, elimination = small, Elimination(small)
            method = "presolve+multiplier"
        except Unsolved:
            relaxation = thin(small)
            elimination = Elimination(relaxation)
            method = "presolve+relaxation"
        try:
            dual = maximise_dual(relaxation, elimination)
        except Infeasible:
            if best is None:
                raise
            return _Answer(choices=best, bound=objective, method=method)  # nothing better is left
        bound = max(bound, dual.bound + offset)
        if math.isfinite(small.objective(dual.light)):
            choices = improve(small, heavy=dual.heavy if relaxation is small else None, light=[dual.light])
            choices = _restore(steps, choices)
            if best is None or problem.objective(choices) < objective:
                best, objective = choices, problem.objective(choices)
        if best is None:
            return _by_milp(problem, steps, None, gap, deadline)
        known = _Answer(choices=best, bound=bound, method=method)
        if objective - bound <= max(gap, _EXACT) * objective:
            return known
        tight = tighten(small, relaxation, elimination, price=dual.price, upper_bound=objective - offset)
        try:
            steps.append(presolve(tight))
        except Infeasible:
            return _Answer(choices=best, bound=objective, method=method)
        if sum(steps[-1].problem.sizes) > _SHRUNK * sum(small.sizes):
            break
    return _by_labels(problem, steps, dual.price, known, gap, deadline)


def _by_labels(
    problem: Problem,
    steps: list[Reduction],
    price: float,
    known: _Answer,
    gap: float,
    deadline: float,
) -> _Answer:
    offset = math.fsum(step.offset_seconds for step in steps)
    objective = problem.objective(known.choices)
    try:
        better, bound = close_gap(
            steps[-1].problem,
            Elimination(steps[-1].problem),
            price=price,
            lower_bound=max(known.bound - offset, 0.0),
            upper_bound=objective - offset,
            gap=_SAFE * max(gap, _EXACT) * known.bound,
        )
    except Infeasible:  # nothing better is left
        return _Answer(choices=known.choices, bound=objective, method=known.method)
    except Unsolved as error:
        bound = max(known.bound, error.lower_bound + offset)
        known = _Answer(choices=known.choices, bound=bound, method=known.method)
        return _by_milp(problem, steps, known, gap, deadline)
    choices = known.choices if better is None else _restore(steps, better)
    return _Answer(choices=choices, bound=bound + offset, method=f"{known.method}+labels")


def _by_milp(problem: Problem, steps: list[Reduction], known: _Answer | None, gap: float, deadline: float) -> _Answer:
    """Step 5; the known assignment need not have survived the reductions."""
    offset = math.fsum(step.offset_seconds for step in steps)
    objective = math.inf if known is None else problem.objective(known.choices)
    # The asked gap is of the whole objective, HiGHS sees only the part that is left of it.
    left = objective - offset
    part = gap if known is None or left <= 0 else min(gap * objective / left, 1.0)
    method = "presolve+milp" if known is None else f"{known.method}+milp"
    seconds = max(deadline - time.perf_counter(), _LEAST_SECONDS)
    try:
        found = solve_by_milp(steps[-1].problem, gap=part, time_limit_seconds=seconds)
    except Infeasible:
        if known is None:
            raise _explain(problem, deadline) from None
        return _Answer(choices=known.choices, bound=objective, method=method, accuracy=_HIGHS)
    except Unsolved as error:
        if known is None:
            raise
        bound = max(known.bound, error.lower_bound + offset)
        return _Answer(choices=known.choices, bound=bound, method=method, accuracy=_HIGHS)
    choices, bound = _restore(steps, found.choices), found.lower_bound + offset
    if known is not None:
        bound = max(bound, known.bound)
        choices = choices if problem.objective(choices) < objective else known.choices
    return _Answer(choices=choices, bound=bound, method=method, accuracy=_HIGHS)


def _restore(steps: list[Reduction], choices: tuple[int, ...]) -> tuple[int, ...]:
    for step in reversed(steps):
        choices = step.restore(choices)
    return choices


def _explain(problem: Problem, deadline: float) -> Infeasible:
    """Why there is no assignment: the least memory of any that is allowed, or that there is none."""
    if not problem.limited:
        return Infeasible.no_finite("presolve")
    try:
        least = solve(problem.of_memory(), time_limit_seconds=max(deadline - time.perf_counter(), _LEAST_SECONDS))
    except Infeasible as error:
        return error
    return Infeasible.over_memory(least_memory=least.objective, memory_limit=problem.memory_limit)
