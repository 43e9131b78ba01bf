"""What may yet be better than the best plan that is known."""

from __future__ import annotations

import pytest

from meshwright.search.best_known import BestKnown, handicap


@pytest.mark.parametrize(("microbatches", "most"), [(1, 105.0), (31, 105.0), (32, 101.0), (1024, 101.0)])
def test_of_many_microbatches_less_is_worth_a_look(microbatches: int, most: float) -> None:
    """The ends of a pipeline, which the objective counts twice, are a smaller share of a longer step."""
    best = BestKnown(100.0)
    assert best.worth_a_look(microbatches) == pytest.approx(most)
    several, alone = best.worth("one_f_one_b", microbatches)
    assert several == pytest.approx(most)
    assert alone == pytest.approx(100.0)
    assert best.worth("zero_bubble", microbatches)[0] == pytest.approx(most / handicap("zero_bubble"))


def test_a_simulation_bounds_plans_of_one_stage_too() -> None:
    best = BestKnown(100.0)
    best.simulate(90.0)
    several, alone = best.worth("one_f_one_b", 4)
    assert several == pytest.approx(1.05 * 90.0)
    assert alone == pytest.approx(90.0)
