"""Updates around pipelines give the numbers of one device, whatever they are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_device import assert_equal_trees, copy
from pipelines import Pipeline, assert_as_on_one_device, pipelined, whole
from test_pipeline import data, perceptron, predict, scanned
from updates import UPDATES, state_of, step_of

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.lowering.pipeline import placement

_THREE = Pipeline(submeshes=(2, 2, 4), microbatches=2)
_TWO = Pipeline(microbatches=2)


@pytest.fixture(autouse=True)
def weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of 32 x 32 are too large to be sent without a word, as those of a model are."""
    monkeypatch.setattr(placement, "SMALL_BYTES", 1024)


def tied(params: Any, x: Any) -> Any:
    """The first layer is the last one too."""
    return jnp.tanh(predict(params, x) @ params[0]["w"].T)


def stack() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    layers = {"w": jax.random.normal(keys[0], (5, 32, 32)) / 32, "b": jnp.full((5, 32), 0.01)}
    return {"in": jax.random.normal(keys[1], (32, 32)) / 32**0.5, "stack": layers}


_STACK = Pipeline(submeshes=(2, 2, 4), layers=(2, 1, 2), microbatches=2, scan_splits={1: (1, 3, 1)})


def assert_updates(name: str, forward: Any, params: Any, pipeline: Pipeline) -> Any:
    update, optimizer = UPDATES[name]
    return assert_as_on_one_device(step_of(update, forward), state_of(params, optimizer), data(), pipeline=pipeline)


def test_a_cond_around_the_update_of_parameters_that_stages_share() -> None:
    assert_updates("scaled", tied, perceptron(), _TWO)


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_every_update(name: str) -> None:
    assert_updates(name, tied, perceptron(), _THREE)
    assert_updates(name, scanned, stack(), _STACK)


def test_what_reads_all_gradients_is_computed_on_one_stage_and_told() -> None:
    step = assert_updates("together", tied, perceptron(), _TWO)
    note = step.local.around.note()
    assert note is not None
    assert "MiB between stages each step" in note
    assert "updates.py" in note
    assert note in step.local.plan_with_memory().notes


@pytest.mark.parametrize(
    ("params", "forward", "pipeline"),
    [(perceptron, tied, _TWO), pytest.param(stack, scanned, _STACK, marks=pytest.mark.slow)],
)
def test_gradients_that_somebody_else_applies(params: Any, forward: Any, pipeline: Pipeline) -> None:
    def step(params: Any, batch: Any) -> Any:
        return mw.value_and_grad(lambda p: jnp.mean((forward(p, batch[0]) - batch[1]) ** 2))(params)

    parallel = pipelined(step, (params(), data()), pipeline)
    assert_equal_trees(whole(parallel(copy(params()), data())), whole(jax.jit(step)(params(), data())))
    assert parallel.local.around.note() is None or params is stack


def test_stages_agree_on_decisions_to_the_bit() -> None:
    """A comparison of what stages would round by themselves is computed by one of them, and so is state."""
    step = assert_updates("spikes", predict, perceptron(), _TWO)
    around = step.local.around
    ema = next(i for i, n in enumerate(step.program.input_names) if "ema" in n)
    for atom in (around.outvars[ema], *(v for e in around.equations if e.primitive.name == "gt" for v in e.outvars)):
        assert len(around.at[atom]) == 1


def test_an_update_for_each_microbatch_waits_for_nobody() -> None:
    update, optimizer = UPDATES["together"]
    with pytest.raises(PlanError, match="an update of each stage by itself"):
        pipelined(
            step_of(update, predict), (state_of(perceptron(), optimizer), data()),
            Pipeline(submeshes=(2, 2, 4), schedule="pipedream"),
        )  # fmt: skip


@pytest.mark.slow
def test_a_second_loss_on_the_new_parameters() -> None:
    """Outside the marked call nothing is a pipeline: activations go from stage to stage, or weights do."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((tied(params, batch[0]) - batch[1]) ** 2)

        value, grads = mw.value_and_grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, {"before": value, "after": loss(params)}

    assert_as_on_one_device(step, perceptron(), data(), pipeline=_THREE)
