"""Prices of logical axes: cases worked out by hand, and a count of every byte on every host's NICs."""

import dataclasses
import itertools
import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from meshwright.cluster import Axis, Cluster, ClusterError, Device, Host, Link, LogicalMesh, load_cluster

DEVICE = Device(
    kind="toy",
    peak_flops={"float32": 1e12},
    memory_bytes=1e9,
    memory_bandwidth_bytes_per_second=1e11,
    efficiency=1.0,
    kernel_launch_seconds=0.0,
    usable_memory_fraction=1.0,
)


def cluster_of(*devices: int, nics: int = 1, oversubscription: float = 1.0, per_leaf: int = 1) -> Cluster:
    """Hosts with the given numbers of devices; link 100 bytes/s and 1 s a hop, each NIC 16 bytes/s and 9 s a hop."""
    link = Link(bandwidth_bytes_per_second=100.0, latency_seconds=1.0, launch_seconds=5.0)
    nic = Link(bandwidth_bytes_per_second=16.0, latency_seconds=9.0, launch_seconds=7.0)
    hosts = tuple(Host(device=DEVICE, devices=count, link=link, nics=nics, nic=nic) for count in devices)
    return Cluster(name="toy", hosts=hosts, fabric_oversubscription=oversubscription, fabric_hosts_per_leaf=per_leaf)


def test_two_hosts_with_one_nic_by_hand():
    cluster = load_cluster("p3.16xlarge:2")
    host = dataclasses.replace(cluster.hosts[0], wires=())
    cluster = dataclasses.replace(cluster, hosts=(host, host))
    link, nic = cluster.hosts[0].link, cluster.hosts[0].nic

    across, inside = cluster.logical_mesh((2, 8)).axes  # 8 groups of one device a host share the one NIC
    assert across.bandwidth_bytes_per_second == nic.bandwidth_bytes_per_second / 8
    assert across.latency_seconds == nic.latency_seconds
    assert inside.bandwidth_bytes_per_second == link.bandwidth_bytes_per_second
    assert inside.latency_seconds == link.latency_seconds

    across, inside = cluster.logical_mesh((8, 2)).axes  # 2 groups of 4 + 4 devices, each leaves a host once
    assert across.bandwidth_bytes_per_second == nic.bandwidth_bytes_per_second / 2
    assert across.latency_seconds == pytest.approx((6 * link.latency_seconds + 2 * nic.latency_seconds) / 8)
    assert inside.bandwidth_bytes_per_second == link.bandwidth_bytes_per_second

    (flat,) = cluster.logical_mesh((16,)).axes  # one ring through both hosts has the NIC for itself
    assert flat.bandwidth_bytes_per_second == nic.bandwidth_bytes_per_second
    assert flat.latency_seconds == pytest.approx((14 * link.latency_seconds + 2 * nic.latency_seconds) / 16)
    reached = nic.bandwidth_bytes_per_second * nic.exchange_efficiency
    assert flat.exchange_bandwidth_bytes_per_second == pytest.approx(reached * 15 / 64)


def test_more_nics_help_until_the_link_inside_the_host_is_the_slower():
    assert cluster_of(4, 4, nics=2).logical_mesh((8,)).axes[0].bandwidth_bytes_per_second == 32.0
    assert cluster_of(4, 4, nics=16).logical_mesh((8,)).axes[0].bandwidth_bytes_per_second == 100.0
    # With one device a host no byte takes the link inside.
    (alone,) = cluster_of(1, 1, 1, nics=16).logical_mesh((3,)).axes
    assert alone.bandwidth_bytes_per_second == 256.0
    assert alone.launch_seconds == 7.0


def test_oversubscription_divides_what_leaves_a_host_and_nothing_else():
    across, inside = cluster_of(4, 4, oversubscription=4.0).logical_mesh((2, 4)).axes
    assert across.bandwidth_bytes_per_second == 16.0 / 4 / 4
    assert inside.bandwidth_bytes_per_second == 100.0


def test_only_what_leaves_a_leaf_is_oversubscribed():
    cluster = cluster_of(4, 4, 4, 4, oversubscription=4.0, per_leaf=2)
    across, inside = cluster.logical_mesh((4, 4)).axes  # 4 groups over all hosts: 4 bytes/s each of a host's NIC
    assert [level.kind for level in across.levels] == ["host", "leaf"]
    assert across.levels[0].bandwidth_bytes_per_second == 16.0 / 4
    assert across.levels[1].bandwidth_bytes_per_second == across.bandwidth_bytes_per_second == 2 * 16.0 / 4 / 4
    assert [level.kind for level in inside.levels] == ["device"]
    leaves, leaf, _ = cluster.logical_mesh((2, 2, 4)).axes
    assert leaf.bandwidth_bytes_per_second == 16.0 / 4  # inside a leaf nothing is oversubscribed
    # 4 groups of one device in each leaf, from each of its two hosts: 8 flows share 8 bytes/s.
    assert leaves.bandwidth_bytes_per_second == 2 * 16.0 / 4 / 8
    assert [(level.kind, level.size) for level in leaves.levels] == [("leaf", 2)]
    (flat,) = cluster.logical_mesh((16,)).axes  # one ring leaves each leaf once
    assert flat.bandwidth_bytes_per_second == 2 * 16.0 / 4
    assert [level.size for level in flat.levels] == [4, 2, 2]


