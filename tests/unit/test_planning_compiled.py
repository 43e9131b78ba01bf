"""`check="compile"`: searches are repeated until the compiler accepts a plan, in as much memory as it says is right."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from meshwright.cluster import Cluster, load_cluster
from meshwright.compilers.facts import StageFacts
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.planning import compiled
from meshwright.planning.checks import request_of
from meshwright.planning.measured import Candidate
from meshwright.planning.plan_for import plan_for
from meshwright.planning.request import Planning, PlanOptions
from meshwright.program.traces import traces_of
from meshwright.targets import load_target

CLUSTER = load_cluster("tpu-v5e:8").with_memory_limit(1e9)
TARGET = load_target("mlp-tiny")


@pytest.fixture(scope="module")
def planning() -> Planning:
    return plan_for(TARGET.step, TARGET.example_args, cluster=CLUSTER, stages=1)


class Searched:
    """A search that uses all memory it is given and is the faster for it, and a compiler.

    Args:
      planning: any plan.
      error: what the compiler needs of what is predicted.
      least: bytes that every plan needs, as predicted.
      squeezed_from: predicted bytes from which on the compiler rematerialises by itself.
      most: bytes that plans need at most, as predicted.
    """

    def __init__(
        self, planning: Planning, monkeypatch: pytest.MonkeyPatch, error: float, least: float = 0.0,
        squeezed_from: float = inf, most: float = inf,
    ) -> None:  # fmt: skip
        self.given: list[float] = []
        self._planning, self._error, self._least = planning, error, least
        self._squeezed_from, self._most = squeezed_from, most
        monkeypatch.setattr(compiled, "check_compiler", lambda cluster: None)
        monkeypatch.setattr(compiled, "target_devices", lambda cluster, plan: [])
        monkeypatch.setattr(compiled, "executable", lambda program, plan, devices: plan)
        monkeypatch.setattr(compiled, "facts_of", self._facts)

    def plan(self, options: PlanOptions) -> Planning:
        assert isinstance(options.cluster, Cluster)
        self.given.append(options.cluster.device.usable_memory_bytes)
        if self.given[-1] < self._least:
            raise MemoryExceeded(refused="all", got="", needed="", where="", try_="")
        predicted = self._planning.plan.predicted
        assert predicted is not None
        return replace(
            self._planning,
            plan=replace(self._planning.plan, predicted=replace(predicted, step_seconds=1e9 / self.given[-1])),
        )

    def _facts(self, step: object, plan: object, *, cluster: Cluster) -> tuple[StageFacts, ...]:
        size = min(self.given[-1], self._most)
        peak = inf if self._error == inf else self._error * size
        refusals = [("out of memory",)] if peak == inf else [()]
        squeezed = [3 * (size >= self._squeezed_from)]
        if peak == inf:  # a stage before it compiles, which is of no use then
            refusals, squeezed = [(), *refusals], [5, *squeezed]
        return tuple(
            StageFacts(
                predicted={}, compiled={}, flops=(None, 0.0), peak_bytes=(size, peak), limit_bytes=1e9,
                unknown_loops=0, refusals=words, rematerialised=count,
            )
            for words, count in zip(refusals, squeezed, strict=True)
        )  # fmt: skip

    def found(self) -> Planning:
        return compiled.checked_plan(
            self.plan, PlanOptions(), cluster=CLUSTER, whole=CLUSTER, tell=lambda text: None
        )  # fmt: skip


def test_a_plan_that_is_too_large_is_followed_by_one_in_less_memory(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Searched(planning, monkeypatch, error=1.25)
    found = search.found()
    assert search.given == [pytest.approx(1e9), pytest.approx(0.98e9 / 1.25)]
    assert "fits" in found.plan.notes[-1]
    assert [one.what for one in found.considered[-2:]] == ["compiled", "compiled"]
    (stage,) = found.plan.stages
    assert stage.memory_limit_bytes == CLUSTER.device.usable_memory_bytes
    assert found.plan.cluster_fingerprint == CLUSTER.fingerprint()


def test_memory_that_a_plan_does_not_need_is_given_to_the_next(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Searched(planning, monkeypatch, error=0.5)
    found = search.found()
    assert search.given == [pytest.approx(1e9), pytest.approx(1.96e9)]
    assert found.step_seconds == pytest.approx(1e9 / 1.96e9)


def test_a_program_that_the_compiler_squeezes_counts_as_too_large(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Searched(planning, monkeypatch, error=0.99, squeezed_from=0.9e9)
    found = search.found()
    assert search.given == [pytest.approx(1e9), pytest.approx(0.8e9), pytest.approx(0.9e9)]
    assert "computes 3 values twice" in found.considered[-1].outcome
    assert found.step_seconds == pytest.approx(1e9 / 0.8e9)


def test_what_the_model_refuses_is_left_to_the_compiler(planning: Planning, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Searched(planning, monkeypatch, error=0.6, least=1.3e9)
    assert "fits" in search.found().plan.notes[-1]
    assert search.given[:2] == [pytest.approx(1e9), pytest.approx(1.4e9)]


@pytest.mark.parametrize(("error", "least"), [(inf, 0.0), (3.0, 0.9e9)])
def test_nothing_that_fits_is_a_refusal(
    planning: Planning, monkeypatch: pytest.MonkeyPatch, error: float, least: float
) -> None:
    search = Searched(planning, monkeypatch, error=error, least=least)
    with pytest.raises(MemoryExceeded, match="does not fit"):
        search.found()
    assert len(search.given) <= 4


def test_a_refused_plan_is_not_compiled_again(planning: Planning, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next search has less memory than that plan takes by prediction."""
    search = Searched(planning, monkeypatch, error=inf, most=0.3e9)
    with pytest.raises(MemoryExceeded, match="out of memory"):
        search.found()
    assert search.given[1] == pytest.approx(0.8 * 0.3e9)


