"""A cluster: hosts in the order their devices are numbered, and what joins them.

Cost: everything here is linear in the number of devices, except `logical_shapes`, which is small for the sizes clusters
come in. Known limit: all devices are of one kind and the fabric between hosts is one number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .errors import ClusterError, check_count, check_number, check_text, check_type
from .hardware import Device, Host
from .logical_mesh import LogicalMesh, build_logical_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`hosts` joined by a fabric that gives each NIC 1/`fabric_oversubscription` of its bandwidth under full load.

    Raises ClusterError for no hosts, hosts with different devices, or an oversubscription below 1.

    >>> from meshwright.cluster import load_cluster
    >>> cluster = load_cluster("p3.16xlarge:2")
    >>> cluster.num_devices, cluster.logical_shapes(max_axes=2)
    (16, ((16,), (2, 8), (4, 4), (8, 2)))
    """

    name: str
    hosts: tuple[Host, ...]
    fabric_oversubscription: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        self.validate()

    def validate(self) -> None:
        """Check the cluster; construction calls it, so a Cluster at hand has passed. Raises ClusterError."""
        check_text("Cluster", "name", self.name)
        check_number("Cluster", "fabric_oversubscription", self.fabric_oversubscription, at_least=1.0)
        for host in self.hosts:
            check_type("Cluster", "hosts", host, Host)
        if len({host.device.kind for host in self.hosts}) != 1 or any(h.device != self.device for h in self.hosts):
            raise ClusterError(
                refused=f"cluster {self.name!r}",
                got=f"{len(self.hosts)} hosts with devices {sorted({host.device.kind for host in self.hosts})}",
                needed="at least one host, and the same device in all of them",
                where="Cluster.hosts",
                try_="describe each kind of device as a cluster of its own",
            )

    @property
    def num_devices(self) -> int:
        """Devices in all hosts."""
        return sum(host.devices for host in self.hosts)

    def hosts_of(self, devices: Iterable[int]) -> tuple[int, ...]:
        """Positions of the hosts that hold some devices (positions in the cluster), ascending.

        Raises ClusterError for a device that is not there.
        """
        ends = list(accumulate(host.devices for host in self.hosts))
        wanted = sorted(set(devices))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < ends[-1]:
            raise ClusterError(
                refused="a device", got=str(wanted[-1] if wanted[0] >= 0 else wanted[0]),
                needed=f"0 to {ends[-1] - 1}", where=f"cluster {self.name}", try_="positions in the cluster",
            )  # fmt: skip
        return tuple(sorted({bisect_right(ends, device) for device in wanted}))

    @property
    def device(self) -> Device:
        """The device that every host holds."""
        return self.hosts[0].device

    def with_memory_limit(self, limit_bytes: float) -> Cluster:
        """This cluster with at most `limit_bytes` usable on each device. Raises ClusterError for a limit <= 0."""
        check_number("Cluster", "with_memory_limit(limit_bytes)", limit_bytes, above=True)
        usable = min(float(limit_bytes), self.device.usable_memory_bytes)
        device = dataclasses.replace(self.device, memory_bytes=usable, usable_memory_fraction=1.0)
        return dataclasses.replace(self, hosts=tuple(dataclasses.replace(h, device=device) for h in self.hosts))

    def logical_mesh(self, shape: Sequence[int], axis_names: Sequence[str] | None = None) -> LogicalMesh:
        """All devices in a grid of `shape`, row-major, the last axis fastest, each axis with its prices.

        Names default to x, y, z in order. Raises ClusterError when `shape` does not hold every device exactly once.
        """
        return build_logical_mesh(self.hosts, shape, axis_names, fabric_oversubscription=self.fabric_oversubscription)

    def logical_shapes(self, max_axes: int = 3) -> tuple[tuple[int, ...], ...]:
        """Every shape of 1 to `max_axes` axes for all devices, by number of axes, then ascending.

        No axis has size 1, except in (n,) itself, so that a cluster of one device has the shape (1,).
        """
        check_count("Cluster", "logical_shapes(max_axes)", max_axes)
        n = self.num_devices
        shapes: list[tuple[int, ...]] = [(n,)]
        for count in range(2, max_axes + 1):
            shapes.extend(_factorisations(n, count))
        return tuple(shapes)

    def fingerprint(self) -> str:
        """16 hexadecimal digits that are equal for equal hardware in every process and release of Python.

        The name is left out: two descriptions of the same machines are the same cluster.
        """
        content = dataclasses.asdict(self)
        del content["name"]
        # 8 and 8.0 are the same bandwidth; JSON would print them differently.
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        numbers = json.dumps(json.loads(text, parse_int=float), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(numbers.encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """This cluster as TOML text that `load_cluster` reads back to an equal cluster."""
        from .toml_format import cluster_to_toml

        return cluster_to_toml(self)


def _factorisations(n: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered ways to write n as `count` factors >= 2, ascending."""
    if count == 1:
        if n >= 2:
            yield (n,)
        return
    for first in range(2, n // 2 + 1):
        if n % first == 0:
            for rest in _factorisations(n // first, count - 1):
                yield (first, *rest)
