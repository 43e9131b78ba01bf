"""One problem at many prices of memory, with all work that does not depend on the price done once.

The stage search prices the memory of every layer at many prices. A price changes only the costs of nodes. Shared by all
prices are: the forests that bound them at once (`solve.forest`) and mostly find an optimum; and where they do not, the
choices without a finite edge, the choices that others dominate, the elimination order, and the nodes that hold no
memory, most of which are eliminated once. The rest is eliminated at all prices at once where tables are small: ten
prices take hardly longer than one. Where they are large, prices are solved one by one, and none between two with the
same optimum: the least total is concave in the price, so they share it.

Known limit: graphs too wide for elimination are solved anew for every price, to a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from ...solve import Infeasible, Problem, Unsolved, solve
from ...solve.eliminate import Elimination
from ...solve.flat import FlatEdges, FlatNodes
from ...solve.forest import Forest
from ...solve.improve import Improvement
from ...solve.messages import Messages
from ...solve.presolve import Reduction, presolve

# Elimination of more table entries than these takes longer than what `solve` does instead.
_MOST_ENTRIES = 1 << 24

# From so many on, the tables of many prices are no cheaper together than one by one; and choices that are never better
# than another one are worth looking for.
_MANY_ENTRIES = 1 << 18

# Above so many, choices that are never better than another one are not looked for to get below `_MOST_ENTRIES`: without
# them there were 0.98 to 3 times as many, in 41 problems of llama3-8b on 128 H100, and finding them took a second.
_HOPELESS_ENTRIES = 1 << 26

# Sums of the same numbers in another order differ by less.
_ROUNDING = 1e-12

# Of no more nodes than these elimination takes no longer than messages do.
FEW_NODES = 100

# How often messages pass: on ranges of moe-70b they leave less open then than two forests do, and take less time than
# elimination does.
_PASSES = 4


# Choices, and by how many seconds with what their bytes cost they may be more than the best; None where there are none.
_Found = tuple[tuple[int, ...] | None, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The best choices found at one price.

    Args:
      choices: of each node; None where nothing was found.
      bound: no choices have less seconds with what their bytes cost.
      share: of the seconds of these choices, without what their bytes cost, what is certain to be needed: 1 where
        nothing is better.
    """

    choices: tuple[int, ...] | None
    bound: float
    share: float = 1.0


