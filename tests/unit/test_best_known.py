"""What may yet be better than the best plan that is known."""

from __future__ import annotations

from math import isinf

import pytest

from meshwright.search.best_known import BestKnown, bounds, handicap
from meshwright.search.inter.problem import ORDERS, Order


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_estimated_may_be_less_and_what_is_bounded_not(order: Order) -> None:
    best = BestKnown(100.0)
    assert best.worth(order) == pytest.approx((1.0 if bounds(order) else 1.1) * 100.0 / handicap(order))


def test_until_a_plan_is_simulated_the_best_that_is_solved_stands_for_it() -> None:
    best = BestKnown(float("inf"))
    assert isinf(best.worth("adaptive"))
    best.estimate(80.0)
    assert best.worth("adaptive") == pytest.approx(1.1 * 80.0)
    best.simulate(90.0)
    assert best.seconds == 90.0
    assert best.worth("adaptive") == pytest.approx(90.0)
    best.simulate(95.0)
    assert best.seconds == 90.0
