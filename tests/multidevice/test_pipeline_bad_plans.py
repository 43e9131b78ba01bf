"""Plans that were edited into nonsense are refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pipelines import Pipeline, staged_plan
from test_pipeline import data, perceptron, predict

import meshwright as mw
from meshwright.plan import Transfer
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.runtime.pipeline.step import PipelinedStep

Transfers = tuple[Transfer, ...]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: (), "no transfer of value 17 from stage 1 to stage 2"),
        (lambda t: t[:1], "no transfer of value 21 from stage 2 to stage 3"),
        (
            lambda t: (replace(t[0], value=18), t[1]),
            "a transfer of value 18 from stage 1; needed values that the stage computes",
        ),
        (lambda t: (*t, replace(t[0], target=2)), "a transfer of value 17 from stage 1 to stage 3"),
    ],
    ids=["none", "one short", "another value", "one more"],
)
def test_transfers_that_are_not_what_stages_read(edit: Callable[[Transfers], Transfers], said: str) -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        loss, grads = mw.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    program = trace_program(step, (perceptron(), *data()), microbatches=2)
    plan = staged_plan(program, staged_program(program), Pipeline(submeshes=(2, 2, 4), microbatches=2))
    with pytest.raises(mw.PlanError, match=said):
        PipelinedStep(program, replace(plan, transfers=edit(plan.transfers)), jax.devices())