class PricedProblem:
    """A problem without a memory limit, prepared for many prices.

    >>> bytes = ([8.0, 1.0], [8.0, 1.0])
    >>> priced = PricedProblem(Problem(costs=([0.0, 3.0], [0.0, 4.0])), constant=bytes, kept=([0.0] * 2,) * 2)
    >>> [one.choices for one in priced.best([(0.0, 1), (0.5, 1), (1.0, 1)])]
    [(0, 0), (1, 0), (1, 1)]

    Args:
      problem: seconds of nodes and edges.
      constant: bytes of each choice of each node, held once.
      kept: bytes of each choice of each node, held for each microbatch in flight.
    """

    def __init__(self, problem: Problem, *, constant: Sequence[np.ndarray], kept: Sequence[np.ndarray]) -> None:
        self._problem = problem
        self._constant, self._kept = constant, kept

    @cached_property
    def _edges(self) -> FlatEdges:
        return FlatEdges.of(self._problem.edges)

    @cached_property
    def _kinds(self) -> list[int]:
        """Of each node a number that it shares with those of the same seconds and bytes."""
        numbers: dict[tuple[bytes, ...], int] = {}
        rows = zip(self._problem.costs, self._constant, self._kept, strict=True)
        return [numbers.setdefault(tuple(np.asarray(one).tobytes() for one in row), len(numbers)) for row in rows]

    @cached_property
    def _forest(self) -> Forest:
        return Forest(self._problem, edges=self._edges, kinds=self._kinds)

    @cached_property
    def _second_forest(self) -> Forest:
        """A second forest, of the edges that the first one leaves out and whose cost its choices pay at price 0:
        independent of the order in which prices are solved."""
        choices, _, _ = self._forest.minimise_each(self._flat[0].numbers[:, None])
        first = self._forest.paid_for(choices)
        return Forest(self._problem, first, self._edges, self._kinds) if first else self._forest

    @cached_property
    def _allowed(self) -> tuple[Reduction, np.ndarray, np.ndarray]:
        """The problem without choices that have no finite edge, and the nodes that are gone with it, whatever the
        price, with their choices."""
        allowed = presolve(self._problem, held=self._held, dominance=False, fold_degree=0)
        whole = np.array(allowed.restore((0,) * len(allowed.nodes)), dtype=int)
        gone = np.setdiff1d(np.arange(len(whole)), allowed.nodes)
        return allowed, gone, whole[gone]

    @property
    def _held(self) -> list[np.ndarray]:
        """Bytes of each choice of each node, once and for each microbatch in flight."""
        return [np.stack([once, each], axis=1) for once, each in zip(self._constant, self._kept, strict=True)]

    @cached_property
    def _flat(self) -> tuple[FlatNodes, FlatNodes]:
        """Seconds, and bytes once and for each microbatch in flight."""
        return FlatNodes(self._problem.costs), FlatNodes(self._constant, self._kept)

    @cached_property
    def _exact(self) -> _Exact:
        return _Exact(self._problem, self._held)

    def best(
        self, prices: Sequence[tuple[float, float]], *, gap: float = 0.0, time_limit_seconds: float = 60.0
    ) -> list[Priced]:
        """The best choices at each price, optimal or within the gap.

        Args:
          prices: of memory, in seconds per byte, each with the microbatches that are kept.
          gap: at which to stop, relative to the seconds without what bytes cost.
          time_limit_seconds: for each price, where the graph is too wide for elimination; then the best that is known
            is taken.

        Raises:
          Infeasible: every assignment is forbidden.
        """
        found = self.relaxed(prices, gap=gap)

        def open_() -> list[int]:
            return [number for number, one in enumerate(found) if one.choices is None or 1 - one.share > gap]

        if len(self._problem.costs) > FEW_NODES:
            for number in open_():
                found[number] = self.passed(prices[number], found[number])
        if left := open_():
            wanted = [prices[number] for number in left]
            solved = self.solved(wanted, gap=gap, time_limit_seconds=time_limit_seconds)
            for number, price, one in zip(left, wanted, solved, strict=True):
                # Where the graph is too wide for elimination the forest's may be better.
                found[number] = self._better(price, one, found[number])
        return found

    def passed(self, price: tuple[float, float], known: Priced) -> Priced:
        """The known result at a price, improved by message passing, a forest of its remainder and moves of single nodes
        where that is better: independent of the order in which prices are solved. (Ranges of 1,000 nodes of a public
        Gemma 3 4B: messages and the forest leave 1.5 % open, moves 0.4 %, in 0.1 s; the general solver took 0.9 s.)

        Args:
          price: as of `best`.
          known: choices and a bound, of whoever has found them.

        Raises:
          Infeasible: every assignment is forbidden.
        """
        passing = self.passing()
        if passing is None:
            return known
        passed, found = passing.at(*price)
        at = np.array([(price[0], price[0] * price[1])])
        costs = self._flat[0].numbers + _paid(self._flat[1].numbers, at)[:, 0]
        rows = np.split(costs, self._flat[0].starts[1:])
        improvement = Improvement(Problem.unchecked(costs=tuple(rows), edges=self._problem.edges), self._edges)
        moved = [improvement.descended(one) for one in found if self.seconds(one) < inf]
        for choices in moved:
            known = self._better(price, Priced(choices=choices, bound=passed.bound), known)
        return known if moved else self._better(price, passed, known)

    def passing(self) -> Passing | None:
        """Messages on its edges, for prices in sequence; None where every node has one choice.

        Raises:
          Infeasible: every assignment is forbidden.
        """
        allowed, gone, their_choices = self._allowed
        if not allowed.problem.costs:
            return None
        return Passing(allowed, self._flat[1], gone, their_choices)

    def _better(self, price: tuple[float, float], one: Priced, other: Priced) -> Priced:
        """The better choices and the closer bound of two results at one price."""
        bound = max(one.bound, other.bound)
        known = [choices for choices in (one.choices, other.choices) if choices is not None]
        if not known:
            return Priced(choices=None, bound=bound)
        best = min(known, key=lambda choices: sum(self._totals(choices, price)))
        return _priced(best, *self._totals(best, price), bound)

    @property
    def is_exact(self) -> bool:
        """Whether `solved` finds the best, and soon.

        Raises:
          Infeasible: some node has no choice left.
        """
        return self._exact.is_exact

    def relaxed(self, prices: Sequence[tuple[float, float]], *, gap: float = 0.0) -> list[Priced]:
        """The choices and bounds of forests; a second forest is built where the first leaves more than the gap.

        Args:
          prices: as of `best`.
          gap: as of `best`.

        Raises:
          Infeasible: every assignment is forbidden.
        """
        if not self._problem.costs:
            return [Priced(choices=(), bound=0.0)] * len(prices)
        at = np.array([(price, price * in_flight) for price, in_flight in prices]).reshape(-1, 2)
        seconds, held = self._flat
        costs = seconds.numbers[:, None] + _paid(held.numbers, at)
        choices, totals, bounds = self._forest.minimise_each(costs)
        if not np.isfinite(bounds).all():
            raise Infeasible.no_finite("the spanning forest")
        paid = (held.sum(choices) * at).sum(axis=1)
        left = np.flatnonzero(totals - bounds > min(gap, 1.0) * np.where(np.isfinite(totals), totals - paid, 0.0))
        if len(left):
            # At all prices: sums of a single one are rounded otherwise, and nothing may depend on how many are left.
            others, their_totals, their_bounds = self._second_forest.minimise_each(costs)
            if not np.isfinite(their_bounds).all():
                raise Infeasible.no_finite("another spanning forest")
            better = left[their_totals[left] < totals[left]]
            choices[:, better], totals[better] = others[:, better], their_totals[better]
            bounds[left] = np.maximum(bounds[left], their_bounds[left])
            paid = (held.sum(choices) * at).sum(axis=1)
        return [
            _priced(tuple(one), total - bytes_cost, bytes_cost, bound)
            if total < inf
            else Priced(choices=None, bound=bound)
            for one, total, bytes_cost, bound in zip(
                choices.T.tolist(), totals.tolist(), paid.tolist(), bounds.tolist(), strict=True
            )
        ]

    def solved(
        self, prices: Sequence[tuple[float, float]], *, gap: float = 0.0, time_limit_seconds: float = 60.0
    ) -> list[Priced]:
        """The optimum by elimination, or the general solver's result where the graph is too wide.

        Args:
          prices: as of `best`.
          gap: the same.
          time_limit_seconds: the same.

        Raises:
          Infeasible: every assignment is forbidden.
        """
        found = []
        solved = self._exact.choices(prices, gap=gap, time_limit_seconds=time_limit_seconds)
        for price, (choices, over) in zip(prices, solved, strict=True):
            if choices is None:
                found.append(Priced(choices=None, bound=-inf))
            else:
                seconds, paid = self._totals(choices, price)
                found.append(_priced(choices, seconds, paid, seconds + paid - over))
        return found

    def seconds(self, choices: tuple[int, ...]) -> float:
        """Of choices, one for each node."""
        at = np.array(choices, dtype=int)
        return float(self._flat[0].sum(at) + self._edges.sum(at))

    def _totals(self, choices: tuple[int, ...], price: tuple[float, float]) -> tuple[float, float]:
        """Seconds of choices, and what their bytes cost."""
        once, each = self._flat[1].sum(np.array(choices, dtype=int)).tolist()
        return self.seconds(choices), price[0] * (once + price[1] * each)


