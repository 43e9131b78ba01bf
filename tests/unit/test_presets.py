"""What presets are called, what they refuse, and what their axes are told to split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import presets, zoo
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.program.batch import batch_inputs
from meshwright.program.origins import dim_origins, operator_origins
from meshwright.program.traces import Traces


def planned(preset: Any, target: Any | None = None, **options: Any) -> Any:
    target = target or zoo.mlp(width=64, layers=2, batch=16)
    return plan_for(
        target.step, (target.example_state, target.example_batch), preset=preset, cluster="local", **options
    )


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("data_parallel", "data_parallel()"),
        ("zero(3)", "zero(stage=3)"),
        ("megatron(tp=2, pp=2)", "megatron(tp=2, pp=2, dp=2)"),
        ("megatron(tp=4, sequence_parallel=True)", "megatron(tp=4, dp=2, sequence_parallel=True)"),
        ("megatron(tp=2, pp=2, chunks=3)", "megatron(tp=2, pp=2, dp=2, chunks=3)"),
        ("deepspeed_3d(tp=2, pp=4, dp=1)", "deepspeed_3d(tp=2, pp=4, dp=1, zero=1)"),
        ("fsdp_tp(tp=4)", "fsdp_tp(tp=4, dp=2)"),
        ("gpipe(4)", "gpipe(stages=4, dp=2)"),
        ("pipedream(stages=8)", "pipedream(stages=8, dp=1)"),
        ("expert_parallel", "expert_parallel(ep=8, dp=1)"),
        ("expert_parallel(ep=4)", "expert_parallel(ep=4, dp=2)"),
        ("expert_parallel(dp=4)", "expert_parallel(ep=2, dp=4)"),
        ("megatron(dp=2)", "megatron(tp=4, dp=2)"),
        ("megatron(pp=2, dp=2)", "megatron(tp=2, pp=2, dp=2)"),
        ("megatron(tp=2, dp=2, chunks=2)", "megatron(tp=2, pp=2, dp=2, chunks=2)"),
        ("megatron()", "megatron(tp=1, dp=8)"),
        ("deepspeed_3d(tp=2, dp=2)", "deepspeed_3d(tp=2, pp=2, dp=2, zero=1)"),
        ("fsdp_tp(dp=4)", "fsdp_tp(tp=2, dp=4)"),
        ("gpipe(dp=2)", "gpipe(stages=4, dp=2)"),
        ("pipedream(dp=4)", "pipedream(stages=2, dp=4)"),
        ("parameter_server()", "parameter_server()"),
    ],
)
def test_a_preset_reads_as_it_is_written(text: str, whole: str) -> None:
    preset = presets.parse_preset(text).on(8)
    assert str(preset) == whole
    assert presets.parse_preset(whole).on(8) == preset


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("megatorn(tp=2)", ("megatorn", "try megatron")),
        ("megatron(tp=2, tq=2)", ("tq", "arguments")),
        ("megatron(tp=__import__('os'))", ("megatron",)),
        ("zero(4)", ("stage=4", "1 or 2 or 3")),
        ("megatron(tp=0)", ("tp=0", "at least 1")),
        ("megatron(tp=3)", ("8 devices", "multiple of 3")),
        ("megatron(tp=2, pp=2, dp=4)", ("8 devices", "16")),
        ("fsdp_tp()", ("neither dp= nor tp=", "giving dp= or tp=")),
        ("gpipe()", ("neither stages= nor dp=",)),
        ("gpipe(3)", ("multiple of 3", "stages=3")),
        ("gpipe(1)", ("stages=1", "at least 2")),
        ("deepspeed_3d(tp=2, zero=3)", ("zero=3", "1 or 2")),
        ("expert_parallel()", ("stack of experts", "expert_parallel(ep=8, dp=1)")),
    ],
)  # fmt: skip
def test_refusals(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as refusal:
        planned(text)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize("options", [{"zero": 1}, {"mesh": (8,)}, {"stages": 2}, {"schedule": "gpipe"}], ids=str)
def test_an_option_that_the_preset_decides_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="data_parallel"):
        planned("data_parallel", **options)


def test_rematerialisation_is_free_unless_the_preset_decides_it() -> None:
    presets.check_free(presets.data_parallel(), remat="layer")
    with pytest.raises(PlanError, match="remat"):
        presets.check_free(presets.gpipe(2), remat="none")


def test_a_batch_that_the_axis_does_not_divide() -> None:
    with pytest.raises(PlanError, match="a batch that 8 divides"):
        planned("data_parallel", zoo.mlp(width=64, layers=2, batch=12))
    with pytest.raises(PlanError, match="a batch that 8 divides"):
        planned("data_parallel", microbatches=4)


def test_widths_that_the_axis_does_not_divide() -> None:
    with pytest.raises(PlanError, match="inner width"):
        planned("megatron(tp=8)", zoo.mlp(width=20, layers=2, batch=16))


def test_a_step_without_a_marked_loss() -> None:
    args = (jax.ShapeDtypeStruct((8, 8), jnp.float32),)
    with pytest.raises(PlanError, match="value_and_grad"):
        plan_for(lambda x: x + 1, args, preset="data_parallel", cluster="local")


def test_more_microbatches_where_memory_is_short_still_divide() -> None:
    target = zoo.mlp(width=64, layers=2, batch=64)
    with pytest.raises(MemoryExceeded):
        planned("data_parallel", target, memory_per_device=1e3)


def test_what_the_dims_of_a_transformer_stand_for() -> None:
    target = zoo.build("gpt-tiny")
    args = (target.example_state, target.example_batch)
    traces = Traces(target.step)
    program = traces.program(args)
    graph = program.graph
    kinds = {
        graph.values[graph.inputs[p]].name: tuple(o.kind if o else None for o in dim_origins(graph, graph.inputs[p]))
        for p in graph.parameters
    }
    layer = "args[0]['params']['layers'][1]"
    assert kinds["args[0]['params']['embedding']['tokens']"] == ("vocabulary", "stream")
    assert kinds["args[0]['params']['embedding']['positions']"] == ("data", "stream")
    assert kinds[f"{layer}['attention']['qkv']"] == ("stream", "weight", "weight", "weight")
    assert kinds[f"{layer}['feed_forward']['in']"] == ("stream", "weight")
    assert kinds[f"{layer}['feed_forward_norm']['scale']"] == ("stream",)
    batch = batch_inputs(program, traces, args)
    assert batch == {("args[1]['tokens']", 0), ("args[1]['labels']", 0)}


def test_stacks_of_matrices_are_experts_and_routers_are_none() -> None:
    target = zoo.build("moe-tiny")
    graph = Traces(target.step).program((target.example_state, target.example_batch)).graph
    found = {
        graph.values[graph.inputs[p]].name.rsplit("['", 1)[1]: [o.kind if o else "" for o in origins]
        for p in graph.parameters
        if "experts" in graph.values[graph.inputs[p]].name
        for origins in [dim_origins(graph, graph.inputs[p])]
    }
    assert found == {
        "in']": ["expert", "stream", "weight"],
        "out']": ["expert", "weight", "stream"],
        "router']": ["stream", "expert"],
    }


def test_a_perceptron_without_residuals_has_no_stream() -> None:
    target = zoo.mlp(width=64, layers=3, batch=16)
    graph = Traces(target.step).program((target.example_state, target.example_batch)).graph
    assert "stream" not in {o.kind for origins in operator_origins(graph) for o in origins}


def test_pipedream_takes_its_steady_period_and_keeps_versions() -> None:
    target = zoo.mlp(width=64, layers=8, batch=64)
    flushed = planned("megatron(pp=2)", target, microbatches=8).plan
    plan = planned("pipedream(2)", target, microbatches=8).plan
    assert plan.schedule == "pipedream"
    slowest = max(
        s.forward_seconds + s.backward_seconds + s.synchronise_seconds + s.update_seconds for s in plan.stages
    )
    # As many periods as microbatches, and at most one more until the pipeline of two is full.
    assert 8 * slowest <= plan.predicted.step_seconds <= 9.05 * slowest
    for stage, alone in zip(plan.stages, flushed.stages, strict=True):
        assert stage.memory.parameters == stage.in_flight * alone.memory.parameters


def test_a_plan_with_a_server_is_saved_and_compared(tmp_path: Any) -> None:
    plan = planned("parameter_server").plan
    assert plan.stages[0].gradient_exchange == "central"
    plan.save(tmp_path / "plan.json")
    assert mw.load_plan(tmp_path / "plan.json") == plan
    lines = plan.diff(planned("data_parallel").plan)
    assert "stage 1: gradient exchange central -> collective" in lines
    text = (tmp_path / "plan.json").read_text().replace('"central"', '"star"')
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match="gradient_exchange"):
        mw.load_plan(tmp_path / "plan.json")
