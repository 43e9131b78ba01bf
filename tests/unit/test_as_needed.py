"""Estimates made as plans need them: the same plan as with all of them, and fewer are made."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.search.as_needed import AsNeeded
from meshwright.search.inter_op import least_seconds, solve_inter_op
from meshwright.search.inter_op_problem import InterOpProblem, Option
from meshwright.search.submeshes import Submesh

LAYERS, DEVICES = 5, 4
PLACES = [Submesh(first, first + size) for size in (1, 2, 4) for first in range(0, DEVICES, size)]


class BySize:
    """Submeshes of a size cost the same."""

    meshes = ((None,),) * 3

    def __getitem__(self, submesh: Submesh) -> int:
        return submesh.size.bit_length() - 1


KINDS = BySize()


def level(
    rng: np.random.Generator, loose: float, truth: np.ndarray | None = None
) -> tuple[Any, Any, np.ndarray, set[int]]:
    """A problem with its costs, its seconds by kind, first and last layer, and the kinds of which estimates were asked.
    What it knows without estimates is lower by a factor of `loose` to 1."""
    shape = (3, LAYERS + 1, LAYERS + 1)
    seconds = truth if truth is not None else rng.uniform(0.5, 2.0, shape) * np.arange(1, 4)[::-1, None, None]
    seconds = np.where(np.triu(np.ones(shape[1:], dtype=bool), 1), seconds, inf)
    least = seconds * rng.uniform(loose, 1.0, shape)
    asked: set[int] = set()

    def options(first: int, last: int, submesh: Submesh, in_flight: int) -> tuple[Option, ...]:
        """Two, of which one is faster forward and slower in all."""
        del in_flight
        taken = float(seconds[KINDS[submesh], first, last])
        ways = ((taken / 2, taken / 2), (taken / 3, 0.7 * taken))
        return tuple(Option(forward_seconds=f, backward_seconds=b, weight_seconds=b / 2) for f, b in ways)

    def fastest(submesh: Submesh, in_flight: Any) -> tuple[np.ndarray, np.ndarray]:
        asked.add(KINDS[submesh])
        both = np.broadcast_to(seconds[KINDS[submesh]], (len(in_flight), *shape[1:]))
        return both, both / 3

    problem = InterOpProblem(
        layers=LAYERS, devices=DEVICES, submeshes=PLACES, options=options, crossings=(), microbatches=8,
        transfer_seconds=lambda source, target, size: 0.0, limit_bytes=lambda submesh, last: inf,
        least=lambda submesh: (least[KINDS[submesh]], least[KINDS[submesh]] / 3), fastest=fastest,
    )  # fmt: skip
    costs = SimpleNamespace(
        program=SimpleNamespace(microbatches=8), solver=SimpleNamespace(kind_of=KINDS), used={},
        check=lambda: None,
        may_fit=lambda submesh, in_flight, share: np.ones((len(in_flight), 1, 1), dtype=bool),
    )  # fmt: skip
    return problem, costs, seconds, asked


@pytest.mark.parametrize("order", ["one_f_one_b", "eager_one_f_one_b", "zero_bubble"])
def test_the_plan_is_the_best_under_all_estimates_and_not_all_are_made(order: Any) -> None:
    rng, made = np.random.default_rng(0), 0
    for _ in range(40):
        problem, costs, _, asked = level(rng, 0.9)
        problem = replace(problem, order=order)
        expected = solve_inter_op(problem)
        asked.clear()
        found = AsNeeded((problem, costs)).solved(beam=1 << 10)
        assert expected is not None
        assert found is not None
        assert found.seconds == pytest.approx(expected.seconds)
        used = {KINDS[stage.submesh] for stage in found.stages}
        assert used <= asked
        assert used <= costs.used[order]
        made += len(asked)
        again = AsNeeded((problem, costs))
        again.find_used()
        asked.clear()
        assert again.solved(beam=1 << 10) == found
        assert asked <= costs.used[order]
    assert made < 3 * 40


def test_what_fewer_microbatches_say_comes_before_estimates_and_changes_no_plan() -> None:
    rng, coarse_made, made = np.random.default_rng(1), 0, 0
    for _ in range(40):
        problem, costs, seconds, asked = level(rng, 0.5)
        coarser, coarse_costs, _, coarse_asked = level(rng, 0.5, seconds * rng.uniform(0.8, 1.0))
        expected = solve_inter_op(problem)
        asked.clear()
        found = AsNeeded((coarser, coarse_costs), (problem, costs)).solved(beam=1 << 10)
        assert expected is not None
        assert found is not None
        assert found.seconds == pytest.approx(expected.seconds)
        assert asked <= coarse_asked
        coarse_made, made = coarse_made + len(coarse_asked), made + len(asked)
    assert made < coarse_made


def test_nothing_within_the_bound_is_nothing() -> None:
    problem, costs, _, _ = level(np.random.default_rng(2), 0.9)
    best = AsNeeded((problem, costs)).solved(beam=1 << 10)
    assert best is not None
    assert AsNeeded((problem, costs)).solved(beam=1 << 10, upper_bound=0.99 * best.seconds) is None


def test_gpipe_is_estimated_where_bounds_leave_hope() -> None:
    rng, spared = np.random.default_rng(3), 0
    for _ in range(40):
        problem, costs, _, asked = level(rng, 0.9)
        problem = replace(problem, order="gpipe")
        expected = solve_inter_op(problem)
        assert expected is not None
        assert least_seconds(problem) <= expected.seconds * (1 + 1e-12)
        for share in (0.5, 0.97, 1.0 + 1e-9):
            asked.clear()
            found = AsNeeded((problem, costs)).solved(beam=1 << 10, upper_bound=share * expected.seconds)
            assert (found is not None) == (share > 1)
            assert found is None or found.seconds == pytest.approx(expected.seconds)
            spared += not asked
    assert 40 <= spared < 80