class Passing:
    """Messages on the edges of one problem. They are kept from price to price, since they converge fast where prices
    differ little.

    Args:
      allowed: the problem without choices that have no finite edge.
      held: bytes of each choice of each node of the whole problem, once and for each microbatch in flight.
      gone: nodes that have one choice left.
      their_choices: that one.
    """

    def __init__(self, allowed: Reduction, held: FlatNodes, gone: np.ndarray, their_choices: np.ndarray) -> None:
        self._allowed, self._held, self._gone, self._their_choices = allowed, held, gone, their_choices
        self._messages = Messages(allowed.problem)

    def at(self, price: float, in_flight: float) -> tuple[Priced, list[tuple[int, ...]]]:
        """The choices at a price of a forest on what messages leave, with the bound of both; and all choices found.

        Args:
          price: of memory, in seconds a byte.
          in_flight: microbatches that are kept.
        """
        allowed, starts = self._allowed, self._held.starts
        paid = self._held.numbers[:, 0] * price + self._held.numbers[:, 1] * (price * in_flight)
        costs = [
            seconds + paid[starts[node] + names]
            for seconds, node, names in zip(allowed.problem.costs, allowed.nodes, allowed.choices, strict=True)
        ]
        passed, rest = self._messages.bound(costs, passes=_PASSES)
        choices, totals, bounds = Forest(rest).minimise_each(np.concatenate(rest.costs)[:, None])
        apart = allowed.offset_seconds + float(paid[starts[self._gone] + self._their_choices].sum())
        best = allowed.restore(tuple(choices[:, 0].tolist())) if np.isfinite(totals[0]) else None
        decoded = allowed.restore(self._messages.decode(costs))
        found = [decoded, best] if best is not None else [decoded]
        return Priced(choices=best, bound=apart + passed + float(bounds[0]), share=0.0), found


