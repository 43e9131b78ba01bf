"""A plan that is known before all numbers of microbatches are searched is kept, with what is known of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright import plan_memory, stage_planning, zoo
from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded
from meshwright.plan import Plan
from meshwright.plan_request import Planning
from meshwright.planning import plan_for
from meshwright.program.traces import traces_of
from meshwright.search.memory_reserve import MissedMemory
from meshwright.search.pipeline import NothingFaster, StageSearch, StageSearchResult

Run = Callable[..., StageSearchResult]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Run], StageSearchResult]], Planning]:
    """Plans two stages of a program that counts as large; what the search says after its first plan is given."""
    monkeypatch.setattr(stage_planning, "_SMALL_PROGRAM", 0)
    target = zoo.build("mlp-tiny")
    real = StageSearch.run

    def plan(then: Callable[[Run], StageSearchResult]) -> Planning:
        known: list[float] = []

        def run(self: StageSearch, *args: Any, **options: Any) -> StageSearchResult:
            assert options["probing"] == (not known)
            if not known:
                result = real(self, *args, **options)
                assert result.plan.predicted is not None
                known.append(result.plan.predicted.step_seconds)
                return result
            assert options["faster_than_seconds"] == known[0]
            return then(lambda: real(self, *args, **{**options, "faster_than_seconds": float("inf")}))

        monkeypatch.setattr(StageSearch, "run", run)
        return plan_for(
            traces_of(target.step), (target.example_state, target.example_batch), cluster=load_cluster("dgx-a100-80"),
            stages=2,
        )  # fmt: skip

    return plan


def step_seconds(planning: Planning) -> float:
    assert planning.plan.predicted is not None
    return planning.plan.predicted.step_seconds


def test_nothing_faster_says_how_much_faster_others_can_be(planned: Callable[..., Planning]) -> None:
    def then(search: Run) -> StageSearchResult:
        del search
        raise NothingFaster(1e-4, ("8 microbatches: nothing",))

    found = planned(then)
    assert found.plan.predicted is not None
    assert found.plan.predicted.optimality_gap == pytest.approx(1 - 1e-4 / step_seconds(found))
    assert "8 microbatches: nothing" in found.considered


def test_its_stages_are_all_written_out_before_it_is_returned(
    planned: Callable[..., Planning], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Plan] = []
    real = plan_memory.written_out

    def write(plan: Plan, *args: Any, **options: Any) -> Plan:
        written.append(real(plan, *args, **options))
        return written[-1]

    def then(search: Run) -> StageSearchResult:
        del search
        assert not written, "the fullest rank alone is looked at first"
        raise NothingFaster(1e-4, ())

    monkeypatch.setattr(plan_memory, "written_out", write)
    found = planned(then)
    assert [stage.memory for stage in found.plan.stages] == [stage.memory for stage in written[0].stages]


def test_one_that_does_not_fit_after_all_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank than the fullest needs more than there is: that is learned, and the search goes on."""
    monkeypatch.setattr(stage_planning, "_SMALL_PROGRAM", 0)
    real, write_real = StageSearch.run, plan_memory.written_out
    asked: list[tuple[bool, float, float]] = []
    written: list[Plan] = []

    def run(self: StageSearch, reserve: MissedMemory, **options: Any) -> StageSearchResult:
        asked.append((options["probing"], options["faster_than_seconds"], reserve(1).final))
        if len(asked) == 2:
            raise NothingFaster(1e-4, ())
        return real(self, reserve, **options)

    def write(plan: Plan, *args: Any, **options: Any) -> Plan:
        first, last = (plan if written else write_real(plan, *args, **options)).stages
        if not written:  # the first time
            last = replace(last, memory=replace(last.memory, workspace=2 * last.memory_limit_bytes))
        written.append(replace(plan, stages=(first, last)))
        return written[-1]

    monkeypatch.setattr(StageSearch, "run", run)
    monkeypatch.setattr(plan_memory, "written_out", write)
    target = zoo.build("mlp-tiny")
    found = plan_for(
        traces_of(target.step), (target.example_state, target.example_batch), cluster=load_cluster("dgx-a100-80"),
        stages=2,
    )  # fmt: skip
    (first, known, before), (second, below, _), (third, again, learned) = asked
    assert (first, second, third) == (True, False, False)
    assert below < known == again == float("inf")
    assert before == 0.0 < learned
    assert found.plan.stages == written[1].stages


def test_it_is_returned_where_a_later_one_is_slower(planned: Callable[..., Planning]) -> None:
    slower: list[float] = []

    def then(search: Run) -> StageSearchResult:
        result = search()
        assert result.plan.predicted is not None
        slower.append(10 * result.plan.predicted.step_seconds)
        return replace(
            result, plan=replace(result.plan, predicted=replace(result.plan.predicted, step_seconds=slower[0]))
        )

    assert step_seconds(planned(then)) < slower[0]


def test_it_is_returned_as_it_is_where_a_search_ends_without_a_plan(planned: Callable[..., Planning]) -> None:
    def then(search: Run) -> StageSearchResult:
        del search
        raise MemoryExceeded(refused="a plan", got="little", needed="more", where="a test", try_="again")

    found = planned(then)
    assert found.plan.predicted is not None
    assert found.plan.predicted.optimality_gap > 0.5, "nothing is known of other numbers"
