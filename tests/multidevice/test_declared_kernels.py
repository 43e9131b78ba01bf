"""Kernels that declare a sharding rule (`custom_partitioning`) are split by it; without one a warning names them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec
from one_device import assert_as_on_one_device

import meshwright as mw
from meshwright.program.rules import ReplicationWarning

Function = Callable[..., Any]


def as_given(function: Function) -> Function:
    """A partition function that runs `function` on blocks as they are, each result laid out as it was asked for."""

    def partition(*args: Any) -> Any:
        *_, mesh, operands, result = args
        return mesh, function, jax.tree.map(lambda r: r.sharding, result), tuple(o.sharding for o in operands)

    return partition


def declared(function: Function, rule: Any, partition: Function | None = None, **options: Any) -> Function:
    kernel = custom_partitioning(function)
    kernel.def_partition(partition=partition or as_given(function), sharding_rule=rule, **options)
    return kernel


def differentiable(forward: Function, backward: Function) -> Function:
    """`forward`, with a derivative `backward(operands, cotangent)` of its own."""

    @jax.custom_vjp
    def call(*operands: Any) -> Any:
        return forward(*operands)

    call.defvjp(lambda *operands: (forward(*operands), operands), backward)
    return call


def activation(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.1 * x) * 2


def activated(kernel: Function) -> Function:
    return differentiable(kernel, lambda kept, g: (jnp.where(kept[0] > 0, 2 * g, 0.2 * g),))


def step_of(act: Function, product: Function = jnp.matmul) -> Function:
    def step(state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((product(act(product(x, p[0])), p[1]) - x) ** 2)

        value, grads = mw.value_and_grad(loss)(state)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value

    return step


def weights(width: int = 32, inner: int = 64) -> Any:
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(keys[0], (width, inner)) * 0.1, jax.random.normal(keys[1], (inner, width)) * 0.1]


def batch(width: int = 32) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (16, width))


def traffic(plan: mw.Plan) -> Any:
    return [{c.kind: (c.count, c.bytes) for c in stage.communication} for stage in plan.stages]


RULES: dict[str, Any] = {
    "text": "... f -> ... f",
    "object": SdyShardingRule((ArrayMapping("b", "f"),), (ArrayMapping("b", "f"),)),
    "callable": lambda mesh, operands, results: ("b f -> b f", {}),
    "compound": SdyShardingRule(
        (ArrayMapping("b", CompoundFactor("h", "d")),), (ArrayMapping("b", CompoundFactor("h", "d")),), h=8, d=8
    ),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("preset", ["data_parallel()", "megatron(tp=8)"])
def test_a_kernel_is_split_as_its_rule_says(rule: Any, preset: str) -> None:
    """The same plan, with the same traffic, as of the function without a kernel."""
    args = weights(), batch()
    kernel = step_of(activated(declared(activation, rule)))
    plain = step_of(activated(activation))
    planned = [mw.plan_for(step, args, preset=preset).plan for step in (kernel, plain)]
    assert traffic(planned[0]) == traffic(planned[1])
    assert planned[0].stages[0].compute_seconds == pytest.approx(planned[1].stages[0].compute_seconds)


@pytest.mark.parametrize(
    "options", [{"preset": "megatron(tp=4)"}, {"stages": 2, "microbatches": 4}], ids=["tensor", "stages"]
)
def test_its_numbers_are_those_of_one_device(options: dict[str, Any]) -> None:
    kernel = activated(declared(activation, "b f -> b f"))
    scanned = jax.checkpoint(jax.jit(lambda h: jax.lax.scan(lambda c, _: (kernel(c) * 0.4, None), h, length=2)[0]))
    assert_as_on_one_device(step_of(scanned), weights(), batch(), **options)


def product_kernel() -> Function:
    """A matrix product whose every pass is a kernel that sums over its own axes."""

    def made(rule: str, function: Function, along: int) -> Function:
        def partition(mesh: Any, operands: Any, result: Any) -> Any:
            axes = operands[0].sharding.spec[along]

            def run(a: jax.Array, b: jax.Array) -> jax.Array:
                out = function(a, b)
                return jax.lax.psum(out, axes) if axes else out

            return mesh, run, result.sharding, tuple(o.sharding for o in operands)

        return declared(function, rule, partition, reduction_factors=("k",))

    forward = made("i k, k j -> i j", lambda x, w: x @ w, 1)
    to_left = made("i k, j k -> i j", lambda g, w: g @ w.T, 1)
    to_right = made("k i, k j -> i j", lambda x, g: x.T @ g, 0)
    return differentiable(forward, lambda kept, g: (to_left(g, kept[1]), to_right(kept[0], g)))


@pytest.mark.parametrize("preset", ["data_parallel()", pytest.param("zero(stage=3)", marks=pytest.mark.slow)])
def test_a_sum_inside_a_kernel_is_left_to_the_plan(preset: str) -> None:
    """Gradients are summed once a step over the batch, not in the kernel, whose weights its backward pass may read."""
    step = step_of(jnp.tanh, product_kernel())
    assert_as_on_one_device(step, weights(), batch(), preset=preset)
    args = weights(), batch()
    kernels, plain = (mw.plan_for(one, args, preset=preset).plan for one in (step, step_of(jnp.tanh)))
    sums = [
        [{kind: one for kind, one in stage.items() if kind != "all_gather"} for stage in traffic(plan)]
        for plan in (kernels, plain)
    ]
    assert sums[0] == sums[1]


def test_dims_that_need_replication_are_whole() -> None:
    kernel = declared(lambda x: jax.nn.softmax(x, -1), "b f -> b f", need_replication_factors=("f",))

    def backward(kept: Any, g: jax.Array) -> tuple[jax.Array]:
        y = jax.nn.softmax(kept[0], -1)
        return (y * (g - jnp.sum(g * y, -1, keepdims=True)),)

    step = step_of(differentiable(kernel, backward))
    assert_as_on_one_device(step, weights(), batch(), preset="megatron(tp=2)")


def test_a_partition_function_that_wants_other_blocks_is_asked_for_none() -> None:
    """Where it gathers a dim that its rule would split, that dim stays whole and the other is split."""

    def rows(mesh: Any, operands: Any, result: Any) -> Any:
        layout = NamedSharding(mesh, PartitionSpec(operands[0].sharding.spec[0], None))
        return mesh, activation, layout, (layout,)

    step = step_of(activated(declared(activation, "b f -> b f", rows)))
    assert_as_on_one_device(step, weights(), batch(), preset="data_parallel()")
    step = step_of(activated(declared(activation, "b f -> b f", rows)))
    assert_as_on_one_device(step, weights(), batch(), preset="megatron(tp=4)")


def test_a_kernel_outside_the_loss_follows_its_operands() -> None:
    update = declared(lambda rate, p, g: p - rate * g, ", a b, a b -> a b")

    def step(state: Any, x: jax.Array) -> Any:
        value, grads = mw.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p[0]) @ p[1] - x) ** 2))(state)
        return jax.tree.map(lambda p, g: update(0.1, p, g), state, grads), value

    assert_as_on_one_device(step, weights(), batch(), preset="zero(stage=1)")


def no_rule() -> Function:
    return declared(activation, None)


def wrong_rule() -> Function:
    return declared(activation, "a b c -> a b c")


def sends_itself() -> Function:
    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        axes = mesh.axis_names
        return mesh, lambda x: jax.lax.pmax(activation(x), axes), result.sharding, (operands[0].sharding,)

    return declared(activation, "b f -> b f", partition)


@pytest.mark.parametrize(
    ("kernel", "why"),
    [(no_rule, "declares no sharding rule"), (wrong_rule, "rank 3"), (sends_itself, "communicates by itself")],
)
def test_a_kernel_that_cannot_be_split_warns(kernel: Function, why: str) -> None:
    with pytest.warns(ReplicationWarning, match=rf"custom_partitioning at .*{__file__}:\d+.*runs whole.*{why}"):
        mw.plan_for(step_of(activated(kernel())), (weights(), batch()), preset="data_parallel()")


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: x * jnp.square(s),  # one element is whole anyway: a bias of one unit in a global norm
        lambda s, x: s * jax.scipy.special.gammainc(jnp.abs(x) + 1, jnp.abs(x)),  # lowered to a loop over elements
    ],
    ids=["one element", "incomplete gamma"],
)
def test_what_has_a_rule_does_not_warn(function: Function) -> None:
    def step(s: jax.Array, x: jax.Array) -> Any:
        return s, mw.value_and_grad(lambda s: jnp.mean(function(s, x)))(s)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mw.plan_for(step, (jnp.ones(1), batch()))
