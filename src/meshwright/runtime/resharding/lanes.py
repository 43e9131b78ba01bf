"""Buffers of words between CPU processes: each message by itself, several at once.

On accelerators a step of disjoint messages is one `ppermute` over all devices (`exchange`): it is issued and runs by
itself. On CPU a collective holds a thread for every device of its mesh until it is over, and between two of them the
network waits for Python. There each message takes a *lane*: a pair of devices, one of either process, over which a
program with a `ppermute` of the message's own length is run, in a thread. While one message is on its way the next is
packed and the last one unpacked; messages of different processes do not wait for each other. Lanes are few, so programs
and connections are: on CPU all devices of a process share its memory, and a device's words may leave by another.

No process runs more than a few steps ahead of its own slowest message, so that what the plan keeps apart mostly stays
apart. A lane carries its messages in the plan's order, which is the same at both ends. So nobody waits for ever: of all
messages not yet moved, the first in the plan's order is the next of its lane at both ends, and within both windows.

Memory: a message on its way has a buffer packed and one that comes out of the program, at either end; a lane's device
keeps one more for receiving, which is not read.
"""

from __future__ import annotations

import threading
from collections import deque
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

from ...resharding import Message, Piece, RoundMessages

_AXIS = "device"
_SPEC = PartitionSpec(_AXIS)

LANES = 4
"""Between two processes, each way: so many messages at once, each at most a chunk's part of as many."""

