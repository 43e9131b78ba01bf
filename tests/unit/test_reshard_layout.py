"""Layouts and slices: which box lies where, uneven and empty ones included."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshwright.resharding import DeviceMesh, Layout, Move, ReshardError, demand_of, grid_layout, uniform_network
from meshwright.resharding.messages import Piece
from meshwright.resharding.tasks import SliceGrid


def test_axes_of_one_dim_split_it_major_first():
    layout = grid_layout(range(6), (2, 3), ("x", "y"), [("y", "x")])
    assert layout.boxes((6,)) == {0: ((0, 1),), 3: ((1, 2),), 1: ((2, 3),), 4: ((3, 4),), 2: ((4, 5),), 5: ((5, 6),)}


def test_uneven_blocks_are_rounded_up_and_the_last_may_be_empty():
    layout = grid_layout(range(4), (4,), ("x",), [("x",)])
    assert [box for (box,) in layout.boxes((5,)).values()] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_a_scalar_and_an_empty_tensor_have_layouts():
    layout = grid_layout(range(2), (2,), ("x",), [])
    assert layout.boxes(()) == {0: (), 1: ()}
    split = grid_layout(range(2), (2,), ("x",), [("x",)])
    assert split.boxes((0, 3)) == {0: ((0, 0), (0, 3)), 1: ((0, 0), (0, 3))}


@pytest.mark.parametrize(
    ("shape", "axes", "devices", "said"),
    [
        ((2, 2), ("x",), range(4), "as many names"),
        ((2, 2), ("x", "x"), range(4), "all different"),
        ((0,), ("x",), (), "all extents >= 1"),
        ((2, 2), ("x", "y"), range(3), "4 different devices"),
        ((2,), ("x",), (1, 1), "1 of them different"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused(shape, axes, devices, said):
    with pytest.raises(ReshardError, match="refused a mesh") as caught:
        DeviceMesh(devices=tuple(devices), shape=shape, axes=axes)
    assert said in str(caught.value)


def test_a_tensor_that_does_not_fit_its_layout_is_refused_by_name():
    layout = grid_layout(range(2), (2,), ("x",), [(), ("x",)])
    with pytest.raises(ReshardError, match="bias, source, a tensor of rank 1"):
        Move(name="bias", shape=(4,), item_bytes=4, source=layout, destination=layout)


def test_a_device_that_does_not_exist_is_refused_by_side_and_name():
    here, there = (grid_layout(devices, (2,), ("x",), [("x",)]) for devices in ((0, 1), (2, 9)))
    move = Move(name="w", shape=(4,), item_bytes=4, source=here, destination=there)
    with pytest.raises(ReshardError, match=r"destination mesh: got device 9, .* where: w"):
        demand_of(uniform_network([(0, 1), (2, 3)], nic_rate=1e9), [move])


@pytest.mark.parametrize("shape", [(), (0,), (7,), (8, 3), (5, 7, 3), (4, 0, 2)])
def test_slices_partition_the_tensor_and_lie_in_one_block_of_either_side(shape):
    source = grid_layout(range(6), (2, 3), ("x", "y"), [("x",)][: len(shape)])
    spec = [("b",), ("a",)] if len(shape) > 1 else [("b",)][: len(shape)]
    destination = grid_layout(range(6, 14), (4, 2), ("a", "b"), spec)
    grid = SliceGrid(shape, source, destination)
    times = np.zeros(shape, dtype=int)
    for index in range(grid.count):
        box = grid.box(index)
        times[tuple(slice(*r) for r in box)] += 1
        assert grid.elements[index] == math.prod(b - a for a, b in box)
        for layout, block in ((source, grid.source_block[index]), (destination, grid.destination_block[index])):
            outer = layout.boxes(shape)[layout.block_devices(len(shape))[block][0]]
            assert all(a <= c and d <= b for (a, b), (c, d) in zip(outer, box, strict=True))
    assert np.all(times == 1)


@pytest.mark.parametrize("box", [(), ((2, 3),), ((0, 4), (1, 6)), ((1, 3), (0, 2), (5, 8))])
def test_boxes_of_a_piece_are_its_elements_in_order(box):
    extents = [b - a for a, b in box]
    numbers = np.arange(math.prod(extents)).reshape(extents)
    for start in range(numbers.size + 1):
        for stop in range(start, numbers.size + 1):
            boxes = Piece(move=0, slice=box, start=start, stop=stop).boxes
            inside = [
                numbers[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(part, box, strict=True))].ravel()
                for part in boxes
            ]
            found = np.concatenate(inside) if inside else np.empty(0, dtype=int)
            assert found.tolist() == list(range(start, stop))
            assert len(boxes) <= max(2 * len(box) - 1, 1)


def test_classes_merge_tasks_of_all_tensors_and_put_wide_elements_first():
    source = grid_layout((0, 1), (2,), ("x",), [("x",)])
    whole = grid_layout((2, 3), (2,), ("x",), [])
    moves = [Move(name=str(w), shape=(6,), item_bytes=w, source=source, destination=whole) for w in (1, 4, 2)]
    demand = demand_of(uniform_network([(0, 1), (2, 3)], nic_rate=1e9), moves)
    (task,) = demand.classes
    assert (task.senders, task.receivers, task.bytes) == ((0,), (1,), 6 * 7)
    assert sorted(demand.item_bytes[demand.start < 24].tolist()) == [4, 4]
    assert demand.unit_tasks == 6
    # Every multiple of the widest element is the boundary of an element; other positions move down to one.
    for position in range(task.bytes + 1):
        aligned = demand.aligned(0, position)
        assert aligned <= position
        assert position - aligned < 4
        if position % 4 == 0:
            assert aligned == position


def test_what_a_domain_holds_does_not_use_the_network():
    layout = grid_layout(range(4), (4,), ("x",), [("x",)])
    swapped = grid_layout((1, 0, 3, 2), (4,), ("x",), [("x",)])
    network = uniform_network([(0, 1), (2, 3)], nic_rate=1e9)
    demand = demand_of(network, [Move(name="w", shape=(8,), item_bytes=4, source=layout, destination=swapped)])
    assert demand.unit_tasks == 4
    assert demand.needed_bytes == 0


def test_layout_of_shared_spec_type():
    from meshwright.sharding import Spec

    mesh = DeviceMesh(devices=(0, 1), shape=(2,), axes=("x",))
    assert Layout(mesh=mesh, spec=Spec(dims=(("x",), ())).dims).splits(2) == (2, 1)
