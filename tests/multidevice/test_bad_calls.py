"""`parallelize` used in ways it cannot honour: refused in one sentence, before anything is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.errors import PlanError

OPTIMIZER = optax.adam(1e-2)
X = jnp.ones((64, 32))


def state() -> Any:
    params = {"w": jnp.eye(32)}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def step(s: Any, x: jax.Array) -> Any:
    loss, grad = mw.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(s["params"])
    updates, opt = OPTIMIZER.update(grad, s["opt"])
    return {"params": optax.apply_updates(s["params"], updates), "opt": opt}, loss


PLAN = mw.parallelize(step)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mw.parallelize(step, typo=3), ["the option 'typo'", "microbatches"]),
        (lambda: mw.parallelize(step, time_limit=5), ["try time_limit_seconds"]),
        (lambda: mw.parallelize(step, plan=3), ["the plan", "got int"]),
        (lambda: mw.parallelize(step, time_limit_seconds="60"), ["the time limit", "'60'"]),
        (lambda: mw.parallelize(step, batch_axis=7)(state(), X), ["the batch axis", "got 7"]),
        (
            lambda: mw.parallelize(step, plan=PLAN.plan(state(), X), batch_axis=7)(state(), X),
            ["the batch axis", "got 7"],
        ),
        (lambda: mw.parallelize(step, plan="x.json"), ["x.json"]),
        (lambda: mw.parallelize(step, pins=[("w", 1)])(state(), X), ["the pins", "got list"]),
        (lambda: mw.parallelize(step, cluster=3)(state(), X), ["the cluster", "got int 3"]),
        (lambda: mw.parallelize(step, cluster="p3.16xlarge:1")(state(), X), ["cpu devices", "8 x Tesla V100"]),
        (lambda: mw.parallelize(step, mesh={"data": 2.0, "model": 4})(state(), X), ["the logical mesh", "2.0"]),
        (lambda: mw.parallelize(step, zero=True)(state(), X), ["the ZeRO stage", "got True"]),
        (lambda: mw.parallelize(step, pins={"*mu*": ("x", None)})(state(), X), ["no layout of its own", "zero="]),
        (lambda: jax.jit(mw.parallelize(step))(state(), X), ["traced by jax.jit"]),
        (lambda: mw.parallelize(step)(jax.eval_shape(state), X), ["shapes without values", "step.plan"]),
        (lambda: mw.parallelize(step).init(state(), batch=X), ["cannot be called"]),
        (lambda: mw.parallelize(step, stages=1, remat="layer")(state(), X), ['remat="layer"', "no cut into layers"]),
    ],
)
def test_refused(call: Callable[[], Any], said: list[str]) -> None:
    with pytest.raises((PlanError, FileNotFoundError)) as caught:
        call()
    text = str(caught.value)
    for part in said:
        assert part in text, text
    if isinstance(caught.value, PlanError):
        for part in ("refused ", "got ", "needed ", "where: ", "try"):
            assert part in text, text


def test_a_plan_beside_options_that_contradict_it() -> None:
    plan = mw.parallelize(step).plan(state(), X)
    with pytest.raises(PlanError, match="the option 'zero'"):
        mw.parallelize(step, plan=plan, zero=3)


def test_a_saved_plan_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first = mw.parallelize(step)
    first.plan(state(), X).save(path)
    _, loss = mw.parallelize(step, plan=path)(state(), X)
    assert float(loss) == pytest.approx(float(first(state(), X)[1]))


def test_a_state_that_was_given_away() -> None:
    parallel = mw.parallelize(step)
    placed, _ = parallel(state(), X)
    parallel(placed, X)
    with pytest.raises(PlanError, match=r"args\[0\].*already donated.*state, metrics = step"):
        parallel(placed, X)


def test_a_module_whose_changes_would_be_lost() -> None:
    def bad(module: nnx.Module, x: jax.Array) -> jax.Array:
        return jnp.mean(module(x))

    with pytest.raises(PlanError, match=r"the NNX object Linear.*nnx.split"):
        mw.parallelize(bad)(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), X)


def test_a_method() -> None:
    class Trainer:
        rate = 0.5

        @mw.parallelize
        def step(self, w: jax.Array, x: jax.Array) -> Any:
            return w * self.rate, x

    with pytest.raises(PlanError, match="got Trainer"):
        Trainer().step(X, X)
