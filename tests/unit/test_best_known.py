"""What may yet be better than the best plan that is known."""

from __future__ import annotations

from math import isinf

import pytest

from meshwright.search.best_known import BestKnown, bounds, handicap
from meshwright.search.inter.problem import ORDERS, Order


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("microbatches", "slack"), [(1, 1.05), (31, 1.05), (32, 1.01), (1024, 1.01)])
def test_what_is_estimated_may_be_less_and_what_is_bounded_not(order: Order, microbatches: int, slack: float) -> None:
    """The ends of a pipeline, which an estimate counts twice, are a smaller share of a longer step."""
    best = BestKnown(100.0)
    several, alone = best.worth(order, microbatches)
    assert several == pytest.approx((1.0 if bounds(order) else slack) * 100.0 / handicap(order))
    assert alone == pytest.approx(min(several, 100.0))


def test_until_a_plan_is_simulated_the_best_that_is_solved_stands_for_it() -> None:
    best = BestKnown(float("inf"))
    assert isinf(best.worth("adaptive", 4)[0])
    best.estimate(80.0)
    assert best.worth("adaptive", 4)[0] == pytest.approx(1.05 * 80.0)
    best.simulate(90.0)
    assert best.seconds == 90.0
    assert best.worth("adaptive", 4) == (pytest.approx(90.0), pytest.approx(90.0))
    best.simulate(95.0)
    assert best.seconds == 90.0
