"""Mixtures without dropped tokens, as people write them: tokens sorted by expert, products of groups, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.megablox import gmm
from one_device import assert_equal_trees, copy

import meshwright as mw
from meshwright.program.rules import ReplicationWarning
from meshwright.program.trace import trace_program
from meshwright.report.strategy import axis_roles
from meshwright.targets import step_target
from meshwright.verify import verify

EXPERTS, WIDTH, HIDDEN = 8, 16, 32


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
    sizes = jnp.bincount(ids.ravel(), length=p["up"].shape[0])
    rows = x[order // k]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, p["gated"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
    made = jax.lax.ragged_dot(hidden, p["down"], sizes)
    return jnp.zeros_like(x).at[order // k].add(made * weights.ravel()[order][:, None])


def unsorted(p: Any, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Results are brought back into the order of the tokens, and summed there (as MaxText does); with biases."""
    (tokens, k), width = ids.shape, x.shape[1]
    order = jnp.argsort(jnp.ravel(ids))
    sizes = jnp.sum(jax.nn.one_hot(jnp.ravel(ids), EXPERTS, dtype=jnp.int32), axis=0)
    rows = jnp.take(x, order // k, axis=0)
    expert = jnp.ravel(ids)[order]
    hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, p["up"], sizes) + p["up bias"][expert])
    made = jax.lax.ragged_dot(hidden, p["down"], sizes) + p["down bias"][expert]
    made = jnp.take(made, jnp.argsort(order), axis=0)
    return jnp.einsum("tkd,tk->td", made.reshape(tokens, k, width), weights)


