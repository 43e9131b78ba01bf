"""What several devices of a domain are given by one of them, as groups of disjoint messages.

A planned round ends with copies inside the receiving domains: one device has taken a piece in, the others want it. One
after the other they would take as long as there are devices. Here whoever has a piece gives it on: binomial trees, so
that the number of messages one behind the other grows with the logarithm. Trees that start at different devices with
different pieces (what an all-gather is) share their messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import Message, Piece, as_messages, disjoint_groups


def multicast(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """Groups of disjoint messages, one after the other, that bring every piece to all its receivers.

    >>> whole = Piece(move=0, slice=((0, 4),), start=0, stop=4)
    >>> told = [Message(sender=0, receiver=r, pieces=(whole,)) for r in (1, 2, 3)]
    >>> [[(m.sender, m.receiver) for m in group] for group in multicast(told)]
    [[(0, 1)], [(0, 2), (1, 3)]]

    Args:
      messages: each from a device that has all of its pieces.
    """
    wanted: dict[tuple[int, Piece], list[int]] = {}
    for message in messages:
        for piece in message.pieces:
            wanted.setdefault((message.sender, piece), []).append(message.receiver)
    trees: dict[tuple[int, tuple[int, ...]], list[Piece]] = {}
    for (sender, piece), receivers in wanted.items():
        trees.setdefault((sender, tuple(sorted(receivers))), []).append(piece)
    levels: list[dict[tuple[int, int], list[Piece]]] = []
    for (sender, receivers), pieces in sorted(trees.items(), key=lambda tree: tree[0]):
        # From the sender on and round, so that trees of neighbours use the same pairs.
        left = [*(r for r in receivers if r > sender), *(r for r in receivers if r < sender)]
        have, level = [sender], 0
        while left:
            now, left = left[: len(have)], left[len(have) :]
            if level == len(levels):
                levels.append({})
            for giver, taker in zip(have, now, strict=False):
                levels[level].setdefault((giver, taker), []).extend(pieces)
            have, level = have + now, level + 1
    return tuple(group for level in levels for group in disjoint_groups(as_messages(level)))
