"""The submeshes of a cluster, and the seconds of transfers between them.

A submesh is a range of neighbouring devices: a power of two of the devices of one host, or whole hosts (a power of two
of them, a divisor of their number, or all). Stages are placed on submeshes in program order, side by side, so
neighbours in the pipeline are neighbours in the cluster. On very large clusters several hosts form a unit that is not
cut, since a plan has no more stages than layers.

**Transfers** are priced by the alpha-beta model: a launch, a latency, and bytes over the bandwidth that both ends
reach. Inside a host that is the link of each device of the smaller side; between hosts all NICs of the hosts of the
smaller side. Each byte crosses once: copies that a layout needs are made inside the receiving submesh, by its faster
links.

Known limits: two stages on one host that talk to other hosts at once both get all its NICs; copying inside the
receiving submesh costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ...cluster import Cluster, Host
from ...errors import PlanError
from ...resharding import MoveCosts

# More units than these are put together: a stage of the smallest size would be one of as many.
_MOST_UNITS = 32


class Submesh(NamedTuple):
    """Devices `first` to before `stop`, as positions in the cluster."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        """How many devices."""
        return self.stop - self.first


class Submeshes:
    """All submeshes of a cluster.

    >>> from meshwright.cluster import load_cluster
    >>> pieces = Submeshes(load_cluster("p3.16xlarge:2"))
    >>> sorted({piece.size for piece in pieces.all})
    [1, 2, 4, 8, 16]

    Args:
      cluster: to be cut.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._bounds = list(accumulate((host.devices for host in cluster.hosts), initial=0))

    @cached_property
    def all(self) -> tuple[Submesh, ...]:
        """The submeshes that a search considers, ordered by first device, then size."""
        found = set()
        count = len(self.cluster.hosts)
        unit = next(n for n in range(1, count + 1) if count % n == 0 and count // n <= _MOST_UNITS)
        if unit == 1:
            for host, start in zip(self.cluster.hosts, self._bounds, strict=False):
                size = 1
                while size < host.devices:
                    found |= {Submesh(start + i, start + i + size) for i in range(host.devices - size + 1)}
                    size *= 2
        units = count // unit
        for size in range(1, units + 1):
            if size & (size - 1) == 0 or units % size == 0:
                starts = range(0, unit * (units - size) + 1, unit)
                found |= {Submesh(self._bounds[i], self._bounds[i + unit * size]) for i in starts}
        return tuple(sorted(found))

    @cached_property
    def stage_counts(self) -> frozenset[int]:
        """The numbers of submeshes into which the cluster can be cut with no device left out.

        >>> from meshwright.cluster import load_cluster
        >>> sorted(Submeshes(load_cluster("p3.16xlarge:1")).stage_counts)
        [1, 2, 3, 4, 5, 6, 7, 8]
        """
        # Bit n of `reached[d]`: the first d devices can be cut into n submeshes.
        reached = [1] + [0] * self.cluster.num_devices
        for submesh in self.all:
            reached[submesh.stop] |= reached[submesh.first] << 1
        return frozenset(n for n in range(1, len(reached)) if reached[-1] >> n & 1)

    def check_stages(self, stages: int, most: int) -> None:
        """Refuse a number of stages for which there are no submeshes, even if several stages share one.

        Args:
          stages: the number.
          most: how many there can be at most, for want of layers.

        Raises:
          PlanError: naming numbers into which it can.
        """
        if any(stages % ranks == 0 for ranks in self.stage_counts if ranks > 1) or self.cluster.num_devices < stages:
            return
        cluster = self.cluster
        sizes = sorted({host.devices for host in cluster.hosts})
        others = (count for count in self.stage_counts if 1 < count <= most)
        near = sorted(others, key=lambda count: (abs(count - stages), count))[:2]
        tries = [f"stages={count}" for count in near]
        if len(cluster.hosts) == 1:
            (host,) = cluster.hosts
            fewer = (replace(cluster, hosts=(replace(host, devices=n),)) for n in range(host.devices - 1, 0, -1))
            able = next((one.num_devices for one in fewer if stages in Submeshes(one).stage_counts), None)
            tries += [f"{able} devices"] if able is not None else []
        raise PlanError(
            refused=f"{stages} stages on {cluster.num_devices} devices",
            got=f"{len(cluster.hosts)} host{'s' * (len(cluster.hosts) > 1)} of {' and '.join(map(str, sizes))} devices",
            needed="submeshes that leave no device out, each of a power of two of one host's devices or of whole hosts",
            where=f"cluster {cluster.name}", try_=" or ".join([*tries, "stages=None"]),
        )  # fmt: skip

    @cached_property
    def moves(self) -> MoveCosts:
        """Seconds of moves between layouts on this cluster."""
        return MoveCosts(self.cluster)

    def is_submesh(self, submesh: Submesh) -> bool:
        """Whether a stage may have these devices."""
        if not 0 <= submesh.first < submesh.stop <= self.cluster.num_devices:
            return False
        whole = submesh.first in self._bounds and submesh.stop in self._bounds
        return whole or (len(self.hosts(submesh)) == 1 and submesh.size & (submesh.size - 1) == 0)

    def check(self, submesh: Submesh) -> None:
        """Refuse a range of devices that is no submesh.

        Raises:
          PlanError: if it is none.
        """
        if not self.is_submesh(submesh):
            sizes = sorted({piece.size for piece in self.all})
            raise PlanError(
                refused=f"a stage on the devices {submesh.first} to {submesh.stop - 1}",
                got=f"{submesh.size} devices of {self.cluster.num_devices}, numbered from 0",
                needed="whole hosts, or a power of two of the devices of one host",
                where=f"cluster {self.cluster.name}",
                try_=f"sizes {', '.join(map(str, sizes))}",
            )

    def hosts(self, submesh: Submesh) -> tuple[int, ...]:
        """The hosts of a submesh."""
        return tuple(
            number
            for number, (start, stop) in enumerate(zip(self._bounds, self._bounds[1:], strict=False))
            if start < submesh.stop and submesh.first < stop
        )

    def kind(self, submesh: Submesh) -> tuple[Host, ...]:
        """The hardware of a submesh: equal for submeshes on which a stage costs the same."""
        return tuple(
            replace(
                self.cluster.hosts[number],
                devices=min(submesh.stop, self._bounds[number + 1]) - max(submesh.first, self._bounds[number]),
            )
            for number in self.hosts(submesh)
        )

    def part(self, submesh: Submesh) -> Cluster:
        """The submesh as a cluster of its own, whose logical meshes have the prices of this one."""
        return replace(self.cluster, hosts=self.kind(submesh))

    def transfer_seconds(self, source: Submesh, target: Submesh, size_bytes: float) -> float:
        """A lower bound on the seconds of moving a value from one submesh to another; 0 for no bytes.

        Once layouts are known, `crossings.edge_seconds` gives the seconds.
        """
        if size_bytes <= 0 or source == target:
            return 0.0
        launch, latency, bandwidth = self._path(source, target)
        return launch + latency + size_bytes / bandwidth

    def _path(self, source: Submesh, target: Submesh) -> tuple[float, float, float]:
        """Launch and latency in seconds, and bytes/s."""
        here, there = self.hosts(source), self.hosts(target)
        fewest = min(source.size, target.size)
        if here == there and len(here) == 1:
            link = self.cluster.hosts[here[0]].link
            return link.launch_seconds, link.latency_seconds, link.bandwidth_bytes_per_second * fewest
        ends = [self.cluster.hosts[number] for number in (*here, *there)]
        return (
            max(host.nic.launch_seconds for host in ends),
            max(host.nic.latency_seconds for host in ends),
            min(self._nics(here), self._nics(there)),
        )

    def _nics(self, hosts: Sequence[int]) -> float:
        total = sum(self.cluster.hosts[number].nic_bandwidth_bytes_per_second for number in hosts)
        leaves = len(self.cluster.hosts) > self.cluster.fabric_hosts_per_leaf
        return total / (self.cluster.fabric_oversubscription if leaves else 1.0)