def masked(p: Any, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Written for devices that have some of the experts, and run as if one had all (as in jax-llm-examples): keys of
    others' experts would be the largest, and rows are counted behind the sort."""
    (tokens, k), ids = ids.shape, ids.reshape(-1)
    mine = (ids >= 0) & (ids < EXPERTS)
    keys = jnp.where(mine, ids - 0 * EXPERTS, 2**30)
    order = jnp.argsort(keys)
    back = jnp.argsort(order)
    sizes = jnp.bincount(ids[order], length=EXPERTS)
    is_mine = keys[order] < 2**30
    expert = jnp.where(is_mine, keys[order], 0)
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order // k], p["up"], sizes) + p["up bias"][expert])
    made = jax.lax.ragged_dot(jnp.where(is_mine[:, None], hidden, 0), p["down"], sizes) + p["down bias"][expert]
    made = jnp.where(is_mine[:, None], made, 0) * weights.reshape(-1)[order][:, None]
    return jnp.take_along_axis(made, back[:, None], axis=0).reshape(tokens, k, -1).sum(1)


def megablox(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """JAX's Pallas kernel for TPUs."""
    return gmm(rows, matrices, sizes, preferred_element_type=rows.dtype, tiling=(16, 16, 16), interpret=True)


def by_products(p: Any, x: jax.Array, weights: jax.Array, ids: jax.Array, product: Callable[..., Any]) -> jax.Array:
    k, order = ids.shape[1], jnp.argsort(ids.ravel())
    sizes = jnp.bincount(ids.ravel(), length=EXPERTS)
    made = product(jax.nn.silu(product(x[order // k], p["up"], sizes)), p["down"], sizes)
    return jnp.zeros_like(x).at[order // k].add(made * weights.ravel()[order][:, None])


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
        "up bias": (experts, hidden), "down bias": (experts, width),
    }  # fmt: skip


def small() -> tuple[Any, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 9))
    state = {name: 0.3 * jax.random.normal(next(keys), shape) for name, shape in shapes(WIDTH, HIDDEN).items()}
    return state, jax.random.normal(next(keys), (8, 16, WIDTH))


# What is split over which axes: tokens, experts, the hidden dim of each expert.
WAYS = {
    "data": {"tokens": ("x", "y")},
    "expert": {"experts": ("y",)},
    "data x expert": {"tokens": ("x",), "experts": ("y",)},
    "data x tensor": {"tokens": ("x",), "hidden": ("y",)},
    "expert x tensor": {"experts": ("x",), "hidden": ("y",)},
}
MIXTURES = {
    "softmax, three experts, scattered": (softmax_router, scattered, 3),
    "sigmoid, two experts, unsorted": (sigmoid_router, unsorted, 2),
    "softmax, two experts, masked": (softmax_router, masked, 2),
}


def factors_of(step: Callable[..., Any], args: Any) -> tuple[dict[str, int], int]:
    """Which factors of the mixture's operator are tokens, experts and hidden dim, and how many there are."""
    graph = trace_program(step, args).graph
    (operator,) = (one for one in graph.operators if one.name == "sorted_rows")
    shapes = {graph.values[v].shape: dims for v, dims in zip(operator.operands, operator.rule.operands, strict=True)}
    (experts,), _, (hidden,) = shapes[EXPERTS, WIDTH, HIDDEN]
    (tokens,), _ = shapes[8 * 16, WIDTH]
    return {"tokens": tokens, "experts": experts, "hidden": hidden}, len(operator.rule.factors)


@pytest.mark.parametrize(
    ("mixture", "ways"),
    [
        ("softmax, three experts, scattered", ("data x expert", "data x tensor", "expert x tensor")),
        ("sigmoid, two experts, unsorted", ("data x expert", "expert x tensor")),
        ("softmax, two experts, masked", ("data x expert", "expert x tensor")),
        *(pytest.param(mixture, tuple(WAYS), marks=pytest.mark.slow) for mixture in MIXTURES),
    ],
)
def test_split_mixtures_are_exact(mixture: str, ways: tuple[str, ...]) -> None:
    """As the planner would split them were the arrays larger."""
    step, (state, x) = step_of(*MIXTURES[mixture]), small()
    made = jax.jit(step)(state, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        found = mw.plan_for(step, (state, x), cluster="local", mesh={"x": 2, "y": 4}, stages=1).plan
    (stage,) = found.stages
    factors, count = factors_of(step, (state, x))
    for way in ways:
        split = {factors[name]: axes for name, axes in WAYS[way].items()}
        axes = tuple(split.get(f, ()) for f in range(count))
        operators = tuple(replace(one, axes=axes) if one.name == "sorted_rows" else one for one in stage.operators)
        plan = replace(found, stages=(replace(stage, operators=operators),))
        assert_equal_trees(mw.parallelize(step, plan=plan)(copy(state), x), made)


def test_products_of_groups_by_a_kernel_are_exact() -> None:
    """Tokens and experts split, forward and backward; blocks of rows are whole tiles."""
    by_kernel, by_operator = (
        step_of(softmax_router, partial(by_products, product=product), 2) for product in (megablox, jax.lax.ragged_dot)
    )
    state, x = small()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        found = mw.plan_for(by_kernel, (state, x), cluster="local", mesh={"x": 2, "y": 4}, stages=1).plan
    (stage,) = found.stages
    operators = tuple(
        replace(one, axes=(("x",), ("y",), *one.axes[2:])) if one.name == "sorted_rows" else one
        for one in stage.operators
    )
    plan = replace(found, stages=(replace(stage, operators=operators),))
    assert_equal_trees(mw.parallelize(by_kernel, plan=plan)(copy(state), x), jax.jit(by_operator)(state, x))


def test_groups_of_more_rows_than_there_are_are_exact() -> None:
    """Split over the groups, of which the last is cut off."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean(jnp.square(jax.lax.ragged_dot(x, p, jnp.array([6, 6], jnp.int32))))

        value, grads = mw.value_and_grad(loss)(state)
        return state - 0.1 * grads, value

    state, x = jax.random.normal(jax.random.key(0), (2, 4, 4)), jax.random.normal(jax.random.key(1), (8, 4))
    found = mw.plan_for(step, (state, x), cluster="local", mesh={"x": 2, "y": 4}, stages=1).plan
    (operator,) = (one for one in trace_program(step, (state, x)).graph.operators if one.name == "ragged_dot_general")
    ((groups,), *_) = operator.rule.operands[1]
    axes = tuple(("x",) if f == groups else () for f in range(len(operator.rule.factors)))
    (stage,) = found.stages
    operators = tuple(replace(one, axes=axes) if one.name == operator.name else one for one in stage.operators)
    plan = replace(found, stages=(replace(stage, operators=operators),))
    assert_equal_trees(mw.parallelize(step, plan=plan)(copy(state), x), jax.jit(step)(state, x))


def test_microbatches_are_those_of_the_whole_batch() -> None:
    step = step_of(sigmoid_router, scattered, 2)
    state, x = small()
    made = jax.jit(step)(state, x)
    parallel = mw.parallelize(step, cluster="local", mesh={"x": 2, "y": 4}, stages=1, microbatches=2)
    assert_equal_trees(parallel(copy(state), x), made)


def test_a_mixture_verifies() -> None:
    """Collectives and memory are those of the compiled program, and numbers those of one device."""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    state = {name: 0.1 * jax.random.normal(next(keys), shape) for name, shape in shapes(128, 256).items()}
    x = jax.random.normal(next(keys), (16, 128, 128))
    target = step_target(step_of(softmax_router, scattered, 2), (state, x), name="mixture")
    found = verify(target, devices=2, steps=1, timed_steps=0)
    assert found.passed, [one for one in found.checks if not one.passed]


def test_mixtures_in_layers_of_several_stages_are_exact() -> None:
    """Layers in a loop, rematerialised, in two stages: each stage and microbatch sorts tokens of its own."""

    def step(state: Any, x: jax.Array) -> Any:
        @jax.checkpoint
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            tokens = 0.1 * x.reshape(-1, WIDTH)
            return x + scattered(p, tokens, *softmax_router(tokens @ p["router"], 2)).reshape(x.shape), None

        value, grads = mw.value_and_grad(lambda p: jnp.mean(jnp.square(jax.lax.scan(layer, x, p)[0])))(state)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value

    state, x = small()
    state = {name: jnp.stack([leaf, leaf[::-1]]) for name, leaf in state.items() if name not in ("in", "out")}
    made = jax.jit(step)(state, x)
    parallel = mw.parallelize(step, cluster="local", stages=2, microbatches=2)
    assert_equal_trees(parallel(copy(state), x), made)


def test_a_mixture_that_depends_on_the_order_runs_whole() -> None:
    def by_rank(p: Any, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows are scaled by where they come in the order."""
        order = jnp.argsort(ids.ravel())
        rows = x[order // ids.shape[1]] * jnp.arange(order.size)[:, None]
        made = jax.lax.ragged_dot(rows, p["up"], jnp.bincount(ids.ravel(), length=EXPERTS)) @ p["down"][0]
        return jnp.zeros_like(x).at[order // ids.shape[1]].add(made)

    with pytest.warns(ReplicationWarning, match=r"mul at .*test_dropless.*meets sorted rows with what is not sorted"):
        found = mw.plan_for(step_of(softmax_router, by_rank, 2), small(), cluster="local", stages=1).plan
    assert "sort" in {one.name for one in found.stages[0].operators}


# Of one layer of Mixtral 8x7B and of Qwen3-30B-A3B: width, hidden size of an expert, experts, experts a token.
FULL = {"mixtral": (4096, 14336, 8, 2), "qwen3": (2048, 768, 128, 8)}


@pytest.mark.parametrize("name", [pytest.param("mixtral", marks=pytest.mark.slow), "qwen3"])
def test_full_size_mixtures_are_split_where_it_pays(name: str) -> None:
    """On 32 A100s all devices share the tokens and the experts out: large experts by their hidden dim, small ones by
    number, since tiles of their hidden dim would be narrow. (H100s hide what gathering small experts takes.)"""
    width, hidden, experts, k = FULL[name]
    state = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes(width, hidden, experts).items()}
    x = jax.ShapeDtypeStruct((32, 4096, width), jnp.bfloat16)
    step = step_of(softmax_router, scattered, k)
    (stage,) = mw.plan_for(step, (state, x), cluster="dgx-a100-80:4", stages=1).plan.stages
    (mixture,) = (one for one in stage.operators if one.name == "sorted_rows")
    assert {axis for axes in mixture.axes for axis in axes} == {axis for axis, _ in stage.mesh}
    roles = [name for role in axis_roles(stage) for name in role.names]
    assert any(role.startswith("data parallel") for role in roles)
    assert ("expert parallel" in roles) == (name == "qwen3")


def test_a_preset_shares_out_experts() -> None:
    state = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes(1024, 1024).items()}
    x = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)
    step = step_of(softmax_router, scattered, 2)
    (stage,) = mw.plan_for(step, (state, x), cluster="dgx-h100:1", preset="expert_parallel(ep=4)").plan.stages
    roles = {role.axis: role for role in axis_roles(stage)}
    assert "expert parallel" in roles["expert"].names
    assert {p.shape for p in roles["expert"].experts} == {(8, 1024, 1024)}
