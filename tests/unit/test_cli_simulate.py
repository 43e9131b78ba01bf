"""`meshwright simulate`: a saved plan's timeline as text, as JSON and as a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshwright import cli
from meshwright.api import plan_for, value_and_grad
from meshwright.plan import Plan
from meshwright.report.timeline import timeline_text
from meshwright.simulate import plan_schedule, plan_timing, simulate_plan


def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h)

    value, grads = value_and_grad(loss)(weights)
    return [w - g for w, g in zip(weights, grads, strict=True)], value


@pytest.fixture(scope="module")
def plan() -> Plan:
    args = ([jax.ShapeDtypeStruct((2048, 2048), "float32")] * 4, jax.ShapeDtypeStruct((8192, 2048), "float32"))
    return plan_for(step, args, cluster="p3.16xlarge:1", stages=2, microbatches=4, schedule="one_f_one_b").plan


@pytest.fixture
def saved(plan: Plan, tmp_path: Path) -> str:
    plan.save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_simulated_step_is_the_predicted_one(plan: Plan) -> None:
    assert plan.predicted is not None
    timeline = simulate_plan(plan)
    assert timeline.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    assert timeline.bubble_fraction == pytest.approx(plan.predicted.bubble_fraction, rel=1e-6)
    assert plan_schedule(plan).in_flight == tuple(stage.in_flight for stage in plan.stages)


def test_as_json(capsys: pytest.CaptureFixture[str], plan: Plan, saved: str) -> None:
    code, out, _ = run(capsys, "simulate", saved, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["predicted"]["step_seconds"] == simulate_plan(plan).step_seconds
    assert [rank["stages"] for rank in found["ranks"]] == [[0], [1]]
    path = found["critical_path"]
    assert path[0]["start_seconds"] == 0.0
    assert path[-1]["end_seconds"] == found["predicted"]["step_seconds"]


def test_as_text_with_a_trace(capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    code, out, _ = run(capsys, "simulate", saved, "--trace", str(trace))
    assert code == 0
    assert out.startswith("rank 1  0")
    assert "of the step" in out
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"forward 0", "backward 3"} <= {event["name"] for event in events}


def test_every_microbatch_is_in_the_chart(plan: Plan) -> None:
    chart = timeline_text(simulate_plan(plan), width=200).splitlines()[:2]
    for row in chart:
        assert set("0123abcd") <= set(row)


def test_a_plan_of_one_stage() -> None:
    args = ([jax.ShapeDtypeStruct((2048, 2048), "float32")] * 4, jax.ShapeDtypeStruct((8192, 2048), "float32"))
    plan = plan_for(step, args, cluster="p3.16xlarge:1", microbatches=4).plan
    assert plan.predicted is not None
    assert simulate_plan(plan).step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)


def test_refusals(capsys: pytest.CaptureFixture[str], plan: Plan, saved: str, tmp_path: Path) -> None:
    unpriced = replace(plan, predicted=None)
    unpriced.save(tmp_path / "unpriced.json")
    code, _, err = run(capsys, "simulate", str(tmp_path / "unpriced.json"))
    assert code == 2
    assert "without predicted seconds" in err
    code, _, err = run(capsys, "simulate", saved, "--trace", str(tmp_path / "absent" / "trace.json"))
    assert code == 2
    assert "refused to write the trace" in err
    with pytest.raises(ValueError, match="without predicted seconds"):
        plan_timing(unpriced)
