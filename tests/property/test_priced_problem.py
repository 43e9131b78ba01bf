"""Problems at many prices of memory: every price's answer is as cheap as the best of all assignments."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from small_problems import small_problem

from meshwright.search.intra import priced
from meshwright.search.intra.priced import PricedProblem
from meshwright.solve import Infeasible, Problem, Unsolved

PRICES = [(0.1, 2), (0.0, 1), (3.0, 2), (0.5, 2), (0.5, 7), (1.0, 2), (50.0, 7)]


def random_problem(seed: int) -> tuple[Problem, list[np.ndarray], list[np.ndarray]]:
    problem, _, rng = small_problem(seed)
    constant, kept = ([rng.integers(0, 4, k).astype(float) for k in problem.sizes] for _ in range(2))
    return problem, constant, kept


@pytest.mark.parametrize("many", [0, 1 << 18])
@pytest.mark.parametrize("most", [0, 1 << 24])
def test_each_price_has_its_optimum(monkeypatch: pytest.MonkeyPatch, many: int, most: int) -> None:
    monkeypatch.setattr(priced, "_MANY_ENTRIES", many)
    monkeypatch.setattr(priced, "_MOST_ENTRIES", most)
    impossible = 0
    for seed in range(150):
        problem, constant, kept = random_problem(seed)

        def held(choices: tuple[int, ...], constant=constant, kept=kept) -> tuple[float, float]:
            return tuple(sum(float(row[c]) for row, c in zip(rows, choices, strict=True)) for rows in (constant, kept))

        every = [(problem.objective(c), *held(c)) for c in product(*(range(k) for k in problem.sizes))]
        if not np.isfinite(min(seconds for seconds, _, _ in every)):
            impossible += 1
            with pytest.raises(Infeasible):
                PricedProblem(problem, constant=constant, kept=kept).best(PRICES)
            continue
        ready = PricedProblem(problem, constant=constant, kept=kept)
        for (price, times), choices in zip(PRICES, (one.choices for one in ready.best(PRICES)), strict=True):
            assert choices is not None
            once, each = held(choices)
            best = min(seconds + price * (a + times * b) for seconds, a, b in every)
            assert problem.objective(choices) + price * (once + times * each) == pytest.approx(best), seed
    assert 0 < impossible < 75


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("most", [0, 1 << 24])
@pytest.mark.parametrize("gap", [0.0, 0.1, float("inf")])
def test_bounds_and_shares_hold(monkeypatch: pytest.MonkeyPatch, gap: float, most: int, few: int) -> None:
    """No assignment is below the bound; and none that holds no more takes less than the certain share."""
    monkeypatch.setattr(priced, "_MOST_ENTRIES", most)
    monkeypatch.setattr(priced, "FEW_NODES", few)
    uncertain = 0
    for seed in range(150):
        problem, constant, kept = random_problem(seed)
        every = []
        for choices in product(*(range(k) for k in problem.sizes)):
            once, each = (sum(float(row[c]) for row, c in zip(rows, choices, strict=True)) for rows in (constant, kept))
            every.append((problem.objective(choices), once, each))
        if not np.isfinite(min(seconds for seconds, _, _ in every)):
            continue
        ready = PricedProblem(problem, constant=constant, kept=kept)
        for (price, times), one in zip(PRICES, ready.best(PRICES, gap=gap), strict=True):
            assert one.bound <= min(s + price * (a + times * b) for s, a, b in every) + 1e-9, seed
            assert one.choices is not None, seed
            once, each = (float(sum(r[c] for r, c in zip(rows, one.choices, strict=True))) for rows in (constant, kept))
            no_more = [s for s, a, b in every if a + times * b <= once + times * each]
            assert one.share * problem.objective(one.choices) <= min(no_more) + 1e-9, seed
            assert 1 - one.share <= gap + 1e-9, seed
            uncertain += one.share < 1
    assert (uncertain > 0) == (gap > 0)


def test_messages_bound_what_they_find() -> None:
    """With nodes of one choice, and such as have no edges, which no message passes."""
    closer = exact = 0
    for seed in range(150):
        problem, constant, kept = random_problem(seed)
        ready, other = (PricedProblem(problem, constant=constant, kept=kept) for _ in range(2))
        for price, times in PRICES:
            paid = [price * (once + times * each) for once, each in zip(constant, kept, strict=True)]
            costs = tuple(seconds + more for seconds, more in zip(problem.costs, paid, strict=True))
            at_price = Problem(costs=costs, edges=problem.edges)
            best = min(at_price.objective(choices) for choices in product(*(range(k) for k in problem.sizes)))
            if not np.isfinite(best):
                continue
            nothing = priced.Priced(choices=None, bound=-float("inf"))
            passed = ready.passed((price, times), nothing)
            if passed is nothing:  # every node has one choice that is allowed
                continue
            (forest,) = ready.relaxed([(price, times)])
            assert passed.bound <= best + 1e-9, (seed, price)
            closer += passed.bound > forest.bound + 1e-9
            if passed.choices is not None:
                found = at_price.objective(passed.choices)
                assert found >= best - 1e-9
                exact += found <= passed.bound + 1e-9
            other.passed((50.0, 7), nothing)
            assert other.passed((price, times), nothing) == passed, "what was asked before changes nothing"
    assert closer > 20
    assert exact > 300


def test_what_no_solver_finds_in_time_is_told_by_the_forest(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsolved(problem: Problem, **options: object) -> None:
        raise Unsolved("out of time")

    monkeypatch.setattr(priced, "_MOST_ENTRIES", 0)
    monkeypatch.setattr(priced, "solve", unsolved)
    told = 0
    for seed in range(150):
        problem, constant, kept = random_problem(seed)
        ready = PricedProblem(problem, constant=constant, kept=kept)
        try:
            (one,) = ready.best([(0.5, 2)])
        except Infeasible:
            continue
        if one.choices is not None and one.share < 1:
            told += 1
            assert one == ready.relaxed([(0.5, 2)])[0]
    assert told > 0


@pytest.mark.parametrize("gap", [0.0, 0.05])
def test_what_is_found_at_a_price_does_not_depend_on_the_others(gap: float) -> None:
    """Processes ask for different ones together. To the last digit."""
    second = 0
    for seed in range(100):
        problem, constant, kept = random_problem(seed)
        ready, other = (PricedProblem(problem, constant=constant, kept=kept) for _ in range(2))
        try:
            together = ready.relaxed(PRICES, gap=gap)
        except Infeasible:
            continue
        for number, pair in enumerate(pairwise(PRICES)):
            assert other.relaxed(pair, gap=gap) == together[number : number + 2], seed
        second += "_second_forest" in vars(ready)
    assert second > 0


def test_a_problem_without_nodes() -> None:
    ready = PricedProblem(Problem(costs=()), constant=(), kept=())
    assert [one.choices for one in ready.best([(0.0, 1), (1.0, 2)])] == [(), ()]
