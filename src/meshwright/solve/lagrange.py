"""Put a price on memory: the best Lagrange multiplier, found exactly.

With a price of m seconds per byte the memory limit leaves the constraints and the problem is solved by elimination; its
optimum minus m times the limit is a lower bound. The bound is concave and piecewise linear in m, one line per
assignment, so intersecting the lines of the two assignments on either side of the limit and solving there again finds
its maximum in finitely many steps (Kelley's cutting planes in one dimension; Handler and Zang, "A dual algorithm for
the constrained shortest path problem", 1980).

Cost: some ten eliminations. Known limit: a duality gap remains, about the weight of one choice among all nodes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from meshwright.solve.deadline import Deadline
from meshwright.solve.eliminate import Elimination
from meshwright.solve.improve import improve
from meshwright.solve.problem import Infeasible, OutOfTime, Problem, Solution

# The number of lines is finite but not small in theory; in practice a dozen are met.
_MOST_STEPS = 100
# A line this close (relative) to the two it was meant to undercut is one of them.
_SAME = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Dual:
    """The best price of memory.

    Args:
        price: seconds per byte.
        bound: the lower bound it gives, in seconds.
        heavy: the last assignment met that is over the limit; `None` when the limit does not bind.
        light: the assignment met that is within the limit and costs least.
        optimal: whether `light` is an optimum.
    """

    price: float
    bound: float
    heavy: tuple[int, ...] | None
    light: tuple[int, ...]
    optimal: bool

    @property
    def over(self) -> tuple[tuple[int, ...], ...]:
        """`heavy`, where there is one."""
        return (self.heavy,) if self.heavy is not None else ()


def priced(problem: Problem, price: float) -> tuple[np.ndarray, ...]:
    """The node costs with memory paid for at `price` seconds per byte."""
    if problem.memory is None or price == 0:
        return problem.costs
    return tuple(c + price * m for c, m in zip(problem.costs, problem.memory, strict=True))


def maximise_dual(problem: Problem, elimination: Elimination) -> Dual:
    """The best price and the assignments next to it.

    Args:
        problem: the problem.
        elimination: the elimination of the same problem.

    Raises:
        Infeasible: no assignment is allowed, or none fits.
        OutOfTime: the deadline of the elimination passed before the first price; later, the answer is not the best.
    """
    heavy, bound = elimination.minimise(problem.costs)
    if not math.isfinite(bound):
        raise Infeasible.no_finite("exact elimination")
    heavy_memory = problem.memory_of(heavy)
    if problem.memory is None or problem.fits(heavy_memory):
        return Dual(price=0.0, bound=bound, heavy=None, light=heavy, optimal=True)
    heavy_cost = problem.objective(heavy)
    light = _least_memory(problem, elimination)
    light_memory, light_cost = problem.memory_of(light), problem.objective(light)
    if not problem.fits(light_memory):
        raise Infeasible.over_memory(least_memory=light_memory, memory_limit=problem.memory_limit)
    best_light, best_cost, best_price = light, light_cost, 0.0
    for _ in range(_MOST_STEPS):
        price = (light_cost - heavy_cost) / (heavy_memory - light_memory)
        if not (math.isfinite(price) and price > 0):
            break
        try:
            choices, value = elimination.minimise(priced(problem, price))
        except OutOfTime:
            break
        here = value - price * problem.memory_limit
        if here > bound:
            bound, best_price = here, price
        memory, cost = problem.memory_of(choices), problem.objective(choices)
        fits = problem.fits(memory)
        if fits and cost < best_cost:
            best_light, best_cost = choices, cost
        if value >= (heavy_cost + price * heavy_memory) * (1 - _SAME):
            break
        if fits:
            light, light_memory, light_cost = choices, memory, cost
        else:
            heavy, heavy_memory, heavy_cost = choices, memory, cost
    return Dual(
        price=best_price, bound=min(bound, best_cost), heavy=heavy, light=best_light, optimal=bound >= best_cost
    )


def solve_by_multiplier(
    problem: Problem, *, gap: float = 0.0, time_limit_seconds: float = 60.0, incumbent: Solution | None = None
) -> Solution:
    """The best Lagrange multiplier, then local improvement of the assignments next to it.

    Args:
        problem: the problem.
        gap: the answer is called proven when its gap is at most this.
        time_limit_seconds: stop after this many seconds.
        incumbent: an assignment to start the improvement from as well.

    Raises:
        Infeasible: no assignment is allowed, or none fits.
        Unsolved: the graph is too wide for elimination, or the time is out before a price is tried.
    """
    start = time.perf_counter()
    dual = maximise_dual(problem, Elimination(problem, deadline=Deadline.after(time_limit_seconds)))
    choices = dual.light
    if not dual.optimal:
        others = [dual.light] if incumbent is None else [dual.light, incumbent.choices]
        choices = improve(problem, heavy=dual.over, light=others)
    objective = problem.objective(choices)
    bound = min(max(dual.bound, 0.0), objective)
    return Solution(
        choices=choices,
        objective=objective,
        memory=problem.memory_of(choices),
        lower_bound=bound,
        method="elimination" if dual.heavy is None else "multiplier",
        proven=objective - bound <= gap * objective,
        seconds=time.perf_counter() - start,
    )


def _least_memory(problem: Problem, elimination: Elimination) -> tuple[int, ...]:
    """The assignment of finite cost that takes least memory."""
    weight = problem.of_memory()
    choices, total = Elimination(weight, deadline=elimination.deadline).minimise(weight.costs)
    if not math.isfinite(total):
        raise Infeasible.no_finite("exact elimination")
    return choices
