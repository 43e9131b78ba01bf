"""Pipelines through the front door: `parallelize` with stages, schedules, presets and saved plans."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import assert_as_on_one_device
from pipelines import whole

import meshwright as mw
from meshwright import zoo
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.lowering.local_step import LocalStep
from meshwright.runtime.executable import executable
from meshwright.runtime.pipeline.step import PipelinedStep


def losses(step: Any, state: Any, batch: Any, steps: int = 3) -> tuple[Any, list[float]]:
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return state, found


_TARGET = zoo.mlp(width=64, layers=4, batch=64)


@cache
def on_one_device() -> tuple[Any, list[float]]:
    """State and losses of three steps."""
    batch = jax.jit(_TARGET.make_batch)(jax.random.key(1))
    return losses(jax.jit(_TARGET.step), jax.jit(_TARGET.init)(jax.random.key(0)), batch)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "microbatches": 4},
        pytest.param({"stages": 4, "schedule": "gpipe", "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param({"preset": "pipedream(2)", "microbatches": 1}, marks=pytest.mark.slow),
        pytest.param({"stages": None}, marks=pytest.mark.slow),
        pytest.param({"submeshes": (2, 2, 4), "microbatches": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step(options: dict[str, Any], tmp_path: Path) -> None:
    """State created in place, three steps as on one device; the saved plan runs as well, on arrays from anywhere."""
    target, (expected, wanted) = _TARGET, on_one_device()
    batch = jax.jit(target.make_batch)(jax.random.key(1))
    step = mw.parallelize(target.step, **options)
    given = step.init(target.init, jax.random.key(0), batch=batch)
    state, found = losses(step, given, batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    if options.get("stages", 2) is not None:
        with pytest.raises(PlanError, match="already donated"):
            step(given, batch)
    plan = step.plan(state, batch)
    if options.get("stages") != 1 and "stages" in options and options["stages"] is not None:
        assert len(plan.stages) == options["stages"]
        assert isinstance(step.planned(state, batch), PipelinedStep)
    if "submeshes" in options:
        assert tuple(len(stage.devices) for stage in plan.stages) == options["submeshes"]
    plan.save(tmp_path / "plan.json")
    again = mw.parallelize(target.step, plan=tmp_path / "plan.json")
    other, found = losses(again, jax.tree.map(np.asarray, jax.jit(target.init)(jax.random.key(0))), batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    for mine, theirs in ((state, expected), (other, expected)):
        for a, b in zip(jax.tree.leaves(whole(mine)), jax.tree.leaves(whole(theirs)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max() + 1e-6)


def test_a_range_may_hold_nothing_to_choose() -> None:
    """Numbers that depend on no input begin the program, as a layer of its own."""

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = jnp.tanh(x @ p["w"])
            return jax.lax.scan(lambda c, i: (c + jnp.mean(jnp.tanh(h + i)) + p["b"], None), 0.0, jnp.arange(3.0))[0]

        value, gradients = mw.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    state = {"w": jax.random.normal(jax.random.key(0), (16, 16)), "b": jnp.array(0.5)}
    assert_as_on_one_device(step, state, jnp.ones((32, 16)), stages=2, microbatches=4)


def infer(weights: list[Any], x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def test_inference(tmp_path: Path) -> None:
    weights = [jax.random.normal(jax.random.key(i), (64, 64)) / 8 for i in range(4)]
    x = jax.random.normal(jax.random.key(9), (32, 64))
    step = mw.parallelize(infer, stages=2, schedule="inference", microbatches=4)
    np.testing.assert_allclose(np.asarray(step(weights, x)), np.asarray(infer(weights, x)), atol=1e-5)
    plan = step.plan(weights, x)
    assert plan.schedule == "inference"
    assert plan.predicted is not None
    assert plan.predicted.step_seconds > 0
    plan.save(tmp_path / "plan.json")
    again = mw.parallelize(infer, plan=tmp_path / "plan.json")
    np.testing.assert_allclose(np.asarray(again(weights, x)), np.asarray(infer(weights, x)), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 64}, "more stages than|layers"),
        ({"stages": 0}, "the number of stages"),
        ({"stages": 2, "microbatches": 0}, "microbatches"),
        ({"stages": 2, "microbatches": 3}, "microbatches"),
        ({"stages": 2, "schedule": "gpip"}, "try gpipe"),
        ({"stages": 1, "schedule": "gpipe"}, "several stages to be scheduled"),
        ({"stages": 2, "preset": "megatron(tp=2)"}, "the preset megatron"),
        ({"preset": "megatron(tp=3)"}, "multiple of 3"),
        ({"preset": "megatrn"}, "megatron"),
        ({"stages": 2, "mesh": (8,)}, "of at most 7 devices"),
        ({"stages": 2, "schedule": "interleaved_one_f_one_b"}, "several stages for each of several equal ranks"),
        ({"stages": 2, "schedule": "inference"}, "a step that computes gradients"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], said: str) -> None:
    target = zoo.mlp(width=32, layers=4, batch=32)
    args = (target.example_state, target.example_batch)
    with pytest.raises(PlanError, match=said):
        mw.plan_for(target.step, args, **options)


def test_stages_that_do_not_fit() -> None:
    target = zoo.mlp(width=64, layers=8, batch=64)
    args = (target.example_state, target.example_batch)
    with pytest.raises(MemoryExceeded, match="on a device"):
        mw.plan_for(target.step, args, stages=2, memory_per_device=30e3)


def test_a_tight_limit_is_kept_by_the_traced_programs() -> None:
    """Less memory than the fastest plan of two stages takes: another plan, and its count obeys."""
    target = zoo.mlp(width=256, layers=4, batch=512)
    args = (target.example_state, target.example_batch)
    free = mw.plan_for(target.step, args, stages=2)
    most = max(stage.memory.total for stage in free.plan.stages)
    tight = mw.plan_for(target.step, args, stages=2, memory_per_device=0.8 * most)
    assert max(stage.memory.total for stage in tight.plan.stages) <= 0.8 * most
    assert tight.step_seconds >= free.step_seconds * (1 - 1e-9)


def test_numbers_of_microbatches_that_a_step_cannot_be_cut_into_are_left_out() -> None:
    """They were the planner's idea: experts have no capacity left in a microbatch of two examples."""
    target = zoo.build("moe-tiny")
    args = target.example_state, target.example_batch
    free = mw.plan_for(target.step, args, submeshes=(2, 2, 2, 2))
    assert any("refused microbatches=16" in one.words for one in free.considered)
    planning = mw.plan_for(target.step, args, submeshes=(2, 2, 2, 2), schedule="one_f_one_b")
    assert len(free.plan.stages) == len(planning.plan.stages) == 4
    assert free.step_seconds <= planning.step_seconds
    assert planning.plan.predicted is not None
    assert planning.plan.predicted.optimality_gap <= 0.04


