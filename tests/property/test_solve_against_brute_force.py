"""Random small problems: every method agrees with trying everything, and says nothing false."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.solve import (
    Infeasible,
    Problem,
    Solution,
    Unsolved,
    presolve,
    solve,
    solve_by_brute_force,
    solve_by_elimination,
    solve_by_labels,
    solve_by_milp,
    solve_by_multiplier,
)
from meshwright.solve.improve import Improvement, places
from meshwright.solve.thin import thin


def random_problem(seed: int) -> Problem:
    """Up to 8 nodes of up to 5 choices: any density, whole or real numbers, forbidden entries, any limit."""
    rng = np.random.default_rng(seed)
    nodes, most = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    sizes = [int(rng.integers(1, most + 1)) for _ in range(nodes)]
    whole = bool(rng.random() < 0.5)  # whole numbers make ties, and limits that are met with equality
    forbidden = float(rng.choice([0.0, 0.0, 0.1, 0.3]))

    def seconds(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.random(shape) * 10
        values = np.floor(values) if whole else values
        return np.where(rng.random(shape) < forbidden, np.inf, values)

    density = float(rng.choice([0.0, 0.2, 0.4, 0.9]))
    costs = tuple(seconds((k,)) for k in sizes)
    edges = {
        (u, v): seconds((sizes[u], sizes[v]))
        for u in range(nodes)
        for v in range(u + 1, nodes)
        if rng.random() < density
    }
    if rng.random() < 0.2:
        return Problem(costs=costs, edges=edges)
    # Cheap choices take more memory, otherwise the limit would hardly ever bind.
    memory = tuple(
        np.where(np.isinf(c), 0.0, 10 - np.minimum(c, 10)) * rng.random(c.size) + rng.integers(0, 3) for c in costs
    )
    memory = tuple(np.floor(m) if whole else m * 1e9 for m in memory)
    least, most_bytes = sum(float(m.min()) for m in memory), sum(float(m.max()) for m in memory)
    limit = max(least + (most_bytes - least) * (1.1 * rng.random() - 0.05), 0.0)
    return Problem(costs=costs, edges=edges, memory=memory, memory_limit=math.floor(limit) if whole else limit)


def outcome(method: Callable[[Problem], Solution], problem: Problem) -> Solution | Infeasible:
    try:
        return method(problem)
    except Infeasible as error:
        return error


def agree(problem: Problem, found: Solution | Infeasible, truth: Solution | Infeasible, seed: int) -> None:
    if isinstance(truth, Infeasible):
        assert isinstance(found, Infeasible), seed
        assert (found.least_memory is None) == (truth.least_memory is None), seed
        if truth.least_memory is not None:
            assert found.least_memory == pytest.approx(truth.least_memory, rel=1e-9), seed
        return
    assert isinstance(found, Solution), (seed, found)
    assert found.objective == pytest.approx(truth.objective, rel=1e-9, abs=1e-12), seed
    assert found.lower_bound <= truth.objective * (1 + 1e-9), seed
    assert found.objective == problem.objective(found.choices), seed
    assert problem.fits(problem.memory_of(found.choices)), seed
    assert found.proven, seed


def test_solve_from_what_is_known() -> None:
    """Whatever assignment is known, the limit may bind or not: the answer is the same."""
    looked_at = 0
    for seed in range(400):
        problem = random_problem(seed)
        truth = outcome(solve_by_brute_force, problem)
        if isinstance(truth, Infeasible):
            continue
        fitting = [
            one
            for one in itertools.product(*map(range, problem.sizes))
            if math.isfinite(problem.objective(one)) and problem.fits(problem.memory_of(one))
        ]
        known = fitting[seed % len(fitting)]
        agree(problem, solve(problem, known=known), truth, seed)
        looked_at += problem.objective(known) > truth.objective
    assert looked_at > 100


def test_solve() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(1500):
        problem = random_problem(seed)
        truth, found = outcome(solve_by_brute_force, problem), outcome(solve, problem)
        agree(problem, found, truth, seed)
        kinds[found.method if isinstance(found, Solution) else "infeasible"] += 1
        if seed % 10 == 0 and isinstance(found, Solution):
            again = solve(problem)
            assert (again.choices, again.objective, again.lower_bound) == (
                found.choices,
                found.objective,
                found.lower_bound,
            )
    # The problems must reach every way through the portfolio that small problems can reach.
    assert (
        min(kinds[kind] for kind in ("elimination", "infeasible", "presolve+multiplier", "presolve+multiplier+labels"))
        >= 20
    ), kinds


def test_milp() -> None:
    for seed in range(150):
        problem = random_problem(seed)
        agree(problem, outcome(solve_by_milp, problem), outcome(solve_by_brute_force, problem), seed)


@pytest.mark.parametrize(
    "limits",
    [
        {"eliminate._LARGEST_TABLE": 30, "thin._LARGEST_TABLE": 30, "portfolio._CHEAP_ENTRIES": 30},
        {"labels._MOST_LABELS": 10},
    ],
)
def test_when_methods_give_up(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too wide for elimination, or too many labels: the fall-backs are as exact."""
    for name, value in limits.items():
        monkeypatch.setattr(f"meshwright.solve.{name}", value)
    kinds: Counter[str] = Counter()
    for seed in range(400):
        problem = random_problem(seed)
        found = outcome(solve, problem)
        agree(problem, found, outcome(solve_by_brute_force, problem), seed)
        kinds[found.method if isinstance(found, Solution) else "infeasible"] += 1
    assert sum(count for kind, count in kinds.items() if kind.endswith("milp")) >= 5, kinds


