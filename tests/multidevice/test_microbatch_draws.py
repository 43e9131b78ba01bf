"""Random numbers in microbatches: each example has those that one device draws for it, and no key is changed."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from one_device import assert_as_on_one_device, assert_equal_trees, copy

import meshwright as mw
from meshwright.errors import PlanError

SLOW = pytest.mark.slow
_RANDOM = np.random.default_rng(0)
BATCH, WIDTH = 32, 8
X = jnp.asarray(_RANDOM.normal(size=(BATCH, WIDTH)), jnp.float32)
TOKENS = jnp.asarray(_RANDOM.normal(size=(BATCH, 4, WIDTH)), jnp.float32)
PARAMETERS = {name: jnp.asarray(_RANDOM.normal(size=(WIDTH, WIDTH)) * 0.4, jnp.float32) for name in ("in", "out")}
RUNS = [
    {"microbatches": 4, "preset": "data_parallel()"},
    {"microbatches": 2, "stages": 2},
    pytest.param({"microbatches": 2, "mesh": {"data": 2, "model": 4}}, marks=SLOW),
    pytest.param({"microbatches": 4, "stages": 2, "submeshes": (4, 4)}, marks=SLOW),
    pytest.param({"microbatches": 2, "preset": "zero(stage=3)"}, marks=SLOW),
]


@cache
def step_of(loss: Any) -> Any:
    """Of a loss of parameters, a batch and a key, and what it makes beside."""

    def step(p: Any, batch: Any, key: Any) -> Any:
        (value, aux), gradients = mw.value_and_grad(loss, has_aux=True)(p, batch, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), (value, aux)

    return step


def dropped(key: Any, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)


def _layers(p: Any, batch: Any, key: Any) -> Any:
    """Dropout of rows, of tokens merged with the batch, with the batch last, in loops, checkpoints and branches, and
    noise of weights, which all examples share."""
    x, tokens = batch
    keys = jax.random.split(key, 8)
    weights = p["in"] + 0.1 * jax.random.normal(keys[0], (WIDTH, WIDTH))
    h = dropped(keys[1], jnp.tanh(x @ weights))
    merged = dropped(keys[2], (tokens @ p["in"]).reshape(-1, WIDTH)).reshape(tokens.shape)
    h = h + dropped(keys[3], merged.mean(1).T).T
    h, _ = lax.scan(lambda h, k: (jnp.tanh(dropped(k, h) @ p["out"]), None), h, jax.random.split(keys[4], 3))
    h = jax.checkpoint(lambda h: dropped(keys[5], h @ p["out"]))(h)
    h = lax.cond(p["in"][0, 0] > -9, lambda h: dropped(keys[6], h), lambda h: h, h)
    return jnp.mean(jnp.where(jax.random.bernoulli(keys[7]), h, -h) ** 2), h


def _samples(p: Any, batch: Any, key: Any) -> Any:
    """Keys of one's own for each example, made from a seed inside of the loss; times, classes, and positions that are
    numbers."""
    x, _ = batch
    count = x.shape[0]
    seeded = jax.random.fold_in(jax.random.PRNGKey(3), 5)
    times = jax.random.uniform(key, (count,))

    def one(x: jax.Array, time: jax.Array, key: Any) -> jax.Array:
        noise = jax.random.normal(key, x.shape)
        return jnp.mean((jnp.tanh((x * (1 - time) + noise * time) @ p["in"]) - noise) ** 2)

    scores = jax.vmap(one)(x, times, jax.random.split(seeded, count))
    mapped = lax.map(
        lambda row: jnp.sum(row[0] * jax.random.normal(row[1], (WIDTH,))), (x, jax.random.split(key, count))
    )
    folded = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(jnp.arange(count))
    logits = x @ p["out"]
    chosen = jax.random.categorical(key, lax.stop_gradient(logits))
    picked = jax.nn.log_softmax(logits)[jnp.arange(count), chosen]
    return jnp.mean(scores) - jnp.mean(picked * mapped * folded), (chosen, scores)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (_layers, RUNS[0]),
        (_samples, RUNS[1]),
        pytest.param(_layers, RUNS[1], marks=pytest.mark.slow),
        pytest.param(_samples, RUNS[0], marks=pytest.mark.slow),
    ],
    ids=lambda one: one.__name__.strip("_") if callable(one) else str(one),
)
def test_draws_are_those_of_one_device(loss: Any, options: dict[str, Any]) -> None:
    assert_as_on_one_device(step_of(loss), PARAMETERS, (X, TOKENS), jax.random.key(7), steps=2, **options)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys_and_counters_come_back_as_they_went_in(make_key: Any) -> None:
    def step(state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> Any:
            key, count, h = state["key"], state["count"], x
            for name in ("in", "out"):
                h = dropped(jax.random.fold_in(key, count), h) @ p[name]
                count = count + 1
            return jnp.mean(h**2), {"key": key, "count": count}

        (value, kept), gradients = mw.value_and_grad(loss, has_aux=True)(state["p"])
        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], gradients), **kept}, value

    state = {"p": PARAMETERS, "key": make_key(3), "count": jnp.uint32(0)}
    assert_as_on_one_device(step, state, X, microbatches=4, stages=1)


@pytest.mark.parametrize(
    ("draw", "got"),
    [
        (lambda k, h: h * jax.random.gamma(k, 2.0, (h.shape[0], 1)), "random_gamma of the shape of the batch"),
        (lambda k, h: h * jax.random.normal(k, (h.shape[0] + 1, 1))[1:], "examples meet"),
        (lambda k, h: h[jax.random.permutation(k, h.shape[0])] + h, "examples meet"),
        (lambda k, h: dropped(k, jnp.concatenate([h, 2 * h])), "examples meet"),
        (lambda k, h: dropped(k, jnp.stack([h, 2 * h]).reshape(-1, WIDTH)), "examples meet"),
        (lambda k, h: _own_derivative(h), "in a function with a derivative of its own"),
    ],
    ids=["gamma", "one more", "permuted", "two views", "views first", "own derivative"],
)
def test_draws_that_no_microbatch_can_make_are_refused(draw: Any, got: str) -> None:
    step = step_of(lambda p, x, k: (jnp.mean(draw(k, x @ p["in"]) ** 2), ()))
    with pytest.raises(PlanError, match=got) as refused:
        mw.parallelize(step, microbatches=2).plan(PARAMETERS, X, jax.random.key(1))
    assert "test_microbatch_draws.py" in refused.value.where


@jax.custom_jvp
def _own_derivative(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@_own_derivative.defjvp
def _own_tangent(primals: Any, tangents: Any) -> Any:
    return jnp.tanh(primals[0]), dropped(jax.random.key(5), tangents[0])


def test_other_kinds_of_keys_are_noted() -> None:
    step = step_of(lambda p, x, k: (jnp.mean((dropped(k, x) @ p["in"]) ** 2), k))
    keys = {kind: jax.random.key(0, impl=kind) for kind in ("threefry2x32", "rbg")}
    notes = {kind: mw.parallelize(step, microbatches=2).plan(PARAMETERS, X, key).notes for kind, key in keys.items()}
    assert not any("others than on one device" in note for note in notes["threefry2x32"])
    assert any("test_microbatch_draws.py" in note and "others than on one device" in note for note in notes["rbg"])
    # Reproducible all the same, and the key is the one that went in.
    runs = [mw.parallelize(step, microbatches=2)(copy(PARAMETERS), X, keys["rbg"]) for _ in range(2)]
    assert_equal_trees(runs[0], runs[1], rtol=0, atol=0)
    assert (jax.random.key_data(runs[0][1][1]) == jax.random.key_data(keys["rbg"])).all()
