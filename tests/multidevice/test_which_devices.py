"""The devices that a step runs on: those that are named, and those that its arguments lie on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from one_device import assert_equal_trees

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.runtime.devices import Placed, devices_for

UPPER, LOWER = slice(4, None), slice(None, 4)


def weights() -> Any:
    return {"a": jnp.eye(16) + 0.1, "b": jnp.eye(16)}


def batch() -> Any:
    return jax.random.normal(jax.random.key(0), (16, 16))


def step(w: Any, x: Any) -> Any:
    value, grads = mw.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value


WHOLE = P()


def on(tree: Any, where: slice, spec: Any = WHOLE) -> Any:
    """The arrays on a mesh of some devices."""
    mesh = Mesh(np.array(jax.devices()[where]), ("d",))
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)


def numbers(tree: Any) -> list[int]:
    """The devices that arrays lie on."""
    return sorted({d.id for x in jax.tree.leaves(tree) for d in x.sharding.device_set})


def four() -> Any:
    cluster = mw.load_cluster("cpu")
    return replace(cluster, hosts=(replace(cluster.hosts[0], devices=4),))


def test_two_steps_side_by_side() -> None:
    expected, _ = jax.jit(step)(weights(), batch())
    actor, reference = mw.parallelize(step), mw.parallelize(step, cluster=four())
    lower, _ = actor(on(weights(), LOWER), batch())
    upper, _ = reference(on(weights(), UPPER), on(batch(), UPPER, P("d")))
    assert numbers(lower) == [0, 1, 2, 3]
    assert numbers(upper) == [4, 5, 6, 7]
    assert_equal_trees((lower, upper), (expected, expected))
    # The same step on the other half: another plan, as another program under jax.jit.
    assert numbers(actor(upper, np.asarray(batch()))[0]) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"stages": 2, "microbatches": 4}, marks=pytest.mark.slow),
     pytest.param({"preset": "zero(stage=3)"}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_named_devices(options: Any) -> None:
    expected, _ = jax.jit(step)(weights(), batch())
    parallel = mw.parallelize(step, devices=jax.devices()[6:], **options)
    state, _ = parallel(on(weights(), LOWER), batch())
    assert_equal_trees(state, expected)
    assert numbers(state) == numbers(parallel(state, batch())[0]) == [6, 7]
    assert numbers(parallel.init(weights)) == [6, 7]
    assert parallel.plan(state, batch()).num_devices == 2


def test_a_mesh_and_a_saved_plan() -> None:
    mesh = Mesh(np.array(jax.devices()[2:4]), ("d",))
    plan = mw.parallelize(step, devices=mesh).plan(weights(), batch())
    assert numbers(mw.parallelize(step, plan=plan)(on(weights(), slice(4, 6)), batch())[0]) == [4, 5]
    with pytest.raises(PlanError, match="1 devices"):
        mw.parallelize(step, plan=plan, devices=jax.devices()[:1])(weights(), batch())


@pytest.mark.parametrize("devices", ["cpu", [], [0, 1], 3, "twice"])
def test_what_are_no_devices_is_refused(devices: Any) -> None:
    with pytest.raises(PlanError, match=r"refused the devices.*where: devices="):
        mw.parallelize(step, devices=jax.devices()[:1] * 2 if devices == "twice" else devices)


def test_a_cluster_of_another_size_is_refused() -> None:
    with pytest.raises(PlanError, match=r"got 3.*needed 4"):
        mw.parallelize(step, cluster=four(), devices=jax.devices()[:3])(weights(), batch())
    with pytest.raises(PlanError, match=r"needed the 4 of cluster cpu; where: devices="):
        mw.plan_for(step, (weights(), batch()), cluster=four(), devices=jax.devices()[:3])


def one_on(number: int) -> Any:
    return jax.device_put(jnp.ones(2), jax.devices()[number])


@pytest.mark.parametrize(
    ("leaves", "wanted", "found"),
    [
        (lambda: [jnp.ones(2), np.ones(2)], None, range(8)),
        (lambda: [jnp.ones(2)], 4, range(4)),
        (lambda: [on(jnp.ones(8), UPPER, P("d")), jnp.ones(2)], None, range(4, 8)),
        (lambda: [on(jnp.ones(8), UPPER, P("d")), one_on(5)], 4, range(4, 8)),
        (lambda: [on(jnp.ones(8), UPPER, P("d")), on(jnp.ones(8), LOWER)], None, range(8)),
        (lambda: [on(jnp.ones(8), slice(2, 4), P("d"))], 4, range(4)),  # room for all of them
        (lambda: [one_on(5)], None, range(8)),  # one device alone confines nothing
        (lambda: [one_on(5)], 1, [5]),
        (lambda: [one_on(0)], 4, range(4)),
        (lambda: [on(jnp.ones(8), UPPER, P("d")), one_on(0)], None, None),
        (lambda: [on(jnp.ones(8), UPPER, P("d")), one_on(0)], 4, None),
        (lambda: [one_on(5)], 4, None),
    ],
)
def test_the_rule(leaves: Any, wanted: int | None, found: Any) -> None:
    if found is None:
        with pytest.raises(PlanError, match=r"the places of the arguments.*devices="):
            devices_for(Placed(leaves()), wanted)
    else:
        assert [d.id for d in devices_for(Placed(leaves()), wanted)] == list(found)


def decayed(w: Any, x: Any) -> Any:
    """A step whose stages all have their part in the first one: it reads all weights, for their decay."""

    def loss(w: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2) + 1e-3 * sum(jnp.sum(leaf**2) for leaf in w.values())

    value, grads = mw.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value


@pytest.mark.parametrize(
    "options",
    [{"stages": 2, "microbatches": 4},
     pytest.param({"stages": 4, "microbatches": 2}, marks=pytest.mark.slow),
     pytest.param({"preset": "megatron(tp=2, pp=2)"}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_state_on_the_first_stage_alone_is_still_that_of_all(options: Any) -> None:
    """What a pipeline returned says nothing against its plan, replaced leaves and another batch included."""
    parallel, state, expected = mw.parallelize(decayed, **options), weights(), weights()
    for number, size in enumerate([16, 16, 16, 8]):
        x = batch()[:size]
        (state, value), (expected, wanted) = parallel(state, x), jax.jit(decayed)(expected, x)
        assert float(value) == pytest.approx(float(wanted), rel=1e-5)
        assert parallel.plan(state, x).num_devices == 8, number
        state = {**state, "a": jax.jit(lambda a: a + 0.0)(state["a"])}
    assert len(numbers(state)) < 8
    # The user's own choice of devices, which no plan has made.
    assert parallel.plan(on(expected, UPPER), on(batch(), UPPER)).num_devices == 4
