"""Ranges that hold several pieces of one scan, looked at as one scan."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright._jax.accumulate import accumulate_in_scans
from meshwright._jax.jaxpr import evaluate, open_jaxpr
from meshwright._jax.passes import trace_local
from meshwright.program.staged import StagedProgram, merge_scans, staged_program
from meshwright.program.trace import trace_program
from meshwright.zoo import gpt, llama


@cache
def staged(family: str) -> StagedProgram:
    """A stack of eight layers, cut into eight."""
    if family == "gpt":
        target = gpt.build(dataclasses.replace(gpt.CONFIGS["gpt-tiny"], layers=8, scan=True))
    else:
        target = llama.build(dataclasses.replace(llama.CONFIGS["llama-tiny"], layers=8))
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=2)
    return staged_program(program, layers=8)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_folded_range_is_the_merged_program(family: str) -> None:
    program = staged(family)
    count = len(program.layers)
    assert count > 4
    for first, last in ((0, 3), (1, 3), (2, count - 1), (count - 3, count), (0, count)):
        starts = [program.layers[n][0] for n in (first, last) if 0 < n < count]
        merged = merge_scans(program, starts)
        assert merged is not None
        one = program.folding_cutter.cut(program.layers[first][0], program.layers[last - 1][1])
        other = merged.cutter.cut(*merged.layers[1 if first else 0])
        assert one.fingerprint == other.fingerprint
        # All rows of a stack are the whole of it.
        assert one.parameters == other.parameters or (first, last) == (0, count)
        apart = program.cutter.cut(program.layers[first][0], program.layers[last - 1][1])
        assert len(one.graph.operators) < len(apart.graph.operators)
        assert one.graph.flops == pytest.approx(apart.graph.flops)


@pytest.mark.parametrize("reverse", [False, True])
def test_sums_are_made_in_the_scan(reverse: bool) -> None:
    def program(total: jax.Array, other: jax.Array, x: jax.Array, rows: jax.Array) -> list[jax.Array]:
        def trip(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            carry = jnp.tanh(carry + row)
            return carry, (carry * row, carry - row)

        last, (products, differences) = jax.lax.scan(trip, x, rows, reverse=reverse)
        # The first sum is made in the scan; the second result is read twice, and is stacked as before.
        return [total + products, other + differences, last, 2 * differences]

    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 4)
    args = [jax.random.normal(k, s) for k, s in zip(keys, ((5, 3), (5, 3), (3,), (5, 3)), strict=True)]
    closed = trace_local(program, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args], mesh)
    better = accumulate_in_scans(closed, mesh)
    for wanted, found in zip(evaluate(closed, *args), evaluate(better, *args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    (scan,) = (e for e in open_jaxpr(better).eqns if e.primitive.name == "scan")
    stacked = [v for v in scan.outvars if v.aval.shape == (5, 3)]
    assert len(stacked) == 2  # the sum and the differences
    assert sum(e.primitive.name in ("add", "add_any") for e in open_jaxpr(better).eqns) == 1
