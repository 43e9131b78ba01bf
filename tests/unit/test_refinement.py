"""A search and the writing out of its plans share one time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded
from meshwright.planning import refine
from meshwright.planning.advice import with_advice
from meshwright.planning.plan_for import plan_for
from meshwright.planning.refine import NOT_COUNTED, Refinement
from meshwright.planning.request import PlanOptions
from meshwright.search.result import NothingFaster, SearchResult

CLUSTER = load_cluster("rtx4090-4")
TRACE, WRITING = 1.0, 2.0
WORDS = {"what": "a plan", "where": "here", "try_": "more"}


@cache
def small() -> Any:
    target = zoo.mlp(width=32, layers=2, batch=32)
    return target.step, (target.example_state, target.example_batch)


@cache
def found() -> SearchResult:
    planning = plan_for(*small(), cluster=CLUSTER, stages=1, microbatches=1)
    return SearchResult(plan=planning.plan, program=planning.program, considered=())


class Clocked:
    """A refinement whose seconds pass when plans are searched and written out, and the seconds of each search.

    Args:
      seconds: of the time limit; the step has been traced.
      taken: by each search.
      too_large: how many plans are too large.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, taken: float, too_large: int) -> None:
        found()  # before anything is patched
        self.now, self.given, self.written = 0.0, [], 0
        self._taken, self._too_large = taken, too_large
        monkeypatch.setattr(refine, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(refine, "written_out", self._write)
        self.refinement = Refinement(Asked(lambda: seconds - self.now))

    def search(self, missed: Any, most: float, seconds: float) -> SearchResult:
        if found().counted_seconds >= most:
            raise NothingFaster(found().least_seconds, ())
        self.given.append(seconds)
        self.now += self._taken
        return found()

    def _write(self, plan: Any, *args: Any, **options: Any) -> Any:
        self.now += WRITING
        self.written += 1
        (stage,) = plan.stages
        held = 2.0 * stage.memory_limit_bytes if self.written <= self._too_large else 1.0
        return replace(plan, stages=(replace(stage, memory=replace(stage.memory, workspace=held)),))


class Asked(SimpleNamespace):
    """As much of a request as a refinement reads."""

    faster_than_seconds = math.inf
    microbatches = None

    def __init__(self, left: Callable[[], float]) -> None:
        traces = SimpleNamespace(longest_seconds=TRACE)
        super().__init__(traces=traces, cluster=CLUSTER, tell=lambda words: None)
        self._left = left

    @property
    def left_seconds(self) -> float:
        return self._left()


def test_a_search_leaves_time_to_write_its_plan_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch, seconds=10.0, taken=1.0, too_large=1)
    result = clocked.refinement.run(clocked.search, **WORDS)
    assert clocked.written == 2
    assert NOT_COUNTED not in result.plan.notes
    first, second = clocked.given
    assert first < 10.0 + TRACE - refine._WRITING_TRACES * TRACE
    assert second < 10.0 + TRACE - 1.0 - 2 * WRITING, "what the first took is known"


@pytest.mark.parametrize(("seconds", "written"), [(0.0, 0), (2.9, 0), (3.1, 1), (6.1, 2)])
def test_without_time_to_write_it_out_a_plan_says_so(
    seconds: float, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked = Clocked(monkeypatch, seconds=seconds, taken=1.0, too_large=9)
    result = clocked.refinement.run(clocked.search, **WORDS)
    assert (clocked.written, NOT_COUNTED in result.plan.notes) == (written, True)
    assert clocked.now <= seconds + TRACE + 1.0, "the last search"
    clocked = Clocked(monkeypatch, seconds=seconds, taken=1.0, too_large=9)
    monkeypatch.setattr(Asked, "faster_than_seconds", 9.0)
    with pytest.raises(NothingFaster) as caught:
        clocked.refinement.run(clocked.search, **WORDS)
    assert any("out of time" in str(one) for one in caught.value.considered)
    assert caught.value.least_seconds <= found().counted_seconds


def test_what_a_part_of_the_space_has_missed_is_not_reserved_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch, seconds=100.0, taken=1.0, too_large=1)
    seen = []

    def search(missed: Any, most: float, seconds: float) -> SearchResult:
        result = clocked.search(missed, most, seconds)
        seen.append([missed(part)(1).final > 0 for part in ("mine", "other")])
        return replace(result, part="mine")

    clocked.refinement.run(search, **WORDS)
    assert seen == [[False, False], [True, False]]


