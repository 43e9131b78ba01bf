"""Random moves, carried out element by element on NumPy arrays: everything arrives once, at the promised time."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from meshwright.resharding import (
    Host,
    Layout,
    Move,
    Network,
    Nic,
    check_transfers,
    deliver,
    grid_layout,
    plan_reshard,
)
from meshwright.resharding.published import published_seconds


def random_layout(chance: random.Random, devices: list[int], rank: int) -> Layout:
    sizes, left = [], len(devices)
    for factor in (2, 3, 2, 5):
        if left % factor == 0 and chance.random() < 0.7:
            sizes.append(factor)
            left //= factor
    sizes.append(left)
    axes = [f"axis{i}" for i in range(len(sizes))]
    spec: list[list[str]] = [[] for _ in range(rank)]
    for axis in chance.sample(axes, len(axes)):
        if rank and chance.random() < 0.7:
            spec[chance.randrange(rank)].append(axis)
    return grid_layout(devices, sizes, axes, spec)


def random_small(seed: int) -> tuple[Network, list[Move], list[np.ndarray]]:
    """Up to three small tensors between meshes of a few hosts, which may overlap and come in any order."""
    chance = random.Random(seed)
    count, per_host = chance.randint(1, 14), chance.randint(1, 4)
    rates = (5e8, 1e9, 1e9, 1.5e9, 4e9, 0.7310585e9)
    hosts = []
    for first in range(0, count, per_host):
        nics = tuple(
            Nic(send_rate=chance.choice(rates), receive_rate=chance.choice(rates))
            for _ in range(chance.choice((1, 1, 2)))
        )
        hosts.append(Host(devices=tuple(range(first, min(first + per_host, count))), nics=nics))
    domains = None
    if len(hosts) > 2 and chance.random() < 0.2:
        domains = ((0, 2), (1,), *((h,) for h in range(3, len(hosts))))
    network = Network(
        hosts=tuple(hosts),
        domains=domains,
        core_rate=chance.choice((None, None, None, 1.1e9)),
        latency_seconds=chance.choice((0.0, 1e-7)),
    )
    moves, tensors = [], []
    for number in range(chance.randint(1, 3)):
        rank = chance.randint(0, 4)
        shape = tuple(chance.randint(0 if chance.random() < 0.05 else 1, 9) for _ in range(rank))
        dtype = chance.choice((np.int8, np.int16, np.float32, np.complex128))
        source, destination = (
            random_layout(chance, chance.sample(range(count), chance.randint(1, count)), rank) for _ in range(2)
        )
        item_bytes = np.dtype(dtype).itemsize
        moves.append(Move(name=str(number), shape=shape, item_bytes=item_bytes, source=source, destination=destination))
        tensors.append((np.arange(np.prod(shape), dtype=np.int64).reshape(shape) % 101).astype(dtype))
    return network, moves, tensors


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_everything_arrives_exactly_once(seed):
    network, moves, tensors = random_small(seed)
    plan = plan_reshard(network, moves)
    check_transfers(plan)
    assert plan.bytes_between_domains == plan.demand.needed_bytes
    assert plan.seconds >= plan.bound.seconds
    for move, tensor, found in zip(moves, tensors, deliver(plan, tensors), strict=True):
        assert sorted(found) == sorted(move.destination.mesh.devices)
        for device, box in move.destination.boxes(move.shape).items():
            assert np.array_equal(found[device], tensor[tuple(slice(*r) for r in box)])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_no_published_algorithm_beats_the_bound(seed):
    network, moves, _ = random_small(seed)
    plan = plan_reshard(network, moves)
    assert all(seconds >= plan.bound.seconds for seconds in published_seconds(plan.demand).values())


def benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "resharding.py"
    spec = importlib.util.spec_from_file_location("resharding_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["resharding_benchmark"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_large_random_moves_come_within_a_64th_of_the_bound(count):
    found = benchmark().run_random(count, seed=20_000)
    assert found["failures"] == []
    assert found["more_than_a_64th_above_best_published"] == []
    worst = found["worst_ratio"]
    assert all(ratio <= 1 + 1 / 64 for name, ratio in worst.items() if name != "others: to the bound"), worst
