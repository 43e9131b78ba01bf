"""What a copy of the process finds out ahead of a stage search: its own search, which goes the way of the other.

It goes through the numbers of microbatches that are left, as the search would if it found nothing better: bounds, the
program, closer bounds, the estimates with which a refinement begins. What it finds out of parts of the program it
sends, and what bounds say: a number that they rule out the other search need not even trace.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from math import inf, isfinite
from typing import TYPE_CHECKING

from ..errors import PlanError
from .microbatch_bounds import Answer, Question
from .part_rows import KnownParts, OutOfTime

if TYPE_CHECKING:
    from .inter_op_problem import InterOpProblem
    from .pipeline import StageSearch
    from .stage_costs import StageCosts

# What is found out of parts of the program, by microbatches, and what bounds say.
Found = tuple[Mapping[int, KnownParts], Mapping[Question, Answer]]

# Where no plan is known, the best probably takes no more than so many times what any takes at least.
_PROBABLY = 1.3

# How often the two tell each other what they have found out.
_SEND_SECONDS = 0.2

# A plan of this share of the seconds makes it worth asking anew whether a number is too slow.
_MUCH_BETTER = 0.98

# In place of the number that the copy looks at: it has come to its end before it had looked at all.
SOME_LEFT = -1


class News(ctypes.Structure):
    """What both processes see, numbers of microbatches 0 for none; made by `shared_news`.

    Attributes:
      best_seconds: what the best plan is expected to count for.
      near: the number around which to look, that of the best plan.
      at: the number that the search looks at.
      copy_at: the number that the copy looks at, or `SOME_LEFT`.
      search_at: the number of which the search finds out something itself: there the copy has nothing more to do.
    """

    best_seconds: float
    near: int
    at: int
    copy_at: int
    search_at: int
    _fields_ = (
        ("best_seconds", ctypes.c_double), ("near", ctypes.c_int64), ("at", ctypes.c_int64),
        ("copy_at", ctypes.c_int64), ("search_at", ctypes.c_int64),
    )  # fmt: skip


def shared_news() -> News:
    """In memory that this process and copies of it see."""
    news = News.from_buffer(mmap.mmap(-1, ctypes.sizeof(News)))
    news.best_seconds = inf
    return news


class Exchange:
    """What a search and a copy of it tell each other: what either has found out since the other heard of it last. It is
    the same in both, so that who has found it changes no plan.

    Args:
      search: this process's.
      send: tells the other something.
      heard: what the other has told.
    """

    def __init__(
        self, search: StageSearch, send: Callable[[Found], None], heard: Callable[[], Iterable[Found]]
    ) -> None:
        self._search, self._send, self._heard = search, send, heard
        self._told()

    def now(self) -> None:
        """Tell what is new, and learn what the other has found out."""
        costs, known = self._search.costs, self._search.bounds.answers
        parts, answers = costs.known(self._parts), dict(islice(known.items(), self._answers, None))
        if parts or answers:
            self._send((parts, answers))
        for found in self._heard():
            self._search.learn(found)
        self._told()

    def seldom(self) -> None:
        """The same, if some time has passed."""
        if time.perf_counter() - self._at > _SEND_SECONDS:
            self.now()

    def _told(self) -> None:
        self._parts, self._answers = self._search.costs.known_parts, len(self._search.bounds.answers)
        self._at = time.perf_counter()


class LookAhead:
    """What the copy does.

    Args:
      search: the copy's.
      counts: numbers of microbatches that the other search may ask for.
      news: from it, and for it.
      exchange: with the other search.
    """

    def __init__(self, search: StageSearch, counts: Iterable[int], news: News, exchange: Exchange) -> None:
        self._search, self._left, self._news, self._exchange = search, list(counts), news, exchange
        self._costs, self._bounds = search.costs, search.bounds
        self._parent = os.getppid()
        self._costs.late, self._costs.hear = self._breaks_off, exchange.seldom
        self._since = 0.0  # seconds of the best plan when the number at hand was begun with; a guess is not broken off
        self._expected = dict.fromkeys(self._left, self._bounds.floor)
        self._asked: dict[int, float] = {}  # of a number, the seconds of the best plan that its bound is for
        self._last: list[tuple[int, StageCosts, InterOpProblem]] = []
        # Of a number that has been looked at, the seconds of the best plan then; and whether it was slower at once.
        self._seen: dict[int, tuple[float, bool]] = {}
        self._guess, self._probably = news.near, inf
        if not self._guess:
            self._guess_best()

    @property
    def _best(self) -> float:
        """What the best plan is expected to count for, by what is known now."""
        return self._news.best_seconds if isfinite(self._news.best_seconds) else self._probably

    def _guess_best(self) -> None:
        """Where no plan is known: what bounds promise."""
        assert self._costs.base is not None
        for place in self._search.places:
            self._costs.base.least(place)
        least = inf
        for count in sorted(self._left, reverse=True):
            self._expected[count] = self._bounds.of(count, _PROBABLY * least)
            least = min(least, self._expected[count])
        self._probably = _PROBABLY * least
        self._guess = self._bounds.promising(self._left, self._expected, self._probably, None, first=True)

    def run(self) -> None:
        """Until nothing is left, or nothing but what another copy would know better."""
        while self._left:
            self._look_again()
            count = min(self._left, key=self._order)
            if self._waits(count):
                self._news.copy_at = SOME_LEFT
                return
            self._left.remove(count)
            if count != self._news.search_at:
                self._at(count, self._look)
        if self._best != self._news.best_seconds:
            self._news.copy_at = SOME_LEFT  # it went by a guess
            return
        for count, costs, problem in self._last:
            self._at(count, lambda count, costs=costs, problem=problem: self._search.look(costs, problem))

    def _order(self, count: int) -> tuple[bool, bool, float, int]:
        near = self._news.near or self._guess
        slower = self._expected.get(count, 0.0) > self._search.best.objective
        return slower, self._waits(count), max(count / near, near / count), -count

    def _waits(self, count: int) -> bool:
        """Whether the number that the search looks at now will bound another one."""
        at = self._news.at
        return 0 < at < count and not any(at <= one <= count for one in self._bounds.searched)

    def _at(self, count: int, find: Callable[[int], None]) -> None:
        """Find out something of a number, unless it is too slow, and send it."""
        self._news.copy_at, self._since = count, self._best
        with suppress(PlanError, OutOfTime):  # the step cannot be cut so, or the search has caught up
            self._seen[count] = self._since, False  # where that is broken off it is asked anew
            slower = self._is_slower(count)
            self._seen[count] = self._search.best.objective, slower
            if not slower:
                find(count)
        self._exchange.now()

    def _look_again(self) -> None:
        """Where a better plan is known now, or one that is slower than was guessed, ask anew of what the other search
        may yet come to: what is too slow by now is not searched there either."""
        now = self._best
        for count, (seconds, slower) in list(self._seen.items()):
            if (now > seconds or (now < seconds and not slower)) and self._may_come(count):
                del self._seen[count]
                self._asked.pop(count, None)
                self._bounds.searched.discard(count)
                self._costs.refined.discard(count)
                self._expected[count] = self._bounds.floor
                self._left.append(count)
                self._last = [one for one in self._last if one[0] != count]

    def _may_come(self, count: int) -> bool:
        """Whether the other search has a number before it."""
        return not self._news.at or self._order(count) > self._order(self._news.at)

    def _look(self, count: int) -> None:
        search = self._search
        least = self._bounds.closer(count, search.best.objective, search.best.worth_a_look(count))
        self._expected[count] = max(self._expected[count], least)
        self._bounds.searched.add(count)
        if self._is_slower(count):
            return
        costs = self._costs(count)
        self._costs.refined.add(count)
        for problem in search.problems_of(count, costs):
            if problem.order == "gpipe":
                self._last.append((count, costs, problem))  # there is much to find out, and little hope
            elif not self._is_slower(count):
                search.look(costs, problem)

    def _is_slower(self, count: int) -> bool:
        """Whether a number takes too long, by what is known now: a better plan may have been found meanwhile."""
        search, expected = self._search, self._expected
        seconds = search.best.objective = self._best
        if expected[count] <= search.best.worth_searching and seconds < self._asked.get(count, inf):
            self._asked[count] = seconds
            bound = max(self._bounds.of(count, seconds), self._bounds.with_split(count, seconds))
            expected[count] = max(expected[count], bound)
        return expected[count] > search.best.worth_searching

    def _breaks_off(self) -> bool:
        """Whether the search has come to the number that is looked at, or knows of a much better plan than when that
        was begun with, so that it may be too slow by now; asked before anything is found out of a part."""
        if os.getppid() != self._parent:
            raise SystemExit  # nobody is left to hear
        return 0 < self._news.copy_at == self._news.search_at or self._best < _MUCH_BETTER * self._since
