"""Pipelines that only go forward give the results of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_device import assert_equal_trees
from pipelines import Pipeline, holders, inference, pipelined, whole
from test_pipeline import data, perceptron, predict, scanned

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.lowering.pipeline.slots import Role


def answer(params: Any, x: Any) -> Any:
    out = predict(params, x)
    return {"out": out, "largest": jnp.max(out), "mean": jnp.mean(out, axis=0), "count": jnp.array(x.shape[0])}


@pytest.mark.parametrize(
    ("submeshes", "microbatches"), [((2, 2, 4), 4), pytest.param((4, 4), 1, marks=pytest.mark.slow)]
)
def test_a_perceptron(submeshes: tuple[int, ...], microbatches: int) -> None:
    """What grows with the batch is put together, the rest is that of the whole batch."""
    params, (x, _) = perceptron(), data()
    pipeline = Pipeline(submeshes=submeshes, microbatches=microbatches, schedule="inference")
    parallel = inference(answer, (params, x), pipeline)
    expected = jax.jit(answer)(params, x)
    for _ in range(2):  # nothing is donated
        assert_equal_trees(whole(parallel(params, x)), whole(expected))


def test_nothing_is_kept_for_a_backward() -> None:
    params, (x, _) = perceptron(), data()
    parallel = inference(answer, (params, x), Pipeline(schedule="inference"))
    for stage, memory in zip(parallel.stages, parallel.local.memory, strict=True):
        assert all(slot.role is not Role.RESIDUAL for slot in stage.stage.forward.outputs)
        assert memory.in_flight_bytes == memory.gradient_bytes == 0
    assert [holders(parallel, i) for i in range(len(jax.tree.leaves(params)))] == [[0]] * 4 + [[1]] * 4


def test_a_training_step_is_refused() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        loss, grads = mw.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    with pytest.raises(PlanError, match=r"the schedule inference.*a step with gradients"):
        pipelined(step, (perceptron(), *data()), Pipeline(schedule="inference"))


def test_a_loop_over_layers() -> None:
    """Pieces of one loop on several stages, and weights that two stages read."""
    keys = jax.random.split(jax.random.key(0), 2)
    stack = {"w": jax.random.normal(keys[0], (5, 32, 32)) / 32, "b": jnp.zeros((5, 32))}
    params = {"in": jax.random.normal(keys[1], (32, 32)) / 32**0.5, "stack": stack}
    x, _ = data()
    pipeline = Pipeline(layers=(2, 2), microbatches=2, schedule="inference", scan_splits={1: (3, 2)})
    parallel = inference(scanned, (params, x), pipeline)
    assert_equal_trees(whole(parallel(params, x)), whole(jax.jit(scanned)(params, x)))
