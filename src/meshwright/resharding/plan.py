"""A plan for a move of many tensors, as data: rounds of transfers between ports, and what they are on devices.

The plan is periodic. A *period* sends one chunk of everything; its rounds (`Share`: which part of which flow) are the
same in every period, so that an executor compiles them once. Relayed data takes its first hop in one period and its
second in the next: K chunks take K + 1 periods, the first of them without second hops and the last without first
hops. A plan without relays is one period.

A byte is named by its class, and its position on the class's tape (`tasks`). `messages` turns a round into what
devices send each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from .bound import Bound
from .ports import Flow, chunk_bytes, first_ports
from .routes import Route
from .tasks import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one flow sends in one round of a period: bytes [begin, end) of the chunk of its route."""

    round: int
    flow: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """Every transfer of a plan, one entry each, in the order of the rounds.

    Args:
      round: the round, counted over all periods; rounds without transfers are left out of the count.
      number: the class.
      start: first byte on its tape.
      stop: one past the last.
      sender: port.
      receiver: port.
      hop: 0 for a first hop, 1 for a relay's.
    """

    round: np.ndarray
    number: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    hop: np.ndarray

    @cached_property
    def rounds(self) -> int:
        """How many rounds there are."""
        return int(self.round[-1]) + 1 if len(self.round) else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ReshardPlan:
    """How a set of tensors moves from their layouts to others.

    Args:
      demand: what has to move.
      bound: what no plan can beat.
      relay_bound_seconds: what none can beat that moves no byte into a domain twice, relays' sends included.
      routes: who sends what to whom.
      flows: the legs of the routes between ports.
      shares: the rounds of one period.
      chunks: into how many chunks a route is cut.
      unit: bytes of which chunks are multiples.
    """

    demand: Demand
    bound: Bound
    relay_bound_seconds: float
    routes: tuple[Route, ...]
    flows: tuple[Flow, ...]
    shares: tuple[Share, ...]
    chunks: int
    unit: int

    def __str__(self) -> str:
        tensors = len(self.demand.moves)
        relayed = f", relays in {self.chunks} chunks" if any(route.onward for route in self.routes) else ""
        return (
            f"{tensors} tensor{'s' * (tensors != 1)} in {self.demand.unit_tasks:,} unit tasks, "
            f"{self.bytes_between_domains:,} bytes between domains: {float(self.seconds):.4g} s in {self.rounds:,} "
            f"rounds{relayed}; no plan is below {float(self.bound.seconds):.4g} s"
        )

    @cached_property
    def transfers(self) -> Transfers:
        """Every transfer between ports, in the order of the rounds."""
        return expand(self.demand, self.routes, self.flows, self.shares, chunks=self.chunks, unit=self.unit)

    @property
    def rounds(self) -> int:
        """How many rounds are executed."""
        return self.transfers.rounds

    @cached_property
    def seconds(self) -> Fraction:
        """The rounds one after the other, each as long as its busiest port; latency left out; exact."""
        return seconds_of(self.demand, self.transfers)

    @property
    def latency_seconds(self) -> float:
        """What the starts of the messages of all rounds add."""
        return self.rounds * self.demand.network.latency_seconds

    @cached_property
    def bytes_between_domains(self) -> int:
        """Bytes that cross from one domain into another."""
        return int((self.transfers.stop - self.transfers.start).sum())

    @cached_property
    def largest_transfer_bytes(self) -> int:
        """The most bytes that two ports exchange in a round: what an executor's buffers have to hold."""
        moved, ports = self.transfers, first_ports(self.demand.network)[-1]
        key = (moved.round * ports + moved.sender) * ports + moved.receiver
        sizes = np.zeros(len(key), dtype=np.int64)
        np.add.at(sizes, np.unique(key, return_inverse=True)[1], moved.stop - moved.start)
        return int(sizes.max(initial=0))

    @cached_property
    def port_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes out of each port and into it, each of shape (ports,)."""
        moved, ports = self.transfers, first_ports(self.demand.network)[-1]
        sizes = moved.stop - moved.start
        out, into = np.zeros(ports, dtype=np.int64), np.zeros(ports, dtype=np.int64)
        np.add.at(out, moved.sender, sizes)
        np.add.at(into, moved.receiver, sizes)
        return out, into

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of everything that processes must agree on before a byte moves."""
        digest = hashlib.sha256()
        network = self.demand.network
        digest.update(repr((network.members, [host.devices for host in network.hosts])).encode())
        for move in self.demand.moves:
            ends = ((e.mesh.devices, e.mesh.shape, e.mesh.axes, e.spec) for e in (move.source, move.destination))
            digest.update(repr((move.name, move.shape, move.item_bytes, *ends)).encode())
        moved = self.transfers
        digest.update(repr((self.chunks, len(moved.round))).encode())
        for column in (moved.round, moved.number, moved.start, moved.stop, moved.sender, moved.receiver, moved.hop):
            digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]


