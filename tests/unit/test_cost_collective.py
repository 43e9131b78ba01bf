"""Collective prices: closed forms, the relations between them, and what others measured."""

import importlib.util
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.cluster import Axis, Cluster, Device, Host, Level, Link, load_cluster
from meshwright.cost.collective import KINDS, collective_algorithm, collective_lines, collective_seconds
from meshwright.cost.collective_ways import Line, lower_envelope

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "collectives.py"


def axis(name="x", size=4, latency=1.0, bandwidth=10.0, launch=5.0, exchange=None) -> Axis:
    return Axis(
        name=name,
        size=size,
        latency_seconds=latency,
        bandwidth_bytes_per_second=bandwidth,
        launch_seconds=launch,
        exchange_bandwidth_bytes_per_second=exchange,
    )


FAST = axis("fast", size=8, latency=0.5, bandwidth=100.0, launch=5.0)
SLOW = axis("slow", size=2, latency=3.0, bandwidth=10.0, launch=7.0, exchange=4.0)

DEVICE = Device(
    kind="toy", peak_flops={"float32": 1e12}, memory_bytes=1e9, memory_bandwidth_bytes_per_second=1e11,
    efficiency=1.0, kernel_launch_seconds=0.0, usable_memory_fraction=1.0,
)  # fmt: skip


def cluster_of(
    hosts: int, devices: int, *, reduction: float = 0.0, sums: float = 0.0, chunk_steps: float = 0.0,
    launch: float = 5.0, exchange: float = 1.0,
) -> Cluster:  # fmt: skip
    """Link 100 bytes/s and 1 s a step; a NIC of 32 bytes/s and 4 s a step for each device; launches 5 and 7 s."""
    link = Link(
        bandwidth_bytes_per_second=100.0, latency_seconds=1.0, launch_seconds=launch, chunk_steps=chunk_steps,
        reduction_bandwidth_bytes_per_second=reduction, sum_bandwidth_bytes_per_second=sums,
        exchange_efficiency=exchange,
    )  # fmt: skip
    nic = Link(bandwidth_bytes_per_second=32.0, latency_seconds=4.0, launch_seconds=7.0, chunk_steps=chunk_steps)
    host = Host(device=DEVICE, devices=devices, link=link, nics=devices, nic=nic)
    return Cluster(name="toy", hosts=(host,) * hosts)


# Closed forms


def test_one_axis_closed_forms():
    x = [axis()]
    assert collective_seconds("all_reduce", 100.0, x) == 5 + 6 * 1.0 + 2 * 3 / 4 * 100 / 10
    assert collective_seconds("all_gather", 100.0, x) == 5 + 3 * 1.0 + 3 / 4 * 100 / 10
    assert collective_seconds("reduce_scatter", 100.0, x) == 5 + 3 * 1.0 + 3 / 4 * 100 / 10
    assert collective_seconds("all_to_all", 100.0, x) == 5 + 3 * 1.0 + 3 / 4 * 100 / 10
    assert collective_seconds("all_to_all", 100.0, [axis(exchange=5.0)]) == 5 + 3 * 1.0 + 3 / 4 * 100 / 5
    assert collective_seconds("permute", 100.0, x) == 5 + 1.0 + 100 / 10


def test_devices_that_share_memory_meet_once_and_pass_once():
    """Everybody waits for everybody and passes over the buffer once, at the rate of sums, copies or exchanges."""
    (x,) = cluster_of(1, 4, sums=25.0, exchange=0.4).logical_mesh((4,)).axes
    meeting = 5 + 3 * 1.0
    assert collective_seconds("all_reduce", 100.0, [x]) == pytest.approx(meeting + 100 / 25, rel=1e-3)
    assert collective_seconds("all_reduce", 100.0, [x]) > collective_seconds("reduce_scatter", 100.0, [x])
    assert collective_seconds("reduce_scatter", 100.0, [x]) == meeting + 100 / 25
    assert collective_seconds("all_gather", 100.0, [x]) == meeting + 100 / 100
    assert collective_seconds("all_to_all", 100.0, [x]) == meeting + 3 / 4 * 100 / 40
    assert collective_seconds("permute", 100.0, [x]) == meeting + 100 / 25
    two = cluster_of(1, 4, sums=25.0, launch=0.5).logical_mesh((2, 2)).axes
    one = cluster_of(1, 4, sums=25.0, launch=0.5).logical_mesh((4,)).axes
    for kind in KINDS:
        assert collective_algorithm(kind, 100.0, [x]) == "memory"
        assert collective_seconds(kind, 100.0, two) == collective_seconds(kind, 100.0, one)  # not axis by axis
    # A permute has no groups: everybody meets.
    assert collective_seconds("permute", 100.0, two[:1]) == 0.5 + 3 * 1.0 + 100 / 25
    assert collective_seconds("reduce_scatter", 100.0, two[:1]) == 0.5 + 1 * 1.0 + 100 / 25
    (apart,) = cluster_of(2, 4, sums=25.0).logical_mesh((8,)).axes  # between hosts nothing is shared
    assert collective_seconds("all_reduce", 1e6, [apart]) == collective_seconds(
        "all_reduce", 1e6, cluster_of(2, 4).logical_mesh((8,)).axes
    )


