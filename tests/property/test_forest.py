"""Spanning forests: what they find is an assignment of the total they say, and nothing is below their bound."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from small_problems import small_problem

from meshwright.solve import Problem
from meshwright.solve.forest import Forest


@pytest.mark.parametrize("tree", [False, True])
def test_bounds_and_assignments_against_brute_force(*, tree: bool) -> None:
    tight = possible = 0
    for seed in range(300):
        problem, numbers, _ = small_problem(seed, tree=tree)
        costs = [numbers((k, 3)) for k in problem.sizes]
        choices, totals, bounds = Forest(problem).minimise_each(np.concatenate(costs))
        for case in range(3):
            one = Problem(costs=tuple(row[:, case] for row in costs), edges=problem.edges)
            best = min(map(one.objective, product(*map(range, one.sizes))))
            assert bounds[case] <= best * (1 + 1e-12), seed
            assert totals[case] == pytest.approx(one.objective(choices[:, case].tolist())), seed
            if tree:
                assert bounds[case] == pytest.approx(best), seed
            if np.isfinite(best):
                possible += 1
                tight += bool(totals[case] == pytest.approx(best))
                if tree:
                    assert totals[case] == pytest.approx(best), seed
    # Going back, nodes see neighbours over edges that were left out: most assignments are the best all the same.
    assert tight > 0.6 * possible > 0


def test_a_second_forest_has_what_the_first_one_pays_for() -> None:
    """Bounds and assignments hold as well, and often are better; what is left out by a forest that is told so is not
    what comes first."""
    closer = told = 0
    for seed in range(300):
        problem, _, _ = small_problem(seed)
        costs = np.concatenate(problem.costs)[:, None]
        first = Forest(problem)
        choices, totals, bounds = first.minimise_each(costs)
        paid_for = first.paid_for(choices)
        if not np.isfinite(totals[0]) or not paid_for:
            continue
        told += 1
        again, lower, higher = Forest(problem, first=paid_for).minimise_each(costs)
        best = min(map(problem.objective, product(*map(range, problem.sizes))))
        assert higher[0] <= best * (1 + 1e-12), seed
        assert lower[0] == pytest.approx(problem.objective(again[:, 0].tolist())), seed
        assert paid_for[0] not in Forest(problem, first=paid_for).paid_for(again), seed
        closer += min(lower[0], totals[0]) - max(higher[0], bounds[0]) < (1 - 1e-9) * (totals[0] - bounds[0])
    assert closer > 0.2 * told > 0