# How much of a chunk a cut may be moved by.
_SETTLING = 1024

# Loads that are looked at together: bounds the memory of a very long plan.
_BLOCK = 1 << 22


def expand(
    demand: Demand,
    routes: Sequence[Route],
    flows: Sequence[Flow],
    shares: Sequence[Share],
    *,
    chunks: int,
    unit: int,
) -> Transfers:
    """The transfers of all periods, as `ReshardPlan.transfers`."""
    if not shares:
        none = np.empty(0, dtype=np.int64)
        return Transfers(round=none, number=none, start=none, stop=none, sender=none, receiver=none, hop=none)
    sizes = [chunk_bytes(route, chunks=chunks, unit=unit) for route in routes]
    table = np.array(
        [
            (s.round, f.hop, f.sender, f.receiver, r.number, r.start, r.stop, sizes[f.route], s.begin, s.end)
            for s in shares
            for f in (flows[s.flow],)
            for r in (routes[f.route],)
        ],
        dtype=np.int64,
    )
    # By round, so that one period follows another with little left to sort.
    table = table[np.argsort(table[:, 0], kind="stable")]
    each, hop, sender, receiver, number, offset, limit, size, begin, end = table.T
    chunk = np.arange(chunks, dtype=np.int64)[:, None]
    shape = (chunks, len(table))
    number = np.broadcast_to(number, shape)
    # Cuts of chunks that are next to a slice's end are made there: else they cost a message of a few bytes.
    within = max(sizes) // _SETTLING if chunks > 1 else 0
    start = demand.settled(number, np.minimum(offset + chunk * size + begin, limit), within)
    stop = demand.settled(number, np.minimum(offset + chunk * size + end, limit), within)
    place = (chunk + hop) * (int(each[-1]) + 1) + each
    moved = np.flatnonzero(stop > start)
    moved = moved[np.argsort(place.ravel()[moved], kind="stable")]
    place = place.ravel()[moved]
    # Rounds in which nothing moves are not counted.
    counted = np.cumsum(np.append(False, place[1:] != place[:-1])).astype(np.int64)
    column = moved % len(table)
    return Transfers(
        round=counted, number=table[column, 4], start=start.ravel()[moved], stop=stop.ravel()[moved],
        sender=sender[column], receiver=receiver[column], hop=hop[column],
    )  # fmt: skip


def seconds_of(demand: Demand, moved: Transfers) -> Fraction:
    """The rounds of `moved` one after the other, each as long as its busiest port or the core; exact."""
    network, ports = demand.network, first_ports(demand.network)[-1]
    if not moved.rounds:
        return Fraction(0)
    send = [Fraction(nic.send_rate) for nics in network.nics for nic in nics]
    receive = [Fraction(nic.receive_rate) for nics in network.nics for nic in nics]
    rates = [*send, *receive, *([] if network.core_rate is None else [Fraction(network.core_rate)])]
    inexact = np.array([float(r) for r in rates])
    total = np.zeros(len(rates), dtype=np.int64)
    # Loads of all ports, a block of rounds at a time: which port is the busiest, and how many bytes it moves.
    cuts = np.searchsorted(moved.round, np.arange(moved.rounds + 1))
    block = max(_BLOCK // len(rates), 1)
    for first in range(0, moved.rounds, block):
        last = min(first + block, moved.rounds)
        entries = slice(int(cuts[first]), int(cuts[last]))
        place, size = moved.round[entries] - first, moved.stop[entries] - moved.start[entries]
        load = np.zeros((last - first, len(rates)), dtype=np.int64)
        np.add.at(load, (place, moved.sender[entries]), size)
        np.add.at(load, (place, ports + moved.receiver[entries]), size)
        if network.core_rate is not None:
            np.add.at(load[:, -1], place, size)
        busiest = (load / inexact).argmax(axis=1)
        np.add.at(total, busiest, load[np.arange(last - first), busiest])
    return sum((Fraction(int(b)) / r for b, r in zip(total, rates, strict=True) if b), Fraction(0))


def domains_of_ports(demand: Demand) -> np.ndarray:
    """The domain of each port, shape (ports,)."""
    first = first_ports(demand.network)
    return np.repeat(np.arange(len(first) - 1), np.diff(first))


def rounds(moved: Transfers) -> Iterator[slice]:
    """The entries of each round."""
    cuts = np.searchsorted(moved.round, np.arange(moved.rounds + 1))
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        yield slice(begin, end)
