"""From routes between domains to flows between ports, one chunk at a time.

A route sends its range of a tape in K chunks of equal size, rounded up to whole units (the last ones may be shorter
or missing). A *flow* is one leg of a route, or a part of every chunk of it: a domain with several NICs gives each of
them the share of its traffic that the NIC's rate has in the domain's, by laying the legs end to end and cutting where
a NIC is full (McNaughton's wrap-around).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .network import Network
from .routes import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes [begin, end) of every chunk of a route, between two ports.

    Args:
      route: position of the route.
      hop: 0 from the sender to the receiver, 1 from the receiver on.
      begin: first byte of the chunk.
      end: one past the last.
      sender: port number.
      receiver: port number.
    """

    route: int
    hop: int
    begin: int
    end: int
    sender: int
    receiver: int


def flows_of(network: Network, routes: Sequence[Route], *, chunks: int, unit: int) -> list[Flow]:
    """The legs of `routes` between ports, first hops and relays' sends, in the order of the routes.

    Args:
      network: the machines.
      routes: the routes.
      chunks: into how many chunks a route is cut.
      unit: bytes of which chunks and cuts are multiples.
    """
    legs = []
    for i, route in enumerate(routes):
        size = chunk_bytes(route, chunks=chunks, unit=unit)
        legs.append(Flow(route=i, hop=0, begin=0, end=size, sender=route.sender, receiver=route.receiver))
        legs += [Flow(route=i, hop=1, begin=0, end=size, sender=route.receiver, receiver=d) for d in route.onward]
    first = first_ports(network)
    send = [[Fraction(nic.send_rate) for nic in nics] for nics in network.nics]
    receive = [[Fraction(nic.receive_rate) for nic in nics] for nics in network.nics]
    legs = _spread(legs, "sender", send, first, unit)
    return _spread(legs, "receiver", receive, first, unit)


def chunk_bytes(route: Route, *, chunks: int, unit: int) -> int:
    """Size of a chunk of `route`: its bytes over `chunks`, rounded up to a multiple of `unit`."""
    return -(-route.bytes // (chunks * unit)) * unit


def first_ports(network: Network) -> list[int]:
    """The number of the first port of each domain; ports are numbered by domain, then NIC."""
    first = [0]
    for nics in network.nics:
        first.append(first[-1] + len(nics))
    return first


def _spread(legs: list[Flow], end: str, rates: list[list[Fraction]], first: list[int], unit: int) -> list[Flow]:
    """Replace the domain at one `end` ("sender" or "receiver") of every leg by ports."""
    if all(len(shares) == 1 for shares in rates):
        return [leg for leg in legs if leg.begin < leg.end]  # ports are numbered as their domains
    total = [0] * len(rates)
    for leg in legs:
        total[getattr(leg, end)] += leg.end - leg.begin
    limits = []
    for domain, shares in enumerate(rates):
        whole, so_far, cuts = sum(shares, Fraction(0)), Fraction(0), []
        for share in shares:
            so_far += share
            cuts.append(round(total[domain] * so_far / (whole * unit)) * unit)
        limits.append(cuts)
    used = [0] * len(rates)
    found = []
    for leg in legs:
        domain = getattr(leg, end)
        position = leg.begin
        while position < leg.end:
            nic = next(i for i, limit in enumerate(limits[domain]) if used[domain] < limit)
            stop = min(leg.end, position + limits[domain][nic] - used[domain])
            ends = {"sender": leg.sender, "receiver": leg.receiver, end: first[domain] + nic}
            found.append(Flow(route=leg.route, hop=leg.hop, begin=position, end=stop, **ends))
            used[domain] += stop - position
            position = stop
    return found
