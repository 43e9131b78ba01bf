"""Logical meshes: the devices of a cluster in a grid, with a price for talking along each axis.

**Order.** Devices are numbered host by host; a logical mesh lists them row-major, so the last axis is the fastest. An
axis of size n cuts the devices into groups of n: one group for each position on the other axes, all talking at once.
Which links an axis crosses follows from this order alone: the shape (2, 8) on two hosts of 8 has its first axis on the
NICs and its second inside the hosts, the shape (8, 2) has four pairs of the first axis in a host and the other four in
the other. All orders of the sizes are among `Cluster.logical_shapes`, so a search that looks at all of them has seen
every mapping that whole axes can have.

**Ring bandwidth.** A group whose members share a host uses only what joins them there: the link, the wires between
them (`wires`), or the links of their torus (`torus`). A group that crosses hosts visits its hosts one after the other
(its members ascend in device number), so a ring over it leaves each of its hosts exactly once, whatever number of
members it has there. If c groups of the axis cross at a host, each leaves it with

    nics * nic_bandwidth / c

bytes/s, and is also held to the host's link where the ring has a hop inside the host. Likewise each of the c groups
that cross at a leaf switch leaves it with 1/c of what the fabric gives its hosts together, their NICs' bandwidth
divided by the oversubscription. The axis has the bandwidth of its worst host. Example, 2 hosts of 8 devices and one NIC
of bandwidth w: shape (2, 8), axis 0: 8 groups cross, w/8 each; shape (8, 2), axis 0: 2 groups of 4+4 devices cross,
w/2 each; shape (16,): one group crosses with all of w. With a NIC for each device these are the rails: a group that has
one device in each host keeps to the NIC of that device.

**Exchange bandwidth.** An all-to-all does not leave a host once but sends from each member to each: with m of a
group's n members on a host, m*(n-m)/n times the local buffer leaves it, summed over the groups of the host. The
exchange bandwidth b is that load stated per device, so that (n-1)/n * bytes / b is the time. With one member per host
it equals the ring bandwidth; for (16,) above it is w * 15/64.

**Latency** is the mean over the n hops of a group's ring (a chunk travels through all of them), of the worst group.

Cost: linear in the number of devices, for each axis. Known limits: traffic of different axes at the same time is not
modelled, nor that a fabric may give two flows the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from .axis import Axis, Level
from .errors import ClusterError, check_count, near_names
from .hardware import Host, Link, slowest_link
from .torus import axis_parts
from .wires import ring_wires

_DEFAULT_NAMES = ("x", "y", "z")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMesh:
    """Devices in a grid: `axes` in order, row-major over the devices, the last axis fastest.

    Raises ClusterError for no axes or a name used twice.

    >>> from meshwright.cluster import load_cluster
    >>> mesh = load_cluster("p3.16xlarge:2").logical_mesh((2, 8))
    >>> mesh.axis_names, mesh.shape, mesh.num_devices
    (('x', 'y'), (2, 8), 16)
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if not self.axes or len(set(self.axis_names)) != len(self.axes):
            raise ClusterError(
                refused="a logical mesh",
                got=f"axes {self.axis_names}",
                needed="at least one axis, each with its own name",
                where="LogicalMesh.axes",
                try_=f"the default names {_DEFAULT_NAMES}",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Name of each axis."""
        return tuple(axis.name for axis in self.axes)

    @property
    def num_devices(self) -> int:
        """Number of devices in the grid."""
        return prod(self.shape)

    def axis(self, name: str) -> Axis:
        """The axis called `name`. Raises ClusterError if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ClusterError(
            refused=f"axis {name!r}",
            got=f"a logical mesh with axes {self.axis_names}",
            needed="the name of one of them",
            where="LogicalMesh.axis",
            try_=near_names(name, self.axis_names),
        )


def build_logical_mesh(
    hosts: Sequence[Host],
    shape: Sequence[int],
    axis_names: Sequence[str] | None,
    *,
    fabric_oversubscription: float,
    fabric_hosts_per_leaf: int,
) -> LogicalMesh:
    """The logical mesh of `shape` over all devices of `hosts`; see the module for the prices.

    Raises ClusterError when the sizes do not multiply to the number of devices or the names do not match the shape.
    """
    shape = tuple(shape)
    for size in shape:
        check_count("LogicalMesh", "shape", size)
    num_devices = sum(host.devices for host in hosts)
    if prod(shape) != num_devices or not shape:
        raise ClusterError(
            refused=f"logical mesh {shape}",
            got=f"{prod(shape) if shape else 0} positions",
            needed=f"sizes that multiply to the cluster's {num_devices} devices",
            where="Cluster.logical_mesh(shape)",
            try_="one of Cluster.logical_shapes()",
        )
    if axis_names is None and len(shape) <= len(_DEFAULT_NAMES):
        axis_names = _DEFAULT_NAMES[: len(shape)]
    if axis_names is None or len(axis_names) != len(shape):
        raise ClusterError(
            refused=f"logical mesh {shape}",
            got=f"axis names {axis_names}",
            needed=f"{len(shape)} names, one for each size",
            where="Cluster.logical_mesh(axis_names)",
            try_=f"axis_names={tuple(f'axis{i}' for i in range(len(shape)))}",
        )
    places = _Places(hosts, fabric_oversubscription, fabric_hosts_per_leaf)
    numbers = np.arange(num_devices).reshape(shape)
    axes = []
    for position, (name, size) in enumerate(zip(axis_names, shape, strict=True)):
        groups = np.moveaxis(numbers, position, -1).reshape(-1, size)
        axes.append(places.axis(name, groups, stride=prod(shape[position + 1 :])))
    return LogicalMesh(axes=tuple(axes))


class _Places:
    """Where the devices of a cluster are, and what leaves each place."""

    def __init__(self, hosts: Sequence[Host], oversubscription: float, hosts_per_leaf: int) -> None:
        self.hosts = hosts
        counts = [host.devices for host in hosts]
        # Equal hosts are one kind; a cluster has a few kinds and thousands of hosts.
        kinds: dict[Host, int] = {}
        distinct = {
            id(host): kinds.setdefault(host, len(kinds)) for host in {id(host): host for host in hosts}.values()
        }
        self.kind_of_host = np.array([distinct[id(host)] for host in hosts])
        self.kinds = list(kinds)
        self.host_of = np.repeat(np.arange(len(hosts)), counts)
        self.place_of = np.concatenate([np.arange(count) for count in counts])
        # A leaf of one host is that host, and the fabric between leaves is what is between hosts: one level.
        self.leaf_of_host = np.arange(len(hosts)) // (hosts_per_leaf if hosts_per_leaf > 1 else len(hosts))
        self.leaf_of = self.leaf_of_host[self.host_of]
        self.nic_latency = self._by_host([kind.nic.latency_seconds for kind in self.kinds])
        self.link_latency = self._by_host([kind.link.latency_seconds for kind in self.kinds])
        leaving = self._by_host([kind.nic_bandwidth_bytes_per_second for kind in self.kinds])
        self.out_of_host = leaving / oversubscription if hosts_per_leaf == 1 else leaving
        self.out_of_leaf = np.bincount(self.leaf_of_host, weights=leaving) / oversubscription

    def _by_host(self, by_kind: Sequence[float]) -> np.ndarray:
        return np.array(by_kind, dtype=float)[self.kind_of_host]

    def axis(self, name: str, groups: np.ndarray, *, stride: int) -> Axis:
        """The axis whose groups are the rows of `groups` [number of groups, axis size]: devices, ascending."""
        size = groups.shape[1]
        hosts, leaves = self.host_of[groups], self.leaf_of[groups]
        crosses_host, crosses_leaf = hosts[:, 0] != hosts[:, -1], leaves[:, 0] != leaves[:, -1]
        levels, exchange = [], 0.0
        group, host, members = _members(hosts)
        if members.max() > 1 or not crosses_host.any():
            inside, exchange = self._inside(groups, group, host, members, stride)
            levels.append(inside)
        if crosses_host.any():
            used = self.kinds_of(np.unique(hosts[crosses_host]))
            nic = slowest_link([kind.nic for kind in used])
            count = _most_units_in(hosts, leaves)
            out, more = _leaving(group, host, members, crosses_host, self.out_of_host, size, nic)
            exchange = max(exchange, more)
            if count > 1:
                levels.append(Level(kind="host", size=count, link=nic, bandwidth_bytes_per_second=out))
            if crosses_leaf.any():
                up, more = _leaving(*_members(leaves), crosses_leaf, self.out_of_leaf, size, nic)
                exchange, count = max(exchange, more), _most_units_in(leaves, np.zeros_like(leaves))
                levels.append(Level(kind="leaf", size=count, link=nic, bandwidth_bytes_per_second=min(out, up)))
        ring = min(level.bandwidth_bytes_per_second for level in levels)
        reached = (size - 1) / size / exchange if exchange else ring
        return Axis(
            name=name,
            size=size,
            latency_seconds=self._mean_hop_seconds(hosts),
            bandwidth_bytes_per_second=ring,
            launch_seconds=max(level.link.launch_seconds for level in levels),
            exchange_bandwidth_bytes_per_second=reached if levels[0].torus_exchange_seconds else min(reached, ring),
            levels=tuple(levels),
        )

    def kinds_of(self, hosts: np.ndarray) -> list[Host]:
        """The different hosts among some, by their numbers."""
        return [self.kinds[kind] for kind in np.unique(self.kind_of_host[hosts])]

    def _inside(
        self, groups: np.ndarray, group: np.ndarray, host: np.ndarray, members: np.ndarray, stride: int
    ) -> tuple[Level, float]:
        """The level inside hosts, and seconds of its part of an exchange for each byte of the local buffer."""
        size, most = groups.shape[1], int(members.max())
        ways = []
        for kind in self.kinds_of(np.unique(host[members > 1] if most > 1 else host)):
            here = self.kind_of_host[host] == self.kinds.index(kind)
            count, link = int(members[here].max()), kind.link
            if kind.torus:
                ways.append(_torus_level(kind, stride, count))
                continue
            wires = 1.0
            if kind.wires and count > 1:
                sets = {
                    tuple(self.place_of[row[self.host_of[row] == h]])
                    for row, h in zip(groups[group[here]], host[here], strict=True)
                }
                wires = min(ring_wires(kind.wires, tuple(map(int, one))) for one in sorted(sets) if len(one) > 1)
            bandwidth = wires * link.bandwidth_bytes_per_second
            ways.append(
                Level(
                    kind="device",
                    size=count,
                    link=link,
                    bandwidth_bytes_per_second=bandwidth,
                    own_links=bool(kind.wires),
                )
            )
        link = slowest_link([way.link for way in ways])
        slowest = min(ways, key=lambda way: way.bandwidth_bytes_per_second)
        # Told apart only where it counts, so that like axes of different submeshes are one.
        beside = int(np.bincount(self.host_of).max()) if link.sum_bandwidth_bytes_per_second else most
        level = Level(
            kind="device", size=most, link=link, bandwidth_bytes_per_second=slowest.bandwidth_bytes_per_second,
            steps=max(way.steps for way in ways), torus_exchange_seconds=slowest.torus_exchange_seconds,
            own_links=slowest.own_links, beside=beside,
        )  # fmt: skip
        if level.torus_exchange_seconds is not None:
            return level, level.torus_exchange_seconds * most / size
        return level, (most - 1) / size / (level.bandwidth_bytes_per_second * link.exchange_efficiency)

    def _mean_hop_seconds(self, hosts: np.ndarray) -> float:
        """Mean latency of the hops of a ring, of the worst group; a hop between hosts has the sender's NIC."""
        same = hosts == np.roll(hosts, -1, axis=1)
        return float(np.where(same, self.link_latency[hosts], self.nic_latency[hosts]).mean(axis=1).max())


def _members(units: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every group and unit (host or leaf) that it has devices in: the group, the unit, how many devices."""
    most = int(units.max()) + 1
    keys, counts = np.unique(np.arange(len(units))[:, None] * most + units, return_counts=True)
    return keys // most, keys % most, counts


def _most_units_in(units: np.ndarray, outer: np.ndarray) -> int:
    """Most units that a group has inside one outer unit."""
    most = int(units.max()) + 1
    pairs = np.unique(np.arange(len(units))[:, None] * most + units)
    group, unit = pairs // most, pairs % most
    outer_of = np.zeros(most, dtype=int)
    outer_of[units.ravel()] = outer.ravel()
    return int(np.unique(group * (int(outer.max()) + 1) + outer_of[unit], return_counts=True)[1].max())


def _leaving(
    group: np.ndarray, unit: np.ndarray, members: np.ndarray, crosses: np.ndarray, out: np.ndarray, size: int, nic: Link
) -> tuple[float, float]:
    """Bytes/s with which each group leaves the worst unit, and an exchange's seconds for each byte of the buffer."""
    counted = crosses[group]
    unit, members = unit[counted], members[counted]
    flows = np.bincount(unit, minlength=len(out))
    load = np.bincount(unit, weights=members * (size - members) / size, minlength=len(out))
    used = flows > 0
    bandwidth = float((out[used] / flows[used]).min())
    return bandwidth, float((load[used] / out[used]).max()) / nic.exchange_efficiency


def _torus_level(host: Host, stride: int, count: int) -> Level:
    parts = axis_parts(host.torus, host.torus_wraps, stride, count) if count > 1 else ()
    bandwidth = host.link.bandwidth_bytes_per_second
    if parts is None:  # it lies askew in the torus: one link, by the longest way
        links, steps, exchange = 1 / stride, stride * (count - 1), count * stride / 4
    else:
        links, steps = sum(part.links for part in parts) or 1.0, sum(part.steps for part in parts)
        exchange = max((part.exchange_seconds for part in parts), default=0.0)
    return Level(
        kind="device", size=count, link=host.link, bandwidth_bytes_per_second=links * bandwidth, steps=steps,
        torus_exchange_seconds=exchange / (bandwidth * host.link.exchange_efficiency), own_links=True,
    )  # fmt: skip