# In which a process has messages on their way at once: some arrive while the ends of the next find each other. With
# relays few, since what shares a NIC arrives later, and is passed on later.
_STEPS = 4
_STEPS_WITH_RELAYS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A message that this process sends or receives.

    Args:
      message: what is moved.
      lane: the devices over which it goes, the sender's first; None inside this process.
      words: how long it is, rounded up.
      room: words that unpacking may read beyond the end.
      after: the round that has to have landed here before it can be packed, if any.
    """

    message: Message
    lane: tuple[Any, Any] | None
    words: int
    room: int
    after: int | None


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
        self._rounds, self._devices, self._dtype = rounds, devices, dtype
        me = jax.process_index()
        used = {d for one in rounds for step in one.steps for m in step for d in (m.sender, m.receiver)}
        ports: dict[int, list[Any]] = {}
        for device in sorted((devices[d] for d in used), key=lambda d: d.id):
            ports.setdefault(device.process_index, []).append(device)
        carried: dict[tuple[int, int], int] = {}
        landing: dict[tuple[int, Any], list[tuple[int, int, int]]] = {}
        self._flights: list[list[list[_Flight]]] = []
        for number, one in enumerate(rounds):
            self._flights.append([])
            for step in one.steps:
                self._flights[-1].append([])
                for message in step:
                    ends = devices[message.sender].process_index, devices[message.receiver].process_index
                    turn = carried[ends] = carried.get(ends, -1) + 1
                    if me not in ends:
                        continue
                    lane = tuple(ports[p][turn % LANES % len(ports[p])] for p in ends)
                    after = [
                        landed for piece in (relayed(message) if ends[0] == me else ())
                        for start, stop, landed in landing.get((piece.move, piece.slice), ())
                        if landed < number and start < piece.stop and piece.start < stop
                    ]  # fmt: skip
                    self._flights[-1][-1].append(
                        _Flight(
                            message=message, lane=None if ends[0] == ends[1] else (lane[0], lane[1]),
                            words=_rounded(sum(map(length, message.pieces))), room=room(message.pieces),
                            after=max(after, default=None),
                        )
                    )  # fmt: skip
                    for piece in message.pieces if ends[1] == me else ():
                        landing.setdefault((piece.move, piece.slice), []).append((piece.start, piece.stop, number))
        relays = any(relayed(m) for one in rounds for step in one.steps for m in step)
        self._window = _STEPS_WITH_RELAYS if relays else _STEPS
        steps = [flights for one in self._flights for flights in one]
        self._most = max((sum(map(len, steps[i : i + self._window])) for i in range(len(steps))), default=0)
        self._words = max((f.words + f.room for flights in steps for f in flights), default=0)
        self._idle: dict[Any, jax.Array] = {}
        self._free: dict[int, list[jax.Array]] = {}
        self._lock = threading.Lock()

    def run(
        self, *, pack: Callable[[Message, jax.Array], jax.Array], unpack: Callable[[Message, jax.Array], None],
        spread: Callable[[Sequence[Message]], None], tell: Callable[[int, int], None] | None,
    ) -> None:  # fmt: skip
        """Carry everything; these are called in threads, one at a time.

        Args:
          pack: a message's words into a buffer on its sender, which is given up.
          unpack: a message's words out of a buffer on its receiver.
          spread: the copies after a round.
          tell: called with the number of rounds that have landed here, and of all, after each.
        """
        landed: list[Future[None]] = []
        window: deque[list[Future[None]]] = deque()
        turns: dict[tuple[Any, Any], threading.Event] = {}
        told = 0

        def look(wait: bool) -> None:
            nonlocal told
            while told < len(landed) and (wait or landed[told].done()):
                landed[told].result()
                told += 1
                if tell is not None:
                    tell(told, len(self._rounds))

        # One for each message on its way and for each round that has not landed: none waits for a thread.
        with ThreadPoolExecutor(self._most + self._window + 2, thread_name_prefix="reshard") as pool:
            for one, steps in zip(self._rounds, self._flights, strict=True):
                arriving = []
                for flights in steps:
                    while len(window) >= self._window:
                        for future in window.popleft():
                            future.result()
                    look(wait=False)
                    window.append([])
                    for flight in flights:
                        after = None if flight.after is None else landed[flight.after]
                        before, done = None, threading.Event()
                        if flight.lane is not None:
                            before, turns[flight.lane] = turns.get(flight.lane), done
                        future = pool.submit(self._fly, flight, before, done, after, pack, unpack)
                        window[-1].append(future)
                        if self._devices[flight.message.receiver].process_index == jax.process_index():
                            arriving.append(future)
                landed.append(pool.submit(self._land, arriving, one.spread, spread))
            for future in (future for futures in window for future in futures):
                future.result()
            look(wait=True)
        self._free.clear()
        self._idle.clear()

    def _fly(
        self, flight: _Flight, before: threading.Event | None, done: threading.Event, after: Future[None] | None,
        pack: Callable[[Message, jax.Array], jax.Array], unpack: Callable[[Message, jax.Array], None],
    ) -> None:  # fmt: skip
        me, lane = jax.process_index(), flight.lane
        sender, receiver = self._devices[flight.message.sender], self._devices[flight.message.receiver]
        buffer = received = None
        try:
            if before is not None:
                before.wait()
            if sender.process_index == me:
                if after is not None:
                    after.result()
                with self._lock:
                    free = self._free.setdefault(sender.id, [])
                    buffer = pack(flight.message, free.pop() if free else self._empty(sender))
                jax.block_until_ready(buffer)
            if lane is None:
                received = jax.device_put(buffer, receiver)
            elif buffer is not None:
                jax.block_until_ready(self._carried(lane, jax.device_put(buffer, lane[0]), flight))
            else:
                received = self._carried(lane, self._receiving(lane[1]), flight)
            jax.block_until_ready(received)
        finally:
            done.set()
        if buffer is not None:
            with self._lock:
                self._free[sender.id].append(buffer)
        if received is not None:
            received = jax.device_put(received, receiver)
            with self._lock:
                unpack(flight.message, received)

    def _land(
        self, arriving: Sequence[Future[None]], messages: Sequence[Message],
        spread: Callable[[Sequence[Message]], None],
    ) -> None:  # fmt: skip
        for future in arriving:
            future.result()
        if messages:
            with self._lock:
                spread(messages)

    def _carried(self, lane: tuple[Any, Any], buffer: jax.Array, flight: _Flight) -> jax.Array:
        """What comes out of a lane's program on this process's device."""
        ends = tuple(sorted(lane, key=lambda device: device.id))
        run, sharding = _permuted(ends, ends[0] is lane[0], flight.words, flight.room)
        given = jax.make_array_from_single_device_arrays((2 * len(buffer),), sharding, [buffer])
        return run(given).addressable_shards[0].data

    def _receiving(self, device: Any) -> jax.Array:
        """What a program is given on a device that only receives."""
        with self._lock:
            if device not in self._idle:
                self._idle[device] = self._empty(device)
            return self._idle[device]

    def _empty(self, device: Any) -> jax.Array:
        return jnp.zeros(self._words, self._dtype, device=device)


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
