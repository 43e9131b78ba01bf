"""Rings over devices that are joined pair by pair: hand cases, and all integer packings of small hosts."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cluster import ClusterError, load_cluster
from meshwright.cluster.wires import check_wires, ring_wires

V100 = load_cluster("p3.16xlarge").hosts[0]


def test_every_v100_has_six_wires():
    ends = np.zeros(8)
    for a, b, count in V100.wires:
        ends[[a, b]] += count
    assert ends.tolist() == [6.0] * 8


@pytest.mark.parametrize(
    ("group", "wires"),
    [
        (tuple(range(8)), 6),
        ((0, 1, 2, 3), 4),
        ((4, 5, 6, 7), 4),
        ((0, 2, 4, 6), 2),
        ((0, 4), 2),
        ((2, 6), 1),
        ((0, 7), 1),
    ],
)
def test_rings_of_the_cube_mesh(group, wires):
    assert ring_wires(V100.wires, group) == wires


def test_axes_of_the_cube_mesh_have_the_wires_of_their_worst_group():
    cluster = load_cluster("p3.16xlarge")
    wire = V100.link.bandwidth_bytes_per_second

    def wires(shape):
        return [axis.bandwidth_bytes_per_second / wire for axis in cluster.logical_mesh(shape).axes]

    assert wires((8,)) == pytest.approx([6])
    assert wires((2, 4)) == pytest.approx([1, 4])
    assert wires((4, 2)) == pytest.approx([2, 1])


def packings(capacity: np.ndarray, cycles: list[np.ndarray]) -> int:
    """Most cycles (each as often as wished) that fit into the wires, by trying all."""
    if not cycles:
        return 0
    best, times = packings(capacity, cycles[1:]), 0
    while np.all(capacity >= (times + 1) * cycles[0]):
        times += 1
        best = max(best, times + packings(capacity - times * cycles[0], cycles[1:]))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_rings_against_all_packings(seed):
    """What whole rings reach is never more than the linear program, which may share a wire, and at least 2/3 of it."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 6))
    pairs = list(itertools.combinations(range(count), 2))
    numbers = rng.integers(0, 3, len(pairs))
    wires = tuple((a, b, int(n)) for (a, b), n in zip(pairs, numbers, strict=True) if n)
    cycles = []
    for order in itertools.permutations(range(1, count)):
        ring = (0, *order, 0)
        if order[0] < order[-1]:
            cycles.append(np.array([sum({a, b} == {c, d} for c, d in itertools.pairwise(ring)) for a, b in pairs]))
    cycles = [cycle for cycle in cycles if np.all(numbers >= np.minimum(cycle, 1))]
    whole = 2 * packings(numbers, cycles)
    found = ring_wires(wires, tuple(range(count)))
    if not cycles:
        assert found == 1.0
    else:
        assert whole <= found + 1e-3
        assert found <= 1.5 * whole + 1e-3


@pytest.mark.parametrize(
    ("devices", "wires", "words"),
    [
        (3, ((0, 1, 1),), "do not reach device 2 from device 0"),
        (4, ((0, 1, 1), (2, 3, 1)), "do not reach device 2 from device 0"),
        (2, ((0, 0, 1),), "two different devices"),
        (2, ((0, 1),), "two different devices"),
        (2, ((0, -1, 1),), "two different devices"),
        (2, (("a", 1, 1),), "two different devices"),
        (2, ((0, 1, 0),), "a whole number >= 1"),
        (2, ((0, 1, 1), (1, 0, 2)), "twice"),
        (16, ((0, 1, 1),), "at most 9"),
    ],
)
def test_refuses_wires_that_join_nothing(devices, wires, words):
    with pytest.raises(ClusterError, match=words):
        check_wires(devices, wires)


def test_a_part_of_a_host_is_its_first_devices():
    part = replace(V100, devices=4)
    cluster = replace(load_cluster("p3.16xlarge"), hosts=(part,))
    (axis,) = cluster.logical_mesh((4,)).axes
    assert axis.bandwidth_bytes_per_second == pytest.approx(4 * V100.link.bandwidth_bytes_per_second)
