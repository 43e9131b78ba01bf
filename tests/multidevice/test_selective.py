"""Rematerialised segments that keep what is dear to compute: their numbers, and what runs again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_device import assert_equal_trees, copy, drawn
from pipelines import Pipeline, staged_plan, whole

import meshwright as mw
from meshwright import load_plan, plan_for, zoo
from meshwright._jax.jaxpr import open_jaxpr
from meshwright._jax.plain import programs_in
from meshwright.errors import PlanError
from meshwright.lowering.local_step import LocalStep
from meshwright.plan import Plan
from meshwright.planning.request import Planning
from meshwright.program.graph import Graph
from meshwright.program.ladder import ladder_of
from meshwright.program.segments import Runs, layer_segments
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.runtime.executable import executable
from meshwright.runtime.pipeline.step import PipelinedStep
from meshwright.runtime.step import PlannedStep
from meshwright.search.stages.segments import stage_segments
from meshwright.targets import zoo_target
from meshwright.verify import local_cluster, verify
from meshwright.zoo import llama

# So low that small products are dear too: 16 numbers are summed for one.
PRICE = 0.2


def climbed(plan: Plan, number: int, graph: Graph, runs: Runs) -> Plan:
    """A plan of which a stage is rematerialised but for what is dear."""
    ladder = ladder_of(graph, runs, prices=[PRICE], most_kept=10.0)
    assert len(ladder.rungs) > 1
    segments = ladder.at(ladder.segments)
    changed = replace(
        plan.stages[number],
        rematerialised=tuple(sorted((level, tuple(own)) for level, own in segments.runs.items())),
        kept_inside=tuple(sorted(segments.kept)),
    )
    return replace(plan, stages=(*plan.stages[:number], changed, *plan.stages[number + 1 :]))


def one_stage(planning: Planning) -> Plan:
    graph = planning.program.graph
    return climbed(planning.plan, 0, graph, layer_segments(graph))


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("gpt-tiny", "zero(3)"),  # layers one after the other
        ("llama-tiny", "megatron(tp=2)"),  # in a loop
        ("deepseek-v3-tiny", "data_parallel()"),  # loops, branches and mixtures
    ],
)
def test_numbers_are_those_of_one_device(name: str, preset: str) -> None:
    target = zoo.build(name, global_batch=8)
    planning = plan_for(
        target.step, (target.example_state, target.example_batch), cluster="p3.16xlarge:1", preset=preset, remat="none"
    )
    plan = one_stage(planning)
    assert plan.stages[0].remat == "selective"
    state, batch = drawn(target)
    expected = jax.jit(target.step)(copy(state), batch)
    step = PlannedStep(planning.program, plan, jax.devices())
    assert_equal_trees(step(state, batch), expected, atol=3e-5)


@cache
def rematerialised_layers() -> Planning:
    target = zoo.build("gpt-tiny", global_batch=8)
    return plan_for(
        target.step, (target.example_state, target.example_batch), cluster="p3.16xlarge:1", preset="data_parallel()",
        microbatches=1, remat="layer",
    )  # fmt: skip


@pytest.mark.parametrize("path", [(999,), (), (0, 5)])
def test_what_is_no_equation_in_a_segment_is_not_kept(path: tuple[int, ...]) -> None:
    """In a file that was edited by hand."""
    planning = rematerialised_layers()
    (stage,) = planning.plan.stages
    (level, (run, *_)), *_ = stage.rematerialised
    wrong = {"kept_inside": {"kept_inside": (path,)}, "rematerialised": {"rematerialised": ((level, (run, run)),)}}
    for name, change in wrong.items():
        with pytest.raises(PlanError, match=rf"stages\[0\]\.{name}"):
            PlannedStep(planning.program, replace(planning.plan, stages=(replace(stage, **change),)), jax.devices())


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        # Layers one after the other: a ladder as of one stage, and pipelines of them have tests of their own.
        pytest.param("gpt-tiny", None, marks=pytest.mark.slow),
        ("llama-tiny", (1, 2)),
    ],
)
def test_numbers_of_a_pipeline_are_those_of_one_device(name: str, layers: tuple[int, ...] | None) -> None:
    target = zoo.build(name, global_batch=8)
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=2)
    staged = staged_program(program)
    plan = staged_plan(program, staged, Pipeline(microbatches=2, layers=layers))
    for number, stage in enumerate(plan.stages):
        assert stage.equations is not None
        cut = staged.cutter.cut(*stage.equations)
        runs = stage_segments(cut, staged.layers[slice(*stage.layers)])
        plan = climbed(plan, number, cut.graph, runs)
    assert {stage.remat for stage in plan.stages} == {"selective"}
    state, batch = drawn(target)
    expected = jax.jit(target.step)(copy(state), batch)
    assert_equal_trees(whole(PipelinedStep(program, plan, jax.devices())(state, batch)), whole(expected), atol=3e-5)


@pytest.mark.slow  # the compiled test below has the same of a loop, and is in `make test`
def test_a_plan_in_less_memory_keeps_products_and_is_the_same_from_its_file(tmp_path: Path) -> None:
    """Between the memory of nothing computed again and that of everything; full layers take more time."""
    target = zoo.bert_layers(layers=3, hidden=256, heads=8, batch=8, sequence=256)
    plan = partial(
        plan_for, target.step, (target.example_state, target.example_batch), cluster="p3.16xlarge:1",
        microbatches=1, preset="data_parallel()",
    )  # fmt: skip
    nothing, everything = (plan(remat=remat) for remat in ("none", "layer"))
    least, most = (one.plan.stages[0].memory.total for one in (everything, nothing))
    some = plan(memory_per_device=least + 0.7 * (most - least))
    assert [one.plan.stages[0].remat for one in (nothing, some, everything)] == ["none", "selective", "layer"]
    assert nothing.step_seconds < some.step_seconds < everything.step_seconds
    some.plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == some.plan
    state, batch = drawn(target)
    expected = jax.jit(target.step)(copy(state), batch)
    assert_equal_trees(PlannedStep(some.program, loaded, jax.devices())(state, batch), expected, atol=1e-5)


@pytest.mark.compiled
def test_what_is_computed_again_is_what_the_plan_says(tmp_path: Path) -> None:
    """FLOPs of the compiled program, its peak and its numbers: of layers in a loop, since XLA for CPUs finds what is
    computed again outside of one in the forward pass."""
    config = replace(llama.CONFIGS["llama-tiny"], layers=4, sequence=128, global_batch=16, dtype="float32")
    target = zoo_target(llama.build(config))
    plan = partial(
        plan_for, target.step, target.example_args, cluster=local_cluster(8), microbatches=1, preset="data_parallel()"
    )
    nothing, everything = (plan(remat=remat) for remat in ("none", "layer"))
    least, most = (one.plan.stages[0].memory.total for one in (everything, nothing))
    some, less = (plan(memory_per_device=least + share * (most - least)) for share in (0.6, 0.3))
    assert {one.plan.stages[0].remat for one in (some, less)} == {"selective"}
    flops = [one.plan.stages[0].flops or 0.0 for one in (nothing, some, less, everything)]
    assert flops[0] < flops[1] < 1.05 * flops[0] < flops[2] < flops[3]
    assert least < some.plan.stages[0].memory.total < least + 0.6 * (most - least)
    some.plan.save(tmp_path / "plan.json")
    verified = verify(target, plan=tmp_path / "plan.json", timed_steps=0)
    assert verified.passed, verified.checks


def test_a_kept_product_is_summed_over_devices_once() -> None:
    """What is kept of a product in parts is their sum, as its reader has it, and not the parts, to be summed again."""

    def train(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for up, down in weights:
                h = jnp.tanh(jnp.tanh(h @ up) @ down)
            return jnp.mean(h**2)

        value, gradients = mw.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    array = jax.ShapeDtypeStruct
    weights = [(array((64, 128), jnp.float32), array((128, 64), jnp.float32))] * 2
    planning = plan_for(
        train, (weights, array((16, 64), jnp.float32)), cluster=local_cluster(8), mesh={"model": 8}, stages=1,
        microbatches=1, pins={"args[0][*][0]": (None, "model"), "args[0][*][1]": ("model", None)}, remat="none",
    )  # fmt: skip
    (stage,) = planning.plan.stages
    products = [operator.path for operator in planning.program.graph.operators if operator.matmul]
    assert len(products) == 4
    (last,) = products[-1]
    changed = replace(stage, rematerialised=(((), ((0, last + 2),)),), kept_inside=tuple(products))

    def sums(plan: Plan) -> int:
        return executable(planning.program, plan, jax.devices()).lower().as_text().count("all_reduce")

    assert sums(replace(planning.plan, stages=(changed,))) == sums(planning.plan) > 0


@pytest.mark.parametrize("is_computed_again", [True, False])
def test_the_gradient_of_the_head_is_there_before_layers_are_computed_again(*, is_computed_again: bool) -> None:
    """Compilers would make it at the end of the step, and keep what it reads, the logits, until then."""

    def train(weights: Any, x: jax.Array) -> Any:
        def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
            return jnp.tanh(x @ weight)

        def loss(weights: Any) -> jax.Array:
            h = (jax.checkpoint(layer) if is_computed_again else layer)(x, weights["layer"])
            return jnp.mean(jax.nn.logsumexp(h @ weights["head"], axis=-1))

        value, gradients = mw.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    array = jax.ShapeDtypeStruct
    weights = {"layer": array((64, 64), jnp.float32), "head": array((64, 96), jnp.float32)}
    planning = plan_for(
        train, (weights, array((16, 64), jnp.float32)), cluster=local_cluster(8), preset="data_parallel()", remat="none"
    )
    step = LocalStep(planning.program, planning.plan)
    closed = jax.make_jaxpr(step.on(step.abstract_mesh()))(*step.avals())

    def barriers(jaxpr: Any) -> Iterator[set[Any]]:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "optimization_barrier":
                yield {var.aval.shape for var in equation.outvars}
            for inner in programs_in(equation):
                yield from barriers(open_jaxpr(inner))

    together = {(2, 64), (64, 96)}  # the cotangent of what a device has of the batch, and the gradient of the head
    assert any(together <= shapes for shapes in barriers(open_jaxpr(closed))) == is_computed_again
