"""States in which one array stands twice, which a step must not take over twice; against one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from one_device import assert_equal_trees

import meshwright as mw
from meshwright.errors import PlanError

MODES = [
    {},
    pytest.param({"microbatches": 4}, marks=pytest.mark.slow),
    pytest.param({"preset": "zero(stage=3)"}, marks=pytest.mark.slow),
    {"stages": 2, "microbatches": 4},
    pytest.param({"stages": 2, "microbatches": 4, "schedule": "zero_bubble"}, marks=pytest.mark.slow),
]


def parameters() -> Any:
    keys = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(keys[0], (16, 16)), "b": jax.random.normal(keys[1], (16, 16))}


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)


def averaged(state: Any, x: Any) -> Any:
    value, grads = mw.value_and_grad(loss)(state["w"], x)
    w = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], grads)
    return {"w": w, "average": jax.tree.map(lambda e, w: 0.9 * e + 0.1 * w, state["average"], w)}, value


def x() -> Any:
    return jax.random.normal(jax.random.key(2), (16, 16))


@pytest.mark.parametrize("options", MODES)
def test_an_average_that_begins_as_the_parameters(options: Any) -> None:
    p = parameters()
    expected = found = {"w": p, "average": p}
    reference, step = jax.jit(averaged), mw.parallelize(averaged, **options)
    for _ in range(3):
        expected, value = reference(expected, x())
        found, got = step(found, x())
        assert_equal_trees(got, value)
        jax.block_until_ready(jax.tree.leaves(found))
    assert_equal_trees(jax.tree.map(jnp.asarray, found), expected)
    if not options:
        # What a step returned may be put in twice as well, by another name.
        twice = {"w": found["w"], "average": jax.tree.map(lambda v: jax.device_put(v, v.sharding), found["w"])}
        expected, _ = reference({"w": expected["w"], "average": expected["w"]}, x())
        assert_equal_trees(step(twice, x())[0], expected)


def test_a_target_network_is_not_taken_over() -> None:
    def step(p: Any, target: Any, batch: Any) -> Any:
        def distance(p: Any) -> Any:
            return jnp.mean((jnp.tanh(batch @ p["a"]) @ p["b"] - jnp.tanh(batch @ target["a"]) @ target["b"] + 1) ** 2)

        value, grads = mw.value_and_grad(distance)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    p = parameters()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    targets = jax.tree.map(lambda v: jax.device_put(v, NamedSharding(mesh, PartitionSpec())), p)
    expected = jax.jit(step)(p, p, x())
    parallel = mw.parallelize(step)
    # The target is of other arrays in the same buffers, then the same arrays.
    found = parallel(p, targets, x())
    assert_equal_trees(found, expected)
    target = found[0]
    found, _ = parallel(target, target, x())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(target))
    assert_equal_trees(found, jax.jit(step)(expected[0], expected[0], x())[0])


def test_an_array_that_the_step_closes_over_stays() -> None:
    start = parameters()

    def step(p: Any, batch: Any) -> Any:
        value, grads = mw.value_and_grad(lambda p: loss(p, batch) + jnp.sum((p["a"] - start["a"]) ** 2))(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    expected, _ = jax.jit(step)(parameters(), x())
    found, _ = mw.parallelize(step)(start, x())
    assert_equal_trees(found, expected)
    assert not start["a"].is_deleted()
    assert start["b"].is_deleted()


def test_what_is_donated_is_gone_and_what_is_not_stays() -> None:
    def train(p: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    state = parameters()
    step = mw.parallelize(train)
    assert "not donated" in step.plan(state, x()).notes[0]
    placed, _ = step(state, x())
    step(placed, x())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, placed)))
    taking = mw.parallelize(train, donate=0)
    taking(placed, x())
    with pytest.raises(PlanError, match=r"already donated.*donate=\(\)"):
        taking(placed, x())


def test_memory_of_a_state_that_is_not_donated_is_counted_twice() -> None:
    def total(donate: Any) -> float:
        shapes = jax.eval_shape(parameters), jax.ShapeDtypeStruct((16, 16), jnp.float32)
        memory = mw.parallelize(averaged, donate=donate, preset="data_parallel").plan(
            {"w": shapes[0], "average": shapes[0]}, shapes[1]
        )
        return memory.stages[0].memory.total

    assert total(()) - total(None) == pytest.approx(4 * 16 * 16 * 4, rel=0.3)