@pytest.mark.parametrize(("launch", "name"), [(5.0, "by axis"), (50.0, "ring")])
def test_axes_of_one_host_are_one_ring_or_one_after_the_other(launch, name):
    """The same bytes travel; 15 steps and one launch against 3 + 3 steps and a launch for each part."""
    axes = [axis("x", launch=launch), axis("y", launch=launch)]
    for kind, times, parts in (("all_reduce", 2, 3), ("all_gather", 1, 2), ("reduce_scatter", 1, 2)):
        transfer = times * 15 / 16 * 1e6 / 10
        ring, by_axis = launch + times * 15 + transfer, parts * launch + times * 6 + transfer
        assert collective_algorithm(kind, 1e6, axes) == name
        assert collective_seconds(kind, 1e6, axes) == pytest.approx(min(ring, by_axis), abs=1e-6)
        assert collective_seconds(kind, 1e6, [axis(size=16, launch=launch)]) == pytest.approx(ring, abs=1e-6)


def test_an_exchange_over_axes_goes_direct_when_large_and_by_axis_when_small():
    axes = cluster_of(1, 16).logical_mesh((4, 4)).axes
    assert collective_seconds("all_to_all", 1e6, axes) == pytest.approx(5 + 15 + 15 / 16 * 1e6 / 100)
    assert collective_seconds("all_to_all", 1.0, axes) == pytest.approx(2 * (5 + 3 + 3 / 4 / 100))


def test_a_ring_and_a_tree_over_hosts_by_hand():
    # 4 hosts of 8 devices, 256 bytes/s out of each host.
    (flat,) = cluster_of(4, 8).logical_mesh((32,)).axes
    ring = 7 + 2 * 31 / 32 * ((28 * 1.0 + 4 * 4.0) + 1e6 / 100.0)  # the link inside is the slowest
    assert collective_seconds("all_reduce", 1e6, [flat]) == pytest.approx(ring)
    assert collective_algorithm("all_reduce", 1e6, [flat]) == "ring"
    # A chain of 8 and a binary tree over 4 hosts, up and down; the inner nodes send twice.
    tree = 7 + 2 * (7 * 1.0 + 2 * 4.0) + 2 * 1.0 / 100
    assert collective_seconds("all_reduce", 1.0, [flat]) == pytest.approx(tree)
    assert collective_algorithm("all_reduce", 1.0, [flat]) == "tree"


def test_a_tree_over_two_hosts_sends_the_buffer_once():
    """Two nodes have no inner node between them, so large messages leave a host once, not 2(n-1)/n times."""
    cluster = load_cluster("p4d.24xlarge:2")
    (flat,) = cluster.logical_mesh((16,)).axes
    size = 1e12
    out = cluster.hosts[0].nic_bandwidth_bytes_per_second
    assert collective_algorithm("all_reduce", size, [flat]) == "tree"
    assert collective_seconds("all_reduce", size, [flat]) == pytest.approx(size / out, rel=1e-3)
    assert collective_seconds("all_gather", size, [flat]) == pytest.approx(15 / 16 * size / out, rel=1e-3)


