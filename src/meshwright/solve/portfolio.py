"""Which method when: cheap and exact first, and each next one starts from what the last one learned.

1. Elimination without the memory limit. Most problems end here: the limit does not bind.
2. Presolve.
3. Where elimination would still take long, most choices are forbidden by bounds (`narrow`), as often as it helps.
4. The best price of memory, which gives a lower bound and a good assignment; what cannot be part of a better one is
   forbidden, the rest presolved again, and the price found again. Without a limit this is elimination.
5. Elimination with labels closes the gap that the price leaves.
6. MILP where the labels became too many, in the time that remains.

Graphs too wide for elimination go from a relaxation that is not (`thin`) to step 6.

The clock only ever stops the work, and then the best assignment known and its bound are the answer: the same input
gives the same choices unless the time ran out.
"""

from __future__ import annotations

import math
import time

from meshwright.solve.deadline import Deadline
from meshwright.solve.eliminate import LARGEST_HELD, Elimination
from meshwright.solve.improve import Improvement, improve
from meshwright.solve.labels import close_gap
from meshwright.solve.lagrange import maximise_dual, priced
from meshwright.solve.messages import Messages
from meshwright.solve.milp import solve_by_milp
from meshwright.solve.narrow import narrow
from meshwright.solve.order import elimination_order
from meshwright.solve.presolve import Reduction, presolve
from meshwright.solve.problem import Infeasible, Problem, Solution, Unsolved
from meshwright.solve.thin import thin
from meshwright.solve.tighten import tighten

# Elimination of fewer table entries than this takes a tenth of a second, and nothing else needs to be tried first.
_CHEAP_ENTRIES = 1 << 26
# Tightening pays again only while it shrinks the problem to less than this; it rarely does more often than this.
_SHRUNK = 0.9
_MOST_ROUNDS = 4
# What a proof is worth, relative to the objective: by floating-point sums, and by HiGHS.
_EXACT = 1e-9
_HIGHS = 1e-6
# Labels are asked for half the gap that is needed, so that rounding does not undo the proof.
_SAFE = 0.5
# Of the time that is left, what is given to a part of the problem.
_PART_OF_TIME = 0.4
# At this price, in seconds per byte, nothing but memory counts.
_HIGH_PRICE = 1e6
# To explain why nothing fits this much is spent even when the time is out.
_LEAST_SECONDS = 0.5


def solve(
    problem: Problem, *, gap: float = 0.0, time_limit_seconds: float = 60.0, known: tuple[int, ...] | None = None
) -> Solution:
    """The assignment of least cost within the memory limit.

    >>> from meshwright.solve import Problem, solve
    >>> p = Problem(costs=([0.0, 3.0], [0.0, 4.0]), memory=([8.0, 1.0], [8.0, 1.0]), memory_limit=10.0)
    >>> s = solve(p)
    >>> s.choices, s.objective, s.memory, s.proven
    ((1, 0), 3.0, 9.0, True)

    Args:
        problem: the problem.
        gap: stop when (objective - lower bound) / objective is at most this.
        time_limit_seconds: the wall-clock time after which the best assignment known by then is the answer.
        known: an assignment within the limit, of whoever knows that the limit binds: step 1 is left out then.

    Returns:
        The best assignment found, with a lower bound; `proven` says whether the gap was closed.

    Raises:
        Infeasible: no assignment has finite cost, or none fits the memory limit.
        Unsolved: the time ran out before any assignment was found.
    """
    start = time.perf_counter()
    search = _Search(_without_idle_limit(problem), gap, Deadline.after(time_limit_seconds))
    search.run(known)
    bound = min(max(search.bound, 0.0), search.objective)
    left = search.objective - bound
    return Solution(
        choices=search.best,
        objective=search.objective,
        memory=problem.memory_of(search.best),
        lower_bound=search.objective if left <= _EXACT * search.objective else bound,
        method="+".join(search.methods),
        proven=left <= max(gap, search.accuracy) * search.objective,
        seconds=time.perf_counter() - start,
    )


def _without_idle_limit(problem: Problem) -> Problem:
    """The problem without its memory when not even the largest choices of all nodes exceed the limit."""
    if problem.memory is None or not problem.fits(math.fsum(float(m.max()) for m in problem.memory)):
        return problem
    return Problem(costs=problem.costs, edges=problem.edges)


