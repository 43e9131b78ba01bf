"""A time that was measured several times: the median, and between which times it lies with 95 % confidence.

The interval comes from the order of the values alone (the binomial distribution of how many lie below the median), so
nothing is assumed of their distribution, and a few runs that something else disturbed do not move it. With fewer than
six values no pair of them is that sure; the interval is then all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import comb

_MISSED = Fraction(1, 40)  # on either side


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds of one thing.

    Args:
      seconds: the median.
      low: it is at least this, with 95 % confidence.
      high: and at most this.
      runs: how often it was measured.
    """

    seconds: float
    low: float
    high: float
    runs: int

    @property
    def spread(self) -> float:
        """Half of the interval's width as a share of the median."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds > 0 else float("inf")


def sample_of(seconds: Sequence[float]) -> Sample:
    """What several measurements of one thing say.

    >>> sample_of([3.0, 1.0, 2.0, 90.0, 2.5])
    Sample(seconds=2.5, low=1.0, high=90.0, runs=5)
    """
    ordered = sorted(seconds)
    n = len(ordered)
    # The largest number of values that can be left out at each end.
    ways = accumulate(comb(n, k) for k in range(n + 1))
    below = next(k for k, sum_ in enumerate(ways) if sum_ >= _MISSED * 2**n)
    left = max(below - 1, 0)
    return Sample(seconds=statistics.median(ordered), low=ordered[left], high=ordered[n - 1 - left], runs=n)
