"""A time that was measured several times: a quantile of it, and between which times that lies with 95 % confidence.

The interval comes from the order of the values alone (the binomial distribution of how many lie below the quantile), so
nothing is assumed of their distribution, and a few runs that something else disturbed do not move it. With few values
(under six for a median, thirteen for a quartile) no pair of them is that sure; the interval then ends with the first or
the last of them.
"""

from __future__ import annotations

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
      seconds: the quantile.
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
        """Half of the interval's width as a share of the time."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds > 0 else float("inf")


def sample_of(seconds: Sequence[float], quantile: Fraction = Fraction(1, 2)) -> Sample:
    """What several measurements of one thing say.

    >>> sample_of([3.0, 1.0, 2.0, 90.0, 2.5])
    Sample(seconds=2.5, low=1.0, high=90.0, runs=5)

    Args:
      seconds: at least one.
      quantile: which is asked for, between 0 and 1; the median if not given.
    """
    ordered = sorted(seconds)
    n = len(ordered)
    at = quantile * (n - 1)
    below = int(at)
    value = ordered[below] + float(at - below) * (ordered[min(below + 1, n - 1)] - ordered[below])
    # How likely it is that at most so many values lie below the quantile.
    ways = accumulate(comb(n, k) * quantile**k * (1 - quantile) ** (n - k) for k in range(n + 1))
    sure = list(ways)
    low = next(k for k in range(n + 1) if sure[k] >= _MISSED) - 1
    high = next(k for k in range(n + 1) if 1 - sure[k] <= _MISSED)
    return Sample(seconds=value, low=ordered[max(low, 0)], high=ordered[min(high, n - 1)], runs=n)
