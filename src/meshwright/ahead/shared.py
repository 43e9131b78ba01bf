"""Pieces of work shared by this process and a copy of it (`ahead.copied`)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

from .copied import Ahead

# Nobody waits longer for one piece of work.
_MOST_SECONDS = 60.0


def in_two(keys: Sequence[int], work: Callable[[int], Any], learn: Callable[[Any], None]) -> None:
    """Do all pieces of work, each of which takes longer than making a copy does: the copy from the back, this process
    from the front.

    >>> done = []
    >>> in_two([1], done.append, done.append)
    >>> done
    [1]

    Args:
      keys: numbers of the pieces of work.
      work: one of them, of which nothing runs on a device. It changes the process that does it, and returns what the
        other needs to know, or something false where there was nothing to find out.
      learn: makes the same change from what was returned.
    """
    if len(keys) > 1:
        Begun(max(keys) + 1, lambda: (keys, work)).finish(keys, work, learn)
    else:
        for key in keys:
            work(key)


class Begun:
    """Pieces of work with which a copy begins, from the back, before this process comes to them.

    Args:
      most: numbers of pieces of work are below this.
      make: says which there are, and how they are done, as of `in_two`: called by the copy.

    Attributes:
      copy: that works.
    """

    def __init__(self, most: int, make: Callable[[], tuple[Sequence[int], Callable[[int], Any]]]) -> None:
        # A byte for each: whether this process does it.
        self._mine = mmap.mmap(-1, most)

        def from_the_back(send: Callable[[Any], None]) -> None:
            keys, work = make()
            for key in reversed(keys):
                if not self._mine[key]:
                    send((key, False, None))
                    send((key, True, work(key)))

        self._begun: set[int] = set()
        self._done: dict[int, Any] = {}
        self.copy = Ahead(from_the_back)

    def finish(self, keys: Sequence[int], work: Callable[[int], Any], learn: Callable[[Any], None]) -> None:
        """Do what the copy has not begun with, from the front, and wait for the rest.

        Args:
          keys: as of `in_two`, like what follows; the copy may have known less, and have others too.
          work: the same.
          learn: the same.
        """
        with self.copy:
            for key in keys:
                is_done, found = self.take(key)
                if not is_done:
                    work(key)
                elif found:
                    learn(found)

    def take(self, key: int) -> tuple[bool, Any]:
        """A piece of work that is needed now: whether the copy has done it, which is waited for where it has begun,
        and what it found. Where it has not, it leaves it to this process.

        Args:
          key: its number.
        """
        self._listen(0.0)
        while key in self._begun and key not in self._done and self._listen(_MOST_SECONDS):
            pass
        if key in self._done:
            return True, self._done[key]
        self.leave(key)
        if key in self._begun:
            self.copy.end()  # it hangs, or is gone
        return False, None

    def leave(self, key: int) -> None:
        """The copy need not begin with this one."""
        self._mine[key] = 1

    def _listen(self, wait_seconds: float) -> bool:
        heard = self.copy.heard(wait_seconds)
        for key, is_done, found in heard:
            if is_done:
                self._done[key] = found
            self._begun.add(key)
        return bool(heard)
