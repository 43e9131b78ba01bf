"""Plans with padded dims, run on eight and seven devices: the numbers of one device."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from one_device import assert_equal_trees, copy

import meshwright as mw
from meshwright.plan.io import plan_to_dict
from meshwright.planning import measured
from meshwright.planning.checks import request_of
from meshwright.planning.device_kinds import plan_for_kinds
from meshwright.planning.request import Planning, PlanOptions
from meshwright.program.padded_dims import PaddedDim
from meshwright.program.trace import trace_program
from meshwright.program.traces import traces_of
from meshwright.runtime.step import PlannedStep

VOCABULARY, WIDTH, HEADS, INNER, POSITIONS = 41, 40, 5, 61, 8


def decoder(batch: int, *, scan: bool = False, dropout: bool = False, marked: bool = True) -> tuple[Any, Any, Any]:
    """A step of a tiny language model of two layers with momentum, its state and its batch."""

    def layer(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[n]).reshape(*x.shape[:2], HEADS, -1) for n in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["o"]
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x + jax.nn.relu(x @ p["inner"]) @ p["outer"]

    def step(state: Any, tokens: Any) -> Any:
        p, momentum = state

        def loss(p: Any) -> Any:
            x = p["embedding"][tokens]
            if dropout:
                x = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.8, x.shape), x / 0.8, 0.0)
            if scan:
                x, _ = lax.scan(lambda x, one: (layer(one, x), None), x, p["layers"])
            else:
                for one in p["layers"]:
                    x = layer(one, x)
            logs = jax.nn.log_softmax(x @ p["embedding"].T)
            return -jnp.take_along_axis(logs, tokens[..., None], -1).mean()

        value, grads = (mw if marked else jax).value_and_grad(loss)(p)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return (jax.tree.map(lambda a, m: a - 0.1 * m, p, momentum), momentum), value

    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return (random.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    sizes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {"inner": (WIDTH, INNER), "outer": (INNER, WIDTH)}
    rows = (2,) if scan else ()
    layers = [{name: drawn(*rows, *shape) for name, shape in sizes.items()} for _ in range(1 if scan else 2)]
    p = {"embedding": drawn(VOCABULARY, WIDTH), "layers": layers[0] if scan else layers}
    tokens = random.integers(0, VOCABULARY, (batch, POSITIONS)).astype(np.int32)
    return step, (p, jax.tree.map(np.zeros_like, p)), tokens


def check(step: Any, state: Any, tokens: Any, plan: mw.Plan, devices: int = 8) -> None:
    """Two steps by a plan are two steps on one device."""
    parallel = mw.parallelize(step, plan=plan, devices=jax.devices()[:devices])
    alone, expected, found = jax.jit(step), state, copy(state)
    for _ in range(2):
        expected, wanted = alone(expected, tokens)
        found, value = parallel(found, tokens)
    assert_equal_trees((found, value), (expected, wanted), atol=1e-5)


def planned(step: Any, args: tuple[Any, ...], padded: list[PaddedDim], **options: Any) -> mw.Plan:
    """The best plan of a step with these dims padded, whether or not that is faster here."""
    traces, asked = traces_of(step), PlanOptions(**options)
    request = request_of(traces, args, asked, started=time.perf_counter(), tell=lambda text: None)
    return plan_for_kinds(replace(request, padded=tuple(padded))).plan


BATCH, VOCABULARY_DIM = PaddedDim("args[1]", 0, 8), PaddedDim("args[0][0]['embedding']", 0, 8)


def of_layers(scan: bool) -> list[PaddedDim]:
    """The heads and the feed-forward width of both layers."""
    layers, row = (("['layers']",), 1) if scan else (("['layers'][0]", "['layers'][1]"), 0)
    dims = [(name, multiple) for name, multiple in (("q", 8 * 8), ("v", 8 * 8), ("inner", 8))]
    return [PaddedDim(f"args[0][0]{one}['{name}']", row + 1, multiple) for one in layers for name, multiple in dims]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({"batch": 8, "scan": True}, {"preset": "megatron(tp=8)", "remat": "layer"}),
        ({"batch": 8}, {"preset": "megatron(tp=4, pp=2)", "microbatches": 2}),
        # The first is that of `test_what_a_search_pads` with the batch padded too; the second a scan in stages, as in
        # the last one, split as the one before.
        pytest.param({"batch": 8}, {"preset": "megatron(tp=8)"}, marks=pytest.mark.slow),
        pytest.param(
            {"batch": 16, "scan": True}, {"preset": "megatron(tp=2, pp=2)", "microbatches": 4}, marks=pytest.mark.slow
        ),
        ({"batch": 8}, {"mesh": {"x": 2, "y": 4}, "remat": "selective", "zero": 3}),
        ({"batch": 16, "scan": True}, {"mesh": {"x": 2, "y": 4}, "zero": 2, "microbatches": 2, "stages": 1}),
        ({"batch": 30, "dropout": True}, {"mesh": {"x": 8}, "microbatches": 2, "stages": 1}),
        ({"batch": 15, "dropout": True}, {"submeshes": (4, 4)}),
        ({"batch": 15, "scan": True}, {"submeshes": (4, 4), "schedule": "gpipe"}),
    ],
    ids=str,
)
def test_all_dims_padded(model: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    step, state, tokens = decoder(**model)
    padded = [BATCH, VOCABULARY_DIM, *of_layers(model.get("scan", False))]
    plan = planned(step, (state, tokens), padded, **options)
    plan.save(tmp_path / "plan.json")
    assert mw.load_plan(tmp_path / "plan.json") == plan
    assert any(operator.name == "pad" for stage in plan.stages for operator in stage.operators)
    check(step, state, tokens, plan)


@cache
def searched(batch: int, devices: int, marked: bool = True, **options: Any) -> tuple[tuple[Any, Any, Any], Planning]:
    """A decoder, and what a search of its plans finds."""
    step, state, tokens = decoder(batch, marked=marked)
    found = mw.plan_for(step, (state, tokens), devices=jax.devices()[:devices], **options)
    return (step, state, tokens), found


def test_what_a_search_pads() -> None:
    """Five heads over eight devices."""
    (step, state, tokens), found = searched(8, 8, preset="megatron(tp=8)")
    plan = found.plan
    assert {one.multiple for one in plan.padded} == {64}
    assert any(note.startswith("padded: ") for note in plan.notes)
    check(step, state, tokens, plan)
    without = mw.plan_for(step, (state, tokens), preset="megatron(tp=8)", padding=False).plan
    assert not without.padded
    assert plan.predicted.step_seconds < without.predicted.step_seconds


@pytest.mark.parametrize("marked", [True, False])
def test_seven_devices(marked: bool) -> None:
    """Which divide nothing."""
    (step, state, tokens), found = searched(20, 7, marked, stages=1)
    plan = found.plan
    assert PaddedDim("args[1]", 0, 7) in plan.padded
    check(step, state, tokens, plan, devices=7)


def test_another_process_measures_the_plans_of_process_0_as_they_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"preset": "megatron(tp=8)"}
    (step, state, tokens), one = searched(8, 8, **options)
    plan = one.plan
    assert plan.padded
    # Such a process is told the plans, and does not search for them.
    told = json.dumps([["the plan", plan_to_dict(plan)]])
    monkeypatch.setattr(
        measured, "agree", lambda search, **about: told if about["about"] == "the plans to measure" else search()
    )
    found = mw.plan_for(step, (state, tokens), refine="measure", **options)
    assert found.program.padded == found.plan.padded == plan.padded


def test_a_plan_is_of_the_program_that_it_pads() -> None:
    (step, state, tokens), found = searched(20, 7, True, stages=1)
    plan = found.plan
    with pytest.raises(mw.PlanError, match="padded dims"):
        PlannedStep(trace_program(step, (state, tokens)), plan, jax.devices()[:7])
