"""What moves are said to take beside what plans of them take."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshwright.cluster import Cluster, load_cluster
from meshwright.resharding import Layout, Move, MoveCosts, ReshardError, cluster_network, grid_layout, plan_reshard
from meshwright.resharding.simulate import plan_fluid_seconds
from meshwright.search.inter.submeshes import Submeshes

MEBI = 2**20


def free_links(cluster: Cluster) -> Cluster:
    """The cluster with links so fast that only its network counts, as for the planner."""
    fast = [
        replace(h, link=replace(h.link, bandwidth_bytes_per_second=1e18, latency_seconds=0.0, launch_seconds=0.0))
        for h in cluster.hosts
    ]
    return replace(cluster, hosts=tuple(fast))


def some_layout(pick: random.Random, devices: Sequence[int], rank: int) -> Layout:
    size = len(devices)
    shape = pick.choice([(size,), (2, size // 2), (size // 2, 2)]) if size > 1 else (1,)
    axes = ("x", "y")[: len(shape)]
    spec: list[tuple[str, ...]] = [()] * rank
    for axis in axes:
        if pick.random() < 0.6:
            dim = pick.randrange(rank)
            spec[dim] = (*spec[dim], axis)
    return grid_layout(devices, shape, axes, spec)


@pytest.mark.parametrize("seed", range(4))
def test_the_planners_seconds(seed: int) -> None:
    """Latency and the first chunks of relays included, within what rounding the chunks does."""
    pick = random.Random(seed)
    cluster = free_links(load_cluster("p3.16xlarge:4"))
    costs, network = MoveCosts(cluster), cluster_network(cluster)
    for _ in range(10):
        first = pick.randrange(24)
        size = pick.choice([s for s in (1, 2, 4, 8, 16) if first + s <= 24])
        there = pick.choice([s for s in (1, 2, 4, 8, 16) if first + size + s <= 32])
        ends = (range(first, first + size), range(first + size, first + size + there))
        source, destination = (some_layout(pick, devices, 2) for devices in ends)
        told = costs.seconds(256 * MEBI, source, destination, rank=2)
        # Elements of 16 KiB, so that there are as many chunks as wanted.
        move = Move(name="v", shape=(256, 64), item_bytes=16 * 1024, source=source, destination=destination)
        plan = plan_reshard(network, [move])
        assert told >= plan.relay_bound_seconds
        planned = float(plan.seconds) + plan.latency_seconds
        assert told == pytest.approx(planned, rel=0.05, abs=1e-6), (source, destination)
        assert plan_fluid_seconds(plan) <= float(plan.seconds) * 1.001


@pytest.mark.parametrize("seed", range(4))
def test_several_values_take_no_more_together_than_one_after_the_other_and_no_less_than_their_plan(seed: int) -> None:
    pick = random.Random(seed)
    cluster = free_links(load_cluster("p3.16xlarge:3"))
    costs, network = MoveCosts(cluster), cluster_network(cluster)
    for _ in range(5):
        ends = (range(8), range(8, 24))
        pairs = [tuple(some_layout(pick, devices, 2) for devices in ends) for _ in range(3)]
        told = costs.seconds_together((64 * MEBI, here, there, 2) for here, there in pairs)
        moves = [
            Move(name=f"v{n}", shape=(128, 32), item_bytes=16 * 1024, source=here, destination=there)
            for n, (here, there) in enumerate(pairs)
        ]
        plan = plan_reshard(network, moves)
        assert (float(plan.seconds) + plan.latency_seconds) * 0.95 <= told
        assert told <= sum(costs.seconds(64 * MEBI, here, there, rank=2) for here, there in pairs) * (1 + 1e-9)


@pytest.mark.parametrize("cluster", ["p3.16xlarge:4", "dgx-h100:3", "p3.16xlarge:2+p4d.24xlarge:1", "tpu-v5e"])
def test_no_layouts_take_less_than_the_search_says_of_all(cluster: str) -> None:
    """Of stages on submeshes as the search has them (`Submeshes.transfer_seconds`)."""
    pick = random.Random(0)
    submeshes = Submeshes(load_cluster(cluster))
    for _ in range(200):
        source, target = pick.sample(submeshes.all, 2)
        if source.first < target.stop and target.first < source.stop:
            continue
        here, there = (some_layout(pick, range(s.first, s.stop), 2) for s in (source, target))
        told = submeshes.moves.seconds(64 * MEBI, here, there, rank=2)
        assert told >= submeshes.transfer_seconds(source, target, 64 * MEBI) * (1 - 1e-9), (source, target, here, there)


def test_links_are_charged_to_those_who_give() -> None:
    cluster = load_cluster("p3.16xlarge:1")
    link = cluster.hosts[0].link
    one, four = grid_layout([0], (1,), ("x",), []), grid_layout(range(4, 8), (4,), ("x",), [("x",)])
    start = link.launch_seconds + link.latency_seconds
    seconds = MoveCosts(cluster).seconds(MEBI, one, four, rank=1)
    assert seconds == pytest.approx(start + MEBI / link.bandwidth_bytes_per_second)


def test_links_are_charged_where_many_devices_of_a_host_want_the_same() -> None:
    cluster = load_cluster("p3.16xlarge:2")
    link = cluster.hosts[0].link
    costs = MoveCosts(cluster)
    one = grid_layout([0], (1,), ("x",), [])
    near, far = (grid_layout(range(n, n + 4), (4,), ("x",), []) for n in (4, 8))
    assert costs.seconds(0, one, near, rank=1) == 0.0
    start = link.launch_seconds + link.latency_seconds
    assert costs.seconds(MEBI, one, near, rank=1) == pytest.approx(start + MEBI / link.bandwidth_bytes_per_second)
    alone = costs.seconds(MEBI, one, grid_layout([8], (1,), ("x",), []), rank=1)
    spread = start + 0.75 * MEBI / link.bandwidth_bytes_per_second
    assert costs.seconds(MEBI, one, far, rank=1) == pytest.approx(alone + spread)
    assert costs.seconds(MEBI, near, near, rank=1) == 0.0


def test_equal_pairs_anywhere_are_priced_once_and_looked_up_in_microseconds() -> None:
    costs = MoveCosts(load_cluster("p3.16xlarge:16"))
    pairs = []
    for host in range(14):
        source = grid_layout(range(8 * host, 8 * host + 8), (8,), ("x",), [("x",)])
        pairs.append((source, grid_layout(range(8 * host + 8, 8 * host + 24), (2, 8), ("x", "y"), [("y",), ("x",)])))
    seconds = {costs.seconds(64 * MEBI, source, target, rank=2) for source, target in pairs}
    assert len(seconds) == 1
    assert len(costs._prices) == 1
    begun = time.perf_counter()
    for _ in range(100):
        for source, target in pairs:
            costs.seconds(64 * MEBI, source, target, rank=2)
    assert (time.perf_counter() - begun) / 1400 < 1e-4


def test_a_device_that_the_cluster_does_not_have() -> None:
    costs = MoveCosts(load_cluster("p3.16xlarge:1"))
    with pytest.raises(ReshardError, match="device 8, which does not exist"):
        costs.seconds(1, grid_layout([0], (1,), ("x",), []), grid_layout([8], (1,), ("x",), []), rank=1)