def _paid(held: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The cost of bytes, `[choice, case]`. Unlike a matrix product, it gives equal cases equal bits whatever other
    cases are computed with them."""
    return held[:, :1] * at[:, 0] + held[:, 1:] * at[:, 1]


def _priced(choices: tuple[int, ...], seconds: float, paid: float, bound: float) -> Priced:
    """Choices of so many seconds, whose bytes cost so much."""
    over = seconds + paid - bound
    if over <= _ROUNDING * (seconds + paid):
        return Priced(choices=choices, bound=bound)
    return Priced(choices=choices, bound=bound, share=max(1 - over / seconds, 0.0) if seconds > 0 else 0.0)


class _Exact:
    """The same by elimination.

    Args:
      problem: seconds of nodes and edges.
      held: bytes of each choice of each node, once and for each microbatch in flight, shape (k_v, 2).

    Raises:
      Infeasible: some node has no choice left.
    """

    def __init__(self, problem: Problem, held: Sequence[np.ndarray]) -> None:
        self._steps = [presolve(problem, held=held, dominance=False)]
        self._small, self._held = self._steps[0].problem, self._left(held)
        elimination = self._eliminated()
        self._whole: dict[tuple[int, ...], tuple[int, ...]] = {}
        if elimination is not None and _MANY_ENTRIES < elimination.entries <= _HOPELESS_ENTRIES:
            self._drop_dominated()
            elimination = self._eliminated()
        small = elimination is not None and elimination.entries <= _MOST_ENTRIES
        self._elimination = elimination if small else None

    def _drop_dominated(self) -> None:
        self._steps.append(presolve(self._small, held=self._held))
        self._small, self._held = self._steps[1].problem, self._left(self._held)

    def _left(self, held: Sequence[np.ndarray]) -> list[np.ndarray]:
        last = self._steps[-1]
        return [held[v][names] for v, names in zip(last.nodes, last.choices, strict=True)]

    def _eliminated(self) -> Elimination | None:
        try:
            return Elimination(self._small)
        except Unsolved:
            return None

    @property
    def is_exact(self) -> bool:
        """Whether what is found at a price is the best there."""
        return self._elimination is not None

    def choices(self, prices: Sequence[tuple[float, float]], *, gap: float, time_limit_seconds: float) -> list[_Found]:
        """At each price the best choices, and by how much they may be more than the best (`PricedProblem.best`)."""
        if self._elimination is None and len(self._steps) == 1:
            self._drop_dominated()
        if not self._small.costs:
            return [(self._restored(()), 0.0)] * len(prices)
        if self._elimination is not None and self._elimination.entries <= _MANY_ENTRIES:
            at = np.array([(price, price * in_flight) for price, in_flight in prices]).reshape(-1, 2)
            costs = [
                seconds[:, None] + _paid(row, at) for seconds, row in zip(self._small.costs, self._held, strict=True)
            ]
            return [self._checked(*one) for one in self._elimination.minimise_each(costs)]

        def best(price: float, in_flight: float) -> _Found:
            costs = [
                seconds + row @ (price, price * in_flight)
                for seconds, row in zip(self._small.costs, self._held, strict=True)
            ]
            if self._elimination is not None:
                return self._checked(*self._elimination.minimise(costs))
            return self._solved(costs, gap, time_limit_seconds)

        found: dict[tuple[float, float], _Found] = {}
        for in_flight in sorted({times for _, times in prices}):
            line = sorted({price for price, times in prices if times == in_flight})
            along = _along if self.is_exact else _each
            for price, one in zip(line, along(line, lambda p, times=in_flight: best(p, times)), strict=True):
                found[price, in_flight] = one
        return [found[one] for one in prices]

    def _checked(self, choices: tuple[int, ...], total: float) -> _Found:
        if not np.isfinite(total):
            raise Infeasible.no_finite("exact elimination")
        return self._restored(choices), 0.0

    def _restored(self, choices: tuple[int, ...]) -> tuple[int, ...]:
        """The choice of every node; many prices have the same."""
        if choices not in self._whole:
            whole = choices
            for step in reversed(self._steps):
                whole = step.restore(whole)
            self._whole[choices] = whole
        return self._whole[choices]

    def _solved(self, costs: Sequence[np.ndarray], gap: float, time_limit_seconds: float) -> _Found:
        priced = Problem(costs=tuple(costs), edges=self._small.edges)
        try:
            solution = solve(priced, gap=gap, time_limit_seconds=time_limit_seconds)
        except Unsolved:
            return None, inf
        return self._restored(solution.choices), solution.objective - solution.lower_bound


def _each(prices: Sequence[float], best: Callable[[float], _Found]) -> list[_Found]:
    return [best(price) for price in prices]


def _along(prices: Sequence[float], best: Callable[[float], _Found]) -> list[_Found]:
    """The optimum at each of these ascending prices; prices between two with the same optimum are not solved."""
    found: dict[int, _Found] = {end: best(prices[end]) for end in {0, len(prices) - 1}}

    def between(first: int, last: int) -> None:
        if last - first < 2:
            return
        middle = (first + last) // 2
        found[middle] = found[first] if found[first] == found[last] else best(prices[middle])
        between(first, middle)
        between(middle, last)

    between(0, len(prices) - 1)
    return [found[number] for number in range(len(prices))]