def test_a_switch_that_sums_by_hand():
    # Each device sends its buffer and an eighth of the sum, at 80 bytes/s; a ring would take 7/4 of it at 100.
    (inside,) = cluster_of(1, 8, reduction=80.0).logical_mesh((8,)).axes
    assert collective_seconds("all_reduce", 1e6, [inside]) == pytest.approx(5 + 4 * 1.0 + 9 / 8 * 1e6 / 80)
    assert collective_algorithm("all_reduce", 1e6, [inside]) == "switch"
    # Its halves are gathers and scatters: two steps instead of seven, and less bandwidth than rings.
    for kind in ("all_gather", "reduce_scatter"):
        assert collective_seconds(kind, 100.0, [inside]) == pytest.approx(5 + 2 * 1.0 + 100 / 80)
        assert collective_algorithm(kind, 100.0, [inside]) == "switch"
        assert collective_algorithm(kind, 1e6, [inside]) == "ring"
    pair = cluster_of(1, 8, reduction=80.0).logical_mesh((4, 2)).axis("y")
    assert collective_algorithm("all_reduce", 1e6, [pair]) == "ring"
    # Over two hosts: what leaves a host, 256 bytes/s, or what the switch does, the slower of the two.
    (both,) = cluster_of(2, 8, reduction=80.0).logical_mesh((16,)).axes
    assert collective_seconds("all_reduce", 1e6, [both]) == pytest.approx(
        7 + 4 * 1.0 + 2 * 4.0 + max(9 / 8 / 80, 1 / 256) * 1e6
    )


def test_chunks_make_the_square_of_a_sum_of_roots_until_they_are_as_large_as_can_be():
    (x,) = cluster_of(1, 5, chunk_steps=8.0).logical_mesh((5,)).axes
    launch, latency, most = 5.0, 4.0, 8.0
    for size in (50.0, 400.0, 3000.0, 10000.0):
        transfer = 4 / 5 * size / 100 / (1 + 1 / most)
        ideal = launch + (math.sqrt(latency) + math.sqrt(transfer)) ** 2
        # Chunks halve, so the best one is missed by a root of 2 at most.
        missed = 0.5 * (math.sqrt(2) + math.sqrt(0.5)) - 1
        assert (
            ideal <= collective_seconds("all_gather", size, [x]) <= ideal + missed * 2 * math.sqrt(latency * transfer)
        )
    assert collective_seconds("all_gather", 1e9, [x]) == pytest.approx(5 + 4 * 9 + 4 / 5 * 1e9 / 100, rel=1e-12)


# A torus


def test_a_torus_by_hand():
    """The published time model: bytes over the bandwidth of both directions of all dims; an all-reduce is two."""
    cluster = load_cluster("tpu-v5e:256")
    link = cluster.hosts[0].link
    w, size = link.bandwidth_bytes_per_second, 1e12
    (flat,) = cluster.logical_mesh((256,)).axes
    row, column = cluster.logical_mesh((16, 16)).axes
    for one in (row, column):
        assert collective_seconds("all_gather", size, [one]) == pytest.approx(15 / 16 * size / (2 * w), rel=1e-4)
        # A quarter of what a gather of 16 such buffers takes.
        exchange = size * 16 / (2 * w) / 4 / link.exchange_efficiency
        assert collective_seconds("all_to_all", size, [one]) == pytest.approx(exchange, rel=1e-4)
        assert collective_seconds("permute", size, [one]) == pytest.approx(size / w, rel=1e-4)
        assert collective_algorithm("all_reduce", size, [one]) == "torus"
    both = 255 / 256 * size / (4 * w)
    for axes in ([flat], [row, column]):
        assert collective_seconds("all_gather", size, axes) == pytest.approx(both, rel=1e-4)
        assert collective_seconds("all_reduce", size, axes) == pytest.approx(2 * both, rel=1e-4)
    assert collective_seconds("all_gather", 1.0, [flat]) == pytest.approx(
        link.launch_seconds + 16 * link.latency_seconds, rel=1e-4
    )


def test_slices_are_joined_by_their_nics():
    cluster = load_cluster("tpu-v5e:256x4")
    out = cluster.hosts[0].nic_bandwidth_bytes_per_second
    across, inside = cluster.logical_mesh((4, 256)).axes
    size = 1e12
    assert collective_seconds("all_gather", size, [across]) == pytest.approx(3 / 4 * size / (out / 256), rel=1e-3)
    gather = collective_seconds("all_gather", size, [inside])
    flat = collective_seconds("all_gather", size, cluster.logical_mesh((1024,)).axes)
    assert flat == pytest.approx(gather + 3 / 4 * size / out, rel=1e-3)


