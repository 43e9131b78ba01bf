"""Orders of a cluster's hosts. A pipeline runs through the devices in their order; where hosts are of several kinds, it
matters which kind has the first stages (they keep the most microbatches) and which the last (they have the head)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations

from .cluster import Cluster
from .hardware import Device

# Of more kinds than this not all orders are looked at: only those by speed.
_MOST_KINDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """The same hosts in some order.

    Args:
      cluster: with its hosts in this order.
      devices: for each position in it the position in the cluster that was given.
    """

    cluster: Cluster
    devices: tuple[int, ...]


def host_orders(cluster: Cluster) -> tuple[HostOrder, ...]:
    """The orders worth a look: the one given, and those in which hosts of a kind are together.

    Of up to three kinds all orders of the kinds, of more the fastest first and the slowest first. Hosts stay under
    their leaf switches: where leaves have hosts of several kinds, there is the order given alone.

    >>> from meshwright.cluster import load_cluster
    >>> [order.devices[0] for order in host_orders(load_cluster("p3.16xlarge:1+p4d.24xlarge:1"))]
    [0, 8]
    """
    given = tuple(range(len(cluster.hosts)))
    groups = _by_device(cluster)
    found = {given: None}
    if len(groups) > 1 and _keeps_leaves(cluster, list(groups.values())):
        kinds = list(groups)
        orders: Sequence[Sequence[Device]] = list(permutations(kinds))
        if len(kinds) > _MOST_KINDS:
            by_speed = sorted(kinds, key=lambda kind: max(kind.peak_flops.values()))
            orders = [by_speed[::-1], by_speed]
        found |= {tuple(number for kind in order for number in groups[kind]): None for order in orders}
    return tuple(_in_order(cluster, hosts) for hosts in found)


def one_kind_alone(cluster: Cluster) -> tuple[Cluster, ...]:
    """Of a cluster with devices of several kinds the hosts of each kind as a cluster of their own, named for their
    devices; none of any other, or where hosts of several kinds share leaf switches.

    >>> from meshwright.cluster import load_cluster
    >>> [alone.name for alone in one_kind_alone(load_cluster("dgx-a100-80:2+dgx-h100:1"))]
    ['16 x NVIDIA A100-SXM4-80GB', '8 x NVIDIA H100 80GB HBM3']
    """
    groups = _by_device(cluster)
    if len(groups) < 2 or not _keeps_leaves(cluster, list(groups.values())):
        return ()
    found = []
    for device, group in groups.items():
        hosts = tuple(cluster.hosts[number] for number in group)
        name = f"{sum(host.devices for host in hosts)} x {device.kind}"
        found.append(dataclasses.replace(cluster, name=name, hosts=hosts))
    return tuple(found)


def devices_by_kind(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """The devices of the clusters of `one_kind_alone`, by their numbers in the whole one.

    >>> from meshwright.cluster import load_cluster
    >>> devices_by_kind(load_cluster("rtx4090-4:1+dgx-h100:1"))
    ((0, 1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11))
    """
    firsts = list(accumulate((host.devices for host in cluster.hosts), initial=0))
    groups = _by_device(cluster).values() if one_kind_alone(cluster) else ()
    return tuple(tuple(device for n in group for device in range(firsts[n], firsts[n + 1])) for group in groups)


def _by_device(cluster: Cluster) -> dict[Device, list[int]]:
    """Positions of the hosts with each kind of device, in the order in which kinds are first met."""
    groups: dict[Device, list[int]] = {}
    for number, host in enumerate(cluster.hosts):
        groups.setdefault(host.device, []).append(number)
    return groups


def _keeps_leaves(cluster: Cluster, groups: Sequence[Sequence[int]]) -> bool:
    """Whether every leaf switch has hosts of one group, so that groups can change places."""
    leaf = cluster.fabric_hosts_per_leaf
    return all(len(group) % leaf == 0 and len({n // leaf for n in group}) == len(group) // leaf for group in groups)


def _in_order(cluster: Cluster, hosts: Sequence[int]) -> HostOrder:
    starts = list(accumulate((host.devices for host in cluster.hosts), initial=0))
    return HostOrder(
        cluster=dataclasses.replace(cluster, hosts=tuple(cluster.hosts[number] for number in hosts)),
        devices=tuple(device for number in hosts for device in range(starts[number], starts[number + 1])),
    )
