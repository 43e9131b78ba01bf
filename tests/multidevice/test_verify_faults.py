"""`verify` finds a runtime that computes something else: faults are put into it, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import meshwright as mw
from meshwright.lowering import collectives, local_step
from meshwright.lowering.pipeline import stage_program
from meshwright.runtime.pipeline import stage_runtime
from meshwright.runtime.step import PlannedStep
from meshwright.targets import LoadedTarget, step_target
from meshwright.verify import Check, run, verify
from meshwright.verify.reference import OneDevice

pytestmark = pytest.mark.compiled

ADAM = optax.adam(1e-2)
# Small as it is, it would not be split by itself.
ONE_STAGE: dict[str, Any] = {"mesh": (4,), "zero": 0, "microbatches": 4, "pins": {"args?1?*": ("x", None)}}
TWO_STAGES: dict[str, Any] = {"stages": 2, "microbatches": 4, "submeshes": (2, 2)}


@cache
def target() -> LoadedTarget:
    """Adam, whose parameters do not show the scale of a gradient: its moments do."""
    keys = jax.random.split(jax.random.key(0), 6)
    params = [jax.random.normal(key, (16, 16)) / 4 for key in keys[:4]]
    batch = tuple(jax.random.normal(key, (64, 16)) for key in keys[4:])

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = batch[0]
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean((x - batch[1]) ** 2)

        value, gradients = mw.value_and_grad(loss)(state["params"])
        updates, moments = ADAM.update(gradients, state["moments"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value

    return step_target(step, ({"params": params, "moments": ADAM.init(params)}, batch), name="faulty")


@pytest.fixture(scope="module")
def references() -> dict[Any, OneDevice]:
    return {}


@pytest.fixture(autouse=True)
def _one_device_is_compiled_once(references: dict[Any, OneDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are in the runtime, of which the step on one device uses nothing: every test has the same reference."""

    def shared(given: LoadedTarget, num_state: int, steps: int) -> OneDevice:
        key = given.name, num_state, steps
        if key not in references:
            references[key] = OneDevice(given, num_state, steps)
        return references[key]

    monkeypatch.setattr(run, "OneDevice", shared)


def is_off(check: Check) -> bool:
    """Whether a check finds that a result is wrong."""
    return check.name.startswith("error") and not check.passed


def instead(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """Functions of `jax.lax` as the runtime's collectives see it."""
    monkeypatch.setattr(collectives, "lax", SimpleNamespace(**{**vars(lax), **functions}))


def no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, psum=lambda x, axes: x)


def mean_for_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, psum=lax.pmean)


def largest_for_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, psum=lax.pmax)


def wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, psum=lambda x, axes: -lax.psum(x, axes))


def sum_a_percent_off(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, psum=lambda x, axes: 1.01 * lax.psum(x, axes))


def sum_over_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over microbatches that is not taken."""
    made = run.executable
    monkeypatch.setattr(run, "executable", lambda program, *rest: made(replace(program, reduction="sum"), *rest))


def lost_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes the place of the last."""
    cut = local_step._cut
    monkeypatch.setattr(local_step, "_cut", lambda *given: cut(*given).at[-1].set(cut(*given)[0]))


def lost_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one parameter, in every step."""
    called = PlannedStep.__call__

    def call(self: PlannedStep, state: Any, batch: Any) -> Any:
        kept = jnp.copy(state["params"][2])
        state, value = called(self, state, batch)
        return {**state, "params": [*state["params"][:2], kept, *state["params"][3:]]}, value

    monkeypatch.setattr(PlannedStep, "__call__", call)


def loss_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric alone, by a tenth of a percent."""
    called = PlannedStep.__call__

    def call(self: PlannedStep, *args: Any) -> Any:
        state, value = called(self, *args)
        return state, 1.001 * value

    monkeypatch.setattr(PlannedStep, "__call__", call)


@pytest.mark.parametrize(
    "fault",
    [
        no_sum,
        sum_over_microbatches,
        lost_microbatch,
        sum_a_percent_off,
        lost_update,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (mean_for_sum, largest_for_sum, wrong_sign)),
        loss_of_one_device,
    ],
)
def test_faults_in_one_stage(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    found = verify(target(), devices=4, steps=1, timed_steps=0, **ONE_STAGE)
    assert any(map(is_off, found.checks)), found.checks
    assert found.reference == "one device"


def test_no_faults() -> None:
    for options in (ONE_STAGE, TWO_STAGES):
        found = verify(target(), devices=4, steps=1, timed_steps=0, **options)
        assert found.passed, found.checks
        assert found.not_judged == ()


# Random numbers


@cache
def noisy() -> LoadedTarget:
    """With dropout, whose numbers depend on where examples stand."""

    def step(state: Any, x: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            h = jnp.tanh(x @ w)
            kept = jax.random.bernoulli(state["key"], 0.5, h.shape)
            return jnp.mean((jnp.where(kept, h, 0) @ w.T - x) ** 2)

        value, gradient = mw.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - 0.1 * gradient, "key": state["key"]}, value

    state = {"w": 0.1 * jnp.ones((64, 64)), "key": jax.random.key(0)}
    return step_target(step, (state, jnp.sin(jnp.arange(4096.0).reshape(64, 64))), name="noisy")


@pytest.mark.parametrize(
    ("where", "options"),
    [(local_step, {"microbatches": 4}), (stage_program, {"stages": 2, "microbatches": 4})],
    ids=["one stage", "two stages"],
)
def test_microbatches_that_draw_the_same_numbers(
    where: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [check for check in verify(noisy(), devices=2, timed_steps=0, **options).checks if is_off(check)]
    rows = where.MicrobatchRows
    monkeypatch.setattr(where, "MicrobatchRows", lambda **given: rows(**{**given, "number": 0}))
    assert [check for check in verify(noisy(), devices=2, timed_steps=0, **options).checks if is_off(check)]


# Stages


def gradients_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every microbatch begins again: the last alone counts."""
    begun = stage_program.StageProgram._evaluate

    def evaluate(self: Any, given: Any) -> Any:
        zeroed = {slot: jnp.zeros_like(x) if slot.role.value == "gradient" else x for slot, x in given.items()}
        return begun(self, zeroed)

    monkeypatch.setattr(stage_program.StageProgram, "_evaluate", evaluate)


def microbatches_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stage: its labels are those of other examples."""
    stacked = stage_runtime.StageRuntime.stacking

    def stacking(self: Any, slot: Any) -> Any:
        cut = stacked(self, slot)
        if cut is None or self.stage.number == 0:
            return cut
        return lambda x: jnp.flip(jnp.asarray(cut(x)), 0)

    monkeypatch.setattr(stage_runtime.StageRuntime, "stacking", stacking)


@pytest.mark.parametrize("fault", [gradients_not_added, microbatches_in_another_order])
def test_faults_in_stages(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    found = verify(target(), devices=4, steps=1, timed_steps=0, **TWO_STAGES)
    assert any(map(is_off, found.checks)), found.checks