def test_when_elimination_is_never_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem is narrowed by bounds first, and everything better than what is known must survive that."""
    monkeypatch.setattr("meshwright.solve.portfolio._CHEAP_ENTRIES", 0)
    monkeypatch.setattr(sys.modules["meshwright.solve.presolve"], "_MOST_FOLDED", 0)
    kinds: Counter[str] = Counter()
    for seed in range(600):
        problem = random_problem(seed)
        found = outcome(solve, problem)
        agree(problem, found, outcome(solve_by_brute_force, problem), seed)
        for method in found.method.split("+") if isinstance(found, Solution) else ["infeasible"]:
            kinds[method] += 1
    assert min(kinds[kind] for kind in ("infeasible", "narrow", "multiplier", "labels")) >= 20, kinds


def test_a_thinner_graph_never_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.solve.thin._LARGEST_TABLE", 30)
    for seed in range(200):
        problem = random_problem(seed)
        relaxed = thin(problem)
        assert relaxed.edges.keys() <= problem.edges.keys()
        for choices in np.ndindex(*problem.sizes[:6]):
            whole = (*choices, *(0,) * (len(problem.sizes) - len(choices)))
            assert relaxed.objective(whole) <= problem.objective(whole) * (1 + 1e-12), seed
            if sum(choices) > 4:
                break


def test_labels() -> None:
    for seed in range(500):
        problem = random_problem(seed)
        agree(problem, outcome(solve_by_labels, problem), outcome(solve_by_brute_force, problem), seed)


def test_elimination_and_multiplier() -> None:
    for seed in range(300):
        problem = random_problem(seed)
        unlimited = Problem(costs=problem.costs, edges=problem.edges)
        agree(unlimited, outcome(solve_by_elimination, unlimited), outcome(solve_by_brute_force, unlimited), seed)
        found, truth = outcome(solve_by_multiplier, problem), outcome(solve_by_brute_force, problem)
        if isinstance(truth, Infeasible):
            agree(problem, found, truth, seed)
        else:
            assert isinstance(found, Solution), seed
            assert found.lower_bound <= truth.objective * (1 + 1e-9), seed
            assert found.objective >= truth.objective * (1 - 1e-9), seed
            assert problem.fits(found.memory), seed
            assert not found.proven or found.objective == pytest.approx(truth.objective, rel=1e-9), seed


@pytest.mark.parametrize(("dominance", "fold_degree"), [(False, 0), (True, 0), (False, 2), (True, 2)])
def test_presolve_keeps_the_optimum(dominance: bool, fold_degree: int) -> None:
    for seed in range(250):
        problem = random_problem(seed)
        truth = outcome(solve_by_brute_force, problem)
        try:
            reduction = presolve(problem, dominance=dominance, fold_degree=fold_degree)
            inner = solve_by_brute_force(reduction.problem)
        except Infeasible:
            assert isinstance(truth, Infeasible), seed
            continue
        assert isinstance(truth, Solution), seed
        choices = reduction.restore(inner.choices)
        assert problem.objective(choices) == pytest.approx(truth.objective, rel=1e-9, abs=1e-12), seed
        assert inner.objective + reduction.offset_seconds == pytest.approx(truth.objective, rel=1e-9, abs=1e-12), seed
        assert problem.fits(problem.memory_of(choices)), seed


@pytest.mark.slow  # in `make test` a binding limit: `test_solve_large`
def test_a_thousand_nodes_like_a_transformer() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "solver.py"
    spec = importlib.util.spec_from_file_location("benchmarks_solver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    free = solve(module.chain_of_layers(1000, 8, tightness=None))
    assert free.method == "elimination"
    assert free.proven
    assert free.seconds < 5  # a tenth of a second on one laptop core
    problem = module.chain_of_layers(1000, 8, tightness=0.4)
    limited = solve(problem)
    assert limited.proven
    assert problem.fits(limited.memory)
    assert limited.objective >= free.objective
    assert limited.seconds < 30  # about a second
    by_price = solve_by_multiplier(problem)
    assert by_price.lower_bound <= limited.objective <= by_price.objective
    assert solve(problem).choices == limited.choices
    with pytest.raises(Unsolved):
        solve_by_elimination(problem)


def test_crossing_over_takes_the_best_cut() -> None:
    crossed = 0
    for seed in range(400):
        problem = random_problem(seed)
        rng = np.random.default_rng(seed)
        first, rest = (tuple(int(rng.integers(k)) for k in problem.sizes) for _ in range(2))
        place = places(problem)
        every = [
            tuple(a if at < cut else b for a, b, at in zip(first, rest, place, strict=True))
            for cut in range(len(first) + 1)
        ]
        fitting = [problem.objective(one) for one in every if problem.fits(problem.memory_of(one))]
        found = Improvement(problem).crossed_over(first, rest)
        if found is not None:
            assert found in every
            assert problem.fits(problem.memory_of(found))
            assert problem.objective(found) == pytest.approx(min(fitting))
            crossed += first != found != rest
        else:
            assert min(fitting, default=math.inf) == math.inf
    assert crossed > 40
