"""Gradients of stacked parameters added up inside the scan that makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright._jax.accumulate import accumulate_in_scans
from meshwright._jax.jaxpr import ClosedJaxpr, evaluate, open_jaxpr, scan_parts
from meshwright._jax.passes import trace_local

ROWS, WIDTH = 5, 3
MESH = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def traced(function: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct]) -> ClosedJaxpr:
    return trace_local(function, avals, MESH)


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def stacks_of(closed: ClosedJaxpr) -> list[tuple[int, ...]]:
    """Shapes of what the one scan stacks."""
    (scan,) = (e for e in open_jaxpr(closed).eqns if e.primitive.name == "scan")
    return [v.aval.shape for v in scan.outvars[scan_parts(scan).num_carry :]]


def accumulated(function: Callable[..., Any], args: Sequence[jax.Array]) -> ClosedJaxpr:
    """The program with its sums in the scan: every result is what it was."""
    closed = traced(function, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    better = accumulate_in_scans(closed, traced)
    assert better is not None
    for wanted, found in zip(evaluate(closed, *args), evaluate(better, *args), strict=True):
        np.testing.assert_array_equal(found, wanted)
    return better


@pytest.mark.parametrize("reverse", [False, True])
def test_sums_are_made_in_the_scan(reverse: bool) -> None:
    def program(total: jax.Array, other: jax.Array, x: jax.Array, rows: jax.Array) -> list[jax.Array]:
        def trip(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            carry = jnp.tanh(carry + row)
            return carry, (carry * row, carry - row)

        last, (products, differences) = jax.lax.scan(trip, x, rows, reverse=reverse)
        # The first sum is made in the scan; the second result is read twice, and is stacked as before.
        return [total + products, other + differences, last, 2 * differences]

    better = accumulated(program, arrays((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,), (ROWS, WIDTH)))
    assert stacks_of(better) == [(ROWS, WIDTH)]  # the differences
    assert sum(e.primitive.name in ("add", "add_any") for e in open_jaxpr(better).eqns) == 1


def test_of_stacks_in_another_type_and_order() -> None:
    """A model that casts its layers before the scan, or stacks them along another dim."""

    def program(total: jax.Array, other: jax.Array, x: jax.Array, rows: jax.Array) -> list[jax.Array]:
        def trip(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            carry = jnp.tanh(carry + row)
            return carry, ((carry * row).astype(jnp.bfloat16), jnp.outer(carry, row))

        last, (narrow, square) = jax.lax.scan(trip, x, rows)
        return [total + narrow.astype(jnp.float32), other + square.transpose(2, 0, 1), last]

    args = arrays((ROWS, WIDTH), (WIDTH, ROWS, WIDTH), (WIDTH,), (ROWS, WIDTH))
    assert stacks_of(accumulated(program, args)) == []


def test_what_a_trip_scatters_stays_stacked() -> None:
    """It is sent beside the next trip, as long as nothing else is done with it."""

    def program(total: jax.Array, other: jax.Array, x: jax.Array, rows: jax.Array) -> list[jax.Array]:
        def trip(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            carry = jnp.tanh(carry + row)
            return carry, (jax.lax.psum_scatter(carry * row, "x", tiled=True), jax.lax.psum(carry, "x"))

        last, (scattered, summed) = jax.lax.scan(trip, x, rows)
        return [total + scattered, other + summed, last]

    avals = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,), (ROWS, WIDTH))
    ]
    better = accumulate_in_scans(traced(program, avals), traced)
    assert better is not None
    assert stacks_of(better) == [(ROWS, WIDTH)]


def test_nothing_to_be_added_up_is_said() -> None:
    def program(x: jax.Array, rows: jax.Array) -> list[jax.Array]:
        last, stack = jax.lax.scan(lambda carry, row: (carry + row, carry * row), x, rows)
        return [last, stack]

    avals = [jax.ShapeDtypeStruct((WIDTH,), jnp.float32), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)]
    assert accumulate_in_scans(traced(program, avals), traced) is None


def test_a_stack_that_is_scattered_is_scattered_row_by_row() -> None:
    def program(total: jax.Array, x: jax.Array, rows: jax.Array) -> list[jax.Array]:
        last, stack = jax.lax.scan(lambda carry, row: (jnp.tanh(carry + row), carry * row), x, rows)
        scattered = jax.lax.psum_scatter(stack.T, "x", tiled=True)
        return [total + jax.lax.optimization_barrier(scattered), last]

    args = arrays((WIDTH, ROWS), (WIDTH,), (ROWS, WIDTH))
    closed = traced(program, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    better = accumulate_in_scans(closed, traced)
    assert better is not None

    def run(one: ClosedJaxpr) -> Any:
        on_mesh = jax.shard_map(lambda *xs: evaluate(one, *xs), mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(on_mesh)(*args)

    for wanted, found in zip(run(closed), run(better), strict=True):
        np.testing.assert_array_equal(found, wanted)
    outside = [e.primitive.name for e in open_jaxpr(better).eqns]
    assert "reduce_scatter" not in outside
    assert "optimization_barrier" not in outside
    assert stacks_of(better) == [(ROWS, WIDTH)]


def test_a_stack_whose_rows_go_to_different_devices_is_left() -> None:
    def program(total: jax.Array, x: jax.Array, rows: jax.Array) -> list[jax.Array]:
        last, stack = jax.lax.scan(lambda carry, row: (jnp.tanh(carry + row), carry * row), x, rows)
        return [total + jax.lax.psum_scatter(stack, "x", tiled=True), last]

    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, WIDTH), (WIDTH,), (ROWS, WIDTH))]
    assert accumulate_in_scans(traced(program, avals), traced) is None
