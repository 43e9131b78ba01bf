"""Copies inside a domain that cross processes, as rounds of their own.

A byte enters a domain once, and what becomes of it there is free to the planner: copies from device to device. Those
between devices of one process are just that (`copies`). Where a domain is more than a process (an NVLink domain, a
slice of several hosts), the others are messages like those between domains: in rounds before the plan's what the domain
has from the beginning, in rounds after each of the plan's what that one brought. Each process gets a piece once, and
copies it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ...resharding import Message, Piece, RoundMessages
from ...resharding.messages import as_messages, disjoint_groups

_Given = tuple[Piece, tuple[int, ...]]
"""A piece that a device is sent, and the devices of its process that it gives it to."""


def with_rounds_across(
    rounds: Iterable[RoundMessages], copied: Sequence[Message], *, process_of: Callable[[int], int],
    holder: Callable[[Piece, int], int | None], item_bytes: Sequence[int], most_bytes: int,
) -> tuple[tuple[RoundMessages, ...], tuple[Message, ...]]:  # fmt: skip
    """The rounds with those between processes of one domain, and the copies before them that are left to each process.

    Args:
      rounds: of a plan.
      copied: inside domains, of what is there from the beginning.
      process_of: the process of a device.
      holder: a device of a process that has a piece from the beginning, if there is one.
      item_bytes: of each array.
      most_bytes: that one device may send another in a round.
    """
    near: dict[tuple[int, int], list[Piece]] = {}
    far: dict[tuple[int, int], list[Piece]] = {}
    for message in copied:
        for piece in message.pieces:
            process = process_of(message.receiver)
            sender = message.sender if process_of(message.sender) == process else holder(piece, process)
            if sender is not None:
                near.setdefault((sender, message.receiver), []).append(piece)
            else:
                far.setdefault((message.sender, message.receiver), []).append(piece)
    found = list(_rounds(as_messages(far), process_of, item_bytes, most_bytes))
    for one in rounds:
        inside = tuple(m for m in one.spread if process_of(m.sender) == process_of(m.receiver))
        across = [m for m in one.spread if process_of(m.sender) != process_of(m.receiver)]
        found += [replace(one, spread=inside), *_rounds(across, process_of, item_bytes, most_bytes)]
    return tuple(found), as_messages(near)


def _rounds(
    messages: Sequence[Message], process_of: Callable[[int], int], item_bytes: Sequence[int], most: int
) -> Iterator[RoundMessages]:
    """Messages between processes as rounds in which no device sends another more than so many bytes."""
    takers: dict[tuple[int, int, Piece], list[int]] = {}
    for message in messages:
        for piece in message.pieces:
            takers.setdefault((message.sender, process_of(message.receiver), piece), []).append(message.receiver)
    given: dict[tuple[int, int], list[_Given]] = {}
    for (sender, _, piece), (first, *others) in takers.items():
        given.setdefault((sender, first), []).append((piece, tuple(others)))
    parts = {pair: list(_parts(pieces, item_bytes, most)) for pair, pieces in given.items()}
    for number in range(max(map(len, parts.values()), default=0)):
        sent: dict[tuple[int, int], list[Piece]] = {}
        spread: dict[tuple[int, int], list[Piece]] = {}
        for (sender, first), batches in parts.items():
            for piece, others in batches[number] if number < len(batches) else ():
                sent.setdefault((sender, first), []).append(piece)
                for other in others:
                    spread.setdefault((first, other), []).append(piece)
        yield RoundMessages(steps=disjoint_groups(as_messages(sent)), spread=as_messages(spread))


def _parts(pieces: Iterable[_Given], item_bytes: Sequence[int], most: int) -> Iterator[list[_Given]]:
    """Pieces, cut where that is needed, in lists of at most so many bytes, but of an element at least."""
    found: list[_Given] = []
    room = most
    for piece, others in pieces:
        item, start = item_bytes[piece.move], piece.start
        while start < piece.stop:
            left, count = piece.stop - start, max(room // item, 0 if found else 1)
            # Parts of a slice take the next power of two in a buffer.
            count = left if count >= left else 1 << count.bit_length() >> 1
            if count:
                found.append((replace(piece, start=start, stop=start + count), others))
                start, room = start + count, max(room - count * item, 0)
            if start < piece.stop:
                yield found
                found, room = [], most
    if found:
        yield found
