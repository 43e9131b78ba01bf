"""Mixtures without dropped tokens, as people write them: tokens sorted by expert, products of groups, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_device import assert_equal_trees, copy

import meshwright as mw
from meshwright.program.rules import ReplicationWarning

EXPERTS = 8


def softmax_router(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits), k)
    return weights / jnp.sum(weights, -1, keepdims=True), ids


def sigmoid_router(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    weights, ids = jax.lax.top_k(jax.nn.sigmoid(logits), k)
    return weights, ids


def scattered(p: Any, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Results are added to their tokens."""
    k = ids.shape[1]
    order = jnp.argsort(ids.ravel())
    sizes = jnp.bincount(ids.ravel(), length=EXPERTS)
    rows = x[order // k]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, p["gated"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
    made = jax.lax.ragged_dot(hidden, p["down"], sizes)
    return jnp.zeros_like(x).at[order // k].add(made * weights.ravel()[order][:, None])


def unsorted(p: Any, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Results are brought back into the order of the tokens, and summed there (as MaxText does)."""
    (tokens, k), width = ids.shape, x.shape[1]
    order = jnp.argsort(jnp.ravel(ids))
    sizes = jnp.sum(jax.nn.one_hot(jnp.ravel(ids), EXPERTS, dtype=jnp.int32), axis=0)
    rows = jnp.take(x, order // k, axis=0)
    hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, p["up"], sizes))
    made = jnp.take(jax.lax.ragged_dot(hidden, p["down"], sizes), jnp.argsort(order), axis=0)
    return jnp.einsum("tkd,tk->td", made.reshape(tokens, k, width), weights)


def step_of(router: Callable[..., Any], experts: Callable[..., Any], k: int) -> Callable[..., Any]:
    """A training step of a layer with a mixture."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            tokens = x.reshape(-1, x.shape[-1]) @ p["in"]
            made = tokens + experts(p, tokens, *router(tokens @ p["router"], k))
            return jnp.mean(jnp.square(made @ p["out"]))

        value, grads = mw.value_and_grad(loss)(state)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value

    return step


def shapes(width: int, hidden: int, experts: int = EXPERTS) -> dict[str, tuple[int, ...]]:
    return {
        "in": (width, width), "router": (width, experts), "up": (experts, width, hidden),
        "gated": (experts, width, hidden), "down": (experts, hidden, width), "out": (width, width),
    }  # fmt: skip


def small() -> tuple[Any, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 7))
    state = {name: 0.3 * jax.random.normal(next(keys), shape) for name, shape in shapes(16, 32).items()}
    return state, jax.random.normal(next(keys), (8, 16, 16))


# Of a product of groups: rows, summed dim, groups, columns, sizes of groups (`program.ragged`).
WAYS = {
    "experts": ((), (), ("y",), (), ()),
    "experts and rows": (("x",), (), ("y",), (), ()),
    "experts over both axes": ((), (), ("x", "y"), (), ()),
}


@pytest.mark.parametrize("way", WAYS)
def test_split_products_of_groups_are_exact(way: str) -> None:
    """As the planner would split them were the arrays larger."""
    step = step_of(softmax_router, scattered, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        found = mw.plan_for(step, small(), cluster="local", mesh={"x": 2, "y": 4}, stages=1).plan
    (stage,) = found.stages
    operators = tuple(
        replace(one, axes=WAYS[way]) if one.name == "ragged_dot_general" else one for one in stage.operators
    )
    plan = replace(found, stages=(replace(stage, operators=operators),))
    state, x = small()
    assert_equal_trees(mw.parallelize(step, plan=plan)(copy(state), x), jax.jit(step)(state, x))