def test_a_schedule_that_is_not_used_is_said() -> None:
    """One stage is faster than several for a small step; the search is free to say so, not to be silent about it."""
    target = zoo.mlp(width=32, layers=4, batch=32)
    args = (target.example_state, target.example_batch)
    plan = mw.plan_for(target.step, args, stages=None, schedule="gpipe").plan
    assert len(plan.stages) == 1
    assert any("the schedule gpipe is not used" in note for note in plan.notes)


def test_inference_of_as_many_stages_as_are_best() -> None:
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    planning = mw.plan_for(
        infer, (weights, jax.ShapeDtypeStruct((32, 64), jnp.float32)), stages=None, schedule="inference"
    )
    assert planning.plan.schedule == "inference" or any("is not used" in note for note in planning.plan.notes)
    run = mw.parallelize(infer, stages=None, schedule="inference")
    weights, batch = [jnp.full((64, 64), 0.01)] * 4, jnp.ones((32, 64))
    np.testing.assert_allclose(run(weights, batch), infer(weights, batch), rtol=1e-6)


def test_one_stage_that_the_stage_search_finds_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large programs that do not fit in few microbatches are searched for stages first: where one is the best, it is
    counted and run like any other."""
    monkeypatch.setattr("meshwright.planning.stages.SMALL_PROGRAM", 0)
    monkeypatch.setattr("meshwright.planning.one_or_several.fits_in_few", lambda asked: False)
    target = zoo.build("mlp-tiny")
    planning = mw.plan_for(target.step, (target.example_state, target.example_batch), stages=None)
    assert len(planning.plan.stages) == 1
    traced = LocalStep(planning.program, planning.plan).predicted_memory().peak_bytes
    assert planning.plan.stages[0].memory.total >= traced > 0
    generator = np.random.default_rng(0)

    def filled(leaf: Any) -> Any:
        values = 0.02 * generator.normal(size=leaf.shape) if np.issubdtype(leaf.dtype, np.floating) else 0
        return jnp.asarray(np.broadcast_to(values, leaf.shape), leaf.dtype)

    state, batch = jax.tree.map(filled, (target.example_state, target.example_batch))
    expected = jax.jit(target.step)(state, batch)
    found = executable(planning.program, planning.plan, jax.devices())(state, batch)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-5, atol=1e-6)
