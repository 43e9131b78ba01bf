"""Stages that are the same program are counted once, and hold what each of them would be found to hold."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from pipelines import Pipeline, staged_plan

import meshwright as mw
from meshwright import zoo
from meshwright.lowering.pipeline.local_stages import LocalStages
from meshwright.lowering.pipeline.stage_memory import StageMemory, stage_memory
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program


def assert_counted_alike(step: Any, args: Any, pipeline: Pipeline, programs: int) -> None:
    """What stages hold is what each holds that is counted by itself, and `programs` stages were counted."""
    program = trace_program(step, args, microbatches=pipeline.microbatches)
    staged = staged_program(program, scan_splits=pipeline.scan_splits)
    plan = staged_plan(program, staged, pipeline)
    counted: dict[Hashable, StageMemory] = {}
    together = LocalStages(staged, plan, counted=counted)
    alone = LocalStages(program, plan)
    splits = alone.schedule.splits_backward
    expected = [stage_memory(s, u, splits_backward=splits) for s, u in zip(alone.stages, alone.updates, strict=True)]
    assert list(together.memory) == expected
    peaks, kept = together.timeline().peak_bytes, together.schedule.in_flight
    for peak, held, count in zip(peaks, expected, kept, strict=True):
        assert held.constant_bytes + count * held.in_flight_bytes <= peak
    assert len(counted) == programs


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble", "pipedream"])
def test_equal_stages(schedule: str) -> None:
    """Of eight stages the first, which sends and does not receive, the last, which has the loss, and six between."""
    equal_stages_are_counted_alike(schedule)


def equal_stages_are_counted_alike(schedule: str) -> None:
    target = zoo.mlp(width=64, layers=8, batch=64)
    args = target.example_state, target.example_batch
    assert_counted_alike(target.step, args, Pipeline(submeshes=(1,) * 8, schedule=schedule), 3)


def test_a_clipped_step_with_shared_parameters() -> None:
    """Rounds of the update, small values exchanged, parameters that several stages hold."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3))
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    params = {"ends": shape, "inner": [shape] * 6}

    def step(state: Any, x: Any) -> Any:
        params, moments = state

        def loss(params: Any) -> Any:
            h = x @ params["ends"]
            for layer in params["inner"]:
                h = jax.nn.gelu(h @ layer)
            return jnp.mean((h @ params["ends"]) ** 2)

        value, grads = mw.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state = params, jax.eval_shape(optimizer.init, params)
    assert_counted_alike(step, (state, shape), Pipeline(submeshes=(1,) * 8), 3)


def test_unlike_submeshes_and_rows() -> None:
    """Stages of a scan have rows of one parameter; on other submeshes, or of other trips, they are other programs."""
    target = zoo.build("llama-tiny")
    args = target.example_state, target.example_batch
    assert_counted_alike(target.step, args, Pipeline(submeshes=(2, 2, 4), microbatches=2), 3)


def test_what_looks_alike_and_is_not() -> None:
    """Two layers of one shape whose functions keep other values for the backward pass."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = x
            for number, layer in enumerate(w):
                h = jnp.sin(h @ layer) * jnp.cos(h) if number % 2 else jax.nn.relu(h @ layer) + h
            return jnp.mean(h)

        value, grads = mw.value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - g, w, grads), value

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert_counted_alike(step, args, Pipeline(submeshes=(1,) * 8), 4)
