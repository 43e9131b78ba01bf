"""What stands around the loss function: preprocessing, auxiliary results, state that no parameter owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import Pipeline, assert_as_on_one_device, pipelined
from test_pipeline import data, perceptron, predict

import meshwright as mw


def test_preprocessing_casts_and_auxiliary_results() -> None:
    """The batch is scaled and the parameters are cast before the loss; predictions grow with the batch; a parameter is
    unused; the step count, a running mean of the loss and a frozen array are state too."""

    def step(state: Any, x: Any, y: Any) -> Any:
        x = 2 * x - jnp.mean(x)
        halved = jax.tree.map(lambda p: p / 2, state["params"])

        def loss(params: Any, x: Any, y: Any, frozen: Any) -> Any:
            out = predict(params["layers"], x) + frozen
            error = jnp.mean((out - y) ** 2)
            return error, {"out": out, "mean": jnp.mean(out), "frozen": frozen}

        (value, aux), grads = mw.value_and_grad(loss, has_aux=True)(halved, x, y, state["frozen"])
        rate = 0.1 / (1 + state["count"]) * jnp.minimum(1.0, 1 / state["running"])
        params = jax.tree.map(lambda p, g: p - rate * g, state["params"], grads)
        running = 0.9 * state["running"] + 0.1 * value
        kept = {"params": params, "count": state["count"] + 1, "running": running, "frozen": aux["frozen"]}
        return kept, {"loss": value, "out": aux["out"], "mean": aux["mean"], "y": y + 1}

    state = {
        "params": {"layers": perceptron(), "unused": jnp.ones((8, 4))},
        "count": jnp.zeros((), jnp.int32),
        "running": jnp.ones(()),
        "frozen": jnp.linspace(0, 1, 32),
    }
    for microbatches in (1, 4):
        assert_as_on_one_device(step, state, *data(), pipeline=Pipeline(submeshes=(2, 2, 4), microbatches=microbatches))


def test_raw_keys_and_arrays_of_numpy() -> None:
    def step(params: Any, x: Any, y: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            out = predict(params, x)
            noise = jax.random.normal(key, (32,))  # the same for every example
            return jnp.mean((out + noise - y) ** 2)

        value, grads = mw.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    x, y = map(np.asarray, data())
    params = jax.tree.map(np.asarray, perceptron())
    assert_as_on_one_device(step, params, x, y, jax.random.PRNGKey(3), pipeline=Pipeline(microbatches=1))


def test_what_several_stages_hold_is_one_leaf() -> None:
    def step(state: Any, x: Any, y: Any) -> Any:
        value, grads = mw.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(state["params"])
        rate = 0.1 / (1 + state["count"])
        params = jax.tree.map(lambda p, g: p - rate * g, state["params"], grads)
        return {"params": params, "count": state["count"] + 1}, value

    state = {"params": perceptron(), "count": jnp.zeros((), jnp.int32)}
    parallel = pipelined(step, (state, *data()), Pipeline())
    state, value = parallel(state, *data())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((state, value)))
    assert (int(state["count"]), state["count"].shape, state["count"].dtype) == (1, (), jnp.int32)
    assert state["count"].sharding.device_set == set(jax.devices())


def step_with_results(reduction: str, *, rows: bool) -> Callable[..., Any]:
    """A step of a perceptron that returns sums, means, extremes and counts of its batch, whatever the loss's scale.

    Args:
      reduction: "mean" or "sum", of the loss.
      rows: whether it also returns what grows with the batch.
    """
    reduce = jnp.mean if reduction == "mean" else jnp.sum

    def step(params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"])
            out = predict(params[1:], hidden)
            aux = {
                "early": jnp.max(hidden), "max": (out - 100).max(), "min": jnp.min(out + 100, axis=0),
                "sum": out.sum(), "mean": jnp.abs(out).mean(), "count": jnp.array(out.shape[0]),
                "positive": jnp.sum(out[:, 0] > 0), "weight": jnp.sum(params[1]["w"]), "truth": jnp.array(True),
                "any": jnp.any(out > jnp.max(y) + 1), "all": jnp.all(out < 2), "finite": jnp.isfinite(out).all(),
            }  # fmt: skip
            return reduce((out - y) ** 2) / 64, {**aux, "rows": out * 2} if rows else aux

        (value, aux), grads = mw.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, **aux}

    return step


@pytest.mark.parametrize(
    ("reduction", "schedule"),
    [
        ("mean", "gpipe"),
        ("sum", "zero_bubble"),
        pytest.param("mean", "zero_bubble", marks=pytest.mark.slow),
        pytest.param("sum", "gpipe", marks=pytest.mark.slow),
    ],
)
def test_results_beside_the_loss_are_those_of_the_whole_batch(reduction: str, schedule: str) -> None:
    step = step_with_results(reduction, rows=True)
    pipeline = Pipeline(submeshes=(2, 2, 4), schedule=schedule)
    assert_as_on_one_device(step, perceptron(), *data(), pipeline=pipeline)
