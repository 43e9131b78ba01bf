"""The best preset, with which a search begins: it is the best, and nothing that is planned takes longer."""

from __future__ import annotations

from dataclasses import replace
from itertools import count as counting
from math import inf
from typing import Any

import pytest

from meshwright import planning as planning_module, stage_planning, zoo
from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.planning import plan_for
from meshwright.preset_planning import best_under_presets
from meshwright.presets import incumbent as incumbent_module
from meshwright.presets.candidates import candidates_for
from meshwright.presets.incumbent import Incumbent
from meshwright.presets.planned import planned_preset
from meshwright.presets.prices import PresetPrices
from meshwright.program.traces import Traces
from meshwright.zoo.llama import CONFIGS, build as build_llama

COUNTS = [1, 2, 4, 8]
CLUSTER = "p3.16xlarge"


@pytest.fixture(scope="module")
def target() -> Any:
    return build_llama(replace(CONFIGS["llama-tiny"], layers=8, global_batch=32))


@pytest.fixture(scope="module")
def prices(target: Any) -> PresetPrices:
    return PresetPrices(Traces(target.step), (target.example_state, target.example_batch), load_cluster(CLUSTER))


def test_it_is_the_best_of_all_presets(prices: PresetPrices) -> None:
    found = Incumbent(prices, COUNTS, remat=None, late=lambda: False).planned()
    assert found is not None
    seconds = []
    for preset in candidates_for(prices.cluster):
        for count in COUNTS if preset.schedule != "pipedream" else ():
            try:
                priced = prices.priced(preset, count, remat=preset.remat)
            except PlanError:
                continue
            assert priced is not None
            seconds.append(priced.step_seconds)
    assert len(seconds) > 40
    assert found.priced.step_seconds == min(seconds)
    assert found.result.plan.predicted is not None
    assert found.result.plan.predicted.step_seconds == pytest.approx(min(seconds), rel=1e-9)


def test_when_time_is_over_it_is_what_was_found_by_then(prices: PresetPrices) -> None:
    first = Incumbent(prices, COUNTS, remat=None, late=lambda: True).planned()
    best = Incumbent(prices, COUNTS, remat=None, late=lambda: False).planned()
    assert first is not None  # without any time the first that fits
    left = [1000]  # looks at the clock

    def late() -> bool:
        left[0] -= 1
        return left[0] < 0

    hurried = Incumbent(prices, COUNTS, remat=None, late=late)
    left[0] = 1
    some = hurried.planned()
    assert best is not None
    assert some is not None
    assert left[0] < 0
    assert some.priced.step_seconds >= best.priced.step_seconds
    assert first.priced.step_seconds >= best.priced.step_seconds


def test_presets_of_which_none_fits_are_given_up(prices: PresetPrices, monkeypatch: pytest.MonkeyPatch) -> None:
    def placed(*args: Any, **options: Any) -> Any:
        tried.append(args)
        raise MemoryExceeded(refused="a preset", got="8", needed="9", where="here", try_="more")

    tried: list[Any] = []
    monkeypatch.setattr(PresetPrices, "placed", placed)
    incumbent = Incumbent(prices, COUNTS, remat=None, late=lambda: True, given_up=lambda: len(tried) > 2)
    assert incumbent.priced() is None
    assert len(tried) == 3


