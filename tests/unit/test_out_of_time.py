"""A search that runs out of time ends at once, with what it has found and what is known of the rest."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from meshwright.cluster import load_cluster
from meshwright.plan import Plan
from meshwright.planning import plan_for
from meshwright.search import part_rows, pipeline
from meshwright.search.microbatch_costs import MicrobatchCosts
from meshwright.search.part_rows import OutOfTime
from meshwright.search.pipeline import StageSearch
from meshwright.zoo import gpt

CLUSTER = load_cluster("p3.16xlarge:1")


def build() -> Any:
    return gpt.build(gpt.GPTConfig(name="gpt", hidden=256, layers=4, heads=8, sequence=128, global_batch=16))


def planned(**options: Any) -> Any:
    target = build()
    return plan_for(target.step, (target.example_state, target.example_batch), cluster=CLUSTER, stages=2, **options)


@cache
def at_leisure() -> Plan:
    """With all the time it takes."""
    return planned().plan


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


@pytest.mark.parametrize("parts", [1, 10, 40])
def test_what_is_found_is_a_plan_and_its_gap_holds(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is over after so many parts beyond the first plan."""
    best = seconds(at_leisure())
    left = [parts]
    found: list[int] = []

    def over(self: StageSearch) -> bool:
        return bool(self.finished.seconds) and left[0] <= 0

    plain = part_rows.part_row

    def part_row(*args: Any) -> Any:
        left[0] -= bool(found)
        return plain(*args)

    keep = StageSearch._keep

    def kept(self: StageSearch, *args: Any) -> None:
        keep(self, *args)
        found.extend([1] * bool(self.finished.seconds))

    monkeypatch.setattr(StageSearch, "over", property(over))
    monkeypatch.setattr(StageSearch, "_keep", kept)
    monkeypatch.setattr(part_rows, "part_row", part_row)
    short = planned()
    assert best <= seconds(short.plan) * (1 + 1e-9)
    assert short.plan.predicted is not None
    assert (1 - short.plan.predicted.optimality_gap) * seconds(short.plan) <= best * (1 + 1e-9)
    assert any("out of time" in one for one in short.considered)


def test_what_was_broken_off_is_found_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half done is kept: plans are the same whether a search was interrupted on the way or not."""
    calls = [0]
    before = at_leisure()
    plain = pipeline.StageSearch._refine

    def refine(self: StageSearch, *args: Any, **options: Any) -> None:
        costs: MicrobatchCosts = self.costs
        steps = [0]

        def late() -> bool:
            steps[0] += 1
            return steps[0] > 3

        usual, costs.late = costs.late, late
        try:
            plain(self, *args, **options)
        except OutOfTime:
            calls[0] += 1
        costs.late = usual
        for one in costs.all:
            one.forget_estimates()
        plain(self, *args, **options)

    monkeypatch.setattr(StageSearch, "_refine", refine)
    assert planned().plan == before
    assert calls[0] > 0
