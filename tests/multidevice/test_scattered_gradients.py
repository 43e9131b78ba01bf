"""ZeRO-2: the gradients of microbatches are scattered as they are made, and added up in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest
from one_device import assert_as_on_one_device, drawn

from meshwright import plan_for
from meshwright.runtime.step import PlannedStep
from meshwright.zoo import Target, gpt, llama

TINY = dataclasses.replace(gpt.CONFIGS["gpt-tiny"], layers=2)
SCAN = dataclasses.replace(TINY, layers=4, scan=True)  # which is compiled as one layer
MODELS: dict[str, Callable[[], Target]] = {
    "layers in a loop": lambda: gpt.build(TINY),
    "one scan": lambda: gpt.build(SCAN),
    "one scan, rematerialised": lambda: gpt.build(SCAN, remat=True),
    "grouped queries": lambda: llama.build(llama.CONFIGS["llama-tiny"]),
}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("layers in a loop", {"stages": 1}),
        ("one scan", {"stages": 1, "microbatches": 1, "mesh": {"data": 8}}),
        ("one scan", {"stages": 1, "mesh": {"data": 4, "model": 2}}),
        ("one scan, rematerialised", {"stages": 2}),
        # Each of the two, a rematerialised scan and two stages of layers, has a case above with what the other lacks.
        pytest.param("one scan, rematerialised", {"stages": 1}, marks=pytest.mark.slow),
        pytest.param("layers in a loop", {"stages": 2}, marks=pytest.mark.slow),
        ("grouped queries", {"preset": "deepspeed_3d(tp=2, pp=2, dp=2, zero=2)"}),
    ],
    ids=str,
)
def test_numbers_are_those_of_one_device(model: str, options: dict[str, Any]) -> None:
    target = MODELS[model]()
    state, batch = drawn(target)
    options = options if "preset" in options else {**options, "zero": 2}
    step = assert_as_on_one_device(target.step, state, batch, steps=2, **{"microbatches": 2, **options})
    assert any(p.scattered for stage in step.plan(state, batch).stages for p in stage.parameters)


# Numbers are those of layers in a loop too; in a scan the sums of all layers are one array.
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_device_holds_parts_of_the_sums(scan: bool) -> None:
    """Between microbatches an eighth of the gradients is there, under ZeRO-1 all."""
    config = dataclasses.replace(
        SCAN if scan else TINY, hidden=128, vocabulary=64, sequence=8, global_batch=32
    )  # fmt: skip
    target = gpt.build(config, optimizer="sgd")
    state, batch = drawn(target)
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(state["params"]))

    def held(zero: int) -> float:
        found = plan_for(target.step, (state, batch), cluster="local", preset=f"zero(stage={zero})", microbatches=2)
        return (
            PlannedStep(found.program, found.plan, jax.devices()).lower().compile().memory_analysis().temp_size_in_bytes
        )

    assert held(2) < held(1) - 0.6 * gradients
