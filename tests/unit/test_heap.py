"""The heap of XLA's TPU compiler, against one that is made of bytes, and what lies in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st
from jax import lax

from meshwright._jax.dataflow import MEGACORE, Kind, Operation, Program, Value
from meshwright._jax.liveness_adapter import dataflow_of
from meshwright.memory.heap import Stretch, heap_bytes
from meshwright.memory.liveness import predict

STRETCHES = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 4), st.integers(0, 6)).map(
        lambda one: Stretch(one[0], one[0] + one[1], one[2])
    ),
    max_size=12,
)


def of_bytes(stretches: list[Stretch]) -> int:
    """Each byte of the heap by itself: the moment up to which it is taken."""
    bytes_, most = [-1] * 200, 0
    for one in sorted(stretches, key=lambda one: (one.first, -one.size_bytes)):
        top = max((at + 1 for at, until in enumerate(bytes_) if until >= one.first), default=0)
        holes, at = [], 0
        while at < top:
            free = next((n for n in range(at, top) if bytes_[n] >= one.first), top) - at
            if free >= one.size_bytes:
                holes.append((free, at))
            at += free + 1
        place = min(holes)[1] if holes else top
        if one.size_bytes:
            bytes_[place : place + one.size_bytes] = [one.last] * one.size_bytes
            most = max(most, place + one.size_bytes)
    return most


@given(STRETCHES)
def test_a_buffer_takes_the_smallest_hole_or_lies_above_all_others(stretches: list[Stretch]) -> None:
    assert heap_bytes(stretches) == of_bytes(stretches)


@given(STRETCHES)
def test_it_has_room_for_what_is_there_at_once(stretches: list[Stretch]) -> None:
    alive = (sum(one.size_bytes for one in stretches if one.first <= at <= one.last) for at in range(16))
    assert max(alive) <= heap_bytes(stretches) <= sum(one.size_bytes for one in stretches)


def array(size_bytes: int) -> Value:
    return Value(size_bytes=size_bytes, elements=size_bytes // 2, rank=2)


def test_a_conversion_of_a_number_that_several_products_read_is_no_division() -> None:
    """Nothing is read by it (a plan of llama3-8b in two stages on v5p ended in an IndexError)."""
    convert = Operation(kind=Kind.ELEMENTWISE, name="convert_element_type", reads=(), writes=(1,))
    products = [Operation(kind=Kind.CONTRACT, name="dot_general", reads=(0, 1), writes=(made,)) for made in (2, 3)]
    program = Program(
        values=(array(8),) * 4, operations=(convert, *products), arguments=(0,), outputs=(2, 3), platform=MEGACORE
    )
    assert predict(program).output_bytes == 16


@pytest.mark.parametrize(("platform", "itemsize"), [("tpu", 2), ("gpu", 4)])
def test_a_stack_that_is_read_in_fewer_bits_is_stored_so_on_tpus(platform: str, itemsize: int) -> None:
    def step(x: jax.Array) -> jax.Array:
        rows = lax.scan(lambda c, _: (c * 2, jnp.sin(c)), x, None, length=4)[1].astype(jnp.bfloat16)
        return lax.scan(lambda c, row: (c + row, None), x.astype(jnp.bfloat16), rows, reverse=True)[0]

    found = predict(dataflow_of(step, jax.ShapeDtypeStruct((16, 128), jnp.float32), platform=platform))
    assert max(one.size_bytes for one in found.largest) == 4 * 16 * 128 * itemsize
