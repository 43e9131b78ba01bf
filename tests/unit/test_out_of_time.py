"""A search that runs out of time ends at once, with what it has found and what is known of the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded
from meshwright.plan import Plan
from meshwright.planning.plan_for import plan_for
from meshwright.program.traces import traces_of
from meshwright.search.inter import dynamic_program as inter_op
from meshwright.search.inter.problem import InterOpProblem, Option
from meshwright.search.inter.submeshes import Submesh
from meshwright.search.pipelines import driver as pipeline
from meshwright.search.pipelines.deadline import Deadline
from meshwright.search.pipelines.microbatch_costs import MicrobatchCosts
from meshwright.search.result import Priced
from meshwright.search.stages import part_rows
from meshwright.search.stages.part_rows import OutOfTime
from meshwright.zoo import gpt

CLUSTER = load_cluster("p3.16xlarge:1")


def build() -> Any:
    return gpt.build(gpt.GPTConfig(name="gpt", hidden=256, layers=2, heads=8, sequence=128, global_batch=16))


@cache
def traced() -> Any:
    """The same with a memory of its traces."""
    target = build()
    return replace(target, step=traces_of(target.step))


def planned(**options: Any) -> Any:
    target = traced()
    return plan_for(target.step, (target.example_state, target.example_batch), cluster=CLUSTER, stages=2, **options)


@cache
def at_leisure() -> Plan:
    """With all the time it takes."""
    return planned().plan


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


@pytest.mark.parametrize("parts", [*(pytest.param(parts, marks=pytest.mark.slow) for parts in (1, 10)), 40])
def test_what_is_found_is_a_plan_and_its_gap_holds(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is over after so many parts beyond the first plan."""
    best = seconds(at_leisure())
    left = [parts]
    found: list[int] = []

    def over(self: Deadline) -> bool:
        return self.has_plan and left[0] <= 0

    plain = part_rows.part_row

    def part_row(*args: Any) -> Any:
        left[0] -= bool(found)
        return plain(*args)

    keep = pipeline._Run._keep

    def kept(self: pipeline._Run, *args: Any) -> None:
        keep(self, *args)
        found.extend([1] * bool(self.finished.seconds))

    monkeypatch.setattr(Deadline, "over", property(over))
    monkeypatch.setattr(pipeline._Run, "_keep", kept)
    monkeypatch.setattr(part_rows, "part_row", part_row)
    short = planned()
    assert best <= seconds(short.plan) * (1 + 1e-9)
    assert short.plan.predicted is not None
    assert (1 - short.plan.predicted.optimality_gap) * seconds(short.plan) <= best * (1 + 1e-9)
    assert any("out of time" in one.words for one in short.considered)


def test_what_was_broken_off_is_found_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half done is kept: plans are the same whether a search was interrupted on the way or not."""
    calls = [0]
    before = at_leisure()
    plain = pipeline._Run._refine

    def refine(self: pipeline._Run, *args: Any, **options: Any) -> bool:
        costs: MicrobatchCosts = self._of.costs
        steps = [0]

        def late(self: Deadline) -> None:
            steps[0] += 1
            if steps[0] > 3:
                raise OutOfTime

        with monkeypatch.context() as hurried:
            hurried.setattr(Deadline, "over", property(late))
            try:
                plain(self, *args, **options)
            except OutOfTime:
                calls[0] += 1
        for one in costs.all:
            one.forget_estimates()
        return plain(self, *args, **options)

    monkeypatch.setattr(pipeline._Run, "_refine", refine)
    assert planned().plan == before
    assert calls[0] > 0


def test_bounds_of_all_numbers_are_broken_off_where_a_plan_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solving a problem of pure numbers looks at the clock too: of a program of few parts it is most of the work."""
    target, extended = traced(), [0]
    extend = inter_op._Search._extend

    def extending(self: Any, *args: Any) -> None:
        extended[0] += self.problem.layers > 1
        extend(self, *args)

    monkeypatch.setattr(inter_op._Search, "_extend", extending)
    monkeypatch.setattr(Deadline, "over", property(lambda self: extended[0] >= 3 and self.has_plan))
    planning = plan_for(
        target.step, (target.example_state, target.example_batch), cluster=CLUSTER, stages=None, time_limit_seconds=600
    )
    assert extended[0] == 3
    assert len(planning.plan.stages) == 1


def test_a_plan_that_does_not_fit_with_its_scans_merged_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    merge, refused = pipeline.merged, list[Any]()

    def merging(best: Any, *args: Any) -> Any:
        if len(refused) < 2:
            refused.append(best.key)
            return None
        return merge(best, *args)

    monkeypatch.setattr(pipeline, "merged", merging)
    found = planned()
    assert len({*refused}) == 2
    best = Priced(plan=at_leisure()).counted_seconds
    assert found.counted_seconds >= best
    assert found.least_seconds <= best * (1 + 1e-9)
    monkeypatch.setattr(pipeline, "merged", lambda *args: None)
    with pytest.raises(MemoryExceeded) as caught:
        planned()
    assert caught.value.least_seconds <= best * (1 + 1e-9)


def test_whoever_solves_numbers_can_be_stopped() -> None:
    class Over(Exception):
        pass

    def check() -> None:
        raise Over

    problem = InterOpProblem(
        layers=2, devices=1, submeshes=[Submesh(0, 1)], crossings=(), microbatches=1,
        options=lambda *range_: (Option(forward_seconds=1.0, backward_seconds=1.0),),
        transfer_seconds=lambda source, target, size: 0.0, limit_bytes=lambda submesh, last: 1.0,
    )  # fmt: skip
    assert inter_op.solve_inter_op(problem) is not None
    with pytest.raises(Over):
        inter_op.solve_inter_op(problem, check=check)


@pytest.mark.parametrize("room", [1.0, 0.02])
def test_one_stage_is_looked_at_no_longer_than_there_is_time(room: float) -> None:
    """What was not looked at is said and in the gap, whether memory binds or not."""
    target, memory = traced(), room * CLUSTER.device.usable_memory_bytes
    args = target.example_state, target.example_batch
    best = plan_for(target.step, args, cluster=CLUSTER, memory_per_device=memory).plan
    late = plan_for(target.step, args, cluster=CLUSTER, memory_per_device=memory, time_limit_seconds=0)
    assert late.plan.predicted is not None
    assert seconds(late.plan) * (1 - late.plan.predicted.optimality_gap) <= seconds(best) <= seconds(late.plan)
    assert any("microbatches: not searched, out of time" in str(one) for one in late.considered)


def test_several_stages_that_were_not_looked_at_are_in_the_gap() -> None:
    target = traced()
    planning = plan_for(
        target.step, (target.example_state, target.example_batch), cluster=CLUSTER, stages=None, time_limit_seconds=0
    )
    gap = planning.plan.predicted.optimality_gap
    assert 0.5 < gap < 1
    least = (1 - gap) * planning.step_seconds
    (several,) = (one for one in planning.considered if one.what == "several stages")
    assert str(several).startswith("several stages: not searched, out of time, ")
    assert least <= several.least_seconds * (1 + 1e-9)


def test_all_that_was_not_tracing_was_solving() -> None:
    target = build()
    planning = plan_for(target.step, (target.example_state, target.example_batch), cluster=CLUSTER, stages=None)
    assert planning.trace_seconds > 0
    assert planning.trace_seconds + planning.solve_seconds == pytest.approx(planning.seconds)