# Relations


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_move_costs_nothing(kind):
    assert collective_seconds(kind, 0, [FAST, SLOW]) == 0.0
    assert collective_seconds(kind, 1e6, []) == 0.0
    assert collective_seconds(kind, 1e6, [axis(size=1), axis(size=1)]) == 0.0
    assert collective_seconds(kind, 1e6, [axis(size=1, launch=99.0, bandwidth=1e-3), FAST]) == collective_seconds(
        kind, 1e6, [FAST]
    )
    assert collective_algorithm(kind, 1e6, [axis(size=1)]) == ""
    assert [array.tolist() for array in collective_lines(kind, [])] == [[0.0], [0.0]]


MESHES = [
    ("p3.16xlarge:4", (2, 4, 4)), ("p3.16xlarge", (2, 2, 2)), ("p5.48xlarge:4", (4, 8)), ("dgx-h100:6", (2, 3, 8)),
    ("tpu-v5e:256x2", (2, 16, 16)), ("tpu-v4:64", (8, 8)), ("cpu", (2, 4)), ("p4d.24xlarge+p3.16xlarge", (4, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "shape"), MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_axes_does_not_matter_and_prices_rise_ever_more_slowly(kind, text, shape):
    mesh = load_cluster(text).logical_mesh(shape)
    sizes = np.geomspace(1.0, 1e11, 60)
    for axes in itertools.chain(itertools.combinations(mesh.axes, 1), [mesh.axes]):
        orders = [collective_seconds(kind, sizes, order) for order in itertools.permutations(axes)]
        for other in orders[1:]:
            np.testing.assert_allclose(other, orders[0], rtol=1e-12)
        assert np.all(np.diff(orders[0]) > 0)
        assert np.all(np.diff(np.diff(orders[0]) / np.diff(sizes)) <= 1e-18)


@pytest.mark.parametrize(("text", "shape"), MESHES)
def test_an_all_reduce_is_no_dearer_than_its_halves_and_no_cheaper_than_one(text, shape):
    mesh = load_cluster(text).logical_mesh(shape)
    for axes in ([mesh.axes[0]], [mesh.axes[-1]], mesh.axes):
        for size in (1e3, 1e6, 1e9):
            half = collective_seconds("reduce_scatter", size, axes)
            other = collective_seconds("all_gather", size, axes)
            assert collective_seconds("all_reduce", size, axes) <= (half + other) * (1 + 1e-12)


@pytest.mark.parametrize("text", ["gb200-nvl72", "dgx-h100", "p4d.24xlarge", "tpu-v4:64", "p3.16xlarge"])
def test_inside_a_host_a_half_of_an_all_reduce_is_no_dearer_than_the_whole(text):
    cluster = load_cluster(text)
    (axis,) = cluster.logical_mesh((cluster.num_devices,)).axes
    for size in (1e3, 1e5, 1e6, 1e7, 1e9):
        whole = collective_seconds("all_reduce", size, [axis])
        assert max(collective_seconds(kind, size, [axis]) for kind in ("all_gather", "reduce_scatter")) < whole


@pytest.mark.parametrize(
    ("text", "shape"), [("gb200-nvl72:2", (16, 9)), ("gb200-nvl72:2", (9, 16)), ("dgx-h100:4", (4, 8))]
)
def test_faster_nics_make_nothing_slower(text, shape):
    """Whichever axis is the faster one then: each order of the axes is looked at."""
    cluster = load_cluster(text)
    hosts = tuple(replace(host, nics=2 * host.nics) for host in cluster.hosts)
    before, after = (c.logical_mesh(shape).axes for c in (cluster, replace(cluster, hosts=hosts)))
    for kind in KINDS:
        sizes = np.geomspace(1e3, 1e10, 40)
        assert np.all(collective_seconds(kind, sizes, after) <= collective_seconds(kind, sizes, before) * (1 + 1e-12))


@pytest.mark.parametrize("text", ["p4d.24xlarge:4", "dgx-h100:4", "tpu-v4:64"])
def test_the_product_of_axes_is_no_dearer_than_one_axis_over_the_same_devices(text):
    cluster = load_cluster(text)
    whole, axes = cluster.logical_mesh((cluster.num_devices,)).axes, cluster.logical_mesh((4, cluster.num_devices // 4))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for size in (1e3, 1e6, 1e9):
            flat = collective_seconds(kind, size, whole)
            assert collective_seconds(kind, size, axes.axes) <= flat * (1 + 1e-9), (kind, size)


@pytest.mark.parametrize("text", ["p4d.24xlarge:4", "dgx-h100:4", "dgx-2:2"])
def test_axes_together_have_the_links_of_one_axis_over_the_same_devices(text):
    """What leaves a unit adds up over the groups that axes join: seconds per byte of large messages are the same."""
    cluster = load_cluster(text)
    (flat,) = cluster.logical_mesh((cluster.num_devices,)).axes
    for shape in ((2, cluster.num_devices // 2), (cluster.num_devices // 4, 4), (2, 2, cluster.num_devices // 4)):
        axes = cluster.logical_mesh(shape).axes
        _, rates = collective_lines("all_to_all", axes)
        assert rates.min() == pytest.approx(collective_lines("all_to_all", [flat])[1].min(), rel=1e-9), shape
        gather = collective_lines("all_gather", axes)[1].min()
        assert gather <= collective_lines("all_gather", [flat])[1].min() * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_arrays_and_lines_agree(kind):
    mesh = load_cluster("p5.48xlarge:2").logical_mesh((2, 8))
    sizes = np.array([[0.0, 1.0, 1e3], [1e6, 1e8, 1e10]])
    found = collective_seconds(kind, sizes, mesh.axes)
    assert found.shape == sizes.shape
    fixed, rates = collective_lines(kind, mesh.axes)
    for size, seconds in zip(sizes.ravel(), found.ravel(), strict=True):
        assert seconds == collective_seconds(kind, float(size), mesh.axes)
        assert seconds == pytest.approx((fixed + rates * size).min() if size else 0.0)


def test_the_lower_envelope_is_the_least_line_everywhere():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lines = [Line(f, r, "") for f, r in rng.integers(0, 9, (rng.integers(1, 12), 2)).astype(float)]
        envelope = lower_envelope(lines)
        assert len(set(envelope)) == len(envelope)
        for size in (1e-9, 0.3, 1.0, 2.5, 7.0, 1e6):
            least = min(line.fixed_seconds + line.seconds_per_byte * size for line in lines)
            assert min(line.fixed_seconds + line.seconds_per_byte * size for line in envelope) == pytest.approx(least)


def test_levels_refuse_numbers_that_cannot_be():
    link = Link(bandwidth_bytes_per_second=1.0, latency_seconds=1.0)
    for change in ({"size": 0}, {"bandwidth_bytes_per_second": -1.0}, {"link": 3}, {"kind": ""}):
        with pytest.raises(ValueError, match="refused this level"):
            Level(**{"kind": "device", "size": 2, "link": link, "bandwidth_bytes_per_second": 1.0, **change})


@pytest.mark.parametrize("size", [-1.0, math.nan, math.inf, np.array([1.0, -1.0]), np.array([math.nan])])
def test_refuses_sizes_that_cannot_be(size):
    with pytest.raises(ValueError, match=r"needed a finite number >= 0; where: over axes \('fast',\)"):
        collective_seconds("all_reduce", size, [FAST])


def test_refuses_unknown_kinds():
    with pytest.raises(ValueError, match=r"got kind 'allreduce'.*try: 'all_reduce'"):
        collective_seconds("allreduce", 1.0, [FAST])


# What others measured


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("collectives_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_published_curves_are_met_within_15_percent(benchmark):
    """The median over messages from 1 MiB, for every published curve, for each kind and group of it, and overall."""
    rows, others = benchmark.read_rows(benchmark.ROWS)
    assert (len(rows), len(others)) == (134, 21)
    predictions = [benchmark.predict(row) for row in rows]
    errors = benchmark.summary(predictions, float(1 << 20))
    assert len(errors) == 8
    for source, error in errors.items():
        assert error["median_absolute_error"] <= 0.15, source
    assert errors["overall"]["median_absolute_error"] <= 0.05
    parts = {}
    for one in predictions:
        if one.row.curve and one.row.size_bytes >= 1 << 20:
            parts.setdefault((one.row.item, one.row.kind, one.row.shape), []).append(abs(one.error))
    assert len(parts) == 9
    assert max(np.median(part) for part in parts.values()) <= 0.15


def test_published_large_messages_are_met_within_10_percent(benchmark):
    rows, _ = benchmark.read_rows(benchmark.ROWS)
    single = [benchmark.predict(row) for row in rows if not row.curve]
    assert len(single) == 27
    for one in single:
        assert abs(one.error) <= 0.1, one
