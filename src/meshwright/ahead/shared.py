"""Pieces of work shared by this process and a copy of it (`ahead.copied`)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
        Begun(len(keys), lambda: (keys, work)).finish(keys, work, learn)
    else:
        for key in keys:
            work(key)


class Begun:
    """Pieces of work with which a copy begins, from the back, before this process comes to them.

    Args:
      most: how many there may be.
      make: says which there are, and how they are done, as of `in_two`: called by the copy.

    Attributes:
      copy: that works.
    """

    def __init__(self, most: int, make: Callable[[], tuple[Sequence[Any], Callable[[Any], Any]]]) -> None:
        # A byte for each: whether this process does it.
        self._mine = mmap.mmap(-1, most)

        def from_the_back(send: Callable[[Any], None]) -> None:
            keys, work = make()
            for number in reversed(range(len(keys))):
                if not self._mine[number]:
                    send((number, False, None))
                    send((number, True, work(keys[number])))

        self.copy = Ahead(from_the_back)

    def finish(self, keys: Sequence[K], work: Callable[[K], Any], learn: Callable[[Any], None]) -> None:
        """Do what the copy has not begun with, from the front, and wait for the rest.

        Args:
          keys: those of the copy, in the same order; what follows as of `in_two` too.
          work: the same.
          learn: the same.
        """
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
            for number, key in enumerate(keys):
                listen(0.0)
                while number in begun and number not in done and listen(_MOST_SECONDS):
                    pass
                if number in done:
                    if done[number]:
                        learn(done[number])
                    continue
                self._mine[number] = 1
                if number in begun:
                    copy.end()  # it hangs, or is gone
                work(key)
