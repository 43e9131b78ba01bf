"""Buffers of words between CPU processes: each message by itself, several at once.

On accelerators a step of disjoint messages is one `ppermute` over all devices (`exchange`): it is issued and runs by
itself. On CPU a collective holds a thread for every device of its mesh until it is over, and between two of them the
network waits for Python. There each message takes a *lane*: a pair of devices, one of either process, over which a
program with a `ppermute` of the message's own length is run. Lanes are few, so programs and connections are: on CPU all
devices of a process share its memory, and a device's words may leave by another.

A lane has a thread at either end, which carries its messages one by one in the plan's order. No lane waits for another,
nor for a round to be over, but for what its message passes on: while one message is on its way the next of another lane
is packed and the last one unpacked and given to the devices near, and whatever a NIC could send or receive is on its
way. NICs share their rate between lanes. So nobody waits for ever: of all messages not yet moved, the first in the
plan's order is the next of its lane at both ends, and what it passes on has been received.

Memory: a message on its way has a buffer that goes into its lane's program and one that comes out, at either end, or
one of these and its copy on another device; a lane's device keeps one more for receiving, which is not read
(`Lanes.buffer_bytes`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..._jax.context import has_x64, own_context
from ...resharding import Message, Piece, RoundMessages
from ...resharding.messages import as_messages
from .blocks import zeros

_AXIS = "device"
_SPEC = PartitionSpec(_AXIS)

LANES = 4
"""Between two processes, each way: so many messages at once, so that some are on their way while others are packed."""

# Where data is relayed: messages that share a NIC arrive later, and are passed on later.
_LANES_WITH_RELAYS = 2

BUFFERS = 2 * 2 * LANES + LANES
"""What a process holds at most for each other that it exchanges with, in messages: two for each that is on its way in
either direction, and what lanes receive into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A message that this process sends or receives.

    Args:
      message: what is moved.
      lane: the devices over which it goes, the sender's first; None inside this process.
      words: how long it is, rounded up.
      room: words that unpacking may read beyond the end.
      round: in which the plan has it.
      after: the flights that have to have landed here before it can be packed.
      spread: the copies on this process's devices once it has landed.
    """

    message: Message
    lane: tuple[Any, Any] | None
    words: int
    room: int
    round: int
    after: tuple[_Flight, ...]
    spread: tuple[Message, ...]


class Lanes:
    """The rounds of a move, of which this process carries its part.

    Args:
      rounds: of the move.
      devices: by id, of all messages.
      dtype: of a word.
      length: of a piece, in words.
      room: words that unpacking pieces may read beyond their end.
      relayed: the pieces of a message that its sender has been given in earlier rounds.
    """

    def __init__(
        self, rounds: Sequence[RoundMessages], devices: Mapping[int, Any], dtype: Any, *,
        length: Callable[[Piece], int], room: Callable[[Sequence[Piece]], int],
        relayed: Callable[[Message], Sequence[Piece]],
    ) -> None:  # fmt: skip
        self._rounds, self._devices, self._dtype = len(rounds), devices, dtype
        me = jax.process_index()
        used = {d for one in rounds for step in one.steps for m in step for d in (m.sender, m.receiver)}
        ports: dict[int, list[Any]] = {}
        for device in sorted((devices[d] for d in used), key=lambda d: d.id):
            ports.setdefault(device.process_index, []).append(device)
        relays = any(relayed(message) for one in rounds for step in one.steps for message in step)
        lanes = _LANES_WITH_RELAYS if relays else LANES
        carried: dict[tuple[int, int], int] = {}
        landing: dict[tuple[int, Any], list[tuple[int, int, _Flight]]] = {}
        self._lanes: dict[tuple[Any, Any], list[_Flight]] = {}
        for number, one in enumerate(rounds):
            copies: dict[tuple[int, Piece], list[int]] = {}
            for message in one.spread:
                for piece in message.pieces:
                    copies.setdefault((message.sender, piece), []).append(message.receiver)
            landed: list[_Flight] = []
            for message in (message for step in one.steps for message in step):
                ends = devices[message.sender].process_index, devices[message.receiver].process_index
                turn = carried[ends] = carried.get(ends, -1) + 1
                if me not in ends:
                    continue
                lane = _lane(ports[ends[0]], ports[ends[1]], turn, lanes)
                here = ends[1] == me
                after = {
                    id(flight): flight for piece in (relayed(message) if ends[0] == me else ())
                    for start, stop, flight in landing.get((piece.move, piece.slice), ())
                    if start < piece.stop and piece.start < stop
                }  # fmt: skip
                flight = _Flight(
                    message=message, lane=None if ends[0] == ends[1] else lane,
                    words=_rounded(sum(map(length, message.pieces))), room=room(message.pieces), round=number,
                    after=tuple(after.values()), spread=_spread(message, copies) if here else (),
                )  # fmt: skip
                self._lanes.setdefault(lane, []).append(flight)
                landed += [flight] if here else []
            for flight in landed:  # what a round brings is passed on in later ones
                for piece in flight.message.pieces:
                    landing.setdefault((piece.move, piece.slice), []).append((piece.start, piece.stop, flight))
        flights = [flight for lane in self._lanes.values() for flight in lane]
        self._words = max((f.words + f.room for f in flights), default=0)
        self._receiving = {f.lane[1] for f in flights if f.lane and f.lane[1].process_index == me}

    @property
    def buffer_bytes(self) -> int:
        """The most that the devices of this process hold together while messages are on their way."""
        return (2 * len(self._lanes) + len(self._receiving)) * self._words * np.dtype(self._dtype).itemsize

    def run(
        self, *, pack: Callable[[Message, jax.Array], jax.Array], unpack: Callable[[Message, jax.Array], None],
        spread: Callable[[Sequence[Message]], None], tell: Callable[[int, int], None] | None,
    ) -> None:  # fmt: skip
        """Carry everything; the first three are called in threads, one at a time.

        Args:
          pack: a message's words into a buffer on its sender, which is given up.
          unpack: a message's words out of a buffer on its receiver.
          spread: the copies after a message.
          tell: called with the number of rounds that have landed here, and of all, after each.
        """
        if not self._lanes:
            return
        run = _Run(self, pack, unpack, spread)
        with ThreadPoolExecutor(len(self._lanes), thread_name_prefix="reshard") as pool:
            ended = [pool.submit(run.carry, lane) for lane in self._lanes.values()]
            for number in range(self._rounds):
                for future in run.landing.get(number, ()):
                    future.result()
                if tell is not None:
                    tell(number + 1, self._rounds)
            for future in ended:
                future.result()


class _Run:
    """One move over the lanes; arguments as of `Lanes.run`."""

    def __init__(
        self, lanes: Lanes, pack: Callable[[Message, jax.Array], jax.Array],
        unpack: Callable[[Message, jax.Array], None], spread: Callable[[Sequence[Message]], None],
    ) -> None:  # fmt: skip
        self._devices, self._words, self._dtype = lanes._devices, lanes._words, lanes._dtype
        self._pack, self._unpack, self._spread = pack, unpack, spread
        self._lock, self._x64 = threading.Lock(), has_x64()
        self._idle = {device: self._empty(device) for device in lanes._receiving}
        self._landed: dict[int, Future[None]] = {}
        self.landing: dict[int, list[Future[None]]] = {}
        for flight in (flight for lane in lanes._lanes.values() for flight in lane):
            self._landed[id(flight)] = future = Future()
            if self._devices[flight.message.receiver].process_index == jax.process_index():
                self.landing.setdefault(flight.round, []).append(future)

    def carry(self, lane: Sequence[_Flight]) -> None:
        """The messages of a lane, one by one; who waits for one that fails is told."""
        for place, flight in enumerate(lane):
            try:
                with own_context(x64=self._x64):
                    self._fly(flight)
            except BaseException as error:
                for lost in lane[place:]:
                    self._landed[id(lost)].set_exception(error)
                raise
            self._landed[id(flight)].set_result(None)

    def _fly(self, flight: _Flight) -> None:
        me, lane = jax.process_index(), flight.lane
        sender, receiver = self._devices[flight.message.sender], self._devices[flight.message.receiver]
        if sender.process_index == me:
            for before in flight.after:
                self._landed[id(before)].result()
            with self._lock:
                buffer = self._pack(flight.message, self._empty(sender))
            buffer = jax.block_until_ready(jax.device_put(buffer, receiver if lane is None else lane[0]))
        else:
            assert lane is not None  # it comes from another process
            buffer = self._idle[lane[1]]
        if lane is not None:
            buffer = jax.block_until_ready(_carried(lane, buffer, flight))
        if receiver.process_index == me:
            buffer = jax.block_until_ready(jax.device_put(buffer, receiver))
            with self._lock:
                self._unpack(flight.message, buffer)
                self._spread(flight.spread)

    def _empty(self, device: Any) -> jax.Array:
        return zeros((self._words,), self._dtype, device)


def _lane(senders: Sequence[Any], receivers: Sequence[Any], turn: int, lanes: int) -> tuple[Any, Any]:
    """The lane of a message: of all pairs of devices some that share few of them."""
    turn %= min(lanes, len(senders) * len(receivers))
    again = turn // math.lcm(len(senders), len(receivers))
    return senders[turn % len(senders)], receivers[(turn + again) % len(receivers)]


def _spread(message: Message, copies: Mapping[tuple[int, Piece], Sequence[int]]) -> tuple[Message, ...]:
    """What the receiver of a message gives to others near it."""
    given: dict[tuple[int, int], list[Piece]] = {}
    for piece in message.pieces:
        for taker in copies.get((message.receiver, piece), ()):
            given.setdefault((message.receiver, taker), []).append(piece)
    return as_messages(given)


def _carried(lane: tuple[Any, Any], buffer: jax.Array, flight: _Flight) -> jax.Array:
    """What comes out of a lane's program on this process's device."""
    ends = tuple(sorted(lane, key=lambda device: device.id))
    run, sharding = _permuted(ends, ends[0] is lane[0], flight.words, flight.room)
    given = jax.make_array_from_single_device_arrays((2 * len(buffer),), sharding, [buffer])
    return run(given).addressable_shards[0].data


def _rounded(words: int) -> int:
    """At most a 128th more, so that messages of nearly one length share a program."""
    step = 1 << max(words.bit_length() - 8, 0)
    return -(-words // step) * step


@lru_cache(maxsize=4096)
def _permuted(ends: tuple[Any, Any], forward: bool, words: int, room: int) -> tuple[Any, NamedSharding]:
    mesh = Mesh(np.array(ends, dtype=object), (_AXIS,), axis_types=(AxisType.Auto,))

    def permute(block: jax.Array) -> jax.Array:
        moved = lax.ppermute(block[:words], _AXIS, ((0, 1),) if forward else ((1, 0),))
        return jnp.pad(moved, (0, room)) if room else moved

    run = jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=_SPEC, out_specs=_SPEC, check_vma=False))
    return run, NamedSharding(mesh, _SPEC)
