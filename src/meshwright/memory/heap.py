"""Where buffers lie: the heap of XLA's TPU compiler.

It gives every buffer a place when the program first writes it, in the order in which kernels run: the smallest hole
that is large enough, or above all others. A hole that is too small for what comes next stays one, so that a program may
need more than what is alive at once: of llama3-8b on 32 v6e (`benchmarks/compiled_memory.py`) 23.5 GiB are alive, 28.3
laid out, and 28.2 by this rule. Its scores find no room where logits were, since the gradient of the head lies above
those.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple


class Stretch(NamedTuple):
    """Bytes that are taken from one moment to another, both included."""

    first: int
    last: int
    size_bytes: int


def heap_bytes(stretches: Iterable[Stretch]) -> int:
    """The size of a heap whose buffers are placed one after the other.

    >>> heap_bytes([Stretch(0, 1, 4), Stretch(1, 3, 2), Stretch(2, 3, 5)])  # 4 + 2, and 5 do not fit where 4 were
    11
    """
    taken: list[tuple[int, int]] = []  # from where, to where, in the order of the heap
    leaving: dict[int, list[tuple[int, int]]] = {}
    most = 0
    moments: dict[int, list[Stretch]] = {}
    for one in stretches:
        if one.size_bytes:
            moments.setdefault(one.first, []).append(one)
            leaving.setdefault(one.last, [])
    for moment in sorted(moments.keys() | leaving.keys()):
        for one in sorted(moments.get(moment, ()), key=lambda one: -one.size_bytes):
            place = _place(taken, one.size_bytes)
            insort(taken, place)
            leaving[one.last].append(place)
            most = max(most, place[1])
        for place in leaving.get(moment, ()):
            taken.remove(place)
    return most


def _place(taken: list[tuple[int, int]], size: int) -> tuple[int, int]:
    """The smallest hole that is large enough, the lowest of equal ones, or the end."""
    end, best, room = 0, None, 0
    for start, stop in taken:
        hole = start - end
        if hole >= size and (best is None or hole < room):
            best, room = end, hole
        end = stop
    at = end if best is None else best
    return at, at + size