def test_what_others_have_missed_keeps_no_faster_plan_from_being_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reserved in eight microbatches too until a plan fits; then they are searched with what they missed."""
    clocked = Clocked(monkeypatch, seconds=100.0, taken=1.0, too_large=1)
    asked = []

    def in_seconds(seconds: float) -> SearchResult:
        predicted: Any = found().plan.predicted
        return replace(found(), plan=replace(found().plan, predicted=replace(predicted, step_seconds=seconds)))

    def search(missed: Any, most: float, seconds: float) -> SearchResult:
        asked.append((most, missed("")(1).final > 0, missed("")(8).final > 0))
        faster = len(asked) == 1 or not asked[-1][2]  # the first of one microbatch, later of eight
        if (result := in_seconds(2.0 if faster else 3.0)).counted_seconds >= most:
            raise NothingFaster(0.0, ())
        return result

    best = clocked.refinement.run(search, **WORDS)
    assert best.step_seconds == 2.0
    inf = math.inf
    assert asked == [(inf, False, False), (inf, True, True), (pytest.approx(3.0, rel=0.01), True, False)]


@pytest.mark.parametrize(("counted", "searches"), [(1.0, 1), (1.3, 2)])
def test_a_plan_is_searched_for_in_memory_that_was_counted_in_vain(
    counted: float, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that computes again, of which the search counts all memory, but which needs less of it."""
    (stage,) = found().plan.stages
    most, limits = stage.memory_limit_bytes, []

    def holding(plan: Any, share: float) -> Any:
        memory = replace(stage.memory, workspace=share * most - stage.memory.total + stage.memory.workspace)
        return replace(plan, stages=(replace(stage, rematerialised=((0, 1),), memory=memory),))

    written = lambda plan, *_, **options: holding(plan, 0.7 if len(limits) == 1 else 0.9)  # noqa: E731
    monkeypatch.setattr(refine, "written_out", written)
    predicted: Any = found().plan.predicted

    def search(missed: Any, faster_than: float, seconds: float) -> SearchResult:
        limits.append(missed("")(1).limit(most, last=True) / most)
        plan = replace(
            holding(found().plan, 0.7 * counted), predicted=replace(predicted, step_seconds=3.0 - len(limits))
        )
        result = replace(found(), plan=plan).bounded(1.0)
        assert result.counted_seconds < faster_than
        return result

    best = Refinement(Asked(lambda: 100.0)).run(search, **WORDS)
    assert best.step_seconds == 3.0 - searches
    assert best.least_seconds == pytest.approx(1.0), "by the search that had all of the memory"
    assert limits == pytest.approx([1 / refine.MARGIN, 1 / refine.MARGIN + 0.7 * (counted - 1)][:searches])


def test_a_limit_of_no_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "written_out", lambda *args, **options: pytest.fail("nothing is written out"))
    for options in ({"stages": 1}, {"stages": 2}, {"stages": None}, {"preset": "data_parallel"}):
        planning = plan_for(*small(), cluster=CLUSTER, time_limit_seconds=0, **options)
        assert NOT_COUNTED in planning.plan.notes


def test_advice_is_of_plans_that_were_counted() -> None:
    refused = MemoryExceeded(refused="a plan", got="1", needed="2", where="here", try_="more")
    options = PlanOptions(stages=2)
    for notes, advised in (((), True), ((NOT_COUNTED,), False)):
        plan = replace(found().plan, notes=notes)
        given: Any = SimpleNamespace(plan=plan)
        advice = with_advice(refused, lambda _, given=given: given, options, 4, time.perf_counter())
        assert ("which fits" in advice.try_) == advised


@pytest.mark.slow
@pytest.mark.parametrize("memory", [80e3, 92e3])
def test_where_many_plans_are_too_large_one_that_fits_is_found(memory: float) -> None:
    """GPUs gather all of these weights at once, which the search does not count."""

    def step(weights: Any, x: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for weight in weights:
                h = jax.nn.relu(h @ weight)
            return jnp.mean((h - y) ** 2)

        value, gradients = mw.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 5
    plan = mw.plan_for(step, (weights, batch, batch), cluster="p3.16xlarge:1", memory_per_device=memory).plan
    assert max(stage.memory.total for stage in plan.stages) <= memory
