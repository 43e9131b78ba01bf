"""Prices of presets are those of their plans, and what saves looking at them is never too high."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies

import meshwright as mw
from meshwright import presets, zoo
from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.planning import plan_for
from meshwright.presets.families import three_dimensional
from meshwright.presets.least import StageLeast, least_step_seconds, microbatches_in_flight
from meshwright.presets.planned import planned_preset
from meshwright.presets.prices import PresetPrices
from meshwright.presets.solved import PresetStages
from meshwright.program.equal_stages import equal_stages, even_bounds, main_scan, unlike_stages
from meshwright.program.trace import trace_program
from meshwright.program.traces import Traces
from meshwright.refine import held_bytes, written_out
from meshwright.schedule import make_schedule
from meshwright.search.stages.ranges import Ranges
from meshwright.simulate import StageTiming, Timing, simulate, simulate_plan
from meshwright.zoo.gpt import CONFIGS as GPTS, build as build_gpt
from meshwright.zoo.llama import CONFIGS, build as build_llama

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from quality import Search, groups


@pytest.fixture(scope="module")
def target() -> Any:
    return build_llama(replace(CONFIGS["llama-tiny"], layers=8, global_batch=32))


@pytest.fixture(scope="module")
def prices(target: Any) -> PresetPrices:
    args = (target.example_state, target.example_batch)
    return PresetPrices(Traces(target.step), args, load_cluster("p3.16xlarge"))


@pytest.mark.parametrize("text", ["deepspeed_3d(tp=2, pp=2, zero=1)", "gpipe(4)"])
def test_a_price_is_what_the_plan_under_the_preset_takes(target: Any, prices: PresetPrices, text: str) -> None:
    preset = presets.parse_preset(text).on(8)
    priced = prices.priced(preset, 8, remat=preset.remat)
    assert priced is not None
    plan = plan_for(
        target.step, (target.example_state, target.example_batch), cluster="p3.16xlarge", preset=text, microbatches=8
    ).plan
    assert plan.predicted is not None
    assert plan.predicted.step_seconds == pytest.approx(priced.step_seconds, rel=1e-12)
    assert simulate_plan(plan).step_seconds == pytest.approx(priced.step_seconds, rel=1e-12)
    assert [stage.layers for stage in plan.stages] == [(n, n + 1) for n in range(preset.stages)]


@pytest.mark.parametrize(
    "preset",
    [
        three_dimensional("setting", 2, 2, 2, stage=1, chunks=2, sequence_parallel=True),
        three_dimensional("setting", 1, 4, 2, stage=3),
        three_dimensional("setting", 4, 1, 2, stage=1),
    ],
    ids=str,
)  # fmt: skip
def test_a_floor_is_below_every_price(prices: PresetPrices, preset: presets.Preset) -> None:
    for remat in ("layer", None):
        floor = prices.floor(preset, 1, remat=remat)
        for count in (2, 8):
            priced = prices.priced(preset, count, remat=remat)
            assert priced is not None
            least = floor.step_seconds(count, prices.limits(preset))
            assert 0 < least <= priced.step_seconds
            assert prices.priced(preset, count, remat=remat, below_seconds=least) is None


@pytest.mark.parametrize("chunks", [1, 2])
def test_layouts_bound_what_all_stages_take_together(prices: PresetPrices, chunks: int) -> None:
    preset = three_dimensional("setting", 2, 2, 2, stage=1, chunks=chunks, sequence_parallel=True)
    for count in (2, 8):
        placed = prices.placed(preset, count, remat="none")
        priced = prices.timed(placed)
        assert priced is not None
        assert 0 < placed.work_seconds <= placed.least_seconds <= priced.step_seconds
        assert prices.timed(placed, below_seconds=priced.step_seconds) is None
        assert prices.placed(preset, count, remat="none", below_seconds=placed.work_seconds).stages is None


@pytest.mark.parametrize("remat", ["none", "layer", None])
def test_interleaved_stages_are_bounded_by_what_they_are_parts_of(prices: PresetPrices, remat: str | None) -> None:
    preset = three_dimensional("setting", 2, 2, 2, stage=1, chunks=2, sequence_parallel=True)
    floor = prices.floor(replace(preset, chunks=1, shown=()), 2, remat=remat).interleaved(preset)
    for count in (2, 8):
        priced = prices.priced(preset, count, remat=remat)
        assert priced is not None
        assert 0 < floor.step_seconds(count, prices.limits(preset)) <= priced.step_seconds


def test_what_cannot_fit_is_told_by_its_floor(prices: PresetPrices) -> None:
    preset = three_dimensional("setting", 2, 2, 2, stage=0)
    priced = prices.priced(preset, 4, remat="none")
    assert priced is not None
    less = [0.5 * size for size in priced.counted_bytes]
    assert prices.floor(preset, 1, remat="none").step_seconds(4, less) == inf
    with pytest.raises(MemoryExceeded, match=r"setting\(tp=2, pp=2, dp=2\).*4 microbatches"):
        prices.priced(preset, 4, remat="none", limit_bytes=less)


def test_what_the_program_has_not_is_refused_before_microbatches_are_traced(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (target.example_state, target.example_batch)
    prices = PresetPrices(Traces(target.step), args, load_cluster("p3.16xlarge"))
    counts, program = set(), prices.program
    monkeypatch.setattr(prices, "program", lambda count: (counts.add(count), program(count))[1])
    with pytest.raises(PlanError, match="without a stack of experts"):
        planned_preset(prices, presets.expert_parallel(ep=8).on(8), [2, 4, 8])
    assert counts == {1}


def test_rematerialisation_is_chosen_for_each_stage(prices: PresetPrices) -> None:
    preset = three_dimensional("setting", 1, 4, 2, stage=0)
    none, layer = (prices.priced(preset, 8, remat=remat) for remat in ("none", "layer"))
    assert none is not None
    assert layer is not None
    assert none.step_seconds < layer.step_seconds
    # The first rank holds the most microbatches: it alone has less than it would like.
    limits = [0.99 * none.counted_bytes[0], *none.counted_bytes[1:]]
    mixed = prices.priced(preset, 8, limit_bytes=limits)
    assert mixed is not None
    assert none.step_seconds <= mixed.step_seconds <= layer.step_seconds
    assert all(held <= limit for held, limit in zip(mixed.counted_bytes, limits, strict=True))


def test_stages_of_a_rank_are_held_together(prices: PresetPrices) -> None:
    priced = prices.priced(three_dimensional("setting", 2, 2, 2, stage=0, chunks=2), 4, remat="none")
    assert priced is not None
    plan = written_out(priced.plan(prices.submeshes), priced.program, "gpu")
    totals = [stage.memory.total for stage in plan.stages]
    assert held_bytes(plan) == pytest.approx((totals[0] + totals[2], totals[1] + totals[3]))
    timeline = simulate_plan(plan)
    assert timeline.step_seconds == pytest.approx(priced.step_seconds, rel=1e-12)


def test_more_stages_than_layers_and_batches_that_do_not_interleave(prices: PresetPrices) -> None:
    with pytest.raises(PlanError, match="16 equal stages"):
        prices.priced(three_dimensional("setting", 1, 8, 1, stage=0, chunks=2), 8)
    with pytest.raises(PlanError, match="a multiple of 4"):
        prices.priced(three_dimensional("setting", 1, 4, 2, stage=0, chunks=2), 2)
    with pytest.raises(PlanError, match=r"chunks=2 and pp=1"):
        presets.megatron(chunks=2)


@settings(max_examples=40, deadline=None)
@given(data=strategies.data())
def test_no_schedule_takes_less_than_its_least(data: Any) -> None:
    ranks, chunks = data.draw(strategies.integers(1, 4)), data.draw(strategies.integers(1, 3))
    chunks = chunks if ranks > 1 else 1
    count = ranks * data.draw(strategies.integers(1, 4))
    numbers = strategies.floats(0.0, 4.0)
    drawn = [[data.draw(numbers) for _ in range(3)] for _ in range(ranks * chunks)]
    stages = [StageLeast(forward_seconds=f, backward_seconds=b, once_seconds=once) for f, b, once in drawn]
    names = ["one_f_one_b", "gpipe"] if chunks == 1 else ["interleaved_one_f_one_b"]
    name = data.draw(strategies.sampled_from(names))
    schedule = make_schedule(name, len(stages), count, **({"chunks": chunks} if chunks > 1 else {}))
    timing = Timing(
        stages=tuple(
            StageTiming(
                forward_seconds=one.forward_seconds, backward_seconds=one.backward_seconds,
                synchronise_seconds=one.once_seconds,
            )
            for one in stages
        ),
        edges=Timing.uniform(stages=len(stages), forward_seconds=1, backward_seconds=1).edges,
    )  # fmt: skip
    step = simulate(schedule, timing).step_seconds
    assert least_step_seconds(stages, ranks, count) <= step * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "chunks", "count"), [(4, 1, 3), (4, 1, 64), (3, 2, 30), (2, 4, 8)])
def test_microbatches_in_flight_are_those_of_the_schedule(ranks: int, chunks: int, count: int) -> None:
    preset = presets.megatron(pp=ranks, chunks=chunks)
    name = "interleaved_one_f_one_b" if chunks > 1 else "one_f_one_b"
    schedule = make_schedule(name, ranks * chunks, count, **({"chunks": chunks} if chunks > 1 else {}))
    assert microbatches_in_flight(preset, count) == schedule.in_flight
    assert microbatches_in_flight(presets.gpipe(4), 7) == (7, 7, 7, 7)


@given(work=strategies.lists(strategies.integers(0, 9), min_size=1, max_size=8), data=strategies.data())
def test_even_bounds_are_the_best(work: Sequence[int], data: Any) -> None:
    count = data.draw(strategies.integers(1, len(work)))

    def most(bounds: Sequence[int]) -> float:
        return max(sum(work[a:b]) for a, b in pairwise(bounds))

    every = [(0, *inner, len(work)) for inner in combinations(range(1, len(work)), count - 1)]
    found = even_bounds([float(one) for one in work], count)
    assert tuple(found) in every
    assert most(found) == min(map(most, every))


@pytest.mark.parametrize(
    ("build", "config"), [(build_llama, CONFIGS["llama-tiny"]), (build_gpt, replace(GPTS["gpt-tiny"], scan=True))]
)
def test_stages_that_are_alike_are_those_of_all_stages(build: Any, config: Any) -> None:
    """Cut into a few pieces, each stage stands for those that are the same program where all are cut."""
    target = build(replace(config, layers=15, global_batch=32))
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=4)
    for count, pieces in ((4, 0), (5, 4), (6, 5), (7, 5), (8, 4), (15, 4)):
        found = unlike_stages(program, count)
        assert (found is None) == (pieces == 0)
        if found is None:
            continue
        few, alike = found
        whole = equal_stages(program, count)
        assert len(few.layers) == pieces < count == len(alike) == len(whole.layers)
        for stage, like in enumerate(alike):
            assert Ranges(whole).cut(stage, stage + 1).fingerprint == Ranges(few).cut(like, like + 1).fingerprint
            assert Ranges(whole).cut(stage, stage + 1).origins == Ranges(few).cut(like, like + 1).origins
        assert len({Ranges(whole).cut(stage, stage + 1).fingerprint for stage in range(count)}) == len(set(alike))


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


def test_stages_of_a_scan_that_stacks_results_are_all_cut() -> None:
    """The last one puts together as many pieces as there are stages."""
    step, args = stacking(12)
    program = trace_program(step, args, microbatches=4)
    assert main_scan(program) is not None
    assert unlike_stages(program, 6) is None
    prices = PresetPrices(Traces(step), args, load_cluster("p3.16xlarge"))
    priced = prices.priced(presets.parse_preset("gpipe(8)").on(8), 8)
    assert priced is not None
    assert len(priced.stages) == 8


def test_where_stages_that_are_alike_are_others_in_the_whole_all_are_priced(
    prices: PresetPrices, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = presets.megatron(pp=4, chunks=2).on(8)
    expected = prices.priced(preset, 8)
    asked: list[int] = []
    monkeypatch.setattr(PresetStages, "adopted", lambda self, stages: asked.append(len(stages)))
    found = prices.priced(preset, 8)
    assert expected is not None
    assert found is not None
    assert asked == [8]
    assert found.step_seconds == pytest.approx(expected.step_seconds)
    assert found.counted_bytes == pytest.approx(expected.counted_bytes)


def test_a_program_that_is_no_scan_is_cut_between_its_layers() -> None:
    target = zoo.mlp(width=64, layers=8, batch=16)
    prices = PresetPrices(Traces(target.step), (target.example_state, target.example_batch), load_cluster("rtx4090-4"))
    assert main_scan(prices.program(4)) is None
    priced = prices.priced(presets.megatron(pp=4).on(4), 4)
    assert priced is not None
    forward = [stage.forward_seconds for stage in priced.timing.timing.stages]
    assert max(forward) < 1.5 * min(forward)


def test_all_settings_are_found_and_the_best_is_the_best(prices: PresetPrices, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(groups(4, 8, 32))
    shapes = {(g.preset.size("tensor"), g.preset.stages, g.preset.size("batch")) for g in every}
    assert shapes == {(t, p, 4 // t // p) for t in (1, 2, 4) for p in (1, 2, 4) if 4 % (t * p) == 0}
    assert {g.preset.chunks for g in every if g.preset.stages == 2} == {1, 2, 4}
    some = (three_dimensional("setting", 2, 2, 2, stage=0), three_dimensional("setting", 1, 2, 4, stage=0, chunks=2))
    few = [replace(g, counts=g.counts[-2:]) for g in groups(8, 8, 32) if g.preset in some]
    monkeypatch.setattr("quality.SHOWN", 3)
    outcome = Search(prices, 0.0, inf).run(few)
    alone = []
    for group in few:
        for count in group.counts:
            priced = prices.priced(group.preset, count, remat=group.remat)
            assert priced is not None
            alone.append(priced.step_seconds)
    assert outcome.settings == len(alone) == 8
    assert outcome.unknown == outcome.not_applicable == outcome.not_fitting == 0
    assert [one.step_seconds for one in outcome.best] == pytest.approx(sorted(alone)[:3])
    # All that beat a plan of ours are kept.
    assert len(Search(prices, sorted(alone)[5] * (1 + 1e-9), inf).run(few).best) >= 5
