"""`verify`: what a plan predicts is what the compiled program does, and a plan that is wrong is caught."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import cli
from meshwright._jax.grad import value_and_grad
from meshwright.errors import PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.targets import step_target, zoo_target
from meshwright.verify import LeafError, Verification, local_cluster, verify
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
    assert data_parallel.reference == "one device"
    size = 64 * 64 * 4
    (stage,) = data_parallel.stages
    assert {k: t.bytes for k, t in stage.compiled.items()} == {"all_gather": size, "reduce_scatter": size}
    assert [one.name for one in data_parallel.errors] == ["result[0]['moment']", "result[0]['w']", "result[1]"]
    assert any(one.deviation > 0 for one in data_parallel.errors)  # two programs were compared
    assert data_parallel.not_judged == ()
    assert data_parallel.step_seconds > 0


def test_no_traffic_where_some_was_predicted(data_parallel: Verification) -> None:
    (stage,) = data_parallel.stages
    for changes in ({"predicted": {}}, {"compiled": {}}):
        changed = dataclasses.replace(data_parallel, stages=(dataclasses.replace(stage, **changes),))
        assert not by_name(changed)["all_gather bytes"].passed
        assert not changed.passed


def test_most_starts_decide(data_parallel: Verification) -> None:
    def leaf(deviation: float, scale: float = 1.0, noise: float = 0.0) -> tuple[LeafError, ...]:
        return (LeafError(name="w", deviation=deviation, allowed=1e-4 + 4 * noise, noise=noise, scale=scale),)

    def passes(*starts: tuple[LeafError, ...]) -> bool:
        return dataclasses.replace(data_parallel, starts=starts).passed

    good, bad = leaf(1e-6), leaf(2e-4)
    assert passes(good)
    assert passes(bad, good, good)
    assert not passes(bad)
    assert not passes(bad, good, bad)
    assert not passes(leaf(math.inf), good, leaf(math.inf))
    # Nothing that could contradict is no agreement, but one result beside it is.
    unseen = leaf(1.0, noise=1.0)
    assert not passes(unseen)
    assert passes((*unseen, *good))
    assert dataclasses.replace(data_parallel, starts=((*unseen, *good),)).not_judged == unseen
    assert not passes((*leaf(9.0, noise=1.0), *good))


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
    (stage,) = data_parallel.stages
    predicted, compiled = getattr(stage, fact)
    changed = dataclasses.replace(
        data_parallel, stages=(dataclasses.replace(stage, **{fact: (predicted, compiled * factor)}),)
    )
    assert {check.name for check in changed.checks if not check.passed} == failing


def test_a_plan_that_was_saved(tmp_path: Path) -> None:
    """On fewer devices than there are, in two stages, by the interface and by the command."""
    target = zoo_target(mlp(layers=2, width=32, batch=64))
    found = plan_for(target.step, target.example_args, cluster=local_cluster(4), stages=2, microbatches=2)
    path = tmp_path / "plan.json"
    found.plan.save(path)
    verified = verify(target, plan=path, timed_steps=1)
    assert verified.passed, verified.checks
    assert verified.plan == found.plan
    assert {name.split(":")[0] for name in by_name(verified) if name.startswith("stage")} == {"stage 1", "stage 2"}
    for wrong in ({"mesh": (4,)}, {"microbatches": 4}, {"preset": "gpipe"}, {"devices": 8}):
        with pytest.raises(PlanError, match="leaving out the"):
            verify(target, plan=path, **wrong)
    with pytest.raises(PlanError, match="program"):
        verify(zoo_target(mlp(layers=4, width=64, batch=64)), plan=path)
    # What a plan says of memory and FLOPs is held against what its programs do.
    stage = found.plan.stages[0]
    memory = dataclasses.replace(stage.memory, workspace=stage.memory.workspace + stage.memory.total)
    assert stage.flops is not None
    changed = dataclasses.replace(stage, memory=memory, flops=1.1 * stage.flops, communication=())
    stale = dataclasses.replace(found.plan, stages=(changed, *found.plan.stages[1:]))
    failing = {check.name for check in verify(target, plan=stale, timed_steps=0).checks if not check.passed}
    assert failing >= {"stage 1: FLOPs", "stage 1: peak memory"}


def test_updates_for_every_microbatch_have_no_truth() -> None:
    target = zoo_target(mlp(layers=4, width=32, batch=64))
    found = verify(target, devices=2, stages=2, schedule="pipedream", microbatches=4, timed_steps=0)
    assert found.errors == ()
    assert found.reference.startswith("nothing")
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
    assert {one.name for one in found.judged} == {"result['y']", "result['best']"}
    assert found.passed, found.checks


def test_a_step_whose_microbatches_differ_from_its_batch() -> None:
    """The spread of a batch is not the mean of its parts' spreads: the truth is one device with the same parts."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = value_and_grad(lambda w: jnp.std(x @ w))(w)
        return w - 0.1 * grad, loss

    x = jax.random.normal(jax.random.key(0), (64, 64)) * jnp.arange(64)[:, None]
    target = step_target(step, (jnp.ones((64, 64)), x), name="spread")
    # Split over the devices, a microbatch is a piece of every device's part: other examples than in an unsplit batch.
    by_batch = {"args?1?": ("x", None)}
    found = verify(target, timed_steps=1, microbatches=4, reduction="mean", mesh=(8,), pins=by_batch)
    assert found.plan.stages[0].inputs[0].spec.dims == (("x",), ())
    assert found.reference == "one device, the same microbatches"
    assert all(one.deviation < 1e-5 * one.scale for one in found.errors)


def test_arguments_that_are_given_outlive_the_runs() -> None:
    start = {"w": jnp.ones((64, 64)), "moment": jnp.ones((64, 64))}
    assert verify(step_target(train_step, (start, jnp.ones((32, 64))), name="good"), devices=2, timed_steps=0).passed
    assert float(start["w"].sum()) == 64 * 64


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
    (stage,) = found["stages"]
    for name in ("collectives", "flops", "memory_bytes"):
        assert set(stage[name]) == {"predicted", "compiled"}
    assert [one["agrees"] for one in found["results"]] == [True]
    assert found["step_seconds"]["measured"] > 0
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", f"{path}:g", "--mesh", "8"])
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert out.splitlines()[-1] == "FAILED"
    assert "results after 3 steps that can be judged" in out
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", f"{path}:f", "--preset", "gpipe(stages=2)", "--json"])
    assert ended.value.code == 2
    assert "value_and_grad" in capsys.readouterr().err
