"""Plans that split the positions of attention: found where they pay, called what they are, exact to one device."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_device import assert_equal_trees

import meshwright as mw
from meshwright.program.rules import ReplicationWarning
from meshwright.report.strategy import axis_roles


def step(state: Any, x: jax.Array) -> Any:
    """One layer of causal attention with sinks, two queries to a key head."""

    def loss(p: Any) -> jax.Array:
        query = jnp.einsum("bsm,mhd->bshd", x, p["query"].astype(x.dtype))
        both = jnp.einsum("bsm,mtkd->tbskd", x, p["key_value"].astype(x.dtype))
        mixed = mw.attention(query, both[0], both[1], causal=True, sinks=p.get("sinks"))
        y = x + jnp.einsum("bshd,hdm->bsm", mixed, p["out"].astype(x.dtype))
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    value, grads = mw.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value


def shapes(*, hidden: int, heads: int, key_heads: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        "query": (hidden, heads, size), "key_value": (hidden, 2, key_heads, size), "out": (heads, size, hidden),
    }  # fmt: skip


def small() -> tuple[Any, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    sizes = shapes(hidden=32, heads=4, key_heads=2, size=8)
    state = {name: 0.3 * jax.random.normal(next(keys), shape) for name, shape in sizes.items()}
    return {**state, "sinks": jnp.ones(4)}, jax.random.normal(next(keys), (2, 64, 32))


@pytest.mark.parametrize("keys", [(), ("y",)], ids=["gathered keys", "ring"])
def test_numbers_are_those_of_one_device(keys: tuple[str, ...]) -> None:
    """As the planner would split attention were the arrays larger: batch, and positions of four devices."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        found = mw.plan_for(step, small(), cluster="local", mesh={"x": 2, "y": 4}, stages=1).plan
    (stage,) = found.stages
    axes = (("x",), ("y",), (), (), (), keys, ())
    operators = tuple(replace(one, axes=axes) if one.name == "attention" else one for one in stage.operators)
    plan = replace(found, stages=(replace(stage, operators=operators),))
    made = jax.jit(step)(*small())
    assert_equal_trees(mw.parallelize(step, plan=plan)(*small()), made)


def layers(state: Any, x: jax.Array) -> Any:
    """A loop over layers of causal attention."""

    def loss(p: Any) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            both = jnp.einsum("bsm,mtkd->tbskd", x, p["key_value"])
            mixed = mw.attention(jnp.einsum("bsm,mhd->bshd", x, p["query"]), both[0], both[1], causal=True)
            return jnp.tanh(x + jnp.einsum("bshd,hdm->bsm", mixed, p["out"])), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, p)[0] - x))

    value, grads = mw.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value


@pytest.mark.parametrize(
    "options",
    [
        {"remat": "layer", "stages": 2, "microbatches": 2},
        pytest.param({"remat": "layer", "mesh": (8,)}, marks=pytest.mark.slow),
        pytest.param({"stages": 2, "microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_ring_in_rematerialised_layers_and_in_stages(options: Any) -> None:
    state, x = small()
    state = {name: jnp.stack([leaf, -leaf]) for name, leaf in state.items() if name != "sinks"}
    found = mw.plan_for(layers, (state, x), cluster="local", **options).plan
    stages = []
    for stage in found.stages:
        axis, _ = max(stage.mesh, key=lambda one: one[1])
        on_ring = ((), (axis,), (), (), (), (axis,), ())
        operators = (replace(one, axes=on_ring) if one.name == "attention" else one for one in stage.operators)
        stages.append(replace(stage, operators=tuple(operators)))
    parallel = mw.parallelize(layers, plan=replace(found, stages=tuple(stages)))
    expected = jax.jit(layers)(state, x)
    assert_equal_trees(parallel(jax.tree.map(jnp.copy, state), x), expected)


def roles_of(sequence: int, cluster: str, mesh: Any, *, heads: int, key_heads: int) -> dict[str, tuple[str, ...]]:
    """What the axes of the plan found for one layer of width 4096 at batch one are called."""
    sizes = shapes(hidden=4096, heads=heads, key_heads=key_heads, size=128)
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    x = jax.ShapeDtypeStruct((1, sequence, 4096), jnp.bfloat16)
    plan = mw.plan_for(step, (state, x), cluster=cluster, mesh=mesh, stages=1).plan
    return {role.axis: role.names for role in axis_roles(plan.stages[0])}


def test_long_sequences_go_round_a_ring() -> None:
    """With two key heads, eight devices cannot have a head each; a million positions hide what is sent."""
    (names,) = roles_of(1 << 20, "dgx-h100:1", {"x": 8}, heads=2, key_heads=2).values()
    assert "context parallel (ring)" in names


def test_of_queries_that_share_one_key_head_keys_are_gathered() -> None:
    """Keys and values are a thirtieth of the queries: gathering them costs less than the steps of a ring."""
    (names,) = roles_of(8192, "dgx-h100:1", {"x": 8}, heads=30, key_heads=1).values()
    assert "context parallel (gathered keys)" in names


def test_of_many_heads_the_sequence_is_exchanged_for_heads() -> None:
    """Ulysses: positions are split but in attention, where heads are."""
    sizes = shapes(hidden=1024, heads=8, key_heads=8, size=128)
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    x = jax.ShapeDtypeStruct((1, 65536, 1024), jnp.bfloat16)
    pins = {"args[1]": ((), ("x",), ()), **{f"args[0]['{name}']": ((),) * len(shape) for name, shape in sizes.items()}}
    plan = mw.plan_for(step, (state, x), cluster="dgx-h100:1", mesh={"x": 8}, pins=pins, zero=0, stages=1).plan
    (role,) = axis_roles(plan.stages[0])
    assert "sequence parallel (all-to-all)" in role.names


@pytest.mark.slow
def test_cudnn_and_the_operator_are_predicted_alike() -> None:
    """One layer of width 4096 on eight H100s, within a tenth."""

    def seconds(attend: Any) -> float:
        def step(state: Any, x: jax.Array) -> Any:
            def loss(p: Any) -> jax.Array:
                query, key, value = (jnp.einsum("bsm,mhd->bshd", x, p[name].astype(x.dtype)) for name in "qkv")
                return jnp.mean(attend(query, key, value).astype(jnp.float32) ** 2)

            value, grads = mw.value_and_grad(loss)(state)
            return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value

        state = {name: jax.ShapeDtypeStruct((4096, 32, 128), jnp.float32) for name in "qkv"}
        x = jax.ShapeDtypeStruct((16, 4096, 4096), jnp.bfloat16)
        predicted = mw.plan_for(step, (state, x), cluster="dgx-h100:1", stages=1).plan.predicted
        assert predicted is not None
        return predicted.step_seconds

    cudnn = seconds(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True, implementation="cudnn"))
    assert seconds(lambda *x: mw.attention(*x, causal=True)) == pytest.approx(cudnn, rel=0.1)
