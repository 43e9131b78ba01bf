"""Stages at the boundaries that the user set give the numbers of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import assert_equal_trees, copy
from pipelines import whole

import meshwright as mw
from meshwright._jax.jaxpr import open_jaxpr
from meshwright.program.staged import staged_program
from meshwright.runtime.pipeline.step import PipelinedStep

WIDTH, BATCH, BLOCKS = 32, 32, 4


def parameters() -> Any:
    keys = jax.random.split(jax.random.key(0), BLOCKS)
    return [{"w": jax.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5, "b": jnp.zeros(WIDTH)} for k in keys]


def block(layer: Any, x: Any) -> Any:
    x = jnp.tanh(x @ layer["w"] + layer["b"])
    mw.layer_boundary()
    return x


def blocks_in_a_row(params: Any, x: Any) -> Any:
    for layer in params:
        x = block(layer, x)
    return x


def jitted_blocks(params: Any, x: Any) -> Any:
    for layer in params:
        x = jax.jit(block)(layer, x)
    return x


def checkpointed_blocks(params: Any, x: Any) -> Any:
    for layer in params:
        x = jax.checkpoint(block)(layer, x)
    return x


def vmapped_blocks(params: Any, x: Any) -> Any:
    return jax.vmap(lambda row: blocks_in_a_row(params, row))(x)


def scanned_blocks(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params)[0]


@pytest.mark.parametrize("model", [blocks_in_a_row, jitted_blocks, checkpointed_blocks, vmapped_blocks, scanned_blocks])
def test_a_perceptron_with_a_boundary_after_every_block(model: Any) -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        loss, grads = mw.value_and_grad(lambda p: jnp.mean((model(p, x) - y) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = parameters()
    if model is scanned_blocks:
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    y = jnp.roll(x, 1, axis=1)
    planning = mw.plan_for(step, (params, x, y), stages=2, microbatches=4, schedule="one_f_one_b")

    # Every stage begins where a block ended: at a boundary, or at a trip of the scan.
    staged = staged_program(planning.program, scan_splits=dict(planning.plan.scan_splits))
    assert len(staged_program(planning.program).layers) == BLOCKS + 1
    begins = [stage.equations[0] for stage in planning.plan.stages if stage.equations is not None]
    assert begins[0] == 0
    assert set(begins) <= {first for first, _ in staged.layers}
    assert "layer_boundary" not in str(open_jaxpr(planning.program.core))

    parallel = PipelinedStep(planning.program, planning.plan, jax.devices())
    alone = jax.jit(step)
    expected, found = params, copy(params)
    for _ in range(3):
        expected, expected_loss = alone(expected, x, y)
        found, loss = parallel(found, x, y)
        np.testing.assert_allclose(float(loss), float(expected_loss), rtol=1e-5)
    assert_equal_trees(whole(found), whole(expected))
