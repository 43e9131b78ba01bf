"""`refine="measure"`: of the best few plans the one that is the fastest on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import assert_equal_trees

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.planning import measured as refine_module
from meshwright.planning.measured import MOST
from meshwright.runtime.executable import Executable, executable
from meshwright.runtime.step_seconds import step_seconds

WIDTH = 32


def step(w: Any, x: Any) -> Any:
    loss, grad = mw.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grad), loss


SHAPES = (
    {
        "a": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), "float32"),
        "b": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), "float32"),
    },
    jax.ShapeDtypeStruct((16 * WIDTH, WIDTH), "float32"),
)
_RANDOM = np.random.default_rng(0)
ARRAYS = jax.tree.map(lambda s: jnp.asarray(0.1 * _RANDOM.normal(size=s.shape), s.dtype), SHAPES)


class FakeTimer:
    """Seconds by the number of microbatches: two are the fastest; the first time is not to be trusted."""

    def __init__(self) -> None:
        self.timed: list[Executable] = []

    def __call__(self, step: Executable, args: Sequence[Any], steps: int) -> list[float]:
        first = step not in self.timed
        self.timed.append(step)
        once = {1: 3e-3, 2: 1e-3}[step.plan.microbatches]
        return [1e3 * once if first and once < 2e-3 else once] * steps


def test_the_fastest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer()
    monkeypatch.setattr(refine_module, "step_seconds", timer)
    found = mw.plan_for(step, SHAPES, mesh=(8,), refine="measure")
    alone = mw.plan_for(step, SHAPES, mesh=(8,))
    assert (found.plan.microbatches, alone.plan.microbatches) == (2, 1)
    (note,) = (note for note in found.plan.notes if "measured" in note)
    assert "chosen by measured steps on 8 x cpu: microbatches=2: measured 1.0 ms" in note
    assert "as planned: measured 3.0 ms" in note
    # The prediction stays a prediction.
    again = mw.plan_for(step, SHAPES, mesh=(8,), microbatches=2)
    assert found.plan.predicted == again.plan.predicted
    assert [one for one in found.considered if one.what == "measured"]


def test_few_plans_that_differ_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer()
    monkeypatch.setattr(refine_module, "step_seconds", timer)
    mw.plan_for(step, SHAPES, refine="measure")
    plans = {id(one): one.plan for one in timer.timed}
    assert 2 <= len(plans) <= MOST
    described = [(p.microbatches, [(s.communication, s.compute_seconds) for s in p.stages]) for p in plans.values()]
    assert all(one not in described[:place] for place, one in enumerate(described))


def test_a_plan_that_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def timer(step: Executable, args: Sequence[Any], steps: int) -> list[float]:
        if step.plan.microbatches == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return [1e-3] * steps

    monkeypatch.setattr(refine_module, "step_seconds", timer)
    found = mw.plan_for(step, SHAPES, mesh=(8,), refine="measure")
    assert found.plan.microbatches == 1
    assert any("microbatches=2: does not run here: RESOURCE_EXHAUSTED" in note for note in found.plan.notes)

    def broken(step: Executable, args: Sequence[Any], steps: int) -> list[float]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(refine_module, "step_seconds", broken)
    with pytest.raises(PlanError, match=r"refused to measure plans: got as planned: does not run here"):
        mw.plan_for(step, SHAPES, mesh=(8,), refine="measure")


def test_a_step_refined_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real clock; the user's arrays are still there afterwards, and results are those of one device."""
    monkeypatch.setattr(refine_module, "SECONDS", 0.1)
    fast = mw.parallelize(step, refine="measure", mesh=(2, 4))
    state, batch = ARRAYS
    wanted, loss = jax.jit(step)(state, batch)
    plan = fast.plan(state, batch)
    assert any("chosen by measured steps" in note for note in plan.notes)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(ARRAYS))
    found, mine = fast(jax.tree.map(jnp.copy, state), batch)
    assert_equal_trees((found, mine), (wanted, loss), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("stages", [1, 2])
def test_steps_are_timed_from_shapes_alone(stages: int) -> None:
    planning = mw.plan_for(step, SHAPES, stages=stages)
    run = executable(planning.program, planning.plan, jax.devices())
    seconds = step_seconds(run, SHAPES, 3)
    assert len(seconds) == 3
    assert min(seconds) > 0


def test_a_function_without_a_state_is_timed() -> None:
    planning = mw.plan_for(lambda x, key: x + jax.random.normal(key, x.shape), (jnp.ones(8), jax.random.key(0)))
    run = executable(planning.program, planning.plan, jax.devices())
    assert len(step_seconds(run, (jnp.ones(8), jax.eval_shape(lambda: jax.random.key(0))), 2)) == 2


def test_refusals() -> None:
    with pytest.raises(PlanError, match=r"refused the refinement: got 'guess'; needed \"measure\""):
        mw.plan_for(step, SHAPES, refine="guess")
    with pytest.raises(PlanError, match="refused the refinement"):
        mw.parallelize(step, refine=True)
    with pytest.raises(PlanError, match=r"refused to measure plans: got 8 cpu devices; needed the devices themselves"):
        mw.plan_for(step, SHAPES, refine="measure", cluster="p3.16xlarge:2")
    with pytest.raises(PlanError, match=r"the option 'refine'.*leaving out plan="):
        mw.parallelize(step, plan=mw.plan_for(step, SHAPES).plan, refine="measure")
