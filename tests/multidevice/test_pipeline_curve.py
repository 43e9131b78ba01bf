"""What the devices of a pipeline hold while it runs, beside the simulator's curve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from live_bytes import assert_as_predicted
from pipelines import Pipeline, pipelined, staged_plan

import meshwright as mw
from meshwright import zoo
from meshwright.lowering.pipeline.local_stages import LocalStages
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program

pytestmark = pytest.mark.compiled

CASES = [
    ("mlp", Pipeline(submeshes=(2, 2, 4))),
    pytest.param("llama-tiny", Pipeline(submeshes=(2, 2, 4)), marks=pytest.mark.slow),
    pytest.param("mlp", Pipeline(submeshes=(2, 2, 4), schedule="gpipe"), marks=pytest.mark.slow),
    pytest.param("mlp", Pipeline(submeshes=(2, 2, 4), schedule="zero_bubble"), marks=pytest.mark.slow),
    pytest.param("mlp", Pipeline(submeshes=(2, 2, 4), schedule="pipedream", microbatches=8), marks=pytest.mark.slow),
    pytest.param("llama-tiny", Pipeline(submeshes=(2, 2, 4), schedule="gpipe"), marks=pytest.mark.slow),
    pytest.param("gpt-tiny", Pipeline(submeshes=(2, 2, 4), microbatches=4), marks=pytest.mark.slow),
    pytest.param("gpt-tiny", Pipeline(submeshes=(4, 4), schedule="zero_bubble"), marks=pytest.mark.slow),
    pytest.param("unet-tiny", Pipeline(submeshes=(2, 2, 4), microbatches=4), marks=pytest.mark.slow),
    pytest.param("moe-tiny", Pipeline(submeshes=(4, 4), schedule="eager_one_f_one_b"), marks=pytest.mark.slow),
    pytest.param("mlp", Pipeline(submeshes=(2, 2, 4), schedule="eager_one_f_one_b"), marks=pytest.mark.slow),
    pytest.param(
        "mlp",
        Pipeline(submeshes=(2, 2, 4), schedule="adaptive", options=(("warm_up", (3, 2)),)),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "mlp",
        Pipeline(submeshes=(4, 4), schedule="interleaved_one_f_one_b", options=(("chunks", 2),)),
        marks=pytest.mark.slow,
    ),
    pytest.param("mlp", Pipeline(submeshes=(4, 4), remat="layer", microbatches=8), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "pipeline"), CASES, ids=lambda x: getattr(x, "schedule", x))
def test_no_device_holds_more_than_predicted(name: str, pipeline: Pipeline) -> None:
    target = zoo.mlp(width=256, layers=4, batch=256) if name == "mlp" else zoo.build(name)
    assert_as_predicted(pipelined(target.step, (target.example_state, target.example_batch), pipeline), target)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["megatron(tp=2, pp=2)", "deepspeed_3d(tp=2, pp=2, dp=2)", "gpipe(2)", None])
def test_nor_by_plans_of_presets_and_found_ones(preset: str | None) -> None:
    target = zoo.build("llama-tiny")
    wanted = {"stages": 2} if preset is None else {"preset": preset}
    step = mw.parallelize(target.step, microbatches=4, **wanted)
    assert_as_predicted(step.planned(target.example_state, target.example_batch), target)


def test_the_memory_of_a_plan_is_that_of_its_programs() -> None:
    """Traced stages say what a scan keeps, which a search can only estimate. No device is needed."""
    target = zoo.build("llama-tiny")
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=2)
    plan = staged_plan(program, staged_program(program), Pipeline(submeshes=(2, 2, 4)))
    local = LocalStages(program, plan)
    traced = local.plan_with_memory()
    for stage, memory, peak in zip(traced.stages, local.memory, local.timeline().peak_bytes, strict=True):
        assert stage.memory.total == pytest.approx(peak)
        assert stage.memory.activations == memory.in_flight_bytes * stage.in_flight
    assert tuple(stage.in_flight for stage in traced.stages) == local.schedule.in_flight
    assert replace(traced, stages=plan.stages) == plan