def test_when_time_is_over_what_has_layouts_comes_before_what_promises_more(
    prices: PresetPrices, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed, tried = PresetPrices.placed, list[Any]()

    def only_the_first_fits(self: PresetPrices, preset: Any, count: int, **options: Any) -> Any:
        tried.append((preset, count))
        if len(tried) > 1:
            raise MemoryExceeded(refused="a preset", got="8", needed="9", where="here", try_="more")
        return placed(self, preset, count, **options)

    monkeypatch.setattr(PresetPrices, "placed", only_the_first_fits)
    incumbent = Incumbent(prices, COUNTS, remat=None, late=lambda: len(tried) > 0, given_up=lambda: len(tried) > 0)
    found = incumbent.priced()
    assert found is not None
    assert (found.preset, found.microbatches) == tried[0]
    assert len(tried) == 1


def test_rematerialisation_that_is_ruled_out_is_in_no_preset(prices: PresetPrices) -> None:
    found = Incumbent(prices, COUNTS, remat="none", late=lambda: False).planned()
    assert found is not None
    assert not any(stage.rematerialised for stage in found.result.plan.stages)


def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every program be planned as large ones that do not fit in few microbatches are: for several stages first."""
    monkeypatch.setattr(stage_planning, "SMALL_PROGRAM", 0)
    monkeypatch.setattr(planning_module, "fits_in_few", lambda asked: False)


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_no_plan_is_slower_than_the_best_preset(
    target: Any, prices: PresetPrices, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    large(monkeypatch)
    best = Incumbent(prices, [1, 2, 4, 8, 16, 32], remat=None, late=lambda: False).planned()
    assert best is not None
    planning = plan_for(
        target.step, (target.example_state, target.example_batch), cluster=CLUSTER, stages=None,
        time_limit_seconds=seconds,
    )  # fmt: skip
    noted = any("found under the preset" in note for note in planning.plan.notes)
    if seconds:
        assert planning.step_seconds <= best.priced.step_seconds * (1 + 1e-9)
        assert noted == (planning.step_seconds == best.priced.step_seconds)
    else:  # without time a few presets are looked at
        assert any("out of time" in line for line in planning.considered)
        assert noted or any("the preset " in one.what for one in planning.alternatives)


def test_a_preset_that_nothing_beats_is_the_plan_with_its_gap(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)

    def nothing(self: Any, *args: Any, **options: Any) -> Any:
        raise stage_planning.NothingFaster(0.0, ("4 microbatches, gpipe: slower",))

    monkeypatch.setattr(stage_planning.StageSearch, "run", nothing)
    planning = plan_for(
        target.step, (target.example_state, target.example_batch), cluster=CLUSTER, stages=None, microbatches=4
    )
    assert planning.plan.predicted is not None
    assert planning.plan.predicted.optimality_gap == inf, "no bound is known"
    assert any("the search found nothing faster" in note for note in planning.plan.notes)
    assert planning.plan.microbatches == 4
    assert planning.considered[-1] == "4 microbatches, gpipe: slower"


def refusing(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """Have so many of the presets that are written out not fit."""
    asked = counting(1)

    def planned(*args: Any, **options: Any) -> Any:
        if next(asked) <= times:
            raise MemoryExceeded(refused="a preset", got="8", needed="9", where="here", try_="more")
        return planned_preset(*args, **options)

    monkeypatch.setattr(incumbent_module, "planned_preset", planned)


def nothing_of_one_stage(*args: Any, **options: Any) -> Any:
    raise stage_planning.NothingFaster(0.0, ())


def test_where_the_best_preset_does_not_fit_the_next_is_the_plan(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the search has taken that found nothing faster: it is searched once more, for what beats that, and
    what plans have turned out to hold is known then."""
    large(monkeypatch)
    refusing(monkeypatch, 1)
    known: list[Any] = []
    asked: list[float] = []
    missed: list[Any] = []

    def best(*request: Any) -> Any:
        known.append(best_under_presets(*request))
        return known[0]

    def nothing(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(self.request.faster_than_seconds)
        missed.append(args[0])
        known[0]._until = 0.0
        raise stage_planning.NothingFaster(0.0, ())

    monkeypatch.setattr(stage_planning, "best_under_presets", best)
    monkeypatch.setattr(stage_planning.StageSearch, "run", nothing)
    monkeypatch.setattr(planning_module, "plan_one_stage", nothing_of_one_stage)
    args = (target.example_state, target.example_batch)
    planning = plan_for(target.step, args, cluster=CLUSTER, stages=None)
    assert len(asked) == 2
    assert missed[0] is missed[1]
    assert asked[0] < planning.step_seconds == pytest.approx(asked[1])
    assert planning.step_seconds < 1.3 * asked[0]
    assert any("the search found nothing faster" in note for note in planning.plan.notes)


def test_where_no_preset_fits_the_plan_is_what_is_searched_for(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    refusing(monkeypatch, float("inf"))
    run, asked = stage_planning.StageSearch.run, counting()

    def second(self: Any, *args: Any, **options: Any) -> Any:
        if not next(asked):
            raise stage_planning.NothingFaster(0.0, ())
        return run(self, *args, **options)

    monkeypatch.setattr(stage_planning.StageSearch, "run", second)
    args = (target.example_state, target.example_batch)
    planning = plan_for(target.step, args, cluster=CLUSTER, stages=None, microbatches=4)
    assert not any("preset" in note for note in planning.plan.notes)
    assert not any("preset" in one.what for one in planning.alternatives)


def test_a_preset_that_is_beaten_is_an_alternative(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is written out it says that it may not fit."""
    large(monkeypatch)
    known: list[Any] = []

    def best(*request: Any) -> Any:
        known.append(best_under_presets(*request))
        return known[0]

    monkeypatch.setattr(stage_planning, "best_under_presets", best)
    args = (target.example_state, target.example_batch)
    found = replace(plan_for(target.step, args, cluster=CLUSTER, stages=None), alternatives=())
    known[0]._is_plan = False
    (alternative,) = known[0].beaten_by(found).alternatives
    assert alternative.what.endswith(", if it fits")
    assert alternative.step_seconds == known[0].priced.step_seconds
    known[0].planning()
    (alternative,) = known[0].beaten_by(found).alternatives
    assert alternative.what.endswith(")")


def test_interleaved_stages_alone_may_be_asked_for() -> None:
    target = zoo.build("gpt-tiny", global_batch=8)
    planning = plan_for(
        target.step, (target.example_state, target.example_batch), cluster=CLUSTER, stages=4,
        schedule="interleaved_one_f_one_b",
    )  # fmt: skip
    assert planning.plan.schedule == "interleaved_one_f_one_b"
    assert len(planning.plan.stages) == 4
