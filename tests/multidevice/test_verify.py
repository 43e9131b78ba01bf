"""`verify`: what a plan predicts is what the compiled program does, and a plan that is wrong is caught."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import cli
from meshwright._jax.grad import value_and_grad
from meshwright.errors import PlanError
from meshwright.targets import LoadedTarget, step_target, zoo_target
from meshwright.verify import Verification, max_relative_error, verify
from meshwright.zoo import mlp

pytestmark = pytest.mark.compiled

WHOLE = jax.ShapeDtypeStruct((64, 64), "float32")
BATCH = jax.ShapeDtypeStruct((256, 64), "float32")


def train_step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    # Scaled so that gradients stay near one: large ones would make every step the same, and the comparison empty.
    loss, grad = value_and_grad(lambda w: 1e-3 * jnp.mean((jax.nn.relu(x @ w) @ w.T) ** 2))(state["w"])
    moment = 0.9 * state["moment"] + 0.1 * grad**2
    return {"w": state["w"] - 0.1 * grad / jnp.sqrt(moment + 1e-3), "moment": moment}, loss


def by_name(verification: Verification) -> dict[str, Any]:
    return {check.name: check for check in verification.checks}


@pytest.fixture(scope="module")
def data_parallel() -> Verification:
    """A step with its state split by ZeRO-1, so that there is an all-gather and a reduce-scatter."""
    return verify(step_target(train_step, ({"w": WHOLE, "moment": WHOLE}, BATCH), name="step"), zero=1)


def test_a_step_with_abstract_arguments(data_parallel: Verification) -> None:
    assert data_parallel.passed, data_parallel.checks
    assert data_parallel.compared == "parameters"
    assert data_parallel.reference == "one device"
    size = 64 * 64 * 4
    assert {k: t.bytes for k, t in data_parallel.compiled.items()} == {"all_gather": size, "reduce_scatter": size}
    assert 0 < data_parallel.max_relative_error < 1e-5
    assert data_parallel.step_seconds > 0


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"errors": (math.nan,)}, "error after 3 steps (parameters)"),
        ({"errors": (2e-4,)}, "error after 3 steps (parameters)"),
        ({"errors": (2e-4, 1e-6, 2e-4)}, "error after 3 steps (parameters)"),
        ({"errors": (2e-4, math.nan, 1e-6)}, "error after 3 steps (parameters)"),
        ({"predicted": {}}, "all_gather bytes"),
        ({"compiled": {}}, "all_gather bytes"),
    ],
)
def test_a_deviation_is_caught(data_parallel: Verification, changes: dict[str, Any], failing: str) -> None:
    changed = dataclasses.replace(data_parallel, **changes)
    assert not by_name(changed)[failing].passed
    assert not changed.passed


@pytest.mark.parametrize(
    ("fact", "factor", "failing"),
    [
        ("flops", 1.03, {"FLOPs"}),
        ("flops", 0.97, {"FLOPs"}),
        ("peak_bytes", 1.3, {"peak memory"}),
        ("peak_bytes", 1e6, {"peak memory", "peak memory within the limit"}),
    ],
)
def test_a_fact_that_was_not_predicted(
    data_parallel: Verification, fact: str, factor: float, failing: set[str]
) -> None:
    facts = dataclasses.replace(data_parallel.facts, **{fact: getattr(data_parallel.facts, fact) * factor})
    changed = dataclasses.replace(data_parallel, facts=facts)
    assert {check.name for check in changed.checks if not check.passed} == failing


def test_fewer_devices_than_there_are() -> None:
    found = verify(zoo_target(mlp(layers=2, width=32, batch=64)), devices=4, timed_steps=1)
    assert found.planning.plan.num_devices == 4
    assert found.passed, found.checks


def test_more_devices_than_there_are() -> None:
    with pytest.raises(PlanError, match="run on 16 devices"):
        verify(zoo_target(mlp(layers=2, width=32, batch=64)), devices=16)


def test_outputs_of_a_function_without_a_state() -> None:
    target = step_target(
        lambda w, x: {"y": jnp.tanh(x @ w), "best": jnp.argmax(x @ w, axis=1)},
        (WHOLE, jax.ShapeDtypeStruct((32, 64), "float32")),
        name="f",
    )
    found = verify(target, steps=1, timed_steps=1)
    assert found.compared == "outputs"
    assert found.passed, found.checks


def test_a_step_whose_microbatches_differ_from_its_batch() -> None:
    """The spread of a batch is not the mean of its parts' spreads: the truth is one device with the same parts."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = value_and_grad(lambda w: jnp.std(x @ w))(w)
        return w - 0.1 * grad, loss

    x = jax.random.normal(jax.random.key(0), (64, 64)) * jnp.arange(64)[:, None]
    target = step_target(step, (jnp.ones((64, 64)), x), name="spread")
    assert verify(target, timed_steps=1).reference == "one device"
    # Split over the devices, a microbatch is a piece of every device's part: other examples than in an unsplit batch.
    by_batch = {"args?1?": ("x", None)}
    found = verify(target, timed_steps=1, microbatches=4, reduction="mean", mesh=(8,), pins=by_batch)
    assert found.planning.plan.stages[0].inputs[0].spec.dims == (("x",), ())
    assert found.reference == "one device, the same microbatches"
    assert found.max_relative_error < 1e-5


def test_wrong_numbers_are_seen() -> None:
    """The arguments differ from call to call, so the two runs cannot agree; the arrays given outlive the runs."""
    start = {"w": jnp.ones((64, 64)), "moment": jnp.ones((64, 64))}
    good = step_target(train_step, (start, jnp.ones((32, 64))), name="good")
    calls = iter([1.0, 1.1])

    def make_args() -> tuple[Any, ...]:
        state, x = good.make_args()
        return state, x * next(calls)

    shifted = LoadedTarget(name="bad", step=good.step, example_args=good.example_args, make_args=make_args)
    assert verify(good, timed_steps=0).passed
    assert float(start["w"].sum()) == 64 * 64
    assert max_relative_error([np.asarray(shifted.make_args()[1])], [np.asarray(shifted.make_args()[1])]) > 0.05


def test_relative_errors() -> None:
    one, two = np.array([1.0, -2.0]), np.array([1.0, -4.0])
    assert max_relative_error([one], [two]) == 0.5
    assert max_relative_error([one, 0 * one], [one, 0 * one]) == 0.0
    assert max_relative_error([one], [0 * one]) == math.inf
    assert math.isnan(max_relative_error([one, one * math.nan], [one, one]))
    assert math.isnan(max_relative_error([one * math.nan], [one * math.nan]))


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text(
        "import jax, jax.numpy as jnp\n"
        "def f():\n"
        "    args = jax.ShapeDtypeStruct((64, 64), 'float32'), jax.ShapeDtypeStruct((32, 64), 'float32')\n"
        "    return lambda w, x: jnp.sum(jnp.tanh(x @ w)), args\n"
        "def g():\n"
        "    step, args = f()\n"
        "    return lambda w, x: step(w, x) * jnp.nan, args\n"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", f"{path}:f", "--mesh", "8", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert found["passed"]
    assert set(found["collectives"]) == set(found["flops"]) == set(found["memory_bytes"]) == {"predicted", "compiled"}
    assert found["max_relative_error"] <= 1e-4
    assert found["step_seconds"]["measured"] > 0
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", f"{path}:g", "--mesh", "8"])
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert out.splitlines()[-1] == "FAILED"
