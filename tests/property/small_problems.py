"""Problems small enough for brute force: a few nodes, of any density, some choices and pairs forbidden."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.solve import Problem

# Whole seconds of a shape, some of them infinite.
Numbers = Callable[[tuple[int, ...]], np.ndarray]


def small_problem(seed: int, *, tree: bool = False) -> tuple[Problem, Numbers, np.random.Generator]:
    """A problem, how its numbers were drawn, and what they were drawn from, for more of them; or one without cycles."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 7)))]
    forbidden, density = float(rng.choice([0.0, 0.1, 0.3])), float(rng.choice([0.2, 0.5, 0.9]))

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        return np.where(rng.random(shape) < forbidden, np.inf, rng.integers(0, 6, shape).astype(float))

    pairs = [(u, v) for v in range(len(sizes)) for u in range(v) if rng.random() < density]
    if tree:
        pairs = [(int(rng.integers(0, v)), v) for v in range(1, len(sizes)) if rng.random() < density]
    costs = tuple(numbers((k,)) for k in sizes)
    problem = Problem(costs=costs, edges={(u, v): numbers((sizes[u], sizes[v])) for u, v in pairs})
    return problem, numbers, rng