def test_levels_say_what_a_group_has_at_each_place():
    levels = {}
    for shape in ((16,), (2, 8), (8, 2), (4, 4)):
        for axis in cluster_of(8, 8).logical_mesh(shape).axes:
            levels[shape, axis.name] = [(level.kind, level.size) for level in axis.levels]
    assert levels == {
        ((16,), "x"): [("device", 8), ("host", 2)],
        ((2, 8), "x"): [("host", 2)],
        ((2, 8), "y"): [("device", 8)],
        ((8, 2), "x"): [("device", 4), ("host", 2)],
        ((8, 2), "y"): [("device", 2)],
        ((4, 4), "x"): [("device", 2), ("host", 2)],
        ((4, 4), "y"): [("device", 4)],
    }


def test_hosts_of_several_kinds_have_the_worst_of_each():
    cluster = load_cluster("p4d.24xlarge+p3.16xlarge")
    a100, v100 = (host for host in cluster.hosts)
    across, inside = cluster.logical_mesh((2, 8)).axes
    assert across.bandwidth_bytes_per_second == v100.nic.bandwidth_bytes_per_second / 8
    assert across.levels[0].link.latency_seconds == max(a100.nic.latency_seconds, v100.nic.latency_seconds)
    assert inside.bandwidth_bytes_per_second == pytest.approx(6 * v100.link.bandwidth_bytes_per_second)


def test_launch_is_that_of_the_links_an_axis_uses():
    across, inside = cluster_of(4, 4).logical_mesh((2, 4)).axes
    assert (across.launch_seconds, inside.launch_seconds) == (7.0, 5.0)


def test_an_axis_of_which_only_some_groups_cross_has_the_price_of_those():
    # Hosts of 6 devices, groups 0-3, 4-7, 8-11: only the middle one crosses.
    axis = cluster_of(6, 6).logical_mesh((3, 4)).axis("y")
    assert axis.bandwidth_bytes_per_second == 16.0
    assert axis.latency_seconds == (2 * 1.0 + 2 * 9.0) / 4


CASES = [
    (cluster_of(8, 8), shape) for shape in ((16,), (2, 8), (8, 2), (4, 4), (2, 2, 4), (4, 2, 2), (1, 16), (16, 1))
] + [
    (cluster_of(4, 4, 4), (12,)),
    (cluster_of(4, 4, 4), (6, 2)),
    (cluster_of(6, 6), (4, 3)),
    (cluster_of(6, 6), (3, 4)),
    (cluster_of(2, 4, 6), (3, 4)),
    (cluster_of(2, 4, 6), (2, 6)),
    (cluster_of(3, 5, nics=3, oversubscription=2.0), (2, 4)),
    (cluster_of(8), (2, 4)),
    (cluster_of(4, 4, 4, 4, oversubscription=4.0, per_leaf=2), (16,)),
    (cluster_of(4, 4, 4, 4, oversubscription=4.0, per_leaf=2), (4, 4)),
    (cluster_of(4, 4, 4, 4, oversubscription=3.0, per_leaf=2), (2, 8)),
    (cluster_of(4, 4, 4, 4, 4, 4, oversubscription=2.0, per_leaf=4), (3, 8)),
    (cluster_of(2, 4, 6, 4, oversubscription=2.0, per_leaf=3), (4, 4)),
]


def groups_of(cluster: Cluster, shape: tuple[int, ...], position: int) -> list[list[int]]:
    """Host numbers of the members of every group of axis `position`, listed from coordinates."""
    host_of = [number for number, host in enumerate(cluster.hosts) for _ in range(host.devices)]
    others = [range(size) for at, size in enumerate(shape) if at != position]
    groups = []
    for rest in itertools.product(*others):
        coordinates = [(*rest[:position], here, *rest[position:]) for here in range(shape[position])]
        groups.append([host_of[int(np.ravel_multi_index(where, shape))] for where in coordinates])
    return groups


