"""What the best plan so far counts for, and what may yet be better."""

from __future__ import annotations

from math import inf

from ..schedule import WORTH_SPLITTING
from .inter.problem import Order

# Plans of several stages whose objective is this much longer than the best may still be the best simulated: the sum of
# all stages and the period count some of the same seconds twice, a smaller share where microbatches are many, and a
# schedule may hide what a period has of transfers. Nothing proves that this is enough: of many microbatches the plans
# of `benchmarks/planning_time.py` are the same by either, and by 2 %. Of a plan of one stage the two are the same.
_WORTH_SIMULATING, _WORTH_SIMULATING_OF_MANY, _MANY = 1.05, 1.01, 32

# A number of microbatches is not searched for less than this share of the best plan's seconds; the gap says so.
_NOT_WORTH_SEARCHING = 0.005


class BestKnown:
    """What is known of the best plan.

    Args:
      seconds: that it counts for at most; infinite where nothing is known.

    Attributes:
      objective: its seconds, by the objective of the search or by simulation.
      simulated: by simulation alone.
    """

    def __init__(self, seconds: float) -> None:
        self.objective = self.simulated = seconds

    def simulate(self, seconds: float) -> None:
        """A plan counts for so much, by simulation."""
        self.objective, self.simulated = min(self.objective, seconds), min(self.simulated, seconds)

    def worth_a_look(self, microbatches: int) -> float:
        """Objectives of plans in so many microbatches up to this may be those of the best simulated plan."""
        return self.objective * (_WORTH_SIMULATING if microbatches < _MANY else _WORTH_SIMULATING_OF_MANY)

    @property
    def worth_simulating(self) -> float:
        """Finished plans beyond this are not simulated: a plan has been, and `objective` may be less than its own by as
        much as another plan's may be more."""
        return self.objective * _WORTH_SIMULATING**2

    @property
    def worth_searching(self) -> float:
        """Numbers of microbatches that take no more at least may have a plan that is faster by enough."""
        return (1 - _NOT_WORTH_SEARCHING) * self.objective

    def worth(self, order: Order, microbatches: int) -> tuple[float, float]:
        """Objectives of plans in an order and so many microbatches up to this may be the best: of several stages, and
        of one."""
        most = self.worth_a_look(microbatches) / handicap(order)
        return most, min(most, self.simulated * (1 + 1e-9))


def gap_of(seconds: float, least_seconds: float) -> float:
    """How much less than a plan others take at most, as a share of its seconds; infinite where nothing is known of
    them.

    >>> gap_of(10.0, 7.5), gap_of(10.0, 12.0), gap_of(10.0, 0.0)
    (0.25, 0.0, inf)

    Args:
      seconds: of the plan.
      least_seconds: that all others take at least; 0 where nothing is known.
    """
    if seconds <= 0:
        return 0.0
    return max(1 - least_seconds / seconds, 0.0) if least_seconds > 0 else inf


def handicap(order: Order) -> float:
    """What the seconds of plans in an order count for beside others: a split backward has to be worth it."""
    return 1 + WORTH_SPLITTING if order == "zero_bubble" else 1.0
