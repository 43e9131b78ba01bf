"""An intra-operator problem with a memory limit, solved by a Lagrange multiplier: a price of memory.

At each price, forests, and elimination where there are few nodes, find the best layouts without a limit (`priced`).
Each price gives a lower bound for all layouts within a limit; layouts that are best at a price and fit are a solution
(Everett, 1963). The general solver closes the gap that prices leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from ...cluster import Device, LogicalMesh
from ...program.graph import Graph
from ...solve import Problem, Solution
from ...solve.flat import FlatNodes
from ...solve.improve import Improvement, improve
from ..restrictions.constraints import Constraints
from .node_merging import reads_gathered
from .priced import FEW_NODES, Priced, PricedProblem
from .problem import IntraOpProblem, IntraOpSolution, ParameterInfo
from .workspace import Moment, Workspace

# Prices of memory to begin with, in units of a stage's seconds over the limit; and how often they are drawn closer.
_FIRST_PRICES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10.0, 100.0)
_ROUNDS_OF_PRICES = 3

# How often messages are passed, each time at a price closer to the best one, or so many times as dear where nothing
# fits yet. Of the ranges named at `_by_messages` seven rounds at most were needed.
_ROUNDS_OF_MESSAGES, _DEARER = 8, 1.3

# Of assignments beyond the limit, and of those within it, so many are crossed over. Chosen, not measured.
_CROSSED = 3

# Where a forest leaves more than this open, relative, another one is tried; and then elimination, if there are few
# nodes, as where a scan runs over the layers.
_CLOSE = 1e-3

# For what prices leave open where layouts that fit are known: the best plan is seldom made of it. Of gpt3-15b on 32
# V100 (`benchmarks/planning_time.py --tight`) MILP closed nothing in twenty seconds, twice, and no time was left for
# plans that are an eighth faster.
_SECONDS_FOR_THE_REST = 5.0


class _Within(NamedTuple):
    """The best solution and the lower bound that prices of memory give for one limit.

    Args:
      found: the best that fits, if any was found.
      least_seconds: all that fit take so long at least.
      price: the one that proves it, in seconds a byte.
      over: choices that are the best at some price and do not fit.
      fitting: choices that are the best at some price and fit.
      bounds: prices, and what no choices are below there, with what their bytes cost.
    """

    found: IntraOpSolution | None
    least_seconds: float
    price: float
    over: tuple[tuple[int, ...], ...] = ()
    fitting: tuple[tuple[int, ...], ...] = ()
    bounds: tuple[tuple[float, float], ...] = ()


class LimitedProblem(IntraOpProblem):
    """The problem of one stage on one logical mesh, for limits and prices of memory.

    Args:
      graph: as of `IntraOpProblem`, like all that follows but the last.
      mesh: the same.
      device: the same.
      parameters: the same.
      microbatches: the same.
      constraints: the same.
      carried: the same.
      split_dims: the same.
      workspace: what the backward pass makes beside what is kept; None for nothing.

    Attributes:
      in_flight: how many microbatches are kept where a limit is asked for (`keeping`).
    """

    in_flight = 1

    @contextmanager
    def keeping(self, in_flight: int) -> Iterator[None]:
        """Keep so many microbatches in the memory of what is asked within."""
        before, self.in_flight = self.in_flight, in_flight
        try:
            yield
        finally:
            self.in_flight = before

    def __init__(
        self, graph: Graph, mesh: LogicalMesh, device: Device, *, parameters: Sequence[ParameterInfo],
        microbatches: int, constraints: Constraints, carried: int, split_dims: Sequence[int | None] = (),
        workspace: Workspace | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            graph, mesh, device, parameters=parameters, microbatches=microbatches, constraints=constraints,
            carried=carried,
            split_dims=split_dims,
        )  # fmt: skip
        self._workspace = self._workspace_by_node(workspace)
        # A second gradient of what a loop reads row by row, beside the sum so far: its rows are added up in the loop
        # unless they are scattered there, of which those that wait for a sum at the end are not.
        for value in workspace.gradients & self._defines.keys() if workspace is not None else ():
            node, specs = self._defines[value]
            held = self._input_bytes if node in self._input_bytes else self._workspace
            if (known := self.parameter_prices.get(node)) is not None:
                held[node] = held[node] + known.stacked_bytes
            else:
                scattered = np.array([not spec.broadcast for spec in specs])
                held[node] = held[node] + scattered * self.local_bytes(value, specs)

    @cached_property
    def _once_bytes(self) -> Sequence[np.ndarray]:
        """Bytes on one device that each choice of each node holds, however many microbatches are in flight."""
        return [held + made for held, made in zip(super()._memory(), self._workspace, strict=True)]

    @cached_property
    def _each_bytes(self) -> Sequence[np.ndarray]:
        """Bytes on one device that each choice of each node holds for each microbatch in flight."""
        return [np.zeros(len(row)) for row in self._once_bytes]

    def _memory(self) -> tuple[np.ndarray, ...]:
        """With `in_flight` microbatches kept."""
        return tuple(c + self.in_flight * k for c, k in zip(self._once_bytes, self._each_bytes, strict=True))

    def _workspace_by_node(self, workspace: Workspace | None) -> list[np.ndarray]:
        """Bytes of the workspace on one device, by the choice of each node."""
        rows = [np.zeros(len(row)) for row in self._bytes]
        if workspace is None:
            return rows
        again: Counter[int] = Counter()
        for moment in workspace.moments:
            again.update(moment.again)
            self._hold_around(rows, moment, 1 / len(workspace.moments))
        for value in sorted(again.keys() & self._defines.keys()):
            self._hold(rows, value, again[value] / len(workspace.moments))
        for value in workspace.stacks.keys() & self._defines.keys():
            node, specs = self._defines[value]
            rows[node] += workspace.stacks[value] * self.local_bytes(value, specs)
        for user, at in workspace.weights:
            value, node = self.graph.operators[user].operands[at], self.operator_node.get(user)
            if value is not None and node is not None:
                wanted = self.operator_prices[user].operands[at]
                rows[node] += 1 / len(workspace.weights) * self.was_gathered(wanted) * self.local_bytes(value, wanted)
        if workspace.weight is not None:
            node = self.input_node[workspace.weight]
            rows[node] += workspace.gradient_bytes / self.prices.shards(self.parameter_prices[node].uses)
        return rows

    def _hold(self, rows: list[np.ndarray], value: int, share: float) -> None:
        """Add the bytes of a rematerialised value, in the layout of its readers, to the workspace."""
        graph, (node, specs) = self.graph, self._defines[value]
        users = graph.consumers.get(value, ())
        readers = [(self.operator_node[o], o, at) for o, at in users if o in self.operator_node]
        if shared := (value in self._node_merging.shared or not readers):
            rows[node] += share * self.local_bytes(value, specs)
            readers = [one for one in readers if reads_gathered(graph, graph.operators[one[1]], value)]
        for reader, user, at in readers[:1]:
            wanted = self.operator_prices[user].operands[at]
            held = share * self.local_bytes(value, wanted)
            rows[reader] += self.was_gathered(wanted) * held if shared else held

    def _hold_around(self, rows: list[np.ndarray], moment: Moment, share: float) -> None:
        """Add the bytes around an operator, as its algorithms split them, to the workspace."""
        if moment.operator not in self.operator_node:
            return
        operator, node = self.graph.operators[moment.operator], self.operator_node[moment.operator]
        known = self.operator_prices[moment.operator]
        for value, times in moment.around.items():
            made = value in operator.results
            at = (operator.results if made else operator.operands).index(value)
            specs = (known.results if made else known.operands)[at]
            rows[node] += share * times * self.local_bytes(value, specs)

    @cached_property
    def _known(self) -> dict[tuple[float, int, float], _Within]:
        """The cached results of `_known_within`, by limit, microbatches in flight and gap."""
        return {}

    @cached_property
    def _free(self) -> PricedProblem:
        """The problem without a limit, prepared for many prices."""
        plain = Problem.unchecked(costs=tuple(self._seconds), edges=dict(self._edges))
        return PricedProblem(plain, constant=self._once_bytes, kept=self._each_bytes)

    def release(self) -> None:
        """Free what solving it has prepared; it is made again where it is asked for."""
        self.__dict__.pop("_free", None)

    def priced(self, prices: Sequence[tuple[float, float]], *, gap: float, time_limit_seconds: float) -> list[Priced]:
        """The best choices at each price of memory, without a limit (`PricedProblem.best`).

        Args:
          prices: in seconds per byte, each with the microbatches in flight.
          gap: at which to stop, relative to the seconds without what bytes cost.
          time_limit_seconds: for each price, where the graph is too wide to be solved exactly.

        Raises:
          solve.Infeasible: if there is no choice of layouts at all.
        """
        return self._free.best(prices, gap=gap, time_limit_seconds=time_limit_seconds)

    @cached_property
    def fastest(self) -> Priced:
        """The fastest layouts that forests find, without a limit.

        Raises:
          solve.Infeasible: if there is no choice of layouts at all.
        """
        return self._free.relaxed([(0.0, 1)], gap=_CLOSE)[0]

    def needs_at_best(self, in_flight: int) -> float:
        """Bytes on a device, workspace included, of the fastest layouts.

        Args:
          in_flight: microbatches kept.

        Raises:
          solve.Infeasible: if there is no choice of layouts at all.
        """
        free = self.fastest
        return self._held(free.choices, in_flight) if free.choices is not None else 0.0

    def within(self, limit_bytes: float, *, gap: float) -> IntraOpSolution | None:
        """The best solution within a memory limit that prices of memory find, and the lower bound that they prove: at
        each price the best layouts bound all that fit from below (Everett, 1963).

        Args:
          limit_bytes: on a device, workspace included.
          gap: relative, between the best found and the best bound, at which to stop.

        Returns:
          None where nothing is found, which says nothing of whether there is a solution.

        Raises:
          solve.Infeasible: if there is no choice of layouts at all.
        """
        return self._known_within(limit_bytes, gap).found

    def around(self, limit_bytes: float, *, gap: float) -> list[tuple[tuple[int, ...], float]]:
        """Choices that prices of memory find around a limit, each with the share of its seconds that any choices need
        in its bytes: for stages that share the memory of a device, of which some may have more than their share.

        Args:
          limit_bytes: on a device, workspace included.
          gap: as of `within`.

        Raises:
          solve.Infeasible: if there is no choice of layouts at all.
        """
        known = self._known_within(limit_bytes, gap)
        found = {*known.over, *known.fitting, *([known.found.solution.choices] if known.found is not None else [])}
        shares = []
        for one in sorted(found):
            seconds, held = self._free.seconds(one), self._held(one, self.in_flight)
            least = max((bound - _paid(price, held) for price, bound in known.bounds), default=0.0)
            shares.append((one, min(max(least / seconds, 0.0), 1.0) if seconds > 0 else 1.0))
        return shares

    def proven(
        self, limit_bytes: float, *, gap: float, time_limit_seconds: float, enough_seconds: float = inf
    ) -> IntraOpSolution:
        """The best solution within a memory limit, solved to a gap or until the time is over.

        Args:
          limit_bytes: on a device, workspace included.
          gap: relative.
          time_limit_seconds: for what `within` leaves open.
          enough_seconds: a lower bound with which to stop.

        Raises:
          solve.Infeasible: if no choice fits.
          solve.Unsolved: if none was found in time.
        """
        known = self._known_within(limit_bytes, gap)
        found = known.found
        if found is None:
            return self.solve(limit_bytes, gap=gap, time_limit_seconds=time_limit_seconds)
        if found.solution.proven:
            return found
        if len(self.choices) > FEW_NODES:
            found = self._by_messages(limit_bytes, known, gap, enough_seconds)
            if found.solution.proven or found.solution.lower_bound >= enough_seconds:
                return found
        choices, bound = found.solution.choices, found.solution.lower_bound
        seconds = min(time_limit_seconds, _SECONDS_FOR_THE_REST)
        solved = self.solve(limit_bytes, gap=gap, time_limit_seconds=seconds, known=choices)
        # What prices prove holds for whatever was found then.
        proven = min(max(solved.solution.lower_bound, bound), solved.solution.objective)
        return replace(solved, solution=replace(solved.solution, lower_bound=proven))

    def _known_within(self, limit_bytes: float, gap: float) -> _Within:
        """The result of prices for one limit, cached."""
        if limit_bytes <= 0:
            return _Within(None, inf, 0.0)
        key = limit_bytes, self.in_flight, gap
        if key not in self._known:
            self._known[key] = self._by_prices(limit_bytes, gap)
        return self._known[key]

    def _by_prices(self, limit_bytes: float, gap: float) -> _Within:
        ready, in_flight = self._free, self.in_flight
        few = len(self.choices) <= FEW_NODES
        free = self.fastest
        unit = max(free.bound, 1e-12) / limit_bytes
        cheap, dear = 0.0, inf
        heavy: dict[tuple[int, ...], float] = {}  # bytes of what does not fit
        light: dict[tuple[int, ...], float] = {}  # seconds of what does
        bound, at_price = free.bound, 0.0
        if free.choices is not None and (held := self._held(free.choices, in_flight)) > limit_bytes:
            heavy[free.choices] = held
        elif free.choices is not None:
            light[free.choices] = ready.seconds(free.choices)
        prices = unit * np.array(_FIRST_PRICES)
        bounds = [(0.0, free.bound)]
        for _ in range(_ROUNDS_OF_PRICES):
            at = [(price, in_flight) for price in prices.tolist()]
            found = ready.relaxed(at, gap=_CLOSE)
            if few and any(one.choices is None or one.share < 1 - gap for one in found) and ready.is_exact:
                found = ready.best(at, gap=_CLOSE)
            for price, one in zip(prices.tolist(), found, strict=True):
                bounds.append((price, one.bound))
                if (least := one.bound - _paid(price, limit_bytes)) > bound:
                    bound, at_price = least, price
                if one.choices is None:
                    continue
                if (held := self._held(one.choices, in_flight)) > limit_bytes:
                    cheap, heavy[one.choices] = max(cheap, price), held
                else:
                    dear, light[one.choices] = min(dear, price), ready.seconds(one.choices)
            best = min(light.values(), default=inf)
            if not light or not cheap < dear or best - bound <= gap * abs(best):
                break
            prices = np.linspace(cheap, dear, len(_FIRST_PRICES) + 2)[1:-1]
        over = tuple(sorted(heavy, key=lambda one: (heavy[one], one)))
        if not light:
            return _Within(None, bound, at_price, over, (), tuple(bounds))
        ascending = sorted(light, key=lambda one: (light[one], one))
        choices = ascending[0]
        if light[choices] - bound > _CLOSE * abs(light[choices]):
            # Prices alone miss what uses the last bytes of memory.
            choices = improve(self.problem(limit_bytes), heavy=over[:_CROSSED], light=ascending[:_CROSSED])
        return _Within(self._bounded(choices, bound, gap), bound, at_price, over, tuple(ascending), tuple(bounds))

    def _by_messages(self, limit_bytes: float, known: _Within, gap: float, enough_seconds: float) -> IntraOpSolution:
        """A better solution and a closer bound, by message passing at prices that approach the best one, with crossing
        over. On ranges of 1,500 to 2,000 nodes of a public Gemma 3 4B, of which prices leave 3 to 5 % open, it leaves
        0.2 to 0.5 % in two seconds; the general solver leaves 0.6 to 2.2 % in three."""
        passing = self._free.passing()
        assert known.found is not None  # there is something to improve
        best, bound = known.found.solution.choices, known.found.solution.lower_bound
        if passing is None:
            return known.found
        improvement, in_flight = Improvement(self.problem(limit_bytes)), self.in_flight
        solution, cheap, dear = known.found, 0.0, inf
        price = known.price or _FIRST_PRICES[0] * self.fastest.bound / limit_bytes
        for _ in range(_ROUNDS_OF_MESSAGES):
            at_price, found = passing.at(price, in_flight)
            bound = max(bound, at_price.bound - _paid(price, limit_bytes))
            if bound >= enough_seconds:
                return self._bounded(best, bound, gap)
            finite = [one for one in found if isfinite(self._free.seconds(one))]
            fitting = [one for one in finite if self._held(one, in_flight) <= limit_bytes]
            over = [one for one in finite if one not in fitting] or list(known.over[:_CROSSED])
            best = improvement.of(heavy=over, light=[best, *fitting])
            solution = self._bounded(best, bound, gap)
            if solution.solution.proven:
                break
            # Towards the price at which what is best just fits.
            if self._held(found[-1], in_flight) > limit_bytes:
                cheap = price
            else:
                dear = price
            price = (cheap + dear) / 2 if isfinite(dear) else _DEARER * price
        return solution

    def _bounded(self, choices: tuple[int, ...], bound: float, gap: float) -> IntraOpSolution:
        """Choices as a solution with this lower bound."""
        seconds = self._free.seconds(choices)
        share = min(max(bound / seconds, 0.0), 1.0) if seconds > 0 else 1.0
        return self.chosen(choices, share, proven=share >= 1 - gap)

    @cached_property
    def least_held(self) -> float:
        """The least bytes that any layouts hold on a device, with one microbatch in flight."""
        rows = FlatNodes([once + each for once, each in zip(self._once_bytes, self._each_bytes, strict=True)])
        return float(np.minimum.reduceat(rows.numbers, rows.starts).sum()) if len(rows.starts) else 0.0

    @cached_property
    def _flat(self) -> FlatNodes:
        """Bytes of all choices in one array: held throughout, and for each microbatch in flight."""
        return FlatNodes(self._once_bytes, self._each_bytes)

    def _held(self, choices: tuple[int, ...], in_flight: int) -> float:
        once, each = self._flat.sum(np.array(choices, dtype=int)).tolist()
        return once + in_flight * each

    def chosen(self, choices: tuple[int, ...], share: float = 1.0, *, proven: bool = True) -> IntraOpSolution:
        """These choices as a solution whose lower bound is this share of its seconds."""
        objective = self._free.seconds(choices)
        return self.of(
            Solution(
                choices=choices, objective=objective, method="prices", proven=proven, seconds=0.0,
                lower_bound=share * objective, memory=self._held(choices, self.in_flight),
            )
        )  # fmt: skip


def _paid(price: float, limit_bytes: float) -> float:
    """The Lagrangian's constant at a price: the price of the whole limit; 0 where memory is free or unlimited."""
    return price * limit_bytes if price else 0.0
