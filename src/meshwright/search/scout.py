"""A copy of the process that finds out what a stage search will ask next, while the search does what cannot be shared:
solve ranges of layers, simulate, write plans out, price presets.

It goes through the numbers of microbatches that are left, as the search would if it found nothing better, and sends
what parts of the program cost. What it does in vain costs nothing but a processor that had nothing to do.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

from ..ahead import Ahead
from ..errors import PlanError
from .part_rows import OutOfTime

if TYPE_CHECKING:
    from ..plan import Plan
    from ..program.staged import StagedProgram
    from .candidate import Candidate
    from .inter_op_problem import InterOpProblem
    from .pipeline import StageSearch
    from .stage_costs import StageCosts

# Where no plan is known, the best probably takes no more than so many times what any takes at least.
_PROBABLY = 1.3

# In place of the number that the copy looks at: it has come to its end, and has not looked at all.
_LEFT_SOME = -1.0

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
        self._sent = inf
        self._copy: Ahead | None = None
        # In memory that both processes see: what `tell` says, the number of microbatches that the copy looks at, and
        # the one that the search does.
        self._told = memoryview(mmap.mmap(-1, 4 * 8)).cast("d")
        self.tell(inf)
        self._learn: Callable[[Any], None] = lambda found: None
        self._write: Callable[[Plan, StagedProgram, Callable[[Any], None]], None] | None = None
        self._learn_written: Callable[[Any], None] = lambda found: None
        self._written: Candidate | None = None

    def __enter__(self) -> Scout:
        return self

    def __exit__(self, *error: object) -> None:
        if self._copy is not None:
            self._copy.end()
        self._copy = None

    @property
    def _at_work(self) -> bool:
        return self._copy is not None and self._copy.at_work

    def send(self, search: StageSearch, counts: Iterable[int]) -> None:
        """Send it out, if it is not; one that has been overtaken is sent out again.

        Args:
          search: of stages.
          counts: numbers of microbatches that it may ask for.
        """
        left, told = list(counts), self._told
        known = told[1] <= self._sent and self._seen.issuperset(left)  # or the last one came to nothing
        known = known and told[2] != _LEFT_SOME
        overtaken = self._at_work and told[2] > 0 and told[2] not in (*left, self._at)
        goes = overtaken or not (known or self._at_work)
        if known:
            self.write_out(search)
        if not self._goes or not left or not goes or search.costs.base is None:
            return
        self.recall()
        told[2] = 0
        self._seen, self._sent = frozenset(left), told[1]
        self._copy = Ahead(lambda tell: _look_ahead(search, left, told, tell))
        self._learn = search.costs.learn

    def writes(
        self, write: Callable[[Plan, StagedProgram, Callable[[Any], None]], None], learn: Callable[[Any], None]
    ) -> None:
        """What to do with the best plan so far when there is nothing else to do.

        Args:
          write: what the copy does with a plan and its program; it is given a function that sends something.
          learn: called with what was sent.
        """
        self._write, self._learn_written = write, learn

    def write_out(self, search: StageSearch, *, now: bool = False) -> None:
        """Let a copy write out the best plan so far, if there is none at work.

        Args:
          search: of stages.
          now: whether there is nothing left to look at: a copy that does is recalled.
        """
        best, write = search.best_candidate, self._write
        if not self._goes or write is None or best is None or best is self._written or (self._at_work and not now):
            return

        def work(tell: Callable[[Any], None]) -> None:
            plan = search.merged(best)
            if plan is not None:
                write(plan.plan(0.0), plan.costs.program, tell)

        self.recall()
        self._written, self._told[2] = best, 0
        self._copy, self._learn = Ahead(work), self._learn_written

    def catch_up(self) -> None:
        """The search has to find out something itself: a copy at the same number leaves the rest of it to the search,
        and goes on with the next."""
        self._told[3] = self._at

    def tell(self, best_seconds: float, near: int | None = None, at: int = 0) -> None:
        """Tell it what is known by now.

        Args:
          best_seconds: what is expected that the best plan counts for.
          near: the number of microbatches around which to look, that of the best plan; None where none is known.
          at: the number that the search looks at; 0 for none.
        """
        self._at = at
        self._told[1] = best_seconds
        self._told[0] = near or 0

    def listen(self) -> None:
        """Let the search take over what has been found out so far."""
        for found in self._copy.heard() if self._copy is not None else ():
            self._learn(found)

    def recall(self) -> None:
        """The same; then there is no copy."""
        self.listen()
        if self._at_work:
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
        return 0 < best[2] == best[3]

    costs.late = tell_in_time  # asked before anything is found out of a part
    expected = dict.fromkeys(left, bounds.floor)
    guess, probably = best[0], best[1]
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
        probably = _PROBABLY * least
        guess = bounds.promising(left, expected, probably, None, first=True)

    asked: dict[int, float] = {}
    last: list[tuple[int, StageCosts, InterOpProblem]] = []

    def is_slower(count: int) -> bool:
        """Whether a number takes too long, by what is known now: a better plan may have been found meanwhile."""
        seconds = search.best_objective = min(best[1], probably)
        if expected[count] <= search.worth_searching and seconds < asked.get(count, inf):
            asked[count] = seconds
            expected[count] = max(expected[count], bounds.of(count, seconds), bounds.with_split(count, seconds))
        return expected[count] > search.worth_searching

    def look_at(count: int) -> None:
        """Find out what the search would ask of a number.

        Raises:
          PlanError: if the step cannot be cut so.
          OutOfTime: if the search has caught up.
        """
        if is_slower(count):
            return
        made = costs(count)
        expected[count] = max(expected[count], bounds.closer(made, search.best_objective, search.worth_a_look))
        for problem in search.problems_of(count, made):
            if problem.order == "gpipe":
                last.append((count, made, problem))  # there is much to find out, and little hope
            elif not is_slower(count):
                search.look(made, problem)
        bounds.searched.add(count)

    def waits(count: int) -> bool:
        """Whether a number is bounded by what the search finds out now."""
        return 0 < best[3] < count and not any(best[3] < one <= count for one in bounds.searched)

    def order(count: int) -> tuple[bool, bool, float, int]:
        near = best[0] or guess
        return expected[count] > search.best_objective, waits(count), max(count / near, near / count), -count

    while left:
        count = min(left, key=order)
        if waits(count):
            best[2] = _LEFT_SOME
            return  # who is sent out then knows more
        left.remove(count)
        best[2] = count
        if count != best[3]:
            with suppress(PlanError, OutOfTime):
                look_at(count)
            tell_in_time(0.0)
    for count, made, problem in last:
        best[2] = count
        with suppress(OutOfTime):
            if not is_slower(count):
                search.look(made, problem)
        tell_in_time(0.0)
