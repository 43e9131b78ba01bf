"""Arguments and results in the host's memory (`jax.memory.Space.Host`), against `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import SingleDeviceSharding
from one_device import assert_equal_trees

import meshwright as mw
from meshwright._jax.liveness_adapter import dataflow_of
from meshwright.errors import PlanError
from meshwright.memory.liveness import predict
from meshwright.planning.plan_for import plan_for

Space = jax.memory.Space
OPTIMIZER = optax.adam(1e-2)


def put(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, where), tree)


def host() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def parameters() -> Any:
    return [0.1 * jax.random.normal(jax.random.key(i), (32, 32)) for i in range(3)]


def start() -> Any:
    return {"p": parameters(), "o": OPTIMIZER.init(parameters())}


def batch() -> Any:
    return jax.random.normal(jax.random.key(9), (16, 32))


def loss(p: Any, x: Any) -> Any:
    for w in p:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def moments_in_host(state: Any, x: Any) -> Any:
    moments = put(state["o"], Space.Device)
    value, grads = mw.value_and_grad(loss)(state["p"], x)
    updates, moments = OPTIMIZER.update(grads, moments, state["p"])
    return {"p": optax.apply_updates(state["p"], updates), "o": put(moments, Space.Host)}, value


def parameters_in_host(state: Any, x: Any) -> Any:
    p = put(state["p"], Space.Device)
    value, grads = mw.value_and_grad(loss)(p, x)
    updates, moments = OPTIMIZER.update(grads, state["o"], p)
    return {"p": put(optax.apply_updates(p, updates), Space.Host), "o": moments}, jax.device_put(value, Space.Host)


def unaware(state: Any, x: Any) -> Any:
    value, grads = mw.value_and_grad(loss)(state["p"], x)
    updates, moments = OPTIMIZER.update(grads, state["o"], state["p"])
    return {"p": optax.apply_updates(state["p"], updates), "o": moments}, value


@pytest.mark.parametrize(
    ("step", "hosted", "options"),
    [
        (moments_in_host, "o", {"preset": "zero(stage=3)"}),
        (jax.jit(parameters_in_host), "p", {}),
        pytest.param(moments_in_host, "", {"microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(moments_in_host, "o", {"stages": None, "microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(parameters_in_host, "p", {"preset": "data_parallel"}, marks=pytest.mark.slow),
    ],
)
def test_state_stays_where_the_step_leaves_it(step: Any, hosted: str, options: Any) -> None:
    def placed() -> Any:
        return {name: put(part, host()) if name == hosted else part for name, part in start().items()}

    expected, reference = placed(), jax.jit(step)
    state, parallel = placed(), mw.parallelize(step, **options)
    for _ in range(2):
        expected, value = reference(expected, batch())
        state, found = parallel(state, batch())
    assert_equal_trees((state, found), (expected, value))
    for name in ("p", "o"):
        assert kinds(state[name]) == kinds(expected[name])
    assert kinds(found) == kinds(value)
    assert len({id(one) for one in parallel._steps.values()}) == 1
    made = parallel.init(start)
    assert kinds(made["o"]) == kinds(expected["o"])
    assert kinds(made["p"]) == kinds(expected["p"])


def test_the_plan_does_not_count_what_is_in_the_host() -> None:
    shapes = jax.eval_shape(start), batch()
    here = plan_for(unaware, shapes, preset="data_parallel").plan.stages[0].memory
    there = plan_for(moments_in_host, shapes, preset="data_parallel").plan.stages[0].memory
    moments = 2 * 3 * 32 * 32 * 4
    assert here.optimizer == pytest.approx(moments, rel=0.01)
    assert there.optimizer == 0


def test_memory_of_arrays_that_come_from_the_host_and_go_there() -> None:
    def step(h: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.sort(x)
        return h + x, x

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    size = 4 * 64 * 64
    whole = predict(dataflow_of(step, x, x, donate_argnums=(0,)))
    hosted = predict(dataflow_of(step, x, x, donate_argnums=(0,), host_inputs=(0,), host_outputs=(0,)))
    assert (whole.argument_bytes, whole.output_bytes, whole.alias_bytes) == (2 * size, 2 * size, size)
    assert (hosted.argument_bytes, hosted.output_bytes, hosted.alias_bytes) == (size, size, 0)
    assert size <= hosted.temp_bytes <= 2 * size  # what is there while it is added to


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(PlanError, match=r"several stages.*args\[0\]\['o'\].*host's memory.*stages=1"):
        plan_for(moments_in_host, (start(), batch()), stages=2, microbatches=4)
    state = {**start(), "o": put(start()["o"], host())}
    with pytest.raises(PlanError, match=r"Space\.Device"):
        plan_for(unaware, (state, batch()))

    def offloaded(state: Any, x: Any) -> Any:
        middle = jax.device_put(x * 2, Space.Host)
        return unaware(state, jax.device_put(middle, Space.Device))

    notes = plan_for(offloaded, (start(), batch())).plan.notes
    assert any("host's memory" in note and "test_memory_kinds.py" in note for note in notes)
