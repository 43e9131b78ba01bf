"""What a search is: a function from a space and a budget to better and better choices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Protocol

import numpy as np

from ...errors import PlanError
from ..space.choice import Choice
from ..space.space import Price, Space
from ..space.stages import SECONDS_PER_SOLVE

# What the integer program has at least, so that a plan is found at all.
_LEAST_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found so far.

    Args:
      seconds: of the simulated step of the choice.
      lower_bound: no choice of the space takes less; 0 where nothing is known. Seconds.
      choice: fits memory.
    """

    seconds: float
    lower_bound: float
    choice: Choice

    @property
    def gap(self) -> float:
        """How much of its seconds other choices may save at most, as a share."""
        return max(1 - self.lower_bound / self.seconds, 0.0) if self.seconds > 0 else 0.0


def too_large(search: str, got: str, most: int) -> PlanError:
    """The refusal of a space that is too large for a search method."""
    return PlanError(
        refused=f"the search method {search}", got=got, needed=f"at most {most}", where="method=",
        try_="another method, or a smaller program on fewer devices",
    )  # fmt: skip


class Search(Protocol):
    """A search method. `run` raises PlanError where the method does not apply to a space, saying why.

    Attributes:
      name: as the user calls it.
      paper: the publication that the method is from.
      exact: whether its lower bound reaches its best choice, up to the space's gap, given time enough, where plans have
        one stage. (Of several stages no method but `exhaustive` has such a bound.)
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    exact: ClassVar[bool]

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """Anytime: each that is found is faster than the one before it, or proves more. The same seed and the same
        number of evaluations give the same choices."""
        ...


class Budget:
    """What a run may use, and where its random numbers are from.

    >>> budget = Budget(seconds=10.0, clock=iter([0.0, 4.0, 11.0]).__next__)
    >>> budget.over, budget.over
    (False, True)

    Args:
      seconds: from now on.
      evaluations: the most choices to price; infinite for as many as there is time for.
      seed: of the random numbers.
      clock: in seconds.

    Attributes:
      rng: random numbers.
      evaluations: choices priced so far.
    """

    def __init__(
        self, *, seconds: float = inf, evaluations: float = inf, seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._clock, self.seconds, self._most = clock, seconds, evaluations
        self._begun = clock()
        self.rng = np.random.default_rng(seed)
        self.evaluations = 0

    @property
    def spent_seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self._begun

    @property
    def left_seconds(self) -> float:
        """Negative once the time is over."""
        return self.seconds - self.spent_seconds

    @property
    def over(self) -> bool:
        """Whether the run has to end."""
        return self.evaluations >= self._most or self.left_seconds <= 0

    def price(self, space: Space, choice: Choice) -> Price:
        """The price of a choice, which counts as an evaluation; open layouts are solved in the time that is left."""
        self.evaluations += 1
        return space.price(choice, time_limit_seconds=max(min(self.left_seconds, SECONDS_PER_SOLVE), _LEAST_SECONDS))


class Incumbent:
    """The best choice so far, and what is proven; from the beginning a lower bound in seconds."""

    def __init__(self, lower_bound: float = 0.0) -> None:
        self.lower_bound, self.seconds = lower_bound, inf
        self.choice: Choice | None = None

    def offer(self, choice: Choice, price: Price) -> Iterator[Found]:
        """Record a choice if it fits and is faster than the incumbent; yields one `Found` then."""
        if price.fits and price.seconds < self.seconds:
            self.choice, self.seconds = choice, price.seconds
            yield self._found(choice)

    def prove(self, lower_bound: float) -> Iterator[Found]:
        """Record a lower bound if it is closer; yields one `Found` then, if there is an incumbent."""
        if lower_bound > self.lower_bound:
            self.lower_bound = lower_bound
            if self.choice is not None:
                yield self._found(self.choice)

    def _found(self, choice: Choice) -> Found:
        return Found(seconds=self.seconds, lower_bound=min(self.lower_bound, self.seconds), choice=choice)