class _Search:
    """What is known of one problem so far: the best assignment, a lower bound, and what is left of it.

    Each reduction in `steps` keeps everything better than the best assignment known when it was made.
    """

    def __init__(self, problem: Problem, gap: float, deadline: Deadline) -> None:
        self.problem, self.gap, self.deadline = problem, gap, deadline
        self.best: tuple[int, ...] = ()
        self.objective, self.bound = math.inf, 0.0
        self.accuracy = _EXACT  # what the bound is worth, relative
        self.methods: list[str] = []
        self.steps: list[Reduction] = []

    @property
    def small(self) -> Problem:
        return self.steps[-1].problem

    @property
    def offset(self) -> float:
        return math.fsum(step.offset_seconds for step in self.steps)

    @property
    def closed(self) -> bool:
        # An infinite objective is never closed: infinity minus a bound is not less than itself times a gap.
        return math.isfinite(self.objective) and self.objective - self.bound <= max(self.gap, _EXACT) * self.objective

    def offer(self, choices: tuple[int, ...] | None, *, inside: bool = True) -> None:
        """Keep an assignment if it is the best; `inside` says that it is one of what is left."""
        if choices is None:
            return
        for step in reversed(self.steps) if inside else ():
            choices = step.restore(choices)
        objective = self.problem.objective(choices)
        if objective < self.objective and self.problem.fits(self.problem.memory_of(choices)):
            self.best, self.objective = choices, objective

    def run(self, known: tuple[int, ...] | None) -> None:
        self.offer(known, inside=False)
        try:
            if known is not None or not self._without_limit():
                self.methods = ["presolve"]
                self.steps = [presolve(self.problem, deadline=self.deadline)]
                self._within_limit()
        except Unsolved:
            # A walk through the graph that saves memory, or else time: a tenth of a second where nothing else was done.
            for price in (_HIGH_PRICE, 0.0) if math.isinf(self.objective) else ():
                self.offer(Messages(self.problem).decode(priced(self.problem, price)), inside=False)
                self.methods = ["greedy"]
            if math.isinf(self.objective):
                raise
        except Infeasible as error:
            if math.isinf(self.objective):
                raise self._explain(error) from None
            self.bound = self.objective  # nothing better is left

    def _without_limit(self) -> bool:
        """Step 1: whether it answered the problem."""
        allowed = presolve(self.problem, dominance=False, fold_degree=0, deadline=self.deadline)
        whole, offset = allowed.problem, allowed.offset_seconds
        self.methods = ["elimination"]
        if elimination_order(whole.sizes, whole.edges).entries <= _CHEAP_ENTRIES:
            choices, total = Elimination(whole, deadline=self.deadline).minimise(whole.costs)
            if math.isinf(total):
                raise Infeasible.no_finite("exact elimination")
            choices = allowed.restore(choices)
            self.offer(choices, inside=False)
            self.bound = self.problem.objective(choices)
            return self.closed
        self.bound = offset + math.fsum(float(a.min()) for a in (*whole.costs, *whole.edges.values()))
        greedy = Messages(whole).decode(whole.costs)
        if whole.fits(whole.memory_of(greedy)):
            self.offer(allowed.restore(Improvement(whole).descended(greedy)), inside=False)
        if not whole.limited:
            return False
        if math.isinf(self.objective):
            light = self._least_memory(whole)
            self.offer(None if light is None else allowed.restore(Improvement(whole).descended(light)), inside=False)
        free = Problem(costs=whole.costs, edges=whole.edges)
        try:
            found = solve(free, gap=self.gap, time_limit_seconds=_PART_OF_TIME * self.deadline.seconds_left)
        except Unsolved:
            return False
        self.bound = max(self.bound, found.lower_bound + offset)
        self.offer(allowed.restore(found.choices), inside=False)
        self.methods = [found.method]
        return self.closed

    def _within_limit(self) -> None:
        self._narrow()
        price = self._by_price()
        if not self.closed and (price is None or not self._by_labels(price)):
            self._by_milp()

    def _narrow(self) -> None:
        """Step 3."""
        while not self.closed:
            small = self.small
            if elimination_order(small.sizes, small.edges).entries <= _CHEAP_ENTRIES:
                return
            light = self._least_memory(small) if small.limited else None
            left = narrow(small, upper_bound=self.objective - self.offset, light=light, deadline=self.deadline)
            self.methods.append("narrow")
            self.bound = max(self.bound, left.bound + self.offset)
            self.offer(left.choices)
            if not self._reduce(left.problem):
                return

    def _by_price(self) -> float | None:
        """Step 4; the best price, or `None` when no assignment is known that could be improved."""
        self.methods.append("")
        price = 0.0
        for _ in range(_MOST_ROUNDS):
            if self.closed:
                break
            small = self.small
            try:
                relaxation, elimination = small, Elimination(small, deadline=self.deadline)
                self.methods[-1] = "multiplier" if small.limited else "elimination"
            except Unsolved:
                relaxation = thin(small)
                elimination = Elimination(relaxation, deadline=self.deadline)
                self.methods[-1] = "relaxation"
            dual = maximise_dual(relaxation, elimination)
            price = dual.price
            self.bound = max(self.bound, dual.bound + self.offset)
            if math.isfinite(small.objective(dual.light)):
                self.offer(improve(small, heavy=dual.over if relaxation is small else (), light=[dual.light]))
            if math.isinf(self.objective):
                return None
            if self.closed or elimination.largest > LARGEST_HELD:
                break
            upper_bound = self.objective - self.offset
            if not self._reduce(tighten(small, relaxation, elimination, price=price, upper_bound=upper_bound)):
                break
        self.methods = [name for name in self.methods if name]
        return price

    def _by_labels(self, price: float) -> bool:
        """Step 5; whether it could be done."""
        try:
            better, bound = close_gap(
                self.small,
                Elimination(self.small, deadline=self.deadline),
                price=price,
                lower_bound=max(self.bound - self.offset, 0.0),
                upper_bound=self.objective - self.offset,
                gap=_SAFE * max(self.gap, _EXACT) * self.bound,
            )
        except Unsolved as error:
            self.bound = max(self.bound, error.lower_bound + self.offset)
            return False
        self.methods.append("labels")
        self.bound = max(self.bound, bound + self.offset)
        self.offer(better)
        return True

    def _by_milp(self) -> None:
        """Step 6. The assignment known need not have survived the reductions."""
        self.methods.append("milp")
        # The asked gap is of the whole objective, HiGHS sees only the part that is left of it.
        left = self.objective - self.offset
        part = self.gap if math.isinf(left) or left <= 0 else min(self.gap * self.objective / left, 1.0)
        self.accuracy = _HIGHS
        try:
            found = solve_by_milp(self.small, gap=part, time_limit_seconds=self.deadline.seconds_left)
        except Unsolved as error:
            self.bound = max(self.bound, error.lower_bound + self.offset)
            raise
        self.bound = max(self.bound, found.lower_bound + self.offset)
        self.offer(found.choices)

    def _least_memory(self, problem: Problem) -> tuple[int, ...] | None:
        """The assignment of a problem that takes least memory, if it fits and can be found soon."""
        try:
            least = solve(problem.of_memory(), time_limit_seconds=_PART_OF_TIME * self.deadline.seconds_left)
        except Unsolved:
            return None
        if not problem.fits(least.lower_bound):
            raise Infeasible.over_memory(least_memory=least.objective, memory_limit=problem.memory_limit)
        return least.choices if problem.fits(least.objective) else None

    def _explain(self, error: Infeasible) -> Infeasible:
        """Why there is no assignment: the least memory of any that is allowed, or that there is none."""
        if not self.problem.limited:
            return error
        try:
            least = solve(self.problem.of_memory(), time_limit_seconds=max(self.deadline.seconds_left, _LEAST_SECONDS))
        except Infeasible as none:
            return none
        return Infeasible.over_memory(least_memory=least.objective, memory_limit=self.problem.memory_limit)

    def _reduce(self, problem: Problem) -> bool:
        """Presolve what is left of what was left; whether that made it much smaller."""
        before = sum(self.small.sizes)
        self.steps.append(presolve(problem, deadline=self.deadline))
        return sum(self.small.sizes) <= _SHRUNK * before
