"""Pieces of work shared by this process and a copy of it (`search.ahead`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from .ahead import Ahead

K = TypeVar("K", bound=Hashable)

# What takes no longer than this, beside a piece of work, is sooner done than a copy is made.
_SHORT_SECONDS = 0.1


def in_two(keys: Sequence[K], work: Callable[[K], Any], learn: Callable[[Any], None]) -> None:
    """Do all pieces of work, none before it is clear that they take longer than making a copy: from then on this
    process does them from the front and the copy from the back.

    >>> done = []
    >>> in_two([1, 2, 3], done.append, done.append)
    >>> done
    [1, 2, 3]

    Args:
      keys: of the pieces of work, short ones first.
      work: one of them, without JAX. It changes the process that does it, and returns what the other needs to know.
      learn: makes the same change from what was returned.
    """
    left = list(keys)
    begun = time.perf_counter()
    while left and (time.perf_counter() - begun < _SHORT_SECONDS or len(left) == 1):
        work(left.pop(0))
    if not left:
        return
    with Ahead(left[::-1], work) as copy:
        for key in left:
            found = copy.take(key)
            if found is None:
                work(key)
            else:
                learn(found)
