"""PipeDream: updates after each microbatch, with the delays that its paper says, beside a simulation on one device."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_device import assert_equal_trees, copy
from pipelines import Pipeline, holders, pipelined, whole
from test_pipeline import data, perceptron, predict

import meshwright as mw
from meshwright import zoo
from meshwright.errors import PlanError

OPTIMIZER = optax.adam(1e-2, eps=1e-4)


def error(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((predict(params, x) - y) ** 2)


def step(state: Any, x: Any, y: Any) -> Any:
    params, moments = state
    loss, grads = mw.value_and_grad(error)(params, x, y)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": loss}


def delayed(state: Any, batches: Sequence[Any], stage_of: Any, stages: int) -> tuple[Any, list[Any]]:
    """PipeDream on one device: microbatch m goes through stage i of n with the weights after max(0, m - (n - 1 - i))
    updates of that stage, forward and backward; its gradient is applied to the newest."""
    params, moments = state
    versions, losses = [params], []
    for m, batch in enumerate(batches):
        seen = jax.tree.map(lambda stage, *history, m=m: history[max(0, m - (stages - 1 - stage))], stage_of, *versions)
        loss, grads = jax.value_and_grad(error)(seen, *batch)
        updates, moments = OPTIMIZER.update(grads, moments, versions[-1])
        versions.append(optax.apply_updates(versions[-1], updates))
        losses.append(loss)
    return (versions[-1], moments), losses


@pytest.mark.parametrize(
    ("submeshes", "microbatches"),
    [
        ((2, 2, 4), 8),
        pytest.param((4, 4), 4, marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 2), 2, marks=pytest.mark.slow),
    ],
)
def test_it_computes_what_delayed_updates_give(submeshes: tuple[int, ...], microbatches: int) -> None:
    params = perceptron(layers=len(submeshes) * 2 if len(submeshes) < 4 else 4)
    state, (x, y) = (params, OPTIMIZER.init(params)), data()
    pipeline = Pipeline(submeshes=submeshes, microbatches=microbatches, schedule="pipedream")
    parallel = pipelined(step, (state, x, y), pipeline)
    held = [holders(parallel, i) for i in range(len(jax.tree.leaves(params)))]
    stage_of = jax.tree.unflatten(jax.tree.structure(params), [stage for (stage,) in held])
    batches = list(zip(jnp.split(x, microbatches), jnp.split(y, microbatches), strict=True))
    expected, found = state, copy(state)
    for _ in range(2):  # drained in between
        expected, losses = delayed(expected, batches, stage_of, len(submeshes))
        found, metrics = parallel(found, x, y)
    for a, b in zip(jax.tree.leaves(whole(found)), jax.tree.leaves(whole(expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, np.max(np.abs(b))))
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)
    count = next(leaf for leaf in jax.tree.leaves(whole(found[1])) if leaf.ndim == 0)
    assert count == 2 * microbatches
    stages = len(submeshes)
    assert parallel.schedule.weight_versions == tuple(min(microbatches, stages - i) for i in range(stages))


def test_it_is_not_what_one_device_computes() -> None:
    """Gradients are delayed on all stages but the last."""
    params = perceptron()
    state, (x, y) = (params, OPTIMIZER.init(params)), data()
    parallel = pipelined(step, (state, x, y), Pipeline(schedule="pipedream"))
    found, _ = parallel(copy(state), x, y)
    expected = state
    for batch in zip(jnp.split(x, 4), jnp.split(y, 4), strict=True):
        expected, _ = jax.jit(step)(expected, *batch)
    first, other = whole(found)[0][0]["w"], whole(expected)[0][0]["w"]
    assert np.max(np.abs(first - other)) > 1e-4


def test_results_beside_the_loss_and_frozen_state() -> None:
    """Results are those of all microbatches, each with the weights it went forward with; what reads gradients or state
    is that of the last update. With rate zero the weights stay what they are, so one device can tell."""

    def still(state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            out = predict(params, x) + state["shift"]
            aux = {"out": out, "max": jnp.max(out), "sum": jnp.sum(out), "count": jnp.array(out.shape[0])}
            return jnp.mean((out - y) ** 2), aux

        (value, aux), grads = mw.value_and_grad(loss, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.0 * g, state["params"], grads)
        kept = {"params": params, "shift": state["shift"], "updates": state["updates"] + 1}
        return kept, {"loss": 2 * value, **aux, "updates": state["updates"], "y": y + 1}

    state = {"params": perceptron(), "shift": jnp.linspace(0, 1, 32), "updates": jnp.zeros((), jnp.int32)}
    parallel = pipelined(still, (state, *data()), Pipeline(schedule="pipedream"))
    (_, expected), (found, metrics) = jax.jit(still)(state, *data()), parallel(copy(state), *data())
    assert int(np.asarray(found["updates"])) == 4
    assert int(np.asarray(metrics.pop("updates"))) == 3
    expected.pop("updates")
    assert_equal_trees(whole(metrics), whole(expected))


def test_refusals() -> None:
    params, (x, y) = perceptron(), data()
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))

    def clip(state: Any, x: Any, y: Any) -> Any:
        loss, grads = mw.value_and_grad(error)(state, x, y)
        updates, _ = clipped.update(grads, clipped.init(state))
        return optax.apply_updates(state, updates), loss

    def by_loss(state: Any, x: Any, y: Any) -> Any:
        loss, grads = mw.value_and_grad(error)(state, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * loss * g, state, grads), loss

    def halved(state: Any, x: Any, y: Any) -> Any:
        loss, grads = mw.value_and_grad(error)(jax.tree.map(lambda p: p / 2, state), x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    def of_examples(state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            out = predict(params, x)
            return jnp.mean((out - y) ** 2), out

        (value, out), grads = mw.value_and_grad(loss, has_aux=True)(state)
        grads[-1]["b"] += jnp.mean(out, axis=0)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    pipeline = Pipeline(schedule="pipedream")
    for one, words in (
        (clip, r"pipedream: got a number of stage \d that others wait for; .*clipping by the global norm"),
        (by_loss, r"got a number of stage 2 that others wait for.*test_pipeline_asynchronous.py"),
        (halved, r"got an array of shape .* that the step computes from its state"),
        (of_examples, r"got an update that reads results of the whole batch"),
    ):
        with pytest.raises(PlanError, match=words):
            pipelined(one, (params, x, y), pipeline)
    target = zoo.build("gpt-tiny")
    with pytest.raises(PlanError, match=r"that stages 1, 2 share; .*one_f_one_b"):
        pipelined(target.step, (target.example_state, target.example_batch), Pipeline(schedule="pipedream"))


def test_weights_are_freed_when_no_microbatch_needs_them() -> None:
    """As many versions of a stage's weights are alive as the schedule says, and after a step one."""
    params, (x, y) = perceptron(), data()
    state = (params, OPTIMIZER.init(params))
    parallel = pipelined(step, (state, x, y), Pipeline(submeshes=(2, 2, 4), microbatches=8, schedule="pipedream"))
    x, y = np.asarray(x), np.asarray(y)
    first = parallel.create(lambda: state)
    state, _ = parallel(first, x, y)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first) if isinstance(leaf, jax.Array))
    gc.collect()  # what other tests have left
    seen = set()
    for _ in range(20):
        state, _ = parallel(state, x, y)
        seen.add(sum(array.nbytes for array in jax.live_arrays()))
    assert len(seen) == 1
