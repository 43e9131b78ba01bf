"""Prints and callbacks of single examples (`jax.vmap` in the loss): once an example in any number of microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from one_device import assert_equal_trees

import meshwright as mw
from meshwright.errors import PlanError

X = jax.random.normal(jax.random.key(0), (16, 4))
W = 0.5 * jnp.eye(4)
SEEN: list[tuple[Any, ...]] = []


def note(*values: Any) -> None:
    SEEN.append(tuple(np.round(np.asarray(value, np.float64), 4).tolist() for value in values))


def seen() -> list[str]:
    jax.effects_barrier()
    found = sorted(map(str, SEEN))
    SEEN.clear()
    return found


def of_an_example(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    jax.debug.callback(note, h.sum(), w[0, 0], 3.0)
    jax.debug.callback(note, x, ordered=False)
    return jnp.mean(h**2)


def of_layers(w: Any, x: Any) -> Any:
    def layer(h: Any, _: Any) -> Any:
        jax.debug.callback(note, h.sum())
        return jnp.tanh(h @ w), None

    return jnp.mean(jax.lax.scan(layer, x, None, length=2)[0] ** 2)


def of_heads(w: Any, x: Any) -> Any:
    """Two `vmap`s, of which the inner one has the examples."""

    def one(h: Any) -> Any:
        jax.debug.callback(note, h.sum())
        return jnp.mean(jnp.tanh(h) ** 2)

    return jax.vmap(jax.vmap(one), 1)((x @ w).reshape(-1, 2, 2)).mean()


def masked(w: Any, x: Any) -> Any:
    mask = x[:, 0] > 0
    return (jax.vmap(of_an_example, (None, 0))(w, x) * mask).sum() / mask.sum()


def with_io(w: Any, x: Any) -> Any:
    io_callback(note, None, jax.lax.stop_gradient(x @ w))
    return jnp.mean((x @ w) ** 2)


def mapped(one: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jax.vmap(one, (None, 0))(w, x).mean()


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        value, grad = mw.value_and_grad(loss)(w, x)
        return w - 0.1 * grad, value

    return step


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (mapped(of_an_example), {"microbatches": 4}),
        (mapped(of_an_example), {"microbatches": 16}),
        (mapped(of_an_example), {"microbatches": 2, "stages": 2}),
        (mapped(of_layers), {"microbatches": 2, "preset": "data_parallel()"}),
        (of_heads, {"microbatches": 4}),
        pytest.param(mapped(with_io), {"microbatches": 4}, marks=pytest.mark.slow),
        (masked, {"microbatches": 4}),
        pytest.param(of_heads, {"microbatches": 16}, marks=pytest.mark.slow),
        pytest.param(of_heads, {}, marks=pytest.mark.slow),
    ],
)
def test_once_an_example(loss: Callable[..., Any], options: dict[str, Any]) -> None:
    step = step_of(loss)
    expected = jax.jit(step)(W, X)
    calls = seen()
    parallel = mw.parallelize(step, **options)
    assert_equal_trees(parallel(jnp.copy(W), X), expected)
    assert seen() == calls
    assert not [note for note in parallel.plan(W, X).notes if "once a microbatch" in note]


def test_prints_that_follow_the_batch_size_in_another_way_are_named() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = x @ w
        for row in range(len(x)):
            jax.debug.callback(note, h[row])
        return jnp.mean(h**2)

    with pytest.raises(PlanError, match=r"jax.debug.callback in the loss .*test_effects_of_examples.py:\d+"):
        mw.plan_for(step_of(loss), (W, X), microbatches=4)
