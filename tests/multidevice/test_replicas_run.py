"""Replicas of unlike size with unequal shares of the batch give the numbers of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_device import assert_equal_trees, copy
from pipelines import whole
from test_pipeline import data, perceptron, predict
from test_pipeline_surroundings import step_with_results

import meshwright as mw
from meshwright import zoo
from meshwright.cluster import Cluster, load_cluster
from meshwright.errors import PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.program.reduction import ReductionWarning
from meshwright.runtime.pipeline.step import PipelinedStep


def mixed(*devices: int) -> Cluster:
    """Hosts of so many devices, each host three times as fast as the one after it."""
    (like,) = load_cluster("cpu:1").hosts
    hosts = []
    for number, count in enumerate(devices):
        slower = 3.0**number
        device = replace(
            like.device, peak_flops={name: peak / slower for name, peak in like.device.peak_flops.items()},
            memory_bandwidth_bytes_per_second=like.device.memory_bandwidth_bytes_per_second / slower,
            kernel_launch_seconds=like.device.kernel_launch_seconds * slower,
        )  # fmt: skip
        hosts.append(replace(like, devices=count, device=device))
    return Cluster(name="mixed", hosts=tuple(hosts))


def assert_as_on_one_device(
    step: Any, state: Any, *batch: Any, devices: tuple[int, ...] = (4, 2), microbatches: int = 8, **options: Any
) -> PipelinedStep:
    found = plan_for(
        step, (state, *batch), cluster=mixed(*devices), microbatches=microbatches, stages=None, schedule="replicas",
        **options,
    )  # fmt: skip
    assert len(set(found.plan.shares)) > 1
    parallel, alone = PipelinedStep(found.program, found.plan, jax.devices()), jax.jit(step)
    expected, again = state, copy(state)
    metrics = wanted = None
    for _ in range(3):
        expected, wanted = alone(expected, *batch)
        again, metrics = parallel(again, *batch)
    assert_equal_trees(whole((again, metrics)), whole((expected, wanted)))
    return parallel


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
def test_losses_and_results_beside_them(reduction: str) -> None:
    """Sums, means, extremes and counts are those of the whole batch."""
    assert_as_on_one_device(step_with_results(reduction, rows=False), perceptron(), *data())


def of_replicas(parallel: PipelinedStep, state: Any) -> list[list[np.ndarray]]:
    """For each leaf of a state what each replica has of it."""
    kept = zip(jax.tree.leaves(state), parallel.kept_leaves, strict=False)
    return [[np.asarray(part) for part in how.parts(leaf, donated=False).values()] for leaf, how in kept if how]


def test_replicas_agree_on_what_no_reduction_is() -> None:
    """The position of the largest is that of the last microbatch, for all replicas, as for one stage."""

    def step(params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            error = jnp.mean((predict(params, x) - y) ** 2, axis=1)
            return error.mean(), jnp.argmax(error)

        (value, place), grads = mw.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - (0.1 + 0.01 * place) * g, params, grads), (value, place)

    state, batch = perceptron(), data()
    options: dict[str, Any] = {"microbatches": 8, "cluster": mixed(4, 2)}
    with pytest.warns(ReductionWarning):
        found = plan_for(step, (state, *batch), stages=None, schedule="replicas", **options)
    parallel = PipelinedStep(found.program, found.plan, jax.devices())
    alone = mw.parallelize(step, cluster="local", microbatches=8)
    expected, again = copy(state), copy(state)
    with pytest.warns(ReductionWarning):
        expected, wanted = alone(expected, *batch)
    again, metrics = parallel(again, *batch)
    expected, wanted = alone(expected, *batch)
    again, metrics = parallel(again, *batch)
    assert_equal_trees(whole((again, metrics)), whole((expected, wanted)))
    for first, second in of_replicas(parallel, again):
        np.testing.assert_allclose(first, second, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        # ZeRO-3 inside each replica: what they exchange is split otherwise on each.
        {"zero": 3, "devices": (2, 4, 1)},
    ],
    ids=["whole", "zero 3"],
)
def test_adam_with_a_global_norm_and_state_of_its_own(options: dict[str, Any]) -> None:
    """The norm is of gradients that replicas have exchanged; the running mean reads the loss of all."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-5))

    def step(state: Any, x: Any, y: Any) -> Any:
        value, grads = mw.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(state["params"])
        updates, kept = optimizer.update(grads, state["optimizer"], state["params"])
        running = 0.9 * state["running"] + 0.1 * value
        params = optax.apply_updates(state["params"], updates)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return {"params": params, "optimizer": kept, "running": running}, {"loss": value, "norm": norm}

    params = perceptron()
    state = {"params": params, "optimizer": optimizer.init(params), "running": jnp.ones(())}
    assert_as_on_one_device(step, state, *data(), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny"])
def test_models(name: str) -> None:
    target = zoo.build(name, global_batch=16)
    state, batch = target.init(jax.random.key(0)), target.make_batch(jax.random.key(1))
    parallel = assert_as_on_one_device(target.step, state, batch, devices=(4, 4), microbatches=4)
    assert parallel.plan.shares[0] > parallel.plan.shares[1]


def test_states_are_made_and_kept_by_each_replica() -> None:
    target = zoo.mlp(width=32, layers=2, batch=32)
    found = plan_for(
        target.step, (target.example_state, target.example_batch), cluster=mixed(2, 2), microbatches=4, stages=None,
        schedule="replicas",
    )  # fmt: skip
    parallel = PipelinedStep(found.program, found.plan, jax.devices())
    state = parallel.create(target.init, jax.random.key(0))
    batch = target.make_batch(jax.random.key(1))
    losses = []
    for _ in range(3):
        state, metrics = parallel(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    for first, *others in of_replicas(parallel, state):
        for other in others:  # bit for bit: both sum in the same order
            np.testing.assert_array_equal(first, other)


def test_a_plan_for_another_step_is_refused() -> None:
    """One whose results grow with the batch."""

    def step(params: Any, x: Any, y: Any, grown: bool) -> Any:
        def loss(params: Any) -> Any:
            out = predict(params, x)
            return jnp.mean((out - y) ** 2), out if grown else out.sum()

        (value, aux), grads = mw.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, aux)

    args = (perceptron(), *data())
    options: dict[str, Any] = {"cluster": mixed(4, 2), "microbatches": 4, "stages": None}
    good = plan_for(lambda *a: step(*a, False), args, schedule="replicas", **options)
    other = plan_for(lambda *a: step(*a, True), args, **options)
    with pytest.raises(PlanError, match="results of the loss function that grow with the batch"):
        PipelinedStep(other.program, replace(good.plan, program=other.plan.program), jax.devices())


def test_devices_that_a_plan_leaves_idle_have_no_part_in_the_step() -> None:
    step, state, batch = step_with_results("mean", rows=False), perceptron(), data()
    hosts = mixed(4, 1, 1, 1, 1).hosts
    cluster = Cluster(name="mixed", hosts=(hosts[0], hosts[-1]))  # of which one device is 81 times as slow
    parallel = mw.parallelize(step, cluster=cluster, stages=None)
    expected, wanted = jax.jit(step)(state, *batch)
    found, metrics = parallel(copy(state), *batch)
    assert {device for stage in parallel.plan(state, *batch).stages for device in stage.devices} == {0, 1, 2, 3}
    assert_equal_trees(whole((found, metrics)), whole((expected, wanted)))
