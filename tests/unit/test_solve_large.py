"""Problems of hundreds of choices a node, as meshes of three axes give: exact, within the time, and from its parts."""

from __future__ import annotations

import importlib.util
import math
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from meshwright.solve import OutOfTime, Problem, presolve, solve, solve_by_brute_force
from meshwright.solve.deadline import Deadline
from meshwright.solve.dominance import among_equals
from meshwright.solve.eliminate import Elimination
from meshwright.solve.messages import Messages
from meshwright.solve.narrow import narrow
from meshwright.solve.order import elimination_order
from meshwright.solve.tables import min_sum


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "solver.py"
    spec = importlib.util.spec_from_file_location("benchmarks_solver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bounds_agree_with_elimination(benchmark: ModuleType) -> None:
    problem = benchmark.three_axes(8, states=5, tightness=None)
    assert elimination_order(problem.sizes, problem.edges).entries > 1 << 27  # so `solve` takes another way
    _, optimum = Elimination(problem).minimise(problem.costs)
    solution = solve(problem)
    assert solution.method != "elimination"
    assert solution.objective == pytest.approx(optimum, rel=1e-12)
    assert solution.proven
    # Without presolve: nothing of the optimum is lost when all that costs more than it is forbidden.
    left = narrow(problem, upper_bound=math.inf)
    assert left.bound <= optimum * (1 + 1e-9)
    assert left.choices is not None
    assert problem.objective(left.choices) >= optimum * (1 - 1e-12)
    assert left.problem.objective(solution.choices) == pytest.approx(optimum, rel=1e-12)
    assert sum(int(np.isinf(c).sum()) for c in left.problem.costs) > 0.5 * sum(problem.sizes)


def test_a_binding_limit(benchmark: ModuleType) -> None:
    free = solve(benchmark.three_axes(8, tightness=None))
    problem = benchmark.three_axes(8, tightness=0.05)
    assert not problem.fits(problem.memory_of(free.choices))
    close, exact = solve(problem, gap=1e-3), solve(problem)
    assert "narrow" in exact.method
    for solution in (close, exact):
        assert problem.fits(solution.memory)
        assert solution.objective == problem.objective(solution.choices)
        assert solution.proven
    assert close.gap <= 1e-3
    assert close.lower_bound <= exact.objective * (1 + 1e-9)
    assert free.objective < exact.objective <= close.objective


@pytest.mark.parametrize("tightness", [None, 0.05])
@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_the_time_limit_is_kept(benchmark: ModuleType, tightness: float | None, seconds: float) -> None:
    problem = benchmark.three_axes(24, tightness=tightness)
    start = time.process_time()
    solution = solve(problem, time_limit_seconds=seconds)
    assert time.process_time() - start <= 1.2 * seconds + 1.0
    assert not solution.proven
    assert math.isfinite(solution.objective)
    assert problem.fits(solution.memory)
    assert 0 <= solution.lower_bound < solution.objective


def test_elimination_stops_in_the_middle_of_a_table() -> None:
    sides = [np.random.default_rng(0).random((400, 1, 400)), np.random.default_rng(1).random((400, 400, 1))]
    start = time.process_time()
    with pytest.raises(OutOfTime, match="refused exact elimination: got 0 s left"):
        min_sum(sides, (400, 400, 400), Deadline.after(0.01))
    assert time.process_time() - start < 0.1


def test_sums_in_pieces() -> None:
    rng = np.random.default_rng(0)
    for shape in [(7,), (300, 400), (3, 70_000), (60, 50, 40), (500, 9, 200), (40, 1, 3000), (9, 8, 7, 300)]:
        parts = [rng.random((shape[0],) + (1,) * (len(shape) - 1)), rng.random(shape)]
        for dim in range(1, len(shape)):
            one = [1] * len(shape)
            one[0], one[dim] = shape[0], shape[dim]
            parts += [rng.random(one), rng.random(one)]
        whole = sum(parts[1:], start=parts[0])
        np.testing.assert_allclose(min_sum(parts, shape), whole.min(axis=0), rtol=1e-14)


def test_choices_alike_to_all_neighbours() -> None:
    alike = np.array([[1.0, np.inf], [1.0, np.inf], [1.0, np.inf], [0.0, np.inf], [1.0, np.inf]])
    cost, memory = np.array([2.0, 1.0, 3.0, 9.0, 1.0]), np.array([5.0, 7.0, 5.0, 9.0, 7.0])
    # 1 and 4 are equal, 2 is dearer than 0 and takes as much; 0 takes less than 1, and 3 looks different
    assert among_equals(cost, memory, [alike]).tolist() == [True, True, False, True, False]
    assert among_equals(cost, memory, [alike, np.arange(5.0)[:, None]]).all()


def test_messages_move_costs_without_changing_totals() -> None:
    rng = np.random.default_rng(3)
    for pairs in ([(0, 1), (0, 2), (2, 3), (2, 4)], [(u, v) for u in range(5) for v in range(u + 1, 5)]):
        problem = Problem(
            costs=tuple(rng.random(4) for _ in range(5)),
            edges={pair: np.where(rng.random((4, 4)) < 0.1, np.inf, rng.random((4, 4))) for pair in pairs},
        )
        problem = presolve(problem, dominance=False, fold_degree=0).problem
        optimum = solve_by_brute_force(problem).objective
        bound, rest = Messages(problem).bound(problem.costs, passes=8)
        assert bound <= optimum * (1 + 1e-12)
        for choices in np.ndindex(*problem.sizes):
            assert bound + rest.objective(choices) == pytest.approx(problem.objective(choices), rel=1e-12)
        if len(pairs) == 4:  # a tree
            assert bound == pytest.approx(optimum, rel=1e-12)
