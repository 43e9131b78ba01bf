"""Copies inside a domain that cross processes, as rounds of their own.

A byte enters a domain once, and what becomes of it there is free to the planner: copies from device to device. Those
between devices of one process are just that (`copies`). Where a domain is more than a process (an NVLink domain, a
slice of several hosts), the others are messages like those between domains: in rounds before the plan's what the domain
has from the beginning, in rounds after each of the plan's what that one brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ...resharding import Message, Piece, RoundMessages
from ...resharding.messages import disjoint_groups


def with_rounds_across(
    rounds: Iterable[RoundMessages], copied: Sequence[Message], *, process_of: Callable[[int], int],
    item_bytes: Sequence[int], most_bytes: int,
) -> tuple[tuple[RoundMessages, ...], tuple[Message, ...]]:  # fmt: skip
    """The rounds with those between processes of one domain, and the copies before them that are left to each process.

    Args:
      rounds: of a plan.
      copied: inside domains, of what is there from the beginning.
      process_of: the process of a device.
      item_bytes: of each array.
      most_bytes: that one device may send another in a round.
    """

    def parted(messages: Sequence[Message]) -> tuple[tuple[Message, ...], list[RoundMessages]]:
        far = [m for m in messages if process_of(m.sender) != process_of(m.receiver)]
        near = tuple(m for m in messages if process_of(m.sender) == process_of(m.receiver))
        return near, [
            RoundMessages(steps=disjoint_groups(part), spread=()) for part in _limited(far, item_bytes, most_bytes)
        ]

    mine, found = parted(copied)
    for one in rounds:
        near, far = parted(one.spread)
        found += [replace(one, spread=near), *far]
    return tuple(found), mine


def _limited(messages: Sequence[Message], item_bytes: Sequence[int], most: int) -> Iterator[tuple[Message, ...]]:
    """The messages in parts of at most so many bytes each, one part of each message at a time."""
    left = [list(_parts(message, item_bytes, most)) for message in messages]
    for number in range(max(map(len, left), default=0)):
        yield tuple(parts[number] for parts in left if number < len(parts))


def _parts(message: Message, item_bytes: Sequence[int], most: int) -> Iterator[Message]:
    pieces: list[Piece] = []
    room = most
    for piece in message.pieces:
        item, start = item_bytes[piece.move], piece.start
        while start < piece.stop:
            # At least one element, or it would never end.
            count = min(piece.stop - start, room // item if pieces else max(room // item, 1))
            if count:
                pieces.append(replace(piece, start=start, stop=start + count))
                start, room = start + count, room - count * item
            if start < piece.stop:
                yield replace(message, pieces=tuple(pieces))
                pieces, room = [], most
    if pieces:
        yield replace(message, pieces=tuple(pieces))
