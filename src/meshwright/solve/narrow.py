"""Forbid most choices of a problem that is too large for elimination, from a bound and a good assignment.

1. Message passing gives a lower bound and a rest above it (`messages`).
2. A spanning forest of the rest, its other edges charged the least they can cost, is eliminated; its min-marginals
   bound from below what each choice and each pair adds ("soft arc consistency": Cooper et al., 2010).
3. The few best choices of every node make a small problem. Its exact solution is, in practice, the optimum.
4. Whatever must cost more than that assignment is forbidden.

With a memory limit, memory is paid for at a price; steps 1 to 3 are repeated with the best price of the small problem.

Cost: some twenty sweeps over all edges for each price. Known limit: it forbids little where the linear relaxation is
far from the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.solve.deadline import NEVER, Deadline
from meshwright.solve.eliminate import Elimination, Marginals
from meshwright.solve.improve import Improvement, improve
from meshwright.solve.lagrange import maximise_dual, priced
from meshwright.solve.messages import Messages
from meshwright.solve.order import elimination_order
from meshwright.solve.problem import Infeasible, OutOfTime, Problem, Unsolved
from meshwright.solve.thin import relaxed, spanning_forest

# More passes sharpen the bound slowly; a smaller problem does so sooner.
_PASSES = 10
# A price within this much of the last one gives the same choices.
_SAME_PRICE = 0.02
_MOST_PRICES = 5
# The small problem takes as many choices of each node as keep its tables below this many entries.
_KEPT = (32, 24, 16, 12, 8, 6, 4, 3, 2)
_SMALL_ENTRIES = 1 << 23
# Min-marginals are differences of sums; what is this close (relative) to the known assignment stays.
_MARGIN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Narrowed:
    """What is left of a problem.

    Args:
        problem: the problem with everything forbidden that costs more than the best known assignment.
        choices: the best assignment met, or `None`.
        bound: no assignment within the limit costs less than this many seconds.
    """

    problem: Problem
    choices: tuple[int, ...] | None
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _View:
    """The problem at one price: the bound of all assignments, and what each choice and pair adds to it at least."""

    price: float
    bound: float
    marginals: Marginals


def narrow(
    problem: Problem, *, upper_bound: float, light: tuple[int, ...] | None = None, deadline: Deadline = NEVER
) -> Narrowed:
    """Forbid what no better assignment can use.

    Args:
        problem: the problem; every choice has an allowed partner on each edge (`presolve`).
        upper_bound: the cost of a known assignment, in seconds, or `inf`. Everything cheaper survives.
        light: an assignment of finite cost within the limit, if one is known.
        deadline: when to stop, with what is known by then.

    Raises:
        Unsolved: the edges are too large even for a forest.
    """
    messages = Messages(problem)
    known = [] if light is None else [Improvement(problem).descended(light)]
    best: _View | None = None
    price = 0.0
    for _ in range(_MOST_PRICES):
        try:
            view = _view(problem, messages, price, deadline)
        except OutOfTime:
            break
        if best is None or view.bound > best.bound:
            best = view
        known = [c for c in (*known, _decoded(problem, messages, price)) if c is not None]
        found, wanted = _among_the_best(problem, view.marginals, known, deadline)
        known = known if found is None else [found]
        if abs(wanted - price) <= _SAME_PRICE * max(wanted, price):
            break
        price = wanted
    choices = min(known, key=problem.objective, default=None)
    if best is None:
        return Narrowed(problem=problem, choices=choices or _decoded(problem, messages, price), bound=0.0)
    upper_bound = min([upper_bound, *(problem.objective(c) for c in known)])
    return Narrowed(problem=_without(problem, best, upper_bound), choices=choices, bound=best.bound)


def _decoded(problem: Problem, messages: Messages, price: float) -> tuple[int, ...] | None:
    choices = messages.decode(priced(problem, price))
    if math.isfinite(problem.objective(choices)) and problem.fits(problem.memory_of(choices)):
        return Improvement(problem).descended(choices)
    return None


def _view(problem: Problem, messages: Messages, price: float, deadline: Deadline) -> _View:
    bound, rest = messages.bound(priced(problem, price), passes=_PASSES, deadline=deadline)
    forest = relaxed(rest, spanning_forest(rest))
    marginals = Elimination(forest, deadline=deadline).min_marginals(forest.costs)
    paid = price * problem.memory_limit if price > 0 else 0.0
    return _View(price=price, bound=bound + marginals.optimum - paid, marginals=marginals)


def _among_the_best(
    problem: Problem, marginals: Marginals, known: Sequence[tuple[int, ...]], deadline: Deadline
) -> tuple[tuple[int, ...] | None, float]:
    """The best assignment of the small problem, or `None`, and the price of memory there, in seconds per byte."""
    ranked = [np.argsort(m, kind="stable") for m in marginals.nodes]
    for most in _KEPT:
        kept = [
            np.unique(np.concatenate([r[:most], np.asarray([c[v] for c in known], dtype=r.dtype)]))
            for v, r in enumerate(ranked)
        ]
        order = elimination_order([k.size for k in kept], problem.edges)
        if order.entries <= _SMALL_ENTRIES:
            break
    small = problem.restricted(kept)
    try:
        dual = maximise_dual(small, Elimination(small, deadline=deadline))
    except (Infeasible, Unsolved):
        return None, 0.0
    inside = [tuple(int(np.searchsorted(k, s)) for k, s in zip(kept, c, strict=True)) for c in known]
    choices = dual.light if dual.optimal else improve(small, heavy=dual.over, light=[dual.light, *inside])
    whole = tuple(int(k[s]) for k, s in zip(kept, choices, strict=True))
    return Improvement(problem).descended(whole), dual.price


def _without(problem: Problem, view: _View, upper_bound: float) -> Problem:
    """The problem with every choice and pair forbidden that takes the view's bound above the upper bound."""
    paid = view.price * problem.memory_limit if view.price > 0 else 0.0
    above = upper_bound - view.bound + view.marginals.optimum + _MARGIN * (upper_bound + paid)
    return Problem(
        costs=tuple(np.where(m > above, np.inf, c) for m, c in zip(view.marginals.nodes, problem.costs, strict=True)),
        edges={
            pair: np.where(view.marginals.edges[pair] > above, np.inf, table) if pair in view.marginals.edges else table
            for pair, table in problem.edges.items()
        },
        memory=problem.memory,
        memory_limit=problem.memory_limit,
    )
