"""A problem says clearly what it refuses, and adds up correctly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from meshwright.solve import Problem, Solution


def test_objective_and_memory_add_up() -> None:
    problem = Problem(
        costs=([1.0, 2.0], [4.0, 8.0]),
        edges={(0, 1): [[16.0, 32.0], [64.0, math.inf]]},
        memory=([1.0, 10.0], [100.0, 1000.0]),
        memory_limit=1010.0,
    )
    assert problem.objective((0, 1)) == 1.0 + 8.0 + 32.0
    assert problem.memory_of((0, 1)) == 1001.0
    assert problem.objective((1, 1)) == math.inf
    assert problem.sizes == (2, 2)
    assert problem.limited
    assert problem.fits(1010.0)
    assert not problem.fits(1010.0001)


def test_numbers_are_copied_and_read_only() -> None:
    mine = np.array([1.0, 2.0])
    problem = Problem(costs=(mine,))
    mine[0] = 7.0
    assert problem.objective((0,)) == 1.0
    with pytest.raises(ValueError, match="read-only"):
        problem.costs[0][0] = 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": ([],)}, r"costs\[0\] of shape \(0,\)"),
        ({"costs": ([[1.0]],)}, r"costs\[0\] of shape \(1, 1\)"),
        ({"costs": ([1.0], [math.nan])}, r"costs\[1\] with NaN or a negative"),
        ({"costs": ([-1.0],)}, r"costs\[0\] with NaN or a negative"),
        ({"costs": ([0.0], [0.0]), "edges": {(1, 0): [[0.0]]}}, r"edge \(1, 0\); needed \(u, v\) with 0 <= u < v < 2"),
        ({"costs": ([0.0], [0.0]), "edges": {(0, 2): [[0.0]]}}, r"edge \(0, 2\)"),
        ({"costs": ([0.0, 0.0], [0.0]), "edges": {(0, 1): [[0.0, 0.0]]}}, r"shape \(1, 2\); needed shape \(2, 1\)"),
        ({"costs": ([0.0], [0.0]), "edges": {(0, 1): [[math.nan]]}}, r"edges\[\(0, 1\)\] with NaN"),
        ({"costs": ([0.0],), "memory": ([math.inf],)}, r"memory\[0\] with an infinite"),
        ({"costs": ([0.0],), "memory": ([0.0, 0.0],)}, r"memory\[0\] of shape \(2,\); needed shape \(1,\)"),
        ({"costs": ([0.0],), "memory": ()}, "memory for 0 nodes; needed 1"),
        ({"costs": ([0.0],), "memory_limit": -1.0}, "memory_limit -1.0"),
        ({"costs": ([0.0],), "memory_limit": math.nan}, "memory_limit nan"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(**arguments)


@pytest.mark.parametrize(
    ("choices", "message"), [((0,), "1 choices; needed 2"), ((0, 2), "choice 2 of node 1"), ((-1, 0), "choice -1")]
)
def test_refused_choices(choices: tuple[int, ...], message: str) -> None:
    problem = Problem(costs=([0.0, 0.0], [0.0, 0.0]))
    with pytest.raises(ValueError, match=message):
        problem.objective(choices)
    with pytest.raises(ValueError, match=message):
        problem.memory_of(choices)


def test_gap() -> None:
    common: dict[str, Any] = {"choices": (), "memory": 0.0, "method": "m", "proven": True, "seconds": 0.0}
    assert Solution(objective=4.0, lower_bound=3.0, **common).gap == 0.25
    assert Solution(objective=0.0, lower_bound=0.0, **common).gap == 0.0
