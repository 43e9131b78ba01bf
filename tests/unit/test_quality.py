"""What `benchmarks/quality.py` compares our plans with: every shape, and the best plan of those that fit."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.planning.plan_for import plan_without_advice
from meshwright.planning.refine import held_bytes
from meshwright.planning.request import Planning, PlanOptions
from meshwright.presets import Preset
from meshwright.presets.families import three_dimensional
from meshwright.program.traces import Traces
from meshwright.zoo.llama import CONFIGS, build as build_llama

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from quality import faster, fates, least_bytes, shapes

OPTIONS = PlanOptions(cluster=load_cluster("p3.16xlarge"))


@pytest.fixture(scope="module")
def step() -> tuple[Traces, Any]:
    target = build_llama(replace(CONFIGS["llama-tiny"], layers=8, global_batch=32))
    return Traces(target.step), (target.example_state, target.example_batch)


def test_all_shapes_are_found() -> None:
    every = list(shapes(4, 8, 32))
    found = {(one.size("tensor"), one.stages, one.size("batch")) for one in every}
    assert found == {(t, p, 4 // t // p) for t in (1, 2, 4) for p in (1, 2, 4) if 4 % (t * p) == 0}
    assert {one.chunks for one in every if one.stages == 2} == {1, 2, 4}
    assert {one.zero for one in every if one.size("batch") == 2} == {0, 1, 3}
    assert {one.sequence_parallel for one in every if one.size("tensor") == 2} == {False, True}
    assert len(set(map(str, every))) == len(every)


def test_shapes_divide_layers_and_batch() -> None:
    assert {one.stages for one in shapes(4, 6, 32)} == {1, 2}
    assert {one.stages for one in shapes(4, 6, 32, scanned=False)} == {1, 2, 4}
    assert {one.size("batch") for one in shapes(4, 8, 2)} == {1, 2}
    # Ranks take turns with microbatches of one sample at least.
    assert all(one.stages == 2 for one in shapes(4, 8, 2) if one.chunks > 1)


@pytest.mark.slow
def test_the_best_plan_of_all_shapes_is_found(step: tuple[Traces, Any]) -> None:
    presets = [one for one in shapes(8, 8, 32) if one.size("tensor") == 2 and one.stages == 2]
    alone = {}
    for preset in presets:
        alone[preset] = plan_without_advice(*step, replace(OPTIONS, preset=preset)).step_seconds
    found = fates(presets, lambda preset, than, left: planned(step, preset, than))
    assert list(found) == presets
    plans = {preset: fate.step_seconds for preset, fate in found.items() if isinstance(fate, Planning)}
    assert min(plans.values()) == pytest.approx(min(alone.values()))
    assert all(seconds == pytest.approx(alone[preset]) for preset, seconds in plans.items())
    # A shape without a plan is slower than one before it.
    best = inf
    for preset in presets:
        assert preset in plans or alone[preset] >= best
        best = min(best, alone[preset])
    # What takes longer than is of interest is no plan; nothing is looked at when the time is over.
    most = 0.5 * min(alone.values())
    none = fates(presets[:2], lambda preset, than, left: planned(step, preset, than), most_seconds=most)
    assert [isinstance(fate, float) for fate in none.values()] == [True, True]
    assert fates(presets, lambda *_: pytest.fail("late"), deadline=time.perf_counter()) == {}


def planned(step: tuple[Traces, Any], preset: Preset, than_seconds: float = inf, **options: Any) -> Planning:
    return faster(*step, replace(OPTIONS, preset=preset, **options), than_seconds=than_seconds)


def test_what_is_refused_is_told(step: tuple[Traces, Any]) -> None:
    few = [three_dimensional("shape", 2, 1, 4, stage=3), three_dimensional("shape", 1, 8, 1, stage=0, chunks=2)]
    found = fates(few, lambda preset, than, left: planned(step, preset, memory_per_device=1e5))
    assert isinstance(found[few[0]], MemoryExceeded)
    assert isinstance(found[few[1]], PlanError)
    assert "16 equal stages" in str(found[few[1]])


@pytest.mark.parametrize(
    ("pipeline", "zero"),
    [(1, 0), (1, 1), (2, 1), (2, 3), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 3), (2, 0)))],
)
def test_no_plan_holds_less_than_the_least(step: tuple[Traces, Any], pipeline: int, zero: int) -> None:
    preset = three_dimensional("shape", 2, pipeline, 4 // pipeline, stage=zero)
    held = max(held_bytes(planned(step, preset, remat="layer", microbatches=4).plan))
    least = least_bytes(step[0].program(step[1]), preset)
    assert 0.05 * held < least <= held
