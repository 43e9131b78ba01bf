"""Seconds of a sequence of legs under two models of the network.

* *Exclusive ports*: a leg takes all its ports for as long as its bytes take at the slowest of them, and starts, in
  the given order, as soon as all of them are free. This is the model of the resharding literature.
* *Fluid sharing*: legs share ports max-min fairly (progressive filling), each sender working on one leg after the
  other. This is closer to what TCP does.

Under both the core carries what crosses it at no more than its rate. Times are exact under exclusive ports. Cost:
linear in the legs without a core, quadratic with one; the fluid model recomputes all rates whenever a leg ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .network import Network
from .plan import ReshardPlan, domains_of_ports, rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Bytes that pass several ports at once.

    Args:
      senders: domains whose send ports they pass; the first one starts the leg.
      receivers: domains whose receive ports they pass.
      bytes: how many pass each of these ports.
      crossings: how often the core carries them.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    bytes: int
    crossings: int = 1


def exclusive_seconds(network: Network, legs: Sequence[Leg]) -> Fraction:
    """The time until all `legs` are done, ports taken one leg at a time, in the given order.

    >>> from meshwright.resharding.network import uniform_network
    >>> network = uniform_network([(0,), (1,), (2,)], nic_rate=1)
    >>> first = Leg(senders=(0,), receivers=(1,), bytes=4)
    >>> exclusive_seconds(network, [first, Leg(senders=(0,), receivers=(2,), bytes=1)])
    Fraction(5, 1)
    """
    send_free = [Fraction(0)] * len(network.members)
    receive_free = [Fraction(0)] * len(network.members)
    core = None if network.core_rate is None else _Core(Fraction(network.core_rate))
    last = Fraction(0)
    for leg in legs:
        rate = leg_rate(network, leg)
        seconds = leg.bytes / rate
        start = max([*(send_free[d] for d in leg.senders), *(receive_free[d] for d in leg.receivers)])
        if core is not None:
            start = core.place(start, seconds, rate * leg.crossings)
        for d in leg.senders:
            send_free[d] = start + seconds
        for d in leg.receivers:
            receive_free[d] = start + seconds
        last = max(last, start + seconds)
    return last


def leg_rate(network: Network, leg: Leg) -> Fraction:
    """Bytes/s of a leg that has its ports, and the core, to itself."""
    rate = min([*(network.send_rates[d] for d in leg.senders), *(network.receive_rates[d] for d in leg.receivers)])
    return rate if network.core_rate is None else min(rate, Fraction(network.core_rate) / leg.crossings)


class _Core:
    """What the core carries at any time."""

    def __init__(self, rate: Fraction) -> None:
        self.rate = rate
        self.carried: list[tuple[Fraction, Fraction, Fraction]] = []

    def place(self, earliest: Fraction, seconds: Fraction, rate: Fraction) -> Fraction:
        """The first start from `earliest` on with room for `rate` during all of `seconds`."""
        for start in sorted({earliest, *(end for _, end, _ in self.carried if end > earliest)}):
            inside = [c for c in self.carried if c[0] < start + seconds and c[1] > start]
            times = {start, *(c[0] for c in inside if c[0] > start)}
            if all(sum((c[2] for c in inside if c[0] <= t < c[1]), rate) <= self.rate for t in times):
                self.carried.append((start, start + seconds, rate))
                return start
        raise AssertionError("after the end of everything carried there is room")


def fluid_seconds(network: Network, legs: Sequence[Leg]) -> float:
    """The time until all `legs` are done, ports shared fairly, each sender working on one leg after the other.

    >>> from meshwright.resharding.network import uniform_network
    >>> network = uniform_network([(0,), (1,), (2,)], nic_rate=1)
    >>> fluid_seconds(network, [Leg(senders=(s,), receivers=(2,), bytes=1) for s in (0, 1)])
    2.0
    """
    queues: dict[int, list[Leg]] = {}
    for leg in legs:
        if leg.bytes:
            queues.setdefault(leg.senders[0], []).append(leg)
    active = {sender: queue.pop(0) for sender, queue in sorted(queues.items())}
    left = {sender: float(leg.bytes) for sender, leg in active.items()}
    now = 0.0
    while active:
        order = sorted(active)
        rates = fair_rates(network, [active[s] for s in order])
        step = min(left[s] / r for s, r in zip(order, rates, strict=True))
        now += step
        for sender, rate in zip(order, rates, strict=True):
            left[sender] -= step * rate
            if left[sender] <= 1e-9 * active[sender].bytes:
                if queues[sender]:
                    active[sender] = queues[sender].pop(0)
                    left[sender] = float(active[sender].bytes)
                else:
                    del active[sender], left[sender]
    return now


def fair_rates(network: Network, legs: Sequence[Leg]) -> list[float]:
    """Max-min fair rates (bytes/s) of legs that run together: all grow alike until a port is full, and so on."""
    room: dict[tuple[str, int], float] = {}
    uses: list[dict[tuple[str, int], int]] = []
    for leg in legs:
        use = {("send", d): 1 for d in leg.senders} | {("receive", d): 1 for d in leg.receivers}
        room |= {("send", d): float(network.send_rates[d]) for d in leg.senders}
        room |= {("receive", d): float(network.receive_rates[d]) for d in leg.receivers}
        if network.core_rate is not None:
            use["core", 0] = leg.crossings
            room["core", 0] = float(network.core_rate)
        uses.append(use)
    rates = [0.0] * len(legs)
    growing = set(range(len(legs)))
    while growing:
        weight: dict[tuple[str, int], int] = {}
        for i in sorted(growing):
            for port, count in uses[i].items():
                weight[port] = weight.get(port, 0) + count
        more, full = min((room[port] / count, port) for port, count in weight.items())
        for port, count in weight.items():
            room[port] -= more * count
        for i in growing:
            rates[i] += more
        growing -= {i for i in growing if full in uses[i]}
    return rates


def plan_fluid_seconds(plan: ReshardPlan) -> float:
    """The time of a plan's rounds when the transfers of a round share ports fairly; a round waits for the one before.

    Domains with several NICs are taken as one port of their rate together.
    """
    network, moved = plan.demand.network, plan.transfers
    home = domains_of_ports(plan.demand)
    seconds = []
    for entries in rounds(moved):
        pairs: dict[tuple[int, int], int] = {}
        sizes = (moved.stop[entries] - moved.start[entries]).tolist()
        ends = (home[moved.sender[entries]].tolist(), home[moved.receiver[entries]].tolist())
        for sender, receiver, size in zip(*ends, sizes, strict=True):
            pairs[sender, receiver] = pairs.get((sender, receiver), 0) + size
        seconds.append(shared_seconds(network, pairs))
    return math.fsum(seconds)


def shared_seconds(network: Network, pairs: Mapping[tuple[int, int], int]) -> float:
    """The time until all bytes are moved that pairs of domains (sender, receiver) exchange, all of them at once.

    >>> from meshwright.resharding.network import uniform_network
    >>> shared_seconds(uniform_network([(0,), (1,), (2,)], nic_rate=1), {(0, 1): 4, (0, 2): 1})
    5.0
    """
    left = dict(pairs)
    now = 0.0
    while left:
        order = sorted(left)
        rates = np.array(fair_rates(network, [Leg(senders=(s,), receivers=(r,), bytes=left[s, r]) for s, r in order]))
        amounts = np.array([left[pair] for pair in order], dtype=float)
        step = float((amounts / rates).min())
        now += step
        rest = amounts - step * rates
        left = {
            pair: amount for pair, amount, whole in zip(order, rest.tolist(), amounts.tolist(), strict=True)
            if amount > 1e-9 * whole
        }  # fmt: skip
    return now