@pytest.mark.parametrize(("cluster", "shape"), CASES, ids=[f"{len(c.hosts)}hosts{s}" for c, s in CASES])
def test_bandwidths_against_a_count_of_every_message(cluster, shape):
    """Time for one byte on every hop of every ring, and for one byte from each device to each: slowest host or link."""
    for position, axis in enumerate(cluster.logical_mesh(shape).axes):
        groups = groups_of(cluster, shape, position)
        ring_out, exchange_out = np.zeros(len(cluster.hosts)), np.zeros(len(cluster.hosts))
        per_leaf = cluster.fabric_hosts_per_leaf
        ring_up, exchange_up = np.zeros(len(cluster.hosts)), np.zeros(len(cluster.hosts))  # by leaf
        ring_inside = exchange_inside = 0.0
        for group in groups:
            n = len(group)
            for i in range(n):
                hop = group[(i + 1) % n]
                if hop == group[i]:
                    ring_inside = max(ring_inside, 1 / 100.0)
                else:
                    ring_out[group[i]] += 1.0
                mates = sum(group[j] == group[i] for j in range(n)) - 1
                exchange_inside = max(exchange_inside, mates / 100.0)
                exchange_out[group[i]] += n - 1 - mates
                leaf = group[i] // per_leaf
                ring_up[leaf] += hop // per_leaf != leaf
                exchange_up[leaf] += sum(other // per_leaf != leaf for other in group)
        out = np.array([h.nic_bandwidth_bytes_per_second for h in cluster.hosts])
        up = np.array([out[i * per_leaf : (i + 1) * per_leaf].sum() for i in range(len(out))])
        up = np.where(up > 0, up, 1.0) / cluster.fabric_oversubscription
        ring_seconds = max(ring_inside, (ring_out / out).max(), (ring_up / up).max())
        assert 1.0 / axis.bandwidth_bytes_per_second == pytest.approx(ring_seconds)
        if axis.size > 1:
            exchange_seconds = max(exchange_inside, (exchange_out / out).max(), (exchange_up / up).max())
            # A ring's share bounds an exchange too: nothing is sent faster than one neighbour can be reached.
            bound = max(exchange_seconds, (axis.size - 1) * ring_seconds)
            assert (axis.size - 1) / axis.exchange_bandwidth_bytes_per_second == pytest.approx(bound)


def test_default_and_given_axis_names():
    cluster = cluster_of(4, 4)
    assert [cluster.logical_mesh(s).axis_names for s in ((8,), (2, 4), (2, 2, 2))] == [
        ("x",),
        ("x", "y"),
        ("x", "y", "z"),
    ]
    mesh = cluster.logical_mesh((2, 4), ("data", "model"))
    assert mesh.axis("model").size == 4
    assert mesh.num_devices == 8
    with pytest.raises(ClusterError, match="did you mean 'model'"):
        mesh.axis("modle")


@pytest.mark.parametrize(
    ("shape", "names", "needed"),
    [
        ((3, 4), None, "multiply to the cluster's 8 devices"),
        ((), None, "multiply to the cluster's 8 devices"),
        ((0, 8), None, "a whole number >= 1"),
        ((2, 4.0), None, "a whole number >= 1"),
        ((2, 4), ("x",), "2 names, one for each size"),
        ((1, 2, 2, 2), None, "4 names, one for each size"),
        ((2, 4), ("x", "x"), "each with its own name"),
    ],
)
def test_refuses_shapes_and_names(shape, names, needed):
    with pytest.raises(ClusterError, match=needed):
        cluster_of(4, 4).logical_mesh(shape, names)


def test_logical_shapes_are_all_ordered_factorisations():
    for total in (1, 2, 7, 12, 16, 24):
        cluster = cluster_of(*[1] * total)
        expected = [(total,)]
        for count in (2, 3):
            grid = itertools.product(range(2, total + 1), repeat=count)
            expected += [shape for shape in grid if math.prod(shape) == total]
        assert list(cluster.logical_shapes()) == expected
        assert cluster.logical_shapes(max_axes=1) == ((total,),)


def test_axes_of_other_processes_are_found_in_tables():
    """A hash is kept with an axis, and those of texts differ between processes."""
    code = (
        "import pickle, sys; from meshwright.cluster import load_cluster; "
        "sys.stdout.buffer.write(pickle.dumps(load_cluster('p4d.24xlarge').logical_mesh((2, 4))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, check=True
    )
    here, there = load_cluster("p4d.24xlarge").logical_mesh((2, 4)), pickle.loads(run.stdout)
    assert there == here
    assert {axis: axis.name for axis in here.axes}[there.axes[1]] == "y"


def test_axis_checks_and_empty_mesh():
    axis = Axis(name="x", size=2, latency_seconds=1.0, bandwidth_bytes_per_second=1.0, launch_seconds=0.0)
    for change in ({"size": 0}, {"bandwidth_bytes_per_second": 0.0}, {"exchange_bandwidth_bytes_per_second": -1.0}):
        with pytest.raises(ClusterError):
            dataclasses.replace(axis, **change)
    with pytest.raises(ClusterError, match="at least one axis"):
        LogicalMesh(axes=())
