"""A copy of the process that finds out what a stage search will ask next, while the search does what cannot be shared:
solve ranges of layers, simulate, write plans out, price presets.

It goes through the numbers of microbatches that are left, as the search would if it found nothing better, and sends
what parts of the program cost. What it does in vain costs nothing but a processor that had nothing to do.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from ..ahead import Ahead
from ..errors import PlanError
from .part_rows import KnownParts
from .shared_work import estimates_found

if TYPE_CHECKING:
    from .pipeline import StageSearch

# Where no plan is known, the best probably takes no more than so many times what any takes at least.
_PROBABLY = 1.3

# How often the copy sends what it has found out.
_SEND_SECONDS = 0.2


class Scout:
    """There is a copy while it is out, one at a time. Use as a context: at its end there is none.

    Args:
      goes: whether it may be sent out.
    """

    def __init__(self, *, goes: bool = True) -> None:
        self._goes = goes
        self._seen: frozenset[int] = frozenset()
        self._copy: Ahead | None = None
        # In memory that both processes see: what `tell` says, and the number of microbatches that the copy looks at.
        self._best = memoryview(mmap.mmap(-1, 3 * 8)).cast("d")
        self.tell(0, inf)
        self._learn: Callable[[Mapping[int, KnownParts]], None] = lambda found: None

    def __enter__(self) -> Scout:
        return self

    def __exit__(self, *error: object) -> None:
        if self._copy is not None:
            self._copy.end()
        self._copy = None

    def send(
        self, search: StageSearch, counts: Iterable[int], near: int | None = None, best_seconds: float = inf
    ) -> None:
        """Send it out, or if it is out, tell it the news; one that has been overtaken is sent out again.

        Args:
          search: of stages.
          counts: numbers of microbatches that it may ask for.
          near: as of `tell`.
          best_seconds: as of `tell`; infinite if nothing is known.
        """
        left, best = list(counts), self._best
        known = best_seconds <= best[1] and self._seen.issuperset(left)  # or the last one came to nothing
        self.tell(near or 0, best_seconds)
        at_work = self._copy is not None and self._copy.at_work
        overtaken = at_work and best[2] > 0 and best[2] not in left
        goes = overtaken or not (known or at_work)
        if not self._goes or not left or not goes or search.costs.base is None:
            return
        self.recall()
        best[2] = 0
        self._seen = frozenset(left)
        self._copy = Ahead(lambda tell: _look_ahead(search, left, best, tell))
        self._learn = search.costs.learn

    def tell(self, near: int, best_seconds: float) -> None:
        """Tell it what is expected of the best plan by now.

        Args:
          near: its number of microbatches.
          best_seconds: what it counts for.
        """
        self._best[1] = best_seconds
        self._best[0] = near  # last: it may be read between the two, and says whether anything is known

    def listen(self) -> None:
        """Let the search take over what has been found out so far."""
        for found in self._copy.heard() if self._copy is not None else ():
            self._learn(found)

    def recall(self) -> None:
        """The same; then there is no copy."""
        self.listen()
        if self._copy is not None and self._copy.at_work:
            self._seen = frozenset()
        self.__exit__()


def _look_ahead(search: StageSearch, left: list[int], best: memoryview[float], tell: Callable[[Any], None]) -> None:
    """What the copy does; the search is its own."""
    costs, bounds, parent = search.costs, search.bounds, os.getppid()
    since, sent = costs.known_parts, time.perf_counter()

    def tell_in_time(after_seconds: float = _SEND_SECONDS) -> bool:
        nonlocal since, sent
        if time.perf_counter() - sent > after_seconds:
            if os.getppid() != parent:
                raise SystemExit  # nobody is left to hear
            if found := costs.known(since):
                tell(found)
            since, sent = costs.known_parts, time.perf_counter()
        return False

    costs.late = tell_in_time  # asked before anything is found out of a part
    expected = dict.fromkeys(left, bounds.floor)
    guess, seconds, _ = best
    if guess:
        bounds.searched.add(round(guess))  # if not to the end: it bounds those of more microbatches best
    else:
        assert costs.base is not None
        for place in search.places:
            costs.base.least(place)
        least = inf
        for count in sorted(left, reverse=True):
            expected[count] = bounds.of(count, _PROBABLY * least)
            least = min(least, expected[count])
        seconds = _PROBABLY * least
        guess = bounds.promising(left, expected, seconds, None, first=True)
    while left:
        near, seconds, _ = best if best[0] else (guess, seconds, 0.0)
        search.best_objective = seconds
        count = min(left, key=lambda n: (expected[n] > seconds, max(n / near, near / n), -n))
        left.remove(count)
        best[2] = count
        if expected[count] <= search.worth_searching:
            expected[count] = max(bounds.of(count, seconds), bounds.with_split(count, seconds))
        if expected[count] <= search.worth_searching:
            try:
                made = costs(count)
            except PlanError:
                continue  # the step cannot be cut so
            expected[count] = max(expected[count], bounds.closer(made, seconds, search.worth_a_look))
            for problem in search.problems_of(count, made) if expected[count] <= search.worth_searching else ():
                search.bound(made, problem)
                estimates_found(problem, made)
            bounds.searched.add(count)
        tell_in_time(0.0)
