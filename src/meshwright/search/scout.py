"""A copy of the process that finds out what a stage search will ask next (`look_ahead`), while the search does what
cannot be shared: solve ranges of layers, simulate, price presets. When nothing is left to look at, it begins to write
out the best plan.

What it does in vain costs nothing but a processor that had nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING

from ..ahead import Ahead, Post, copied
from .look_ahead import SOME_LEFT, Exchange, LookAhead, shared_news

if TYPE_CHECKING:
    from ..plan import Plan
    from ..program.staged import StagedProgram
    from .pipeline import StageSearch


class Scout:
    """There is a copy while it is out, one at a time. Use as a context: at its end there is none.

    Args:
      goes: whether it may be sent out.

    Attributes:
      write: lets a copy begin to write out a plan of a program, if there is something to do.
      kept: a plan that was found before, with its program: it is the one to write out where a search has found nothing
        faster. None for none.
    """

    def __init__(self, *, goes: bool = True) -> None:
        self.write: Callable[[Plan, StagedProgram], Ahead | None] = lambda plan, program: None
        self.kept: tuple[Plan, StagedProgram] | None = None
        self._goes = goes
        self._news = shared_news()
        self._copy: Ahead | None = None
        self._post: Post | None = None
        self._exchange: Exchange | None = None  # with the copy, unless it writes out a plan
        # What the last copy was to look at, and the seconds of the best plan then.
        self._seen: frozenset[int] = frozenset()
        self._sent = inf
        # The plan that the last one was to write out, and whether that is what the copy does.
        self._begun: object = None
        self._writes = False

    def __enter__(self) -> Scout:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._copy is not None:
            self._copy.end()
        if self._post is not None:
            self._post.close()
        self._copy, self._post, self._exchange, self._writes = None, None, None, False

    @property
    def _at_work(self) -> bool:
        return self._copy is not None and self._copy.at_work

    def tell(self, best_seconds: float, near: int | None = None, at: int = 0) -> None:
        """Tell it what is known by now.

        Args:
          best_seconds: what the best plan is expected to count for.
          near: the number of microbatches around which to look, that of the best plan; None where none is known.
          at: the number that the search looks at; 0 for none.
        """
        if at != self._news.at:
            self._news.search_at = 0
        self._news.best_seconds, self._news.near, self._news.at = best_seconds, near or 0, at

    def catch_up(self) -> None:
        """The search has to find out something itself: a copy at the same number leaves the rest of it to the search,
        and goes on with the next."""
        self._news.search_at = self._news.at

    def send(self, search: StageSearch, counts: Iterable[int]) -> None:
        """Send it out, if it is not and there is something new to look at; one that has been overtaken is sent out
        again.

        Args:
          search: of stages.
          counts: numbers of microbatches that it may ask for.
        """
        left, news = list(counts), self._news
        # Or the last one came to nothing.
        known = news.best_seconds <= self._sent and self._seen.issuperset(left) and news.copy_at != SOME_LEFT
        overtaken = self._at_work and news.copy_at > 0 and news.copy_at not in (*left, news.at)
        if known and self._begun is None:
            self.begin(search)
        goes = overtaken or not (known or self._at_work)
        if not self._goes or not left or not goes or search.costs.base is None or not copied.can_copy():
            return
        self.recall()
        try:
            self._post = post = Post()
        except OSError:  # no file is left for it: then there is no copy
            return
        news.copy_at = 0
        self._seen, self._sent = frozenset(left), news.best_seconds
        self._copy = copy = Ahead(lambda tell: LookAhead(search, left, news, Exchange(search, tell, post.heard)).run())
        self._exchange = Exchange(search, post.send, copy.heard)

    def begin(self, search: StageSearch, *, now: bool = False) -> None:
        """Let a copy begin to write out the best plan so far, if there is none at work.

        Args:
          search: of stages.
          now: whether there is nothing left to look at: a copy that does is recalled.
        """
        if now:
            self.recall(writing=False)
        best = search.best_candidate
        wanted = best if best is not None else self.kept
        if wanted is None or wanted is self._begun or (self._at_work and not now):
            return
        if not self._goes or not copied.can_copy():
            return
        self.recall()
        if self._news.copy_at == SOME_LEFT:
            self._seen = frozenset()
        self._begun, self._news.copy_at = wanted, 0
        found = self.kept
        if best is not None:
            merged = search.merged(best)
            found = (merged.plan(0.0), merged.costs.program) if merged is not None else None
        if found is not None:
            self._copy, self._writes = self.write(*found), True

    def listen(self) -> None:
        """Let the two tell each other what they have found out so far."""
        if self._exchange is not None and self._post is not None and self._copy is not None and self._copy.is_there:
            self._exchange.now()
            self._post.flush()

    def recall(self, *, writing: bool = True) -> None:
        """The same; then there is no copy.

        Args:
          writing: whether one that writes out a plan is meant too. What it has done is lost, and can be begun again.
        """
        if self._writes and not writing:
            return
        self.listen()
        if self._writes:
            self._begun = None
        elif self._at_work:
            self._seen = frozenset()
        self._end()
