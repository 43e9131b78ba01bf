"""What a pipeline keeps, and when it communicates."""

from __future__ import annotations

import gc
import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_device import assert_equal_trees
from pipelines import Pipeline, pipelined, whole

import meshwright as mw
from meshwright import zoo
from meshwright._jax.hlo import read_compiled
from meshwright.errors import PlanError
from meshwright.lowering.pipeline.slots import Role
from meshwright.lowering.pipeline.stage_memory import stage_memory
from meshwright.program.trace import trace_program
from meshwright.runtime.pipeline.step import PipelinedStep

pytestmark = pytest.mark.compiled


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize(
    "schedule",
    ["one_f_one_b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpipe", "zero_bubble", "pipedream"))],
)
def test_nothing_is_left_behind(schedule: str) -> None:
    target = zoo.mlp(width=32, layers=4, batch=32)
    state, batch = jax.jit(target.init)(jax.random.key(0)), jax.jit(target.make_batch)(jax.random.key(1))
    step = pipelined(target.step, (state, batch), Pipeline(schedule=schedule))
    state, _ = step(state, batch)
    gc.collect()  # what other tests have left
    seen = set()
    for _ in range(20):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        del metrics
        seen.add(live_bytes())
    assert len(seen) == 1


def test_programs_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of each stage what begins a step, forward, backward and update, in however many microbatches; later nothing."""
    target = zoo.mlp(width=32, layers=4, batch=32)
    state, batch = jax.jit(target.init)(jax.random.key(0)), jax.jit(target.make_batch)(jax.random.key(1))
    step = pipelined(target.step, (state, batch), Pipeline(submeshes=(2, 2, 4), microbatches=8))

    def compiled() -> list[str]:
        words = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [word.split(" in ")[0] for word in words if word.startswith("Finished XLA compilation")]

    with jax.log_compiles(), caplog.at_level(logging.DEBUG):
        state, _ = step(state, batch)
        assert compiled().count("Finished XLA compilation of jit(local)") == 4 * 3
        for _ in range(2):
            state, _ = step(state, batch)
        assert compiled() == []


def test_gradients_are_synchronised_once_a_step() -> None:
    target = zoo.mlp(width=64, layers=4, batch=4096)
    step = pipelined(target.step, (target.example_state, target.example_batch), Pipeline())
    for stage in step.stages:
        parameters = sum(4 * p.size for p in map(stage.stage.local_shape, stage.stage.parameters))
        for program in (stage.forward, stage.backward):
            found = read_compiled(stage.lower(program).compile()).collectives
            assert sum(c.bytes * c.count for c in found) <= 8, program.outputs
        found = read_compiled(stage.lower(stage.rounds[0]).compile()).collectives
        assert [c.kind for c in found] == ["all_reduce"]
        assert found[0].bytes == pytest.approx(parameters, abs=8)


def test_synchronised_gradients_lie_where_their_sums_were() -> None:
    """The update of a stage with a tied embedding has two rounds; the first takes no second copy of all gradients."""
    target = zoo.build("gpt-tiny")
    step = pipelined(target.step, (target.example_state, target.example_batch), Pipeline())
    for stage in step.stages:
        first, *later = stage.rounds
        assert later
        gradients = sum(4 * g.size for g in map(stage.stage.local_shape, stage.stage.gradients))
        found = stage.lower(first).compile().memory_analysis()
        assert found.alias_size_in_bytes >= 0.99 * gradients  # all but single numbers
        # Beside them, only what carries small ones together.
        memory = stage_memory(stage.stage, stage.update, splits_backward=False)
        assert memory.update_workspace_bytes == pytest.approx(found.temp_size_in_bytes, rel=0.01)


def test_weights_are_not_kept_for_each_microbatch() -> None:
    """Casts of parameters are made again in the backward pass."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = x.astype(jnp.bfloat16)
            for layer in w:
                h = jnp.tanh(h @ layer.astype(jnp.bfloat16))
            return jnp.mean(h.astype(jnp.float32))

        value, grads = mw.value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - g, w, grads), value

    args = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4, jax.ShapeDtypeStruct((16, 256), jnp.float32)
    for stage in pipelined(step, args, Pipeline()).stages:
        activation = 4 * 256 * 2
        assert stage.stage.kept_bytes() <= 4 * activation
        assert all(slot.role is not Role.PARAMETER for slot in stage.stage.forward.outputs)


def test_state_is_created_where_it_is_kept() -> None:
    target = zoo.mlp(width=32, layers=4, batch=32)
    step = pipelined(target.step, (target.example_state, target.example_batch), Pipeline())
    state = step.create(target.init, jax.random.key(0))
    assert_equal_trees(whole(state), whole(target.init(jax.random.key(0))))
    leaves = jax.tree.leaves(state)
    placed = step.place(leaves + jax.tree.leaves(target.example_batch))[: len(leaves)]
    assert all(before is after for before, after in zip(leaves, placed, strict=True))
    first = {d.id for s in step.stages[:1] for d in s.mesh.devices.flat}
    weights = state["params"]["layers"]
    assert {d.id for d in weights[0]["w"].devices()} == first
    assert {d.id for d in weights[-1]["w"].devices()}.isdisjoint(first)


def test_refusals() -> None:
    target = zoo.mlp(width=32, layers=4, batch=32)
    args = target.example_state, target.example_batch
    step = pipelined(target.step, args, Pipeline())
    with pytest.raises(PlanError, match="2 devices; needed 8"):
        PipelinedStep(step.program, step.plan, jax.devices()[:2])
    with pytest.raises(PlanError, match="a plan for program"):
        PipelinedStep(trace_program(target.step, args, microbatches=2), step.plan, jax.devices())


def test_large_values_of_several_stages_are_told_and_counted() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = x
            for layer in w:
                h = jnp.tanh(h @ layer)
            return jnp.mean(h)

        value, grads = mw.value_and_grad(loss)(w)
        mean = sum(grads) / len(grads)
        return [p - mean for p in w], value

    args = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4, jax.ShapeDtypeStruct((16, 256), jnp.float32)
    local = pipelined(step, args, Pipeline(submeshes=(1, 1))).local
    note = local.around.note()
    assert note is not None
    # Two gradients or sums of them one way or the other, and the mean: three matrices of 256 KiB.
    assert "sends 0.8 MiB between stages each step, for add at" in note
    assert "test_pipeline_memory.py" in note
    here, there = (memory.update_workspace_bytes for memory in local.memory)
    assert here >= 2 * 256 * 256 * 4
    assert there >= 256 * 256 * 4


@pytest.mark.parametrize("name", ["gpt-tiny", pytest.param("unet-tiny", marks=pytest.mark.slow)])
def test_a_microbatch_in_flight_keeps_no_more_than_predicted(name: str) -> None:
    target = zoo.build(name)
    pipeline = Pipeline(submeshes=(2, 2, 4), microbatches=2)
    step = pipelined(target.step, (target.example_state, target.example_batch), pipeline)
    for stage, planned in zip(step.stages, step.plan.stages, strict=True):
        assert stage.stage.kept_bytes() <= planned.memory.activations / pipeline.microbatches
