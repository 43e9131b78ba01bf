"""A plan that turns out not to fit when it is written out is searched again, in less memory."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakSet

import pytest

from meshwright import zoo
from meshwright.cluster import load_cluster
from meshwright.planning import stages as stage_planning
from meshwright.planning.plan_for import plan_for
from meshwright.planning.refine import Refinement, held_bytes
from meshwright.search.stages.problem import StageProblem
from meshwright.search.stages.reserve import MissedMemory


def test_what_a_plan_misses_is_reserved_in_the_next_search(monkeypatch: pytest.MonkeyPatch) -> None:
    run, fits = stage_planning.StageSearch.run, Refinement._fits
    reserved: list[float] = []
    refused: list[float] = []

    def running(self: Any, reserve: MissedMemory, **options: Any) -> Any:
        reserved.append(reserve(1).final)
        return run(self, reserve, **options)

    def refusing(self: Any, plan: Any, counted: Any, part: str) -> bool:
        if not refused:
            peaks = held_bytes(plan)
            refused.append(max(peaks))
            less, plain = [0.9 * one for one in peaks], [False] * len(peaks)
            self.missed(part).learn(plan.microbatches, counted, peaks, less, plain)
            return False
        return fits(self, plan, counted, part)

    monkeypatch.setattr(stage_planning.StageSearch, "run", running)
    monkeypatch.setattr(Refinement, "_fits", refusing)
    target = zoo.mlp(width=1024, layers=8, batch=32)
    args = target.example_state, target.example_batch
    assert plan_for(target.step, args, cluster=load_cluster("p3.16xlarge:2"), stages=2).plan.stages
    before, after = reserved
    assert before == 0.0 < after


@pytest.mark.parametrize("memory", [2.876e6, 2.45e6])
def test_presets_reserve_what_each_rank_misses(memory: float) -> None:
    """Of ranks that compute nothing again, inner ones too: the same plan is not found over and over."""
    target = zoo.mlp(width=128, layers=8, batch=2048)
    args = target.example_state, target.example_batch
    found = plan_for(
        target.step, args, cluster=load_cluster("p4d.24xlarge:1"), preset="megatron(tp=2, pp=4)", microbatches=8,
        memory_per_device=memory,
    )  # fmt: skip
    assert max(held_bytes(found.plan)) <= memory


def test_a_search_is_freed_with_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference counts alone free the problems of a search: waiting for the garbage collector, which comes seldom,
    they would be there beside those of the next one."""
    made: WeakSet[StageProblem] = WeakSet()
    build = StageProblem.__init__

    def building(self: StageProblem, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        made.add(self)
        seen.append(1)

    seen: list[int] = []
    monkeypatch.setattr(StageProblem, "__init__", building)
    was = gc.isenabled()
    gc.disable()
    try:
        target = zoo.mlp(width=1024, layers=8, batch=32)
        args = target.example_state, target.example_batch
        plan_for(target.step, args, cluster=load_cluster("p3.16xlarge:2"), stages=2)
        assert seen
        assert not made
    finally:
        if was:
            gc.enable()
