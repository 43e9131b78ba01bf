"""The incumbent of a stage search, and the thresholds that follow from it."""

from __future__ import annotations

from math import inf, isfinite

from ..schedule import WORTH_SPLITTING
from .inter.problem import Order

# The objective of eager 1F1B may be this many times the simulated step, since it counts some seconds of unlike stages
# twice (`inter.dynamic_program`); and until a plan is simulated, its step may be so many times its objective. Measured
# on 498 generated requests: 1.0 makes four plans slower, by up to 16 %, and 1.25 three faster, by up to 3 %. Nine plans
# of the zoo take 5 % more CPU time with 1.1 than with 1.05, and 14 % more with 1.25.
_OBJECTIVE_SLACK = 1.1

# A number of microbatches is not searched for less than this share of the best plan's seconds; the gap says so.
# (wresnet-13b on 64 V100: planned in 32 s instead of 38, with a gap of 0.4 % instead of none.)
_NOT_WORTH_SEARCHING = 0.005


class BestKnown:
    """The penalised seconds of the incumbent.

    Args:
      seconds: of it at most; infinite where nothing is known.

    Attributes:
      simulated: what it counts for.
      estimated: what the best plan that is solved counts for at least; it stands for the other until there is one.
    """

    def __init__(self, seconds: float) -> None:
        self.simulated, self.estimated = seconds, inf

    def estimate(self, seconds: float) -> None:
        """Record the objective of a solved plan, in penalised seconds."""
        self.estimated = min(self.estimated, seconds)

    def simulate(self, seconds: float) -> None:
        """Record the simulated step of a plan, in penalised seconds."""
        self.simulated = min(self.simulated, seconds)

    @property
    def seconds(self) -> float:
        """Penalised seconds of the incumbent: simulated, or by its objective before anything has been simulated."""
        return self.simulated if isfinite(self.simulated) else self.estimated

    @property
    def worth_searching(self) -> float:
        """The threshold for numbers of microbatches: one with a larger lower bound is not searched."""
        return (1 - _NOT_WORTH_SEARCHING) * self.seconds

    def worth(self, order: Order) -> float:
        """The threshold for plans in an order: one with a larger objective cannot be the best."""
        slack = 1.0 if bounds(order) and isfinite(self.simulated) else _OBJECTIVE_SLACK
        return slack * self.seconds / handicap(order)


def bounds(order: Order) -> bool:
    """Whether no plan takes less than its objective in an order."""
    return order != "eager_one_f_one_b"


def gap_of(seconds: float, least_seconds: float) -> float:
    """The optimality gap: the share of a plan's seconds that others, which take `least_seconds`, may save at most;
    infinite where there is no bound (0).

    >>> gap_of(10.0, 7.5), gap_of(10.0, 12.0), gap_of(10.0, 0.0)
    (0.25, 0.0, inf)
    """
    if seconds <= 0:
        return 0.0
    return max(1 - least_seconds / seconds, 0.0) if least_seconds > 0 else inf


def handicap(order: Order) -> float:
    """The factor by which the seconds of an order are penalised: a split backward has to be worth it."""
    return 1 + WORTH_SPLITTING if order == "zero_bubble" else 1.0
