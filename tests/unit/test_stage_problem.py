"""The problem of one stage: what it holds, and what prices of memory find in a limit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.cluster import load_cluster
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.search.inter.submeshes import Submeshes
from meshwright.search.intra import limited
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.intra.priced import Priced, PricedProblem
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.stages.costs import StageCosts
from meshwright.search.stages.problem import StageProblem
from meshwright.solve import Problem, solve
from meshwright.zoo import registry

UNLIMITED = float("inf")


@cache
def costs() -> StageCosts:
    target = registry.build("gpt-tiny", global_batch=8)
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=4)
    return StageCosts(
        staged_program(program), parameters=parameter_infos(program), submeshes=Submeshes(load_cluster("cpu")),
        constraints=Constraints(), remat="none",
    )  # fmt: skip


def problem_of_a_layer() -> StageProblem:
    """The fourth layer on eight devices in a row, in four microbatches."""
    cluster, staged = load_cluster("cpu"), costs().program
    cut = staged.cutter.cut(*staged.layers[3])
    return StageProblem(
        cut, cut.graph, cluster.logical_mesh((8,)), cluster.device, parameters=costs().solver.parameters_of(cut),
        microbatches=4, constraints=Constraints(), split_dims=staged.split_dims,
    )  # fmt: skip


def test_memory_counts_what_is_in_flight() -> None:
    problem = problem_of_a_layer()
    free = problem.solve(UNLIMITED)
    seconds = problem.seconds(free.solution.choices)
    for count in (1, 3):
        problem.in_flight = count
        held = seconds.constant_bytes + count * seconds.in_flight_bytes
        assert problem.problem(UNLIMITED).memory_of(free.solution.choices) == pytest.approx(held)
    least = problem.least_bytes
    assert least.workspace == seconds.workspace_bytes == 0
    assert least.constant <= seconds.constant_bytes
    assert 0 < problem.least_input_bytes[:, 1].sum() <= least.kept <= seconds.in_flight_bytes
    assert least.held(3) == least.constant + 3 * least.kept


def test_prices_of_memory_trade_it_for_seconds() -> None:
    problem = problem_of_a_layer()
    problem.in_flight = 3
    numbers = problem.problem(UNLIMITED)
    before = (0.0, float("inf"))
    for price in (0.0, 1e-12, 1e-9, 1e-6, 1.0):
        (one,) = problem.priced([(price, 3)], gap=0.0, time_limit_seconds=60.0)
        choices = one.choices
        assert choices is not None
        assert numbers.memory is not None
        costs = tuple(seconds + price * size for seconds, size in zip(numbers.costs, numbers.memory, strict=True))
        best = solve(Problem(costs=costs, edges=numbers.edges))
        here = numbers.objective(choices), numbers.memory_of(choices)
        assert here[0] + price * here[1] == pytest.approx(best.objective, rel=1e-9)
        assert before[0] <= here[0] * (1 + 1e-12)
        assert here[1] <= before[1] * (1 + 1e-12)
        before = here
        chosen = problem.chosen(choices)
        assert chosen.solution.memory == pytest.approx(here[1])
        seconds = problem.seconds(choices)
        assert 0 < seconds.weight_seconds <= seconds.backward_seconds


def test_what_prices_leave_open_is_solved_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By message passing, or where that does not prove it by elimination and the like."""
    monkeypatch.setattr(limited, "FEW_NODES", 0)
    plain = PricedProblem.relaxed

    def loose(problem: PricedProblem, prices: Any, **options: Any) -> list[Priced]:
        """The same choices, of which little is known."""
        return [replace(one, bound=0.9 * one.bound, share=0.9 * one.share) for one in plain(problem, prices, **options)]

    monkeypatch.setattr(PricedProblem, "relaxed", loose)
    problem = problem_of_a_layer()
    least, most = problem.least_bytes.held(1), problem.needs_at_best(1)
    methods = set()
    for part in (0.1, 0.3, 0.6, 0.9, 1.1):
        limit = least + part * (most - least)
        found = problem.within(limit, gap=1e-2)
        assert found is not None
        assert not found.solution.proven
        one, best = problem.proven(limit, gap=1e-2, time_limit_seconds=60.0), problem.solve(limit)
        methods.add(one.solution.method == found.solution.method)
        assert one.solution.proven
        assert one.solution.memory <= limit
        assert one.solution.lower_bound <= best.solution.objective * (1 + 1e-9)
        assert best.solution.objective <= one.solution.objective * (1 + 1e-9) <= 1.011 * best.solution.objective
    assert methods == {False, True}


def test_what_forests_leave_open_of_a_small_problem_elimination_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(few_nodes: int) -> list[float]:
        monkeypatch.setattr(limited, "FEW_NODES", few_nodes)
        problem = problem_of_a_layer()
        least, most = problem.least_bytes.held(1), problem.needs_at_best(1)
        found = [problem.within(least + part * (most - least), gap=1e-2) for part in (0.3, 0.6, 0.9)]
        return [one.solution.lower_bound / one.solution.objective for one in found if one is not None]

    plain = PricedProblem.relaxed

    def loose(problem: PricedProblem, prices: Any, **options: Any) -> list[Priced]:
        """The same choices, of which next to nothing is known."""
        return [replace(one, bound=0.5 * one.bound, share=0.5 * one.share) for one in plain(problem, prices, **options)]

    known = shares(100)
    monkeypatch.setattr(PricedProblem, "relaxed", loose)
    assert shares(100) == pytest.approx(known)
    assert len(known) == 3
    assert max(shares(0)) < 0.6
