"""Pieces from device to device inside a process, so that few bytes are on their way at any time.

A piece that is a part of its sender's block is cut out there first, and one that is a part of its receiver's is written
into what is made there: copies that are needed while the piece is on its way, on either side. A device has at most a
chunk of them that leave it and one of them that arrive; larger pieces are cut. What is a whole block on both sides
needs no copy, and is moved as it is.

What may be on its way together is handed to JAX in one call, senders taking turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from math import prod
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ...resharding import Message
from ...resharding.layout import Box
from .blocks import part, place

Blocks = list[dict[int, jax.Array]]
"""For each array, by device id, the blocks on devices of this process."""

_Part = tuple[int, int, Box, list[int]]
"""A box of an array: which array, the device that gives it, the box, the devices that take it."""


class Copies:
    """What one move copies inside this process.

    Args:
      devices: by id; those of other processes are left alone.
      items: bytes of an element of each array.
      targets: for each array, by device id, the boxes of the blocks that are made.
      made: blocks in the making, which are replaced.
      block: the one of an array on a device; made if it is not there.
      chunk_bytes: the most that leaves a device, and that arrives at one, before the next waits.
    """

    def __init__(
        self, devices: Mapping[int, Any], items: Sequence[int], targets: Sequence[Mapping[int, Box]], made: Blocks, *,
        block: Callable[[int, int], jax.Array], chunk_bytes: int,
    ) -> None:  # fmt: skip
        me = jax.process_index()
        self._places = {i: SingleDeviceSharding(d) for i, d in devices.items() if d.process_index == me}
        self._items, self._targets, self._made, self._block = items, targets, made, block
        self._most = chunk_bytes
        self._given: dict[tuple[int, bool], int] = {}  # bytes on their way, by device and whether they arrive
        self._arriving: list[tuple[int, int]] = []

    def run(self, messages: Iterable[Message], source: Blocks, boxes: Sequence[Mapping[int, Box]]) -> None:
        """Copy the pieces of messages.

        Args:
          messages: of this and other processes.
          source: blocks that have them.
          boxes: theirs, for each array by device id.
        """
        senders = self._parts(messages, boxes)
        waiting: list[tuple[_Part, int, jax.Array]] = []
        for each in chain.from_iterable(zip_longest(*senders)):
            if each is None:
                continue
            i, sender, box, receivers = each
            origin = boxes[i][sender]
            costs = self._costs(i, sender, origin, box, receivers)
            if any(self._given.get(end, 0) + size > self._most for end, size in costs.items()):
                self._issue(waiting)
                jax.block_until_ready([self._made[array][device] for array, device in self._arriving])
                waiting, self._given, self._arriving = [], {}, []
            for end, size in costs.items():
                self._given[end] = self._given.get(end, 0) + size
            value = part(source[i][sender], origin, box)
            waiting += [(each, receiver, value) for receiver in receivers]
        self._issue(waiting)

    def _issue(self, waiting: Sequence[tuple[_Part, int, jax.Array]]) -> None:
        if not waiting:
            return
        arrived = jax.device_put([v for _, _, v in waiting], [self._places[receiver] for _, receiver, _ in waiting])
        for ((i, _, box, _), receiver, _), value in zip(waiting, arrived, strict=True):
            target = self._targets[i][receiver]
            self._made[i][receiver] = value if box == target else place(self._block(i, receiver), target, box, value)
            self._arriving.append((i, receiver))

    def _parts(self, messages: Iterable[Message], boxes: Sequence[Mapping[int, Box]]) -> list[Iterator[_Part]]:
        """What each sender gives, cut where a chunk asks for it; a box that several take is cut out once."""
        found: dict[int, dict[tuple[int, Box], list[int]]] = {}
        for message in messages:
            for piece in message.pieces if message.receiver in self._places else ():
                for box in piece.boxes:
                    found.setdefault(message.sender, {}).setdefault((piece.move, box), []).append(message.receiver)
        return [self._cut(sender, parts, boxes) for sender, parts in found.items()]

    def _cut(
        self, sender: int, parts: Mapping[tuple[int, Box], list[int]], boxes: Sequence[Mapping[int, Box]]
    ) -> Iterator[_Part]:
        for (i, box), receivers in parts.items():
            costs = self._costs(i, sender, boxes[i][sender], box, receivers)
            most = max(self._most // self._items[i], 1)
            for one in cut(box, most) if max(costs.values(), default=0) > self._most else (box,):
                yield i, sender, one, receivers

    def _costs(
        self, i: int, sender: int, origin: Box, box: Box, receivers: Sequence[int]
    ) -> dict[tuple[int, bool], int]:
        """Bytes of the copies that are there while a box is on its way, by device and whether it arrives there."""
        size = prod(b - a for a, b in box) * self._items[i]
        found = {(r, True): size for r in receivers if box != self._targets[i][r]}
        if origin != box and (found or list(receivers) != [sender]):
            found[sender, False] = size
        return found


def cut(box: Box, most: int) -> Iterator[Box]:
    """A box as boxes of at most so many elements, in row-major order."""
    if prod(b - a for a, b in box) <= most:
        yield box
        return
    (low, high), rest = box[0], box[1:]
    rows = max(most // prod(b - a for a, b in rest), 1)
    for start in range(low, high, rows):
        for inner in cut(rest, most):
            yield ((start, min(start + rows, high)), *inner)
