"""A cluster: hosts in the order their devices are numbered, and what joins them.

The fabric between hosts is a fat tree of two levels: hosts under one leaf switch reach each other with all their NICs,
and leaves have an uplink that is narrower by the oversubscription. Devices of several kinds may be in one cluster;
whoever treats it as if it had one kind gets a device as slow, and as small, as the least of each (`Cluster.device`).

Cost: everything here is linear in the number of devices, except `logical_shapes`, which is small for the sizes clusters
come in. Known limit: a third level of switches is part of the uplinks' oversubscription.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from .errors import ClusterError, check_count, check_number, check_text, check_type
from .hardware import Device, Host, slowest_device
from .logical_mesh import LogicalMesh, build_logical_mesh
from .measured_on import MeasuredOn

# Fields of links and devices that came later: where they say nothing, a fingerprint is what it was without them.
_LATER = frozenset({"sum_bandwidth_bytes_per_second", "vector_flops"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`hosts` joined by a fabric of leaf switches, `fabric_hosts_per_leaf` hosts under each.

    What leaves a leaf under full load has 1/`fabric_oversubscription` of the bandwidth of its hosts' NICs; one host for
    each leaf, the default, makes this the bandwidth between any two hosts.

    `measured_on` says which devices a calibration found the numbers on; None if they are published ones.

    Raises ClusterError for no hosts, several hosts of which one has no NIC, an oversubscription below 1, or numbers
    measured on another platform than the devices'.

    >>> from meshwright.cluster import load_cluster
    >>> cluster = load_cluster("p3.16xlarge:2")
    >>> cluster.num_devices, cluster.logical_shapes(max_axes=2)
    (16, ((16,), (2, 8), (4, 4), (8, 2)))
    """

    name: str
    hosts: tuple[Host, ...]
    fabric_oversubscription: float = 1.0
    fabric_hosts_per_leaf: int = 1
    measured_on: MeasuredOn | None = None
    _device: Device = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        self.validate()
        object.__setattr__(self, "_device", slowest_device([host.device for host in self._distinct_hosts()]))

    def validate(self) -> None:
        """Check the cluster; construction calls it, so a Cluster at hand has passed. Raises ClusterError."""
        check_text("Cluster", "name", self.name)
        check_number("Cluster", "fabric_oversubscription", self.fabric_oversubscription, at_least=1.0)
        for host in self.hosts:
            check_type("Cluster", "hosts", host, Host)
        check_count("Cluster", "fabric_hosts_per_leaf", self.fabric_hosts_per_leaf)
        if not self.hosts:
            raise ClusterError(
                refused=f"cluster {self.name!r}", got="0 hosts", needed="at least one host", where="Cluster.hosts",
                try_="one [[host]] table, or hosts=(Host(...),)",
            )  # fmt: skip
        platforms = sorted({host.device.platform for host in self._distinct_hosts()})
        if len(platforms) > 1:
            raise ClusterError(
                refused=f"cluster {self.name!r}", got=f"devices of the platforms {' and '.join(platforms)}",
                needed="one platform: a JAX program runs on one", where="Cluster.hosts",
                try_="a cluster for each platform",
            )  # fmt: skip
        if self.measured_on is not None:
            check_type("Cluster", "measured_on", self.measured_on, MeasuredOn)
            described = self.num_devices, [*self.devices_of_kind], platforms
            measured = self.measured_on.devices, [self.measured_on.device_kind], [self.measured_on.platform]
            if described != measured:
                raise ClusterError(
                    refused=f"cluster {self.name!r}", got=f"numbers measured on {self.measured_on}",
                    needed=f"a calibration of what is described, {self.num_devices} x {self.device_kinds}",
                    where="Cluster.measured_on",
                    try_="calibrating those devices, or leaving measured_on out if the description was changed by hand",
                )  # fmt: skip
        alone = [number for number, host in enumerate(self.hosts) if host.nics == 0]
        if alone and len(self.hosts) > 1:
            raise ClusterError(
                refused=f"cluster {self.name!r}",
                got=f"{len(self.hosts)} hosts, of which host {alone[0]} has no NIC",
                needed="a way between all hosts",
                where="Cluster.hosts",
                try_=f"NICs for host {alone[0]}, or each host as a cluster of its own",
            )

    def _distinct_hosts(self) -> list[Host]:
        """One of each object: a cluster has thousands of hosts that are a few objects."""
        return list({id(host): host for host in self.hosts}.values())

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
    def devices_of_kind(self) -> dict[str, int]:
        """How many devices of each kind there are, in the order in which kinds are first met."""
        found: dict[str, int] = {}
        for host in self.hosts:
            found[host.device.kind] = found.get(host.device.kind, 0) + host.devices
        return found

    @property
    def device_kinds(self) -> str:
        """The kinds of its devices in words, in the order in which they are first met."""
        return " + ".join(self.devices_of_kind)

    @property
    def device(self) -> Device:
        """The device that every host holds; in a mixed cluster one that has the least of each, so what it can do all
        can."""
        return self._device

    def device_at(self, position: int) -> Device:
        """The device at a position in the cluster. Raises ClusterError if there is none."""
        (host,) = self.hosts_of([position])
        return self.hosts[host].device

    def with_memory_limit(self, limit_bytes: float) -> Cluster:
        """This cluster with at most `limit_bytes` usable on each device. Raises ClusterError for a limit <= 0."""
        check_number("Cluster", "with_memory_limit(limit_bytes)", limit_bytes, above=True)

        def limited(host: Host) -> Host:
            usable = min(float(limit_bytes), host.device.usable_memory_bytes)
            device = dataclasses.replace(host.device, memory_bytes=usable, usable_memory_fraction=1.0)
            return dataclasses.replace(host, device=device)

        known = {id(host): limited(host) for host in self._distinct_hosts()}
        return dataclasses.replace(self, hosts=tuple(known[id(host)] for host in self.hosts))

    def logical_mesh(self, shape: Sequence[int], axis_names: Sequence[str] | None = None) -> LogicalMesh:
        """All devices in a grid of `shape`, row-major, the last axis fastest, each axis with its prices.

        Names default to x, y, z in order. Raises ClusterError when `shape` does not hold every device exactly once.
        """
        return build_logical_mesh(
            self.hosts, shape, axis_names, fabric_oversubscription=self.fabric_oversubscription,
            fabric_hosts_per_leaf=self.fabric_hosts_per_leaf,
        )  # fmt: skip

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

        The name is left out, where the numbers are from, and what memory a program is given of a device: two
        descriptions of the same machines are the same cluster, and predicted times hold on it.
        """
        described = {id(host): dataclasses.asdict(host) for host in self._distinct_hosts()}
        content = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init}
        content = {**content, "hosts": [described[id(host)] for host in self.hosts]}
        del content["name"], content["measured_on"]
        for host in described.values():
            for name in ("clock_hertz", "memory_bytes", "usable_memory_fraction"):  # no time depends on these
                del host["device"][name]
            for part in (host["link"], host["nic"], host["device"]):
                for later in _LATER & part.keys():
                    if not part[later]:
                        del part[later]
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
