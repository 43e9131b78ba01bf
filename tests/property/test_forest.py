"""Spanning forests: what they find is an assignment of the total they say, and nothing is below their bound."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from meshwright.solve import Problem
from meshwright.solve.forest import Forest


def random_problem(seed: int, *, tree: bool) -> tuple[Problem, list[np.ndarray]]:
    """A problem, and costs of its nodes in three cases."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 7)))]
    forbidden, density = float(rng.choice([0.0, 0.1, 0.3])), float(rng.choice([0.2, 0.5, 0.9]))

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        return np.where(rng.random(shape) < forbidden, np.inf, rng.integers(0, 6, shape).astype(float))

    pairs = [(u, v) for v in range(len(sizes)) for u in range(v) if rng.random() < density]
    if tree:
        pairs = [(int(rng.integers(0, v)), v) for v in range(1, len(sizes)) if rng.random() < density]
    problem = Problem(
        costs=tuple(np.zeros(k) for k in sizes), edges={(u, v): numbers((sizes[u], sizes[v])) for u, v in pairs}
    )
    return problem, [numbers((k, 3)) for k in sizes]


@pytest.mark.parametrize("tree", [False, True])
def test_bounds_and_assignments_against_brute_force(*, tree: bool) -> None:
    tight = possible = 0
    for seed in range(300):
        problem, costs = random_problem(seed, tree=tree)
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
