"""Rematerialised parts: the gradients of their weights are made before the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright._jax.ahead import has_tpu_compiler
from meshwright._jax.jaxpr import open_jaxpr
from meshwright._jax.plain import programs_in
from meshwright.cluster import load_cluster
from meshwright.compilers import target_devices
from meshwright.lowering.local_step import LocalStep
from meshwright.runtime.executable import executable

BLOCKS, WIDTH, ROWS = 3, 1024, 65536
ARGS = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * BLOCKS, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
)  # fmt: skip


def step(weights: Any, x: Any) -> tuple[Any, Any]:
    """Blocks that read one weight eight times: all that they compute is large beside it."""

    def block(x: Any, w: Any) -> Any:
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return x

    def loss(weights: Any) -> Any:
        y = x
        for w in weights:
            y = jax.checkpoint(block)(y, w)
        return jnp.mean(y**2)

    value, gradients = mw.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def planned(zero: int, cluster: str) -> Any:
    return mw.plan_for(
        step, ARGS, cluster=cluster, preset=f"zero(stage={zero})" if zero else "data_parallel", microbatches=1
    )


def equations(program: Any) -> Iterator[Any]:
    """All of a program, those of the programs in it too."""
    for equation in open_jaxpr(program).eqns:
        yield equation
        for inner in programs_in(equation):
            yield from equations(inner)


@pytest.mark.parametrize(("zero", "tied"), [(0, BLOCKS - 1), (1, BLOCKS - 1), (3, 0)])
def test_cotangents_wait_for_gradients_that_are_summed_at_the_end(zero: int, tied: int) -> None:
    """Of gathered weights they do not: those are scattered first. (The first block has no cotangent to send on.)"""
    found = planned(zero, "tpu-v5e:8")
    local = LocalStep(found.program, found.plan)
    closed = jax.make_jaxpr(local.on(local.abstract_mesh(), "tpu"))(*local.avals())
    barriers = [
        {v.aval.shape for v in e.outvars} for e in equations(closed) if e.primitive.name == "optimization_barrier"
    ]
    assert sum({(WIDTH, WIDTH), (ROWS // 8, WIDTH)} <= shapes for shapes in barriers) == tied


@pytest.mark.compilers
@pytest.mark.skipif(not has_tpu_compiler(), reason="needs libtpu (make setup-tpu)")
def test_a_tpu_holds_what_one_part_has_computed_again() -> None:
    """XLA makes gradients that are scattered at the end of the step: the values of all blocks were there."""
    found = planned(1, "tpu-v5e:8")
    lowered = executable(found.program, found.plan, target_devices(load_cluster("tpu-v5e:8"), found.plan)).lower()
    block = 8 * ROWS // 8 * WIDTH * 4
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 1.2 * block