def test_a_model_that_refuses_whatever_it_is_given_is_heard(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MemoryExceeded, match="refused all"):
        Searched(planning, monkeypatch, error=1.0, least=1e12).found()


def test_other_checks_are_refused() -> None:
    with pytest.raises(PlanError, match='"compile", or None'):
        plan_for(TARGET.step, TARGET.example_args, cluster=CLUSTER, check="run")


def _with_seconds(planning: Planning, seconds: float) -> Planning:
    assert planning.plan.predicted is not None
    predicted = replace(planning.plan.predicted, step_seconds=seconds)
    return replace(planning, plan=replace(planning.plan, predicted=predicted))


def _stage_facts(peak: float, compute_seconds: tuple[float, float] = (1.0, nan)) -> StageFacts:
    return StageFacts(
        predicted={}, compiled={}, flops=(None, 0.0), peak_bytes=(peak, peak), limit_bytes=1e9, unknown_loops=0,
        compute_seconds=compute_seconds,
    )  # fmt: skip


def test_kernels_take_what_the_compiler_says_and_the_rest_what_is_predicted(planning: Planning) -> None:
    one = _with_seconds(planning, 3.0)
    assert compiled.seconds_by_compiler(one, [_stage_facts(1.0, (2.0, 2.5))]) == pytest.approx(3.5)
    assert compiled.seconds_by_compiler(one, [_stage_facts(1.0)]) == 3.0
    (stage,) = one.plan.stages
    slow, fast = (replace(stage, compute_seconds=s, communication_seconds=1.0) for s in (4.0, 3.0))
    two = replace(one, plan=replace(one.plan, stages=(slow, fast)))
    # The second stage becomes the slowest: 6 of 5 seconds.
    facts = [_stage_facts(1.0, (4.0, 3.0)), _stage_facts(1.0, (3.0, 5.0))]
    assert compiled.seconds_by_compiler(two, facts) == pytest.approx(3.0 * 6 / 5)


@pytest.mark.parametrize(("peaks", "chosen"), [((2e9, 5e8, 5e8), 2), ((5e8, 5e8, 5e8), 2), ((5e8, 2e9, 2e9), 0)])
def test_of_the_plans_that_fit_the_fastest_by_the_compiler_is_taken(
    planning: Planning, monkeypatch: pytest.MonkeyPatch, peaks: tuple[float, ...], chosen: int
) -> None:
    Searched(planning, monkeypatch, error=1.0)
    few = [Candidate(f"plan {n}", _with_seconds(planning, seconds)) for n, seconds in enumerate((1.0, 1.1, 1.2))]
    said = iter([_stage_facts(peak, times) for peak, times in zip(peaks, ((1.0, 3.0), (1.0, 2.5), (1.0, 1.0)),
                                                                  strict=True)])  # fmt: skip
    monkeypatch.setattr(compiled, "candidates", lambda *_: few)
    monkeypatch.setattr(compiled, "facts_of", lambda *_, **__: (next(said),))
    asked = request_of(traces_of(TARGET.step), TARGET.example_args, PlanOptions(cluster=CLUSTER), started=0.0)
    found = compiled.compiled_best(lambda options: planning, PlanOptions(), asked, whole=CLUSTER)
    assert found.step_seconds == few[chosen].planning.step_seconds
    assert "chosen by what the compiler says" in found.plan.notes[-1]
    assert [one.what for one in found.considered[-3:]] == ["compiled"] * 3


def test_where_none_of_a_few_plans_fits_the_search_goes_on_in_less_memory(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Searched(planning, monkeypatch, error=1.25)
    monkeypatch.setattr(compiled, "candidates", lambda plan, options, asked: [Candidate("as planned", plan(options))])
    options = PlanOptions(cluster=CLUSTER)
    asked = request_of(traces_of(TARGET.step), TARGET.example_args, options, started=0.0)
    found = compiled.compiled_best(search.plan, options, asked, whole=CLUSTER)
    assert search.given == [pytest.approx(1e9), pytest.approx(1e9), pytest.approx(0.98e9 / 1.25)]
    assert "fits" in found.plan.notes[-1]


def test_what_the_model_refuses_of_a_few_plans_is_left_to_the_compiler(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Searched(planning, monkeypatch, error=0.6, least=1.3e9)
    options = PlanOptions(cluster=CLUSTER)
    asked = request_of(traces_of(TARGET.step), TARGET.example_args, options, started=0.0)
    found = compiled.compiled_best(search.plan, options, asked, whole=CLUSTER)
    assert "fits" in found.plan.notes[-1]
    assert search.given[:3] == [pytest.approx(1e9), pytest.approx(1e9), pytest.approx(1.4e9)]
