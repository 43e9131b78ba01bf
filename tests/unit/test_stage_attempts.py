"""A large program is planned in one number of microbatches first; what comes of it where that plan does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import stage_planning, zoo
from meshwright.cluster import load_cluster
from meshwright.plan_memory import PlanMemory
from meshwright.plan_request import Planning
from meshwright.planning import plan_for
from meshwright.search.pipeline import NothingFaster


def planned() -> Planning:
    target = zoo.mlp(width=1024, layers=8, batch=32)
    return plan_for(
        target.step, (target.example_state, target.example_batch), cluster=load_cluster("p3.16xlarge:2"), stages=None
    )


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_planning, "_SMALL_PROGRAM", 0)


def test_a_first_plan_is_written_out_once_and_only_if_it_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[bool] = []
    run = stage_planning.StageSearch.run

    def running(self: Any, *args: Any, **options: Any) -> Any:
        probed.append(options["probing"])
        return run(self, *args, **options)

    monkeypatch.setattr(stage_planning.StageSearch, "run", running)
    written: list[int] = []
    write = PlanMemory.written_out

    def writing(self: Any, plan: Any, *args: Any) -> Any:
        written.append(len(probed))
        return write(self, plan, *args)

    monkeypatch.setattr(PlanMemory, "written_out", writing)
    assert planned().plan.stages
    assert probed[:2] == [True, False]
    assert written == [len(probed)]


def test_a_first_plan_that_nothing_beats_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run, write = stage_planning.StageSearch.run, PlanMemory.written_out

    def running(self: Any, *args: Any, **options: Any) -> Any:
        if not options["probing"]:
            raise NothingFaster(0.0, ())
        return run(self, *args, **options)

    written: list[Any] = []

    def writing(self: Any, *args: Any) -> Any:
        written.append(write(self, *args))
        return written[-1]

    monkeypatch.setattr(stage_planning.StageSearch, "run", running)
    monkeypatch.setattr(PlanMemory, "written_out", writing)
    found = planned()
    ((plan, fits),) = written
    assert fits
    assert len(plan.stages) > 1
    assert found.plan.stages == plan.stages


def test_a_first_plan_that_does_not_fit_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is faster than it: it is written out then, and others are looked for in what memory there is."""
    told: list[bool] = []
    run = stage_planning.StageSearch.run

    def running(self: Any, *args: Any, **options: Any) -> Any:
        told.append(options["probing"])
        if told == [True, False]:
            raise NothingFaster(0.0, ())
        return run(self, *args, **options)

    monkeypatch.setattr(stage_planning.StageSearch, "run", running)
    refused: list[int] = []
    fits = PlanMemory._fits

    def refusing(self: Any, plan: Any, peaks: Any, counted: Any) -> bool:
        if not refused:
            refused.append(len(plan.stages))
            self.missed.learn(plan.microbatches, counted, peaks, [0.9 * one for one in peaks], [False] * len(peaks))
            return False
        return fits(self, plan, peaks, counted)

    monkeypatch.setattr(PlanMemory, "_fits", refusing)
    assert planned().plan.stages
    assert refused[0] > 1
    assert told == [True, False, False]
