"""Pieces of work shared by this process and a copy of it (`search.ahead`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from .ahead import Ahead

K = TypeVar("K", bound=Hashable)


def in_two(keys: Sequence[K], work: Callable[[K], Any], learn: Callable[[Any], None]) -> None:
    """Do all pieces of work. As soon as one has found something out, which takes longer than making a copy, the copy
    does the others from the back and this process from the front.

    >>> done = []
    >>> in_two([1, 2, 3], done.append, done.append)
    >>> done
    [1, 2, 3]

    Args:
      keys: of the pieces of work, short ones first.
      work: one of them, without JAX. It changes the process that does it, and returns what the other needs to know, or
        something false but None where there was nothing to find out.
      learn: makes the same change from what was returned.
    """
    left = list(keys)
    found: Any = None
    while left and (not found or len(left) == 1):
        found = work(left.pop(0))
    if not left:
        return
    with Ahead(left[::-1], work) as copy:
        for key in left:
            found = copy.take(key)
            if found is None:
                work(key)
            elif found:
                learn(found)
