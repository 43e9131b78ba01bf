"""Axes on a torus: hand cases, and every message of an exchange and every part of a gather counted link by link."""

import itertools
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from meshwright.cluster import ClusterError, load_cluster
from meshwright.cluster.torus import TorusPart, axis_parts, slice_shape


def test_parts_of_a_16_by_16_torus():
    shape, wraps = (16, 16), (True, True)
    row = TorusPart(count=16, stride=1, ring=True)
    assert axis_parts(shape, wraps, 1, 16) == (row,)
    assert axis_parts(shape, wraps, 16, 16) == (row,)
    assert axis_parts(shape, wraps, 1, 256) == (row, row)
    assert axis_parts(shape, wraps, 64, 4) == (TorusPart(count=4, stride=4, ring=True),)
    assert axis_parts(shape, wraps, 16, 4) == (TorusPart(count=4, stride=1, ring=False),)
    assert axis_parts(shape, wraps, 1, 64) == (TorusPart(count=4, stride=1, ring=False), row)
    assert axis_parts(shape, wraps, 4, 8) == (
        TorusPart(count=2, stride=1, ring=False), TorusPart(count=4, stride=4, ring=True),
    )  # fmt: skip
    assert axis_parts(shape, (False, True), 16, 16) == (TorusPart(count=16, stride=1, ring=False),)
    assert axis_parts(shape, wraps, 3, 4) is None
    assert axis_parts((4, 6), (True, True), 4, 6) is None


@pytest.mark.parametrize("shape", [(16, 16), (4, 4, 4), (2, 4, 8), (8, 16)])
def test_parts_are_where_the_devices_of_an_axis_are(shape):
    """Coordinates of the group that holds device 0, for every axis of every logical mesh of powers of two."""
    size, wraps = prod(shape), tuple(length > 2 for length in shape)
    for exponent in range(size.bit_length()):
        for count in range(1, size.bit_length() - exponent):
            stride, members = 2**exponent, 2**count
            parts = axis_parts(shape, wraps, stride, members)
            coordinates = np.unravel_index(np.arange(members) * stride, shape)
            expected = []
            for length, places in zip(shape, coordinates, strict=True):
                found = sorted(set(places.tolist()))
                if len(found) > 1:
                    apart = found[1] - found[0]
                    assert found == list(range(0, len(found) * apart, apart))
                    ring = length > 2 and len(found) > 2 and len(found) * apart == length
                    expected.append(TorusPart(count=len(found), stride=apart, ring=ring))
            assert parts == tuple(expected)


def link_loads(length: int, ring: bool, stride: int, weight: float) -> float:
    """Most bytes on a link of one dim, if the members of every group, `stride` apart, send `weight` bytes to each other
    by the shortest way (half each way if both are equally long)."""
    loads = np.zeros((2, length))  # to the next device, to the one before
    for here, hop in itertools.product(range(length), range(1, length)):
        there = (here + hop) % length
        if hop % stride:
            continue
        ways = []
        if ring:
            forward, backward = hop, length - hop
            ways = [(0, forward)] if forward < backward else [(1, backward)]
            if forward == backward:
                ways = [(0, forward), (1, backward)]
        else:
            ways = [(0, there - here)] if there > here else [(1, here - there)]
        for direction, steps in ways:
            for step in range(steps):
                at = (here + step) % length if direction == 0 else (here - step) % length
                loads[direction, at] += weight / len(ways)
    return float(loads.max())


@pytest.mark.parametrize(("length", "ring", "stride"), [
    (4, True, 1), (8, True, 1), (16, True, 1), (16, True, 4), (16, True, 2), (4, False, 1), (8, False, 1),
    (8, False, 2), (2, False, 1),
])  # fmt: skip
def test_an_exchange_against_a_count_of_every_message(length, ring, stride):
    """Every member sends an equal part of one byte to each other one; the busiest link says how long it takes."""
    count = length // stride
    part = TorusPart(count=count, stride=stride, ring=ring and count > 2)
    counted = link_loads(length, ring, stride, 1 / count)
    assert part.exchange_seconds == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize(("length", "ring"), [(3, True), (4, True), (8, True), (16, True), (4, False), (16, False)])
def test_a_gather_is_bound_by_what_a_device_can_receive(length, ring):
    """Parts of 1 byte: on a ring both neighbours bring half of the others', at the end of a line one brings all."""
    part = TorusPart(count=length, stride=1, ring=ring)
    assert (length - 1) / part.links == pytest.approx((length - 1) / 2 if ring else length - 1)
    assert part.steps == (length // 2 if ring else length - 1)


def test_axes_of_slices_have_the_bandwidth_of_their_links():
    mesh = load_cluster("tpu-v5e:256").logical_mesh((4, 64))
    w = load_cluster("tpu-v5e:256").hosts[0].link.bandwidth_bytes_per_second
    assert mesh.axis("x").bandwidth_bytes_per_second == pytest.approx(2 * w / 4)
    assert mesh.axis("y").bandwidth_bytes_per_second == pytest.approx(w + 2 * w)
    part = load_cluster("tpu-v5e:64").logical_mesh((8, 8))  # no rings below 16
    assert part.axis("x").bandwidth_bytes_per_second == w


def test_a_part_of_a_slice_keeps_the_rings_that_are_whole():
    whole = load_cluster("tpu-v5e:256")
    half = replace(whole, hosts=(replace(whole.hosts[0], devices=128),))
    w = whole.hosts[0].link.bandwidth_bytes_per_second
    rows, columns = half.logical_mesh((8, 16)).axes
    assert rows.bandwidth_bytes_per_second == w
    assert columns.bandwidth_bytes_per_second == 2 * w


def test_an_axis_askew_in_the_torus_has_a_price():
    mesh = load_cluster("tpu-v4:192").logical_mesh((64, 3))  # 3 of a dim of 12
    assert mesh.axis("y").levels[0].steps == 2
    askew = load_cluster("tpu-v4:192").logical_mesh((24, 8))
    assert all(axis.bandwidth_bytes_per_second > 0 for axis in askew.axes)


def test_shapes_of_slices():
    small = [(2, 2, 1), (2, 2, 2)]
    assert slice_shape(8, small, 4096) == (2, 2, 2)
    assert slice_shape(64, small, 4096) == (4, 4, 4)
    assert slice_shape(768, small, 4096) == (8, 8, 12)
    assert slice_shape(12, small, 4096) is None
    assert slice_shape(8192, small, 4096) is None
    assert slice_shape(64, [(2, 2), (4, 4)], 256) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torus": (2, 2)}, "8 devices in a torus of 2 x 2"),
        ({"torus": (2, 0)}, "a whole number >= 1"),
        ({"torus": 8}, "needed a list"),
        ({"torus_wraps": (True,)}, "2 times true or false"),
        ({"torus_wraps": (0, 0)}, "2 times true or false"),
        ({"torus_wraps": (True, False)}, "rings of at least 3"),
        ({"torus": ()}, "0 times true or false"),
        ({"wires": ((0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 4, 1), (4, 5, 1), (5, 6, 1), (6, 7, 1))}, "one way in which"),
    ],
)
def test_refuses_tori_that_cannot_be(change, words):
    with pytest.raises(ClusterError, match=words):
        replace(load_cluster("tpu-v5e").hosts[0], **change)
