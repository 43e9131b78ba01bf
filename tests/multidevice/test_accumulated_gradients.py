"""Gradients of a model that is one scan, added up over microbatches in that scan."""

from __future__ import annotations

import dataclasses

import jax
from one_device import assert_as_on_one_device, drawn

from meshwright import plan_for
from meshwright.runtime.step import PlannedStep
from meshwright.zoo import gpt


def test_gradients_of_a_scan_are_there_once() -> None:
    """Under ZeRO-1 a device has the sum of all gradients, and beside it those of one layer of a microbatch,
    not of all."""
    config = dataclasses.replace(
        gpt.CONFIGS["gpt-tiny"], hidden=128, layers=8, heads=4, vocabulary=64, sequence=8, global_batch=32, scan=True
    )
    target = gpt.build(config, optimizer="sgd")
    state, batch = drawn(target)
    assert_as_on_one_device(target.step, state, batch, preset="zero(stage=1)", microbatches=2)
    found = plan_for(target.step, (state, batch), cluster="local", preset="zero(stage=1)", microbatches=2)
    memory = PlannedStep(found.program, found.plan, jax.devices()).lower().compile().memory_analysis()
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(state["params"]))
    assert gradients < memory.temp_size_in_bytes < 1.5 * gradients
