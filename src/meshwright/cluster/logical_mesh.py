"""Logical meshes: the devices of a cluster in a grid, with a price for talking along each axis.

**Order.** Devices are numbered host by host; a logical mesh lists them row-major, so the last axis is the fastest. An
axis of size n cuts the devices into groups of n: one group for each position on the other axes, all talking at once.

**Ring bandwidth.** A group whose members share a host uses only the host's link. A group that crosses hosts visits its
hosts one after the other (its members ascend in device number), so a ring over it leaves each of its hosts exactly
once, whatever number of members it has there. If c groups of the axis cross at a host, each leaves it with

    nics * nic_bandwidth / oversubscription / c

bytes/s, and is also held to the host's link where the ring has a hop inside the host. The axis has the bandwidth of its
worst host. Example, 2 hosts of 8 devices and one NIC of bandwidth w: shape (2, 8), axis 0: 8 groups cross, w/8 each;
shape (8, 2), axis 0: 2 groups of 4+4 devices cross, w/2 each; shape (16,): one group crosses with all of w.

**Exchange bandwidth.** An all-to-all does not leave a host once but sends from each member to each: with m of a
group's n members on a host, m*(n-m)/n times the local buffer leaves it, summed over the groups of the host. The
exchange bandwidth b is that load stated per device, so that (n-1)/n * bytes / b is the time. With one member per host
it equals the ring bandwidth; for (16,) above it is w * 15/64.

**Latency** is the mean over the n hops of a group's ring (a chunk travels through all of them), of the worst group.

Known limits: traffic of different axes at the same time is not modelled, nor the place of a host in the fabric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from .errors import ClusterError, check_count, check_number, check_text, near_names

if TYPE_CHECKING:
    from .hardware import Host

_DEFAULT_NAMES = ("x", "y", "z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a logical mesh, with what a collective along it costs.

    `latency_seconds`: one hop of a ring over a group. `bandwidth_bytes_per_second`: of that ring, per group, while all
    groups of the axis talk. `launch_seconds`: fixed cost of one collective.
    `exchange_bandwidth_bytes_per_second`: per device in an all-to-all (see the module); None means the ring's.

    >>> Axis(name="x", size=2, latency_seconds=1e-6, bandwidth_bytes_per_second=1e9, launch_seconds=5e-6).size
    2
    """

    name: str
    size: int
    latency_seconds: float
    bandwidth_bytes_per_second: float
    launch_seconds: float
    exchange_bandwidth_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        check_text("Axis", "name", self.name)
        check_count("Axis", "size", self.size)
        check_number("Axis", "latency_seconds", self.latency_seconds)
        check_number("Axis", "bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, above=True)
        check_number("Axis", "launch_seconds", self.launch_seconds)
        if self.exchange_bandwidth_bytes_per_second is not None:
            check_number(
                "Axis", "exchange_bandwidth_bytes_per_second", self.exchange_bandwidth_bytes_per_second, above=True
            )


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
    hosts: Sequence[Host], shape: Sequence[int], axis_names: Sequence[str] | None, *, fabric_oversubscription: float
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
    host_of_device = np.repeat(np.arange(len(hosts)), [host.devices for host in hosts]).reshape(shape)
    axes = []
    for position, (name, size) in enumerate(zip(axis_names, shape, strict=True)):
        groups = np.moveaxis(host_of_device, position, -1).reshape(-1, size)
        axes.append(_price_axis(name, groups, hosts, fabric_oversubscription))
    return LogicalMesh(axes=tuple(axes))


def _price_axis(name: str, groups: np.ndarray, hosts: Sequence[Host], oversubscription: float) -> Axis:
    """The axis whose groups are the rows of `groups` [number of groups, axis size], each entry a host number."""
    size = groups.shape[1]
    crosses = groups[:, 0] != groups[:, -1]  # a row ascends, so its ends tell
    ring_bandwidth, exchange_bandwidth, launch = np.inf, np.inf, 0.0
    for number in np.unique(groups):
        host = hosts[number]
        members = (groups == number).sum(axis=1)  # [number of groups]: devices of this host in each group
        if members.max() > 1 or not crosses.any():
            ring_bandwidth = min(ring_bandwidth, host.link.bandwidth_bytes_per_second)
            launch = max(launch, host.link.launch_seconds)
            reached = host.link.bandwidth_bytes_per_second * host.link.exchange_efficiency
            inside = (members.max() - 1) / size / reached
            exchange_bandwidth = min(exchange_bandwidth, _per_device(size, inside))
        leaving = crosses & (members > 0)
        if leaving.any():
            out = host.nic_bandwidth_bytes_per_second / oversubscription
            ring_bandwidth = min(ring_bandwidth, out / leaving.sum())
            launch = max(launch, host.nic.launch_seconds)
            load = (members[leaving] * (size - members[leaving])).sum() / size
            reached = out * host.nic.exchange_efficiency
            exchange_bandwidth = min(exchange_bandwidth, _per_device(size, load / reached))
    return Axis(
        name=name,
        size=size,
        latency_seconds=max(_mean_hop_seconds(row, hosts) for row in np.unique(groups, axis=0)),
        bandwidth_bytes_per_second=float(ring_bandwidth),
        launch_seconds=launch,
        exchange_bandwidth_bytes_per_second=float(min(exchange_bandwidth, ring_bandwidth)),
    )


def _per_device(size: int, seconds_per_byte: float) -> float:
    """Bandwidth b with (size-1)/size / b equal to `seconds_per_byte`, the time for each byte of the local buffer."""
    return np.inf if seconds_per_byte == 0 else (size - 1) / size / seconds_per_byte


def _mean_hop_seconds(row: np.ndarray, hosts: Sequence[Host]) -> float:
    """Mean latency of the hops of a ring over devices on the hosts `row`; a hop between hosts has the sender's NIC."""
    hops = zip(row, np.roll(row, -1), strict=True)
    return float(np.mean([(hosts[a].link if a == b else hosts[a].nic).latency_seconds for a, b in hops]))
