"""Pieces of work shared by this process and a copy of it (`ahead.copied`)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from .copied import Ahead

K = TypeVar("K")

# Nobody waits longer for one piece of work.
_MOST_SECONDS = 60.0


def in_two(keys: Sequence[K], work: Callable[[K], Any], learn: Callable[[Any], None]) -> None:
    """Do all pieces of work, each of which takes longer than making a copy does: the copy from the back, this process
    from the front.

    >>> done = []
    >>> in_two([1], done.append, done.append)
    >>> done
    [1]

    Args:
      keys: of the pieces of work.
      work: one of them, of which nothing runs on a device. It changes the process that does it, and returns what the
        other needs to know, or something false where there was nothing to find out.
      learn: makes the same change from what was returned.
    """
    if len(keys) > 1:
        Begun(keys, work, learn).finish()
    else:
        for key in keys:
            work(key)


class Begun(Generic[K]):
    """Pieces of work that a copy has begun with, from the back; this process comes to them when it finishes them.

    Args:
      keys: as of `in_two`, like what follows.
      work: the same.
      learn: the same.

    Attributes:
      copy: that works.
    """

    def __init__(self, keys: Sequence[K], work: Callable[[K], Any], learn: Callable[[Any], None]) -> None:
        self._keys, self._work, self._learn = keys, work, learn
        # A byte for each: whether this process does it.
        self._mine = mmap.mmap(-1, max(len(keys), 1))
        self.copy = Ahead(self._from_the_back)

    def _from_the_back(self, send: Callable[[Any], None]) -> None:
        for number in reversed(range(len(self._keys))):
            if not self._mine[number]:
                send((number, False, None))
                send((number, True, self._work(self._keys[number])))

    def finish(self) -> None:
        """Do what the copy has not begun with, and wait for the rest."""
        begun: set[int] = set()
        done: dict[int, Any] = {}

        def listen(wait_seconds: float) -> bool:
            heard = copy.heard(wait_seconds)
            for number, is_done, found in heard:
                if is_done:
                    done[number] = found
                begun.add(number)
            return bool(heard)

        with self.copy as copy:
            for number, key in enumerate(self._keys):
                listen(0.0)
                while number in begun and number not in done and listen(_MOST_SECONDS):
                    pass
                if number in done:
                    if done[number]:
                        self._learn(done[number])
                    continue
                self._mine[number] = 1
                if number in begun:
                    copy.end()  # it hangs, or is gone
                self._work(key)
