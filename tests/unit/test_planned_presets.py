"""Plans under presets: the stage search, held to the stages, axes and schedule of a preset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies

import meshwright as mw
from meshwright import plan_for, presets, zoo
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.planning.refine import held_bytes
from meshwright.planning.request import Planning
from meshwright.program.equal_stages import even_bounds, main_scan
from meshwright.program.traces import Traces
from meshwright.simulate import simulate_plan
from meshwright.zoo.llama import CONFIGS, build as build_llama


@pytest.fixture(scope="module")
def target() -> Any:
    return build_llama(replace(CONFIGS["llama-tiny"], layers=8, global_batch=32))


@pytest.fixture(scope="module")
def traces(target: Any) -> Traces:
    return Traces(target.step)


@pytest.fixture(scope="module")
def small() -> Any:
    return build_llama(replace(CONFIGS["llama-tiny"], layers=4, global_batch=8))


@pytest.fixture(scope="module")
def small_traces(small: Any) -> Traces:
    return Traces(small.step)


def planned(traces: Traces, target: Any, preset: str, **options: Any) -> Planning:
    args = (target.example_state, target.example_batch)
    return plan_for(traces, args, cluster="p3.16xlarge", preset=preset, **options)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("deepspeed_3d(tp=2, pp=2, zero=1)", marks=pytest.mark.slow),
        pytest.param("gpipe(4)", marks=pytest.mark.slow),
        "megatron(tp=2, pp=2, chunks=2)",
        "zero(stage=3)",
    ],
)
def test_the_best_number_of_microbatches_is_taken(small: Any, small_traces: Traces, text: str) -> None:
    found = planned(small_traces, small, text)
    assert simulate_plan(found.plan).step_seconds == pytest.approx(found.step_seconds, rel=1e-12)
    each = {}
    for count in (n for n in (1, 2, 4, 8) if n >= presets.parse_preset(text).on(8).stages):
        try:
            each[count] = planned(small_traces, small, text, microbatches=count).step_seconds
        except PlanError:
            continue
    assert found.plan.predicted is not None
    gap = found.plan.predicted.optimality_gap
    assert (1 - gap) * found.step_seconds <= min(each.values()) <= found.step_seconds * (1 + 1e-9)
    if "chunks" not in text:  # nothing bounds interleavings but all arithmetic
        assert gap <= 0.01


@pytest.mark.parametrize(
    "text", ["megatron(tp=2, pp=4)", pytest.param("gpipe(8)", marks=pytest.mark.slow), "pipedream(4)"]
)
def test_stages_are_as_many_equal_ones(target: Any, traces: Traces, text: str) -> None:
    preset = presets.parse_preset(text).on(8)
    plan = planned(traces, target, text).plan
    assert [stage.layers for stage in plan.stages] == [(n, n + 1) for n in range(preset.stages)]
    assert {len(stage.devices) for stage in plan.stages} == {8 // preset.stages}
    assert {stage.mesh for stage in plan.stages} == {tuple(zip(*preset.mesh, strict=True))}
    assert plan.schedule == preset.schedule


def test_rematerialisation_is_chosen_for_each_stage(target: Any, traces: Traces) -> None:
    preset = "megatron(pp=4, dp=2)"
    none, layer = (planned(traces, target, preset, microbatches=8, remat=remat) for remat in ("none", "layer"))
    assert none.step_seconds < layer.step_seconds
    # The first rank holds the most microbatches: it alone has less than it would like.
    held = held_bytes(none.plan)
    assert held[0] == max(held)
    mixed = planned(traces, target, preset, microbatches=8, memory_per_device=0.95 * held[0])
    assert none.step_seconds <= mixed.step_seconds <= layer.step_seconds
    assert max(held_bytes(mixed.plan)) <= 0.95 * held[0]


def test_stages_of_a_rank_are_held_together(target: Any, traces: Traces) -> None:
    plan = planned(traces, target, "megatron(tp=2, pp=2, chunks=2)", microbatches=4, remat="none").plan
    totals = [stage.memory.total for stage in plan.stages]
    assert held_bytes(plan) == pytest.approx((totals[0] + totals[2], totals[1] + totals[3]))


def test_there_may_be_more_stages_than_devices(target: Any, traces: Traces) -> None:
    args = (target.example_state, target.example_batch)
    plan = plan_for(traces, args, cluster="rtx4090-4", preset="megatron(pp=4, chunks=2)", microbatches=8).plan
    assert [stage.devices for stage in plan.stages] == 2 * [(0,), (1,), (2,), (3,)]


def test_what_the_program_has_not_is_refused(target: Any, traces: Traces) -> None:
    with pytest.raises(PlanError, match="without a stack of experts"):
        planned(traces, target, "expert_parallel(ep=8)")
    with pytest.raises(PlanError, match="16 equal stages"):
        planned(traces, target, "megatron(pp=8, chunks=2)")
    with pytest.raises(PlanError, match="a multiple of 4"):
        planned(traces, target, "megatron(pp=4, dp=2, chunks=2)", microbatches=2)
    with pytest.raises(PlanError, match=r"chunks=2 and pp=1"):
        presets.megatron(chunks=2)


def test_a_refusal_for_memory_names_what_fits(target: Any, traces: Traces) -> None:
    least = max(held_bytes(planned(traces, target, "megatron(tp=2, pp=2)", microbatches=8, remat="layer").plan))
    with pytest.raises(MemoryExceeded, match=r"preset megatron\(tp=2, pp=2, dp=2\) .*zero=1.*, which fits"):
        planned(traces, target, "megatron(tp=2, pp=2)", microbatches=8, memory_per_device=0.9 * least)


@given(work=strategies.lists(strategies.integers(0, 9), min_size=1, max_size=8), data=strategies.data())
def test_even_bounds_are_the_best(work: Sequence[int], data: Any) -> None:
    count = data.draw(strategies.integers(1, len(work)))

    def most(bounds: Sequence[int]) -> float:
        return max(sum(work[a:b]) for a, b in pairwise(bounds))

    every = [(0, *inner, len(work)) for inner in combinations(range(1, len(work)), count - 1)]
    found = even_bounds([float(one) for one in work], count)
    assert tuple(found) in every
    assert most(found) == min(map(most, every))


def stacking(layers: int) -> tuple[Any, Any]:
    """A step whose layers have results besides, which are stacked and read."""
    shape = jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            def layer(h: Any, weight: Any) -> Any:
                made = jnp.tanh(h @ weight)
                return made, jnp.mean(made**2, axis=1)

            h, each = jax.lax.scan(layer, x, weights)
            return jnp.mean(h**2) + jnp.mean(each)

        value, grads = mw.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step, (shape, jax.ShapeDtypeStruct((32, 64), jnp.float32))


def test_a_scan_that_stacks_results_is_cut() -> None:
    step, args = stacking(12)
    plan = plan_for(step, args, cluster="p3.16xlarge", preset="gpipe(8)", microbatches=8).plan
    assert len(plan.stages) == 8


def test_a_program_that_is_no_scan_is_cut_between_its_layers() -> None:
    target = zoo.mlp(width=64, layers=8, batch=16)
    traces, args = Traces(target.step), (target.example_state, target.example_batch)
    assert main_scan(traces.program(args, microbatches=4)) is None
    plan = plan_for(traces, args, cluster="rtx4090-4", preset="megatron(pp=4)", microbatches=4).plan
    forward = [stage.forward_seconds for stage in plan.stages]
    assert max(forward) < 1.5 * min(forward)


@pytest.mark.parametrize("chunks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_stages_of_a_program_that_is_no_scan_are_interleaved_as_asked(chunks: int) -> None:
    target = zoo.mlp(width=64, layers=8, batch=16)
    args, preset = (target.example_state, target.example_batch), f"megatron(pp=2, dp=2, chunks={chunks})"
    plan = plan_for(target.step, args, cluster="rtx4090-4", preset=preset, microbatches=4).plan
    assert [stage.devices for stage in plan.stages] == chunks * [(0, 1), (2, 3)]
