"""A planned move on devices.

What needs no network comes first: a device that holds what it needs keeps it, and other pieces are copied
between devices of one process, never over the host. Then the rounds, one after the other: senders pack their pieces
into buffers, the buffers are exchanged, receivers unpack them and hand them to the other devices of their process.

Beside the source and the destination a device holds two buffers of at most a chunk each (`Mover.buffer_bytes`), and as
much for what is copied inside its process (`copies`); between CPU processes, where several messages are on their way at
once (`lanes`), all devices of one hold two buffers for each process that it exchanges with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ...memory.transfers import CHUNK_BYTES
from ...resharding import Message, Piece, ReshardPlan, RoundMessages, local_messages, round_messages
from .across import with_rounds_across
from .blocks import empty, finished, give, padded_elements, take, whole
from .copies import Blocks, Copies
from .exchange import Exchange
from .lanes import BUFFERS, Lanes
from .layouts import boxes_by_id, holds
from .words import item_bytes, word_of


def most_bytes(devices: Iterable[Any], chunk_bytes: int) -> int:
    """The most that a plan may send between two devices in a round, so that no more than two chunks are needed."""
    return max(2 * chunk_bytes // BUFFERS, 1) if _by_lanes(devices) else chunk_bytes


def _by_lanes(devices: Iterable[Any]) -> bool:
    """Whether messages between devices go by lanes: between CPU processes."""
    found = list(devices)
    return len({d.process_index for d in found}) > 1 and found[0].platform == "cpu"


class Mover:
    """Moves arrays of given shapes from given layouts to others, as often as asked.

    Args:
      plan: of the move.
      arrays: shapes and dtypes.
      sources: their shardings.
      targets: the shardings they are to have.
      chunk_bytes: the most that is copied from a device, or to one, of this process at once.
      rounds: to be run in place of the plan's (another algorithm's, for comparison).
    """

    def __init__(
        self, plan: ReshardPlan, arrays: Sequence[jax.ShapeDtypeStruct], sources: Sequence[Sharding],
        targets: Sequence[Sharding], *, chunk_bytes: int = CHUNK_BYTES, rounds: Sequence[RoundMessages] | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self._given = rounds
        self._arrays, self._chunk = arrays, chunk_bytes
        self._targets = targets
        self._from = [boxes_by_id(s, a.shape) for s, a in zip(sources, arrays, strict=True)]
        self._to = [boxes_by_id(s, a.shape) for s, a in zip(targets, arrays, strict=True)]
        devices = {d.id: d for s in (*sources, *targets) for d in s.device_set}
        self._devices = dict(sorted(devices.items()))
        self._word = word_of(a.dtype for a in arrays)

    @cached_property
    def _mine(self) -> frozenset[int]:
        return frozenset(i for i, d in self._devices.items() if d.process_index == jax.process_index())

    @cached_property
    def _local(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        return local_messages(self.plan)

    @cached_property
    def _moves(self) -> tuple[tuple[RoundMessages, ...], tuple[Message, ...]]:
        """The rounds, and the copies before them between devices of one process."""
        return with_rounds_across(
            round_messages(self.plan) if self._given is None else self._given, self._local[1],
            process_of=lambda device: self._devices[device].process_index, holder=self._holder,
            item_bytes=[item_bytes(a.dtype) for a in self._arrays],
            most_bytes=most_bytes(self._devices.values(), self._chunk),
        )  # fmt: skip

    def _holder(self, piece: Piece, process: int) -> int | None:
        there = (d for d, box in self._from[piece.move].items() if self._devices[d].process_index == process
                 and holds(box, piece.slice))  # fmt: skip
        return min(there, default=None)

    @property
    def _rounds(self) -> tuple[RoundMessages, ...]:
        return self._moves[0]

    @cached_property
    def _words(self) -> int:
        """Of a buffer: the longest message, with room for a last piece that is rounded up."""
        steps = [message for one in self._rounds for step in one.steps for message in step]
        return max((sum(map(self._length, m.pieces)) + self._room(m.pieces) for m in steps), default=0)

    @cached_property
    def _kept(self) -> list[Message]:
        """What devices have of their new blocks, but for blocks that stay as they are."""
        return [Message(sender=m.sender, receiver=m.receiver, pieces=self._changing(m)) for m in self._local[0]]

    @cached_property
    def _exchanging(self) -> list[Any]:
        """The devices that send or receive in any round; others have nothing to do with it."""
        steps = [message for one in self._rounds for step in one.steps for message in step]
        return [self._devices[d] for d in sorted({d for m in steps for d in (m.sender, m.receiver)})]

    @cached_property
    def _lanes(self) -> Lanes | None:
        """What carries the rounds between CPU processes; elsewhere they go step by step."""
        if not _by_lanes(self._exchanging):
            return None
        return Lanes(
            self._rounds, self._devices, self._word, length=self._length, room=self._room, relayed=self._relayed
        )

    @property
    def buffer_bytes(self) -> int:
        """What is held beside the source and the destination: by a device, or with lanes by all of this process."""
        if not self._rounds:
            return 0
        return 2 * self._words * np.dtype(self._word).itemsize if self._lanes is None else self._lanes.buffer_bytes

    def __call__(
        self, values: Sequence[jax.Array], *, donated: Collection[int] = (),
        tell: Callable[[int, int], None] | None = None,
    ) -> list[jax.Array]:  # fmt: skip
        """The arrays in their new places; of a process without a device of one, an array without blocks.

        Args:
          values: where they are.
          donated: positions of those whose blocks may be taken over where they stay, and are let go elsewhere, once
            everything has arrived.
          tell: called with the number of rounds that are done, and of all, after each.
        """
        held: Blocks = [{shard.device.id: shard.data for shard in value.addressable_shards} for value in values]
        made: Blocks = [{} for _ in self._arrays]
        copies = Copies(
            self._devices, [item_bytes(a.dtype) for a in self._arrays], self._to, made,
            block=lambda i, device: self._block(made, i, device), chunk_bytes=self._chunk,
        )  # fmt: skip
        self._locally(held, donated, made, copies)
        if self._mine and self._rounds:
            if self._lanes is not None:
                self._lanes.run(
                    pack=lambda message, buffer: self._packed(message, buffer, held, made),
                    unpack=lambda message, buffer: self._unpack(message, buffer, made),
                    spread=lambda messages: copies.run(messages, made, self._to), tell=tell,
                )  # fmt: skip
            else:
                self._in_steps(held, made, copies, tell)
        results: list[jax.Array] = []
        for i, (array, target) in enumerate(zip(self._arrays, self._targets, strict=True)):
            for device in target.addressable_devices:
                made[i][device.id] = finished(self._block(made, i, device.id), array.dtype)
            blocks = [made[i][device.id] for device in target.addressable_devices]
            results.append(
                jax.make_array_from_single_device_arrays(array.shape, target, blocks, dtype=array.dtype)
            )  # fmt: skip
        for i in donated:
            for device, block in held[i].items():
                if made[i].get(device) is not block:
                    block.delete()
        return results

    def _locally(self, held: Blocks, donated: Collection[int], made: Blocks, copies: Copies) -> None:
        """What devices of this process have already into the new blocks."""
        for i, (source, target) in enumerate(zip(self._from, self._to, strict=True)):
            for device, box in target.items():
                if device in self._mine and source.get(device) == box:
                    made[i][device] = held[i][device] if i in donated else jnp.copy(held[i][device])
        copies.run([*self._kept, *self._moves[1]], held, self._from)

    def _changing(self, message: Message) -> tuple[Piece, ...]:
        """Of what a device keeps, that which does not stay where it is."""
        device = message.receiver
        return tuple(p for p in message.pieces if self._from[p.move].get(device) != self._to[p.move][device])

    def _in_steps(self, held: Blocks, made: Blocks, copies: Copies, tell: Callable[[int, int], None] | None) -> None:
        """The rounds, step by step: messages between disjoint pairs of devices at once."""
        exchange = Exchange(self._exchanging, self._words, self._word)
        for number, one in enumerate(self._rounds, start=1):
            for step in one.steps:
                for message in step:
                    if message.sender in self._mine:
                        buffer = exchange.buffers[message.sender]
                        exchange.buffers[message.sender] = self._packed(message, buffer, held, made)
                words = max(sum(map(self._length, m.pieces)) + self._room(m.pieces) for m in step)
                received = exchange.run([(message.sender, message.receiver) for message in step], words)
                for message in step:
                    if message.receiver in self._mine:
                        self._unpack(message, received[message.receiver], made)
            copies.run(one.spread, made, self._to)
            if tell is not None:
                tell(number, len(self._rounds))

    def _unpack(self, message: Message, buffer: jax.Array, made: Blocks) -> None:
        offset = 0
        for piece in message.pieces:
            i, device = piece.move, message.receiver
            box = self._to[i][device]
            if piece.boxes == (box,):
                made[i][device] = whole(buffer, piece, self._arrays[i].dtype, offset)
            else:
                made[i][device] = give(self._block(made, i, device), box, piece, buffer, offset)
            offset += self._length(piece)

    def _packed(self, message: Message, buffer: jax.Array, held: Blocks, made: Blocks) -> jax.Array:
        """The buffer, which is given up, with the message's words at its beginning."""
        offset, relayed = 0, self._relayed(message)
        for piece in message.pieces:
            i = piece.move
            if piece in relayed:
                origin, block = self._to[i][message.sender], made[i][message.sender]
            else:
                origin, block = self._from[i][message.sender], held[i][message.sender]
            buffer = take(buffer, block, origin, piece, offset)
            offset += self._length(piece)
        return buffer

    def _relayed(self, message: Message) -> list[Piece]:
        """What its sender did not hold from the beginning."""
        return [p for p in message.pieces if not holds(self._from[p.move].get(message.sender), p.slice)]

    def _length(self, piece: Piece) -> int:
        """Words of a piece."""
        return (piece.stop - piece.start) * self._words_each(piece)

    def _words_each(self, piece: Piece) -> int:
        return item_bytes(self._arrays[piece.move].dtype) // np.dtype(self._word).itemsize

    def _room(self, pieces: Sequence[Piece]) -> int:
        """Words by which pieces are rounded up, at most."""
        return max((padded_elements(p) - (p.stop - p.start)) * self._words_each(p) for p in pieces)

    def _block(self, made: Blocks, number: int, device: int) -> jax.Array:
        """The new block of a device of this process; made here when its first piece comes."""
        if device not in made[number]:
            box, dtype = self._to[number][device], self._arrays[number].dtype
            made[number][device] = empty(box, dtype, self._devices[device])
        return made[number][device]
