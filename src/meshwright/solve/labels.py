"""Elimination with memory as a second criterion: closes the gap that a price of memory leaves.

Every table entry keeps a *set of labels*: the ways to reach it that are not both slower and larger than another one
(label setting, as for constrained paths: Desrochers and Soumis, 1988). The min-marginals at the best price bound
what each label can still become, so only labels whose excess over the priced optimum is below the gap survive. Equal
layers, whose permutations keep branch and cut busy, give equal labels and fall together here.

The search first asks for a solution in the lowest part of the gap, then in ever larger parts: one that is found is
optimal, and each part found empty raises the lower bound. Cost: number of labels times the logarithm for sorting them.
Known limit: refused when the labels become too many, as with a wide gap or very uneven numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.solve.deadline import Deadline
from meshwright.solve.eliminate import Elimination
from meshwright.solve.improve import improve
from meshwright.solve.lagrange import maximise_dual, priced
from meshwright.solve.problem import Infeasible, Problem, Solution, Unsolved

# Parts of the gap that are searched one after another; the cost of a part grows faster than its size.
_PARTS = (1 / 64, 1 / 16, 1 / 4, 1.0)
# Labels that may be made and sorted while searching all parts: a few seconds.
_MOST_LABELS = 1 << 23
_LABELS_PER_SECOND = 1 << 21
# Tables of min-marginals are held all at once.
_MOST_ENTRIES = 1 << 22
# Costs this close (relative to the budget) count as equal, so that sums of the same numbers in another order do.
_GRID = 1e-13
# Rounding allowed where a sum meets a limit.
_SAME = 1e-12
_EXACT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Labels:
    """The labels of one table, sorted by entry.

    Args:
        entry: which entry of the table each label belongs to, flat.
        excess: how far its priced cost is above the entry's best, in seconds.
        memory: what it takes so far, in bytes.
        source: the entry, before the node was eliminated, that it came from, flat.
        chosen: the label it takes from each child, shape (labels, children).
    """

    entry: np.ndarray
    excess: np.ndarray
    memory: np.ndarray
    source: np.ndarray
    chosen: np.ndarray

    def take(self, index: np.ndarray) -> _Labels:
        return _Labels(
            entry=self.entry[index],
            excess=self.excess[index],
            memory=self.memory[index],
            source=self.source[index],
            chosen=self.chosen[index],
        )


class _Search:
    """One problem at one price; `find` may be called with several targets and shares one allowance of labels."""

    def __init__(self, problem: Problem, elimination: Elimination, price: float) -> None:
        if elimination.entries > _MOST_ENTRIES:
            raise Unsolved(
                f"refused labels: got tables of {elimination.entries} entries; needed {_MOST_ENTRIES}; try solve()"
            )
        if problem.memory is None:
            raise Unsolved("refused labels: got a problem without memory; needed one with a limit; try elimination")
        costs = priced(problem, price)
        self.problem, self.elimination, self.price = problem, elimination, price
        self.memory = problem.memory
        messages = elimination.messages(costs)
        if not all(np.isfinite(m).any() for m in messages):
            raise Infeasible.no_finite("exact elimination")
        self.beliefs = dict(elimination.beliefs(costs, messages))
        self.allowance = _MOST_LABELS

    def find(self, target: float) -> tuple[int, ...] | None:
        """The cheapest assignment that survives when everything that must cost more than `target` seconds is dropped.

        If there is one within the limit of at most `target` seconds, it is the optimum. A dearer one proves that there
        is none, but may not be the optimum itself.

        Raises:
            Unsolved: the allowance of labels is used up, or the time.
        """
        budget = target + self.price * self.problem.memory_limit
        unit = max(budget, float(np.finfo(float).tiny)) * _GRID
        steps = self.elimination.steps
        below = [0.0] * len(steps)  # least memory of everything eliminated into a step
        everything = math.fsum(float(m.min()) for m in self.memory)
        labels: list[_Labels] = []
        roots = []
        for i, step in enumerate(steps):
            below[i] = float(self.memory[step.node].min()) + math.fsum(below[c] for c in step.children)
            belief = self.beliefs[i]
            own = self.memory[step.node].reshape((-1,) + (1,) * (belief.ndim - 1))
            start = np.flatnonzero(belief <= budget)
            joined = _Labels(
                entry=start,
                excess=np.zeros(start.size),
                memory=np.broadcast_to(own, belief.shape).reshape(-1)[start],
                source=start,
                chosen=np.zeros((start.size, 0), dtype=np.int32),
            )
            room = self.problem.memory_limit * (1 + _SAME) - (everything - below[i])
            index = np.unravel_index(np.arange(belief.size), belief.shape)
            flat = belief.reshape(-1)
            for c, dims in zip(step.children, step.dims[len(step.edges) :], strict=True):
                to_child = np.ravel_multi_index([index[d] for d in dims], [belief.shape[d] for d in dims])
                joined = self._join(joined, labels[c], to_child, flat, budget, room)
                joined = self._undominated(joined, unit)
            # Forget the node: from its table to its message, whose best is the least over the node's choices.
            least = belief.min(axis=0)
            to_message = joined.source % max(least.size, 1)
            above = flat[joined.source] - least.reshape(-1)[to_message]
            message = _Labels(
                entry=to_message,
                excess=joined.excess + above,
                memory=joined.memory,
                source=joined.source,
                chosen=joined.chosen,
            )
            labels.append(self._undominated(message, unit))
            if not step.separator:
                roots.append(i)
        return self._finish(labels, roots, budget, unit)

    def _join(
        self, labels: _Labels, child: _Labels, to_child: np.ndarray, belief: np.ndarray, budget: float, room: float
    ) -> _Labels:
        """Every label with every label of the child at the same entry, as far as the budget and the memory allow."""
        wanted = to_child[labels.entry]
        first = np.searchsorted(child.entry, wanted, side="left")
        count = np.searchsorted(child.entry, wanted, side="right") - first
        total = int(count.sum())
        self.allowance -= total
        if self.allowance < 0:
            raise Unsolved(
                f"refused labels: got more than {_MOST_LABELS} of them; needed fewer; try solve(), or a larger gap"
            )
        self.elimination.deadline.check("labels", needed_seconds=total / _LABELS_PER_SECOND)
        left = np.repeat(np.arange(count.size), count)
        right = np.arange(total) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        excess = labels.excess[left] + child.excess[right]
        memory = labels.memory[left] + child.memory[right]
        keep = belief[labels.source[left]] + excess <= budget
        # `room` is for the whole subtree; children not joined yet only make it tighter.
        keep &= memory <= room
        left, right = left[keep], right[keep]
        return _Labels(
            entry=labels.entry[left],
            excess=excess[keep],
            memory=memory[keep],
            source=labels.source[left],
            chosen=np.column_stack([labels.chosen[left], right.astype(np.int32)]),
        )

    def _undominated(self, labels: _Labels, unit: float) -> _Labels:
        """Drop every label that another one at the same entry beats in cost and in memory; sort by entry."""
        if labels.entry.size == 0:
            return labels
        cost = labels.excess - self.price * labels.memory
        grid = np.rint((cost - cost.min()) / unit).astype(np.int64)
        order = np.lexsort((grid, labels.memory, labels.entry))
        entry = labels.entry[order]
        segment = np.cumsum(np.diff(entry, prepend=entry[0]) != 0)
        span = int(grid.max()) + 1
        if span * (int(segment[-1]) + 1) >= 1 << 62:
            raise Unsolved(
                "refused labels: got costs too far apart to compare exactly; needed a smaller range; try solve()"
            )
        # Later entries start lower than any earlier one can reach, so the running minimum begins anew with each entry.
        ladder = grid[order] - segment * span
        least = np.minimum.accumulate(ladder)
        keep = np.ones(order.size, dtype=bool)
        keep[1:] = ladder[1:] < least[:-1]
        return labels.take(order[keep])

    def _finish(
        self, labels: list[_Labels], roots: Sequence[int], budget: float, unit: float
    ) -> tuple[int, ...] | None:
        """Join the parts of a graph that is not connected, take the best and read off its choices."""
        optimum = np.asarray([float(self.beliefs[roots[0]].min())]) if roots else np.zeros(1)
        joined = _Labels(
            entry=np.zeros(1, dtype=np.int64),
            excess=np.zeros(1),
            memory=np.zeros(1),
            source=np.zeros(1, dtype=np.int64),
            chosen=np.zeros((1, 0), dtype=np.int32),
        )
        room = self.problem.memory_limit * (1 + _SAME)
        for root in roots:
            joined = self._undominated(
                self._join(joined, labels[root], np.zeros(1, dtype=np.int64), optimum, budget, room), unit
            )
        if joined.entry.size == 0:
            return None
        best = int((joined.excess - self.price * joined.memory).argmin())
        taken = dict(zip(roots, joined.chosen[best].tolist(), strict=True))
        choices = [0] * len(labels)
        for i in range(len(labels) - 1, -1, -1):
            step, label = self.elimination.steps[i], taken[i]
            choices[step.node] = int(labels[i].source[label] // math.prod(step.shape[1:]))
            taken.update(zip(step.children, labels[i].chosen[label].tolist(), strict=True))
        return tuple(choices)


def close_gap(
    problem: Problem, elimination: Elimination, *, price: float, lower_bound: float, upper_bound: float, gap: float
) -> tuple[tuple[int, ...] | None, float]:
    """Find the optimum below a known assignment, or prove that there is nothing worth finding.

    Args:
        problem: the problem, with a memory limit.
        elimination: the elimination of the same problem.
        price: the price of memory, in seconds per byte; best the one of the highest lower bound.
        lower_bound: no assignment within the limit costs less than this many seconds.
        upper_bound: the cost of a known assignment, in seconds.
        gap: improvements smaller than this many seconds are not looked for.

    Returns:
        A better assignment than the known one, if any was met, and a lower bound within `gap` of the better of both.

    Raises:
        Infeasible: no assignment is allowed.
        Unsolved: too many labels; its `lower_bound` is what was proven until then.
    """
    search = _Search(problem, elimination, price)
    better, proven = None, lower_bound
    for part in _PARTS:
        target = lower_bound + part * (upper_bound - gap - lower_bound)
        if target <= proven:
            continue
        try:
            choices = search.find(target)
        except Unsolved as error:
            raise Unsolved(str(error), lower_bound=proven) from None
        if choices is not None and problem.fits(problem.memory_of(choices)):
            cost = problem.objective(choices)
            if cost <= target * (1 + _SAME):
                return choices, cost  # everything up to the target was looked at
            if cost < upper_bound:
                better, upper_bound = choices, cost
        proven = target
    return better, proven


def solve_by_labels(
    problem: Problem, *, gap: float = 0.0, time_limit_seconds: float = 60.0, incumbent: Solution | None = None
) -> Solution:
    """The best price of memory, then labels for the gap that it leaves.

    Args:
        problem: the problem.
        gap: stop when (objective - bound) / objective is at most this.
        time_limit_seconds: give up after this many seconds.
        incumbent: a known assignment.

    Raises:
        Infeasible: no assignment is allowed, or none fits.
        Unsolved: the graph is too wide, the labels become too many, or the time is out.
    """
    start = time.perf_counter()
    elimination = Elimination(problem, deadline=Deadline.after(time_limit_seconds))
    dual = maximise_dual(problem, elimination)
    known = [dual.light] if incumbent is None else [dual.light, incumbent.choices]
    choices = dual.light if dual.optimal else improve(problem, heavy=dual.over, light=known)
    objective = problem.objective(choices)
    bound = min(max(dual.bound, 0.0), objective)
    if objective - bound > max(gap, _EXACT) * objective:
        better, bound = close_gap(
            problem,
            elimination,
            price=dual.price,
            lower_bound=bound,
            upper_bound=objective,
            gap=0.5 * max(gap, _EXACT) * bound,
        )
        if better is not None:
            choices, objective = better, problem.objective(better)
    return Solution(
        choices=choices,
        objective=objective,
        memory=problem.memory_of(choices),
        lower_bound=objective if objective - bound <= _EXACT * objective else bound,
        method="labels",
        proven=objective - bound <= max(gap, _EXACT) * objective,
        seconds=time.perf_counter() - start,
    )
