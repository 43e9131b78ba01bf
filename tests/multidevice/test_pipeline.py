"""Steps cut into stages give the numbers of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from pipelines import Pipeline, assert_as_on_one_device

import meshwright as mw
from meshwright import zoo


def perceptron(layers: int = 4, width: int = 32) -> Any:
    keys = jax.random.split(jax.random.key(0), layers)
    return [{"w": jax.random.normal(k, (width, width)) * width**-0.5, "b": jnp.zeros(width)} for k in keys]


def predict(params: Any, x: Any) -> Any:
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def data(batch: int = 32, width: int = 32) -> tuple[Any, Any]:
    x = jax.random.normal(jax.random.key(1), (batch, width))
    return x, jnp.roll(x, 1, axis=1)


_OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-5))


def clipped_step(state: Any, x: Any, y: Any) -> Any:
    params, moments = state
    loss, grads = mw.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
    updates, moments = _OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": loss, "norm": optax.tree.norm(grads)}


@pytest.mark.parametrize(
    ("pipeline"),
    [
        Pipeline(schedule="zero_bubble", submeshes=(2, 2, 4), microbatches=2),
        Pipeline(schedule="one_f_one_b", microbatches=8, submeshes=(4, 2, 2)),
        Pipeline(schedule="eager_one_f_one_b", options=(("split_backward", 1),), submeshes=(2, 2, 2, 2)),
        Pipeline(schedule="adaptive", options=(("warm_up", (2, 1)),), submeshes=(2, 2, 4)),
        # As of presets (`test_preset_runs`).
        pytest.param(Pipeline(schedule="gpipe"), marks=pytest.mark.slow),
        pytest.param(Pipeline(schedule="gpipe", microbatches=1), marks=pytest.mark.slow),
    ],
    ids=lambda p: f"{p.schedule}-{p.microbatches}",
)
def test_a_clipped_perceptron(pipeline: Pipeline) -> None:
    """Clipping by the global norm reads the gradients of all stages."""
    params = perceptron()
    assert_as_on_one_device(clipped_step, (params, _OPTIMIZER.init(params)), *data(), pipeline=pipeline)


@pytest.mark.slow
def test_a_tied_embedding() -> None:
    target = zoo.build("gpt-tiny")
    state, batch = target.init(jax.random.key(0)), target.make_batch(jax.random.key(1))
    step = assert_as_on_one_device(target.step, state, batch, pipeline=Pipeline(microbatches=2))
    tied = [p.name for p in step.plan.stages[0].parameters if p in step.plan.stages[1].parameters]
    assert [name for name in tied if "tokens" in name] or tied


def dropout_step(state: Any, x: Any, y: Any, key: Any) -> Any:
    def loss(params: Any, x: Any, y: Any, key: Any) -> Any:
        for number, layer in enumerate(params):
            x = jnp.tanh(x @ layer["w"] + layer["b"])
            x = x * jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape)
        return jnp.mean((x - y) ** 2)

    value, grads = mw.value_and_grad(loss)(state, x, y, key)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}


@pytest.mark.slow
def test_dropout_draws_what_the_whole_batch_draws() -> None:
    args = perceptron(), *data(), jax.random.key(7)
    assert_as_on_one_device(dropout_step, *args, pipeline=Pipeline(microbatches=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe-tiny", "unet-tiny", "wresnet-tiny", "gpt-tiny"])
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_reference_models(name: str, schedule: str) -> None:
    target = zoo.build(name)
    state, batch = target.init(jax.random.key(0)), target.make_batch(jax.random.key(1))
    # Batch normalisation means other numbers in microbatches.
    pipeline = Pipeline(submeshes=(2, 2, 4), microbatches=1 if name == "wresnet-tiny" else 2, schedule=schedule)
    assert_as_on_one_device(target.step, state, batch, pipeline=pipeline)


def scanned(params: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> tuple[Any, None]:
        return h + jnp.tanh(h @ w["w"] + w["b"]), None

    h, _ = jax.lax.scan(layer, x @ params["in"], params["stack"])
    return h @ params["in"].T


@cache
def stacked_step(dim: int) -> tuple[Any, Any]:
    """A step of layers stacked on a dim, and its optimizer."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-5))

    def step(state: Any, x: Any, y: Any) -> Any:
        params, moments = state

        def loss_of(p: Any) -> Any:
            layers_first = {**p, "stack": jax.tree.map(lambda w: jnp.moveaxis(w, dim, 0), p["stack"])}
            return jnp.mean((scanned(layers_first, x) - y) ** 2)

        loss, grads = mw.value_and_grad(loss_of)(params)
        finite = jnp.all(jnp.isfinite(grads["stack"]["w"]))
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": loss, "finite": finite}

    return step, optimizer


@pytest.mark.parametrize(
    ("submeshes", "layers", "trips", "schedule", "dim"),
    [
        ((4, 4), (2, 2), (3, 2), "one_f_one_b", 1),
        ((2, 2, 4), (2, 1, 2), (1, 3, 1), "zero_bubble", 0),
        pytest.param((4, 4), (2, 2), (3, 2), "one_f_one_b", 0, marks=pytest.mark.slow),
        pytest.param((2, 2, 4), (2, 1, 2), (1, 3, 1), "zero_bubble", 1, marks=pytest.mark.slow),
    ],
)
def test_a_stack_cut_by_trips(
    submeshes: tuple[int, ...], layers: tuple[int, ...], trips: tuple[int, ...], schedule: str, dim: int
) -> None:
    """Each stage holds its rows of a scanned layer's parameters, stacked on any dim; clipping adds up over all rows."""
    step, optimizer = stacked_step(dim)
    depth, width = 5, 32
    keys = jax.random.split(jax.random.key(0), 2)
    stack = {"w": jax.random.normal(keys[0], (depth, width, width)) / width, "b": jnp.zeros((depth, width))}
    stack = jax.tree.map(lambda w: jnp.moveaxis(w, 0, dim), stack)
    params = {"in": jax.random.normal(keys[1], (width, width)) / width**0.5, "stack": stack}
    # Two transposes come before the scan where the layers are not stacked on dim 0.
    pipeline = Pipeline(
        submeshes=submeshes, layers=layers, microbatches=2, schedule=schedule,
        scan_splits={1 if dim == 0 else 3: trips},
    )  # fmt: skip
    parallel = assert_as_on_one_device(step, (params, optimizer.init(params)), *data(), pipeline=pipeline)
    rows = [p.rows for stage in parallel.plan.stages for p in stage.parameters if p.rows is not None]
    assert len(rows) == 2 * len(trips)
    assert {p.rows_dim for stage in parallel.plan.stages for p in stage.parameters if p.rows is not None} == {dim}
