"""Seconds of moving a value from one mesh and layout to another on a cluster, fast enough for a search to ask.

What the network takes is what `planner.plan_reshard` comes to, without making the plan: the lower bound, or where
senders have no slack the linear program of `routes`, and the relays' chunks. Copies inside a host are charged by what
each device still has to get over its link; they follow the network, and are not hidden behind it.

Seconds grow with the bytes and depend otherwise only on how the blocks of the two layouts cut each other and on which
hosts they lie. So the numbers are found on the smallest tensor with the same blocks, once for each pair of layouts up
to the names of hosts and devices: neighbouring submeshes all along a cluster are asked about once. Cost: a few
milliseconds for a new pair, then a look-up of some microseconds.

Known limits: every dim is taken to be divided by its blocks; each device of a host reaches the others at its link's
full rate; what leaves a leaf of an oversubscribed fabric always gets the bandwidth of full load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from ..cluster import Cluster
from .bound import lower_bound
from .layout import Layout
from .network import Host, Network, Nic
from .planner import MOST_CHUNKS
from .routes import choose_routes
from .tasks import Demand, Move, check_devices, demand_of


def cluster_network(cluster: Cluster) -> Network:
    """A cluster as the planner sees it; devices are their positions in the cluster.

    >>> from meshwright.cluster import load_cluster
    >>> network = cluster_network(load_cluster("p3.16xlarge:2"))
    >>> len(network.hosts), network.domain_of[8]
    (2, 1)

    Args:
      cluster: its hosts become hosts, each a domain of its own.
    """
    bounds = list(accumulate((host.devices for host in cluster.hosts), initial=0))
    leaves = len(cluster.hosts) > cluster.fabric_hosts_per_leaf
    share = cluster.fabric_oversubscription if leaves else 1.0
    hosts = []
    for host, first in zip(cluster.hosts, bounds, strict=False):
        # A host without NICs is alone in its cluster, and nothing is sent: the rate only has to be one.
        rate = host.nic.bandwidth_bytes_per_second / share if host.nics else host.link.bandwidth_bytes_per_second
        nics = (Nic(send_rate=rate, receive_rate=rate),) * max(host.nics, 1)
        hosts.append(Host(devices=tuple(range(first, first + host.devices)), nics=nics))
    starts = [host.nic.launch_seconds + host.nic.latency_seconds for host in cluster.hosts if host.nics]
    return Network(hosts=tuple(hosts), latency_seconds=max(starts, default=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Price:
    """Seconds a byte of the tensor: over the network, over links inside hosts; and whether data is relayed."""

    network: float
    links: float
    relayed: bool


class MoveCosts:
    """Seconds of moves on a cluster.

    >>> from meshwright.cluster import load_cluster
    >>> from meshwright.resharding.layout import grid_layout
    >>> costs = MoveCosts(load_cluster("p3.16xlarge:2"))
    >>> here = grid_layout(range(8), (8,), ("x",), [("x",)])
    >>> split, whole = (grid_layout(range(8, 16), (8,), ("x",), spec) for spec in ([("x",)], []))
    >>> costs.seconds(2**30, here, split, rank=2) < costs.seconds(2**30, here, whole, rank=2)
    True

    Args:
      cluster: whose devices the layouts name by position.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.network = cluster_network(cluster)
        self._host_of = self.network.domain_of
        self._starts = {n: host.link.launch_seconds + host.link.latency_seconds for n, host in enumerate(cluster.hosts)}
        self._pairs: dict[tuple[Layout, Layout, int], tuple[_Price, float, float]] = {}
        self._prices: dict[object, _Price] = {}

    def seconds(self, size_bytes: float, source: Layout, destination: Layout, *, rank: int) -> float:
        """Of moving one value.

        Args:
          size_bytes: of the whole value.
          source: where it is.
          destination: where it is needed.
          rank: how many dims it has.

        Raises:
          ReshardError: a spec is longer than the rank, or a device is none of the cluster's.
        """
        return self.seconds_together([(size_bytes, source, destination, rank)])

    def seconds_together(self, values: Iterable[tuple[float, Layout, Layout, int]]) -> float:
        """Of moving several values in one plan, at most: what each takes adds up, the starts of messages are paid once.

        Args:
          values: as of `seconds`: bytes, source, destination and rank of each.

        Raises:
          ReshardError: as of `seconds`.
        """
        over_network = over_links = relayed = network_start = link_start = 0.0
        for size_bytes, source, destination, rank in values:
            key = (source, destination, rank)
            found = self._pairs.get(key)
            if found is None:
                found = self._pairs[key] = self._pair(source, destination, rank)
            price, mine, near = found
            over_network += size_bytes * price.network
            over_links += size_bytes * price.links
            network_start, link_start = max(network_start, mine), max(link_start, near)
            relayed += size_bytes * price.network if price.relayed else 0.0
        total = 0.0
        if over_network:
            total = over_network + network_start
            if relayed:
                # With K chunks a K-th of the time and K starts more; the planner takes the best K.
                best = math.sqrt(relayed / network_start) if network_start else math.inf
                chunks = min(max(best, 1.0), MOST_CHUNKS)
                total += relayed / chunks + network_start * chunks
        return total + (over_links + link_start if over_links else 0.0)

    def _pair(self, source: Layout, destination: Layout, rank: int) -> tuple[_Price, float, float]:
        # The smallest tensor whose dims every block of either layout divides.
        shape = tuple(math.lcm(k, m) for k, m in zip(source.splits(rank), destination.splits(rank), strict=True))
        move = Move(name="value", shape=shape, item_bytes=1, source=source, destination=destination)
        check_devices(self.network, [move])
        # Devices and hosts by the order in which they are met.
        names = {d: i for i, d in enumerate(dict.fromkeys((*source.mesh.devices, *destination.mesh.devices)))}
        hosts = {host: i for i, host in enumerate(dict.fromkeys(self._host_of[d] for d in names))}
        ends = tuple(
            (tuple(names[d] for d in e.mesh.devices), e.mesh.shape, e.mesh.axes, e.spec) for e in (source, destination)
        )
        homes = tuple(hosts[self._host_of[d]] for d in names)
        key = (shape, ends, homes, tuple(self.cluster.hosts[host] for host in hosts))
        if key not in self._prices:
            self._prices[key] = self._price(move)
        return self._prices[key], self.network.latency_seconds, max(self._starts[host] for host in hosts)

    def _price(self, move: Move) -> _Price:
        demand = demand_of(self.network, [move])
        bound = lower_bound(demand)
        chosen = choose_routes(demand, bound)
        return _Price(
            network=max(float(bound.seconds), chosen.relay_bound_seconds) / move.bytes,
            links=self._link_seconds(demand) / move.bytes,
            relayed=any(route.onward for route in chosen.routes),
        )

    def _link_seconds(self, demand: Demand) -> float:
        """Of the copies inside hosts: the most that a device has to get from others of its host, or to give them first,
        over its link.

        Of what enters a host each of the devices that need it takes in a share from the network. What a host has is
        given once by those that hold it there, in equal shares; those that got it give it on.
        """
        busy: dict[tuple[str, int], float] = {}

        def count(way: str, device: int, size: float) -> None:
            busy[way, device] = busy.get((way, device), 0.0) + size

        for number, size in zip(demand.pattern.tolist(), demand.bytes.tolist(), strict=True):
            holders, needers = demand.patterns[number]
            for host in {self._host_of[d] for d in needers}:
                takers = [d for d in needers if self._host_of[d] == host]
                givers = [d for d in holders if self._host_of[d] == host]
                lacking = [d for d in takers if d not in holders]
                for device in lacking:
                    count("in", device, size * (1 - (0.0 if givers else 1 / len(takers))))
                for device in givers if lacking else ():
                    count("out", device, size / len(givers))
        rates = {d: self.cluster.hosts[self._host_of[d]].link.bandwidth_bytes_per_second for _, d in busy}
        return max((size / rates[device] for (_, device), size in busy.items()), default=0.0)
