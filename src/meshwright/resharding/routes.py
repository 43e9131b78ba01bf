"""Which domain sends which range of a class to whom: fractional senders, and relays where senders have no slack.

A range of a class's tape is either sent by its senders to every receiver (*direct*), or sent once to one receiver, its
*relay*, which passes it on to the others. Any broadcast tree costs its sources and its relays a vector of sends that
is a mixture of these, so nothing is lost by looking at no deeper trees. Two steps:

1. Direct only. If all copies can leave within the lower bound (an exact max-flow), that is the answer and it is
  optimal.
2. Otherwise a linear program: minimise the load of the busiest sender, then the bytes that are relayed. Per class,
  o[s] bytes leave sender s and z[d] bytes have relay d, with sum o + (receivers - 1) sum z = receivers * volume. On
  disjoint meshes whose receivers send as fast as they receive, z[d] = volume / receivers shows that the optimum is
  within the lower bound; elsewhere the larger of both, `Routes.relay_bound_seconds`, is what any schedule that moves
  no byte twice into a domain can reach.

Where receivers are the bottleneck, senders that only keep within the bound would do for a schedule that is kept to the
byte. Networks share their ports otherwise: between emulated hosts (docs/resharding.md) case C16 takes 1.39 of its bound
with senders as full as receivers, and less where senders and relays all send at two thirds of their rates.

Cost: step 1 as `flow`; step 2 one to three sparse linear programs (HiGHS, one variable per class and domain). Limit:
the linear program is in floating point, so which of several equal optima is taken may depend on the processor; the
plan's fingerprint tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from .bound import Bound
from .flow import least_send_load
from .tasks import Demand

# Relative; what a linear program in floating point may be off by, and parts of a class too small to be meant.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A range of a class's tape and its way: from `sender` to `receiver`, and on to the domains in `onward`.

    >>> Route(number=0, start=0, stop=8, sender=0, receiver=1, onward=(2,)).bytes
    8

    Args:
      number: of the class in the demand.
      start: first byte on the tape.
      stop: one past the last.
      sender: a domain that holds it.
      receiver: a domain that needs it.
      onward: the other domains that need it, if `receiver` is their relay.
    """

    number: int
    start: int
    stop: int
    sender: int
    receiver: int
    onward: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Length of the range."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """All routes of a demand.

    Args:
      routes: ordered by class and place on the tape.
      relay_bound_seconds: the busiest port's load with the relays' sends in it; the lower bound itself where nothing
        is relayed.
    """

    routes: tuple[Route, ...]
    relay_bound_seconds: float


def choose_routes(demand: Demand, bound: Bound) -> Routes:
    """Routes of least load for `demand`, whose lower bound is `bound`."""
    copies: dict[tuple[int, ...], int] = {}
    for task in demand.classes:
        if task.receivers:
            copies[task.senders] = copies.get(task.senders, 0) + task.bytes * len(task.receivers)
    seconds, flow = least_send_load(copies, demand.network.send_rates)
    if seconds <= bound.seconds:
        return Routes(routes=tuple(_direct(demand, flow)), relay_bound_seconds=float(bound.seconds))
    program = _RelayProgram(demand)
    busiest = program.mean_seconds  # often nobody has to send more
    solution = program.least_relayed(busiest)
    if solution is None:
        busiest = program.least_seconds()
        solution = program.least_relayed(busiest)
    if solution is None:  # the program that gave `busiest`, with more room for what floating point is off by
        solution = program.least_relayed(busiest * (1 + 1e-6))
    assert solution is not None
    return Routes(
        routes=tuple(program.routes(solution)), relay_bound_seconds=max(busiest, float(bound.seconds))
    )  # fmt: skip


def _direct(demand: Demand, flow: dict[tuple[int, ...], dict[int, Fraction]]) -> Iterator[Route]:
    """Every class sent by its senders to each receiver, in the shares of `flow` (bytes by set of senders)."""
    left: dict[tuple[int, ...], list[tuple[int, Fraction | int]]]
    left = {senders: list(shares.items()) for senders, shares in flow.items()}
    for number, task in enumerate(demand.classes):
        if task.receivers and task.bytes:
            line = [(receiver, (), 0, task.bytes) for receiver in task.receivers]
            yield from _cut(demand, number, line, left[task.senders])


def _cut(
    demand: Demand,
    number: int,
    line: Sequence[tuple[int, tuple[int, ...], int, int]],
    shares: list[tuple[int, Fraction | int]],
) -> Iterator[Route]:
    """Give the parts of `line` (receiver, onward, start, stop) to senders in turn; `shares` is used up on the way."""
    for receiver, onward, start, stop in line:
        position = start
        while position < stop:
            sender, share = shares[0]
            reach = position + share
            end = stop if len(shares) == 1 or reach >= stop else demand.aligned(number, round(reach))
            if end < stop:
                shares.pop(0)
            else:
                shares[0] = (sender, max(reach - stop, 0))
            if end > position:
                yield Route(number=number, start=position, stop=end, sender=sender, receiver=receiver, onward=onward)
                position = end


def on_grid(demand: Demand, routes: Iterable[Route], grid: int) -> list[Route]:
    """The same routes with their cuts moved to the nearest multiples of `grid` bytes, so that chunks come out whole."""
    found = []
    for route in routes:
        whole = demand.classes[route.number].bytes
        start, stop = (
            whole if p == whole else demand.aligned(route.number, min((p + grid // 2) // grid * grid, whole))
            for p in (route.start, route.stop)
        )
        if stop > start:
            found.append(replace(route, start=start, stop=stop))
    return found


class _RelayProgram:
    """The linear program of step 2. Volumes are in units of the largest class, rates of the fastest domain.

    Columns: for each class the bytes o[s] of its senders, then (if it has several receivers) z[d]; last the time.
    """

    def __init__(self, demand: Demand) -> None:
        from scipy.sparse import csr_array  # a sixth of a second, which most never need

        self.demand = demand
        self.tasks = [(i, task) for i, task in enumerate(demand.classes) if task.receivers and task.bytes]
        self.unit = max(task.bytes for _, task in self.tasks)
        fastest = max(demand.network.send_rates)
        # One unit of time, in seconds.
        self.second = self.unit / float(fastest)
        domain: list[int] = []
        row: list[int] = []
        weight: list[int] = []
        relays: list[bool] = []
        most: list[float] = []
        for i, (_, task) in enumerate(self.tasks):
            volume, others = task.bytes / self.unit, len(task.receivers) - 1
            ends = [(s, 1, False) for s in task.senders] + [(d, others, True) for d in task.receivers if others]
            for d, copies, relay in ends:
                domain.append(d)
                row.append(i)
                weight.append(copies)
                relays.append(relay)
                most.append(volume if relay else volume * (others + 1))
        column, columns, rows = np.arange(len(row)), len(row) + 1, len(self.tasks)
        self.most = most
        copies = sum(task.bytes * len(task.receivers) for _, task in self.tasks)
        # Of what all have to send together, to those that may send any of it.
        self.mean_seconds = copies / sum(float(demand.network.send_rates[d]) for d in set(domain))
        self.relayed = np.append(np.where(relays, weight, 0), 0)
        rates = [float(r / fastest) for r in demand.network.send_rates]
        # Sends of every domain within its rate times the time, and at least one first hop for every byte.
        sends = (np.array(weight), (np.array(domain), column))
        time = (-np.array(rates), (np.arange(len(rates)), np.full(len(rates), columns - 1)))
        first = ~np.array(relays)
        hops = (np.full(int(first.sum()), -1), (len(rates) + np.array(row)[first], column[first]))
        self.limits = csr_array(
            tuple(_joined(part) for part in zip(sends, time, hops, strict=True)), shape=(len(rates) + rows, columns)
        )
        volumes = np.array([task.bytes / self.unit for _, task in self.tasks])
        self.room = np.concatenate([np.zeros(len(rates)), -volumes])
        # Every receiver gets every byte.
        self.served = csr_array((weight, (row, column)), shape=(rows, columns))
        self.wanted = volumes * [len(task.receivers) for _, task in self.tasks]

    def least_relayed(self, seconds: float) -> np.ndarray | None:
        """The solution within `seconds` that relays least, or None if there is none."""
        time = seconds / self.second * (1 + _ROUNDING)
        return self._solve(self.relayed, (time, time))

    def least_seconds(self) -> float:
        """The least load of the busiest sender."""
        solution = self._solve(np.append(np.zeros(len(self.most)), 1.0), (0.0, np.inf))
        assert solution is not None  # enough time always suffices
        return float(solution[-1]) * self.second

    def _solve(self, cost: np.ndarray, time: tuple[float, float]) -> np.ndarray | None:
        from scipy.optimize import linprog  # a third of a second, which most never need

        result = linprog(
            cost, A_ub=self.limits, b_ub=self.room, A_eq=self.served, b_eq=self.wanted,
            bounds=np.array([*((0.0, most) for most in self.most), time]), method="highs-ds",
        )  # fmt: skip
        return result.x if result.status == 0 else None

    def routes(self, solution: np.ndarray) -> Iterator[Route]:
        """The solution as ranges of tapes: what is relayed first, by relay, then what is sent to each receiver."""
        column, volumes = 0, solution.tolist()
        for number, task in self.tasks:
            receivers = task.receivers
            sent = volumes[column : column + len(task.senders)]
            column += len(task.senders)
            line: list[tuple[int, tuple[int, ...], int, int]] = []
            position = 0
            if len(receivers) > 1:
                ends = accumulate(volumes[column : column + len(receivers)])
                column += len(receivers)
                for relay, volume in zip(receivers, ends, strict=True):
                    end = volume * self.unit
                    whole = end > task.bytes * (1 - _ROUNDING)
                    stop = task.bytes if whole else self.demand.aligned(number, round(end))
                    if stop > position:
                        line.append((relay, tuple(d for d in receivers if d != relay), position, stop))
                        position = stop
            line += [(receiver, (), position, task.bytes) for receiver in receivers if position < task.bytes]
            least = _ROUNDING * task.bytes
            shares: list[tuple[int, Fraction | int]] = [
                (s, round(x * self.unit)) for s, x in zip(task.senders, sent, strict=True)
                if x * self.unit > least
            ]  # fmt: skip
            yield from _cut(self.demand, number, line, shares or [(task.senders[0], 0)])


def _joined(parts: tuple[Any, ...]) -> Any:
    """Arrays end to end, or pairs of them."""
    if isinstance(parts[0], tuple):
        return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return np.concatenate(parts)
