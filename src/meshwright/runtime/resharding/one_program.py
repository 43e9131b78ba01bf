"""A planned move as one program over the devices of both sides, for what is moved often: the values of a microbatch.

`mover.Mover` runs a plan round by round, with buffers of a chunk and a few calls a round, which suits a tree of
parameters. A pipeline moves a few megabytes thousands of times, and there the calls are what counts: here all rounds,
relays and copies inside a domain are one compiled program, and a move is one call in every process that takes part.

All devices run the same program. In a group of disjoint messages each sender cuts its pieces out of its blocks, lays
them end to end as words (`words`), and one `ppermute` takes them to the receivers, which write them into theirs. What
differs between devices are positions, read from a table by the device's own; where messages differ in their pieces'
shapes, all kinds of a group are cut and the device's own is taken. What many devices of a domain want is given on from
one to the next (`resharding.multicast`).

Steps that follow each other and differ in places alone are a loop, so that the time to compile hardly depends on how
many chunks there are.

Cost: compiled once; in a run, beside the source and the destination, two to three times the longest message of a step,
a block that takes the place of the source on devices that have none of it, and on senders one that nobody reads: at
most four times what the program is given and gives back. Known limit: relayed chunks are parts of slices, for which a
receiver reads and writes the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ..._jax.blocks import Assembly, blocks_of, local_devices_in_order
from ...resharding import Message, Piece, ReshardPlan, local_messages, multicast, round_messages
from ...resharding.layout import Box
from ...resharding.messages import as_messages
from .layouts import boxes_by_id, holds
from .words import as_bits, bits_dtype, from_bits, from_words, item_bytes, to_words, word_of

_AXIS = "device"
_EACH = PartitionSpec(_AXIS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The shape of a piece: which array, cut out of the source's block or the destination's, how large the slice is,
    and how many of its elements (None for all)."""

    array: int
    from_source: bool
    sizes: tuple[int, ...]
    length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Disjoint messages whose pieces are of the same kinds: for each the places of both ends, and of each piece where
    the slice begins in the sender's block and in the receiver's, and where the piece begins in the slice."""

    kinds: tuple[_Kind, ...]
    pairs: tuple[tuple[int, int], ...]
    taken: tuple[tuple[int, ...], ...]
    given: tuple[tuple[int, ...], ...]


class OneProgram:
    """Moves arrays of given shapes from given layouts to others, as often as asked.

    Args:
      plan: of the move.
      arrays: shapes and dtypes.
      sources: their shardings.
      targets: the shardings they are to have.
      nothing: a block of zeros of a shape and dtype on a device, for devices that only receive.
    """

    def __init__(
        self, plan: ReshardPlan, arrays: Sequence[jax.ShapeDtypeStruct], sources: Sequence[Sharding],
        targets: Sequence[Sharding], *, nothing: Callable[[tuple[int, ...], Any, Any], jax.Array],
    ) -> None:  # fmt: skip
        self.plan = plan
        self._arrays, self._nothing = arrays, nothing
        self._from = [boxes_by_id(s, a.shape) for s, a in zip(sources, arrays, strict=True)]
        self._to = [boxes_by_id(s, a.shape) for s, a in zip(targets, arrays, strict=True)]
        devices = {d.id: d for s in (*sources, *targets) for d in s.device_set}
        self._devices = [devices[i] for i in sorted(devices)]
        self._place = {d.id: place for place, d in enumerate(self._devices)}
        self._mine = [d for d in self._devices if d.process_index == jax.process_index()]
        self._word = word_of(a.dtype for a in arrays)
        self._blocks = [s.shard_shape(a.shape) for s, a in zip(sources, arrays, strict=True)]
        self._results = [s.shard_shape(a.shape) for s, a in zip(targets, arrays, strict=True)]
        self._steps = [self._grouped(step) for step in _steps(plan, self._from)]
        self._runs = _runs(self._steps)
        mesh = Mesh(np.array(self._devices, dtype=object), (_AXIS,), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, _EACH)
        self._nobodys = [_ghost(a, t) for a, t in zip(arrays, targets, strict=True)]
        count = len(arrays)
        self._had = [local_devices_in_order(s) for s in sources]
        self._stacked = [_stacked(block, 1) for block in self._blocks]
        self._given = [
            Assembly(_stacked(block, len(self._devices)), a.dtype, self._sharding)
            for block, a in zip(self._blocks, arrays, strict=True)
        ]
        self._wanted = [[self._mine.index(d) for d in local_devices_in_order(t)] for t in targets]
        self._found = [Assembly(a.shape, a.dtype, t) for a, t in zip(arrays, targets, strict=True)]
        self._jitted = jax.jit(
            jax.shard_map(
                self._run, mesh=mesh, in_specs=(_EACH,) * count, out_specs=((_EACH,) * count, _EACH), check_vma=False
            )
        )

    def __call__(self, values: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        """The arrays in their new places, of a process without a device of one an array without blocks; and a byte for
        each device that is there when its blocks are."""
        given = []
        for value, had, assembly, stacked in zip(values, self._had, self._given, self._stacked, strict=True):
            have = dict(zip(had, blocks_of(value), strict=True))
            given.append(
                assembly(
                    [
                        _shaped(have[d], stacked) if d in have else self._nothing(stacked, value.dtype, d)
                        for d in self._mine
                    ]
                )
            )
        made, token = self._jitted(*given)
        return [self._arrived(number, array) for number, array in enumerate(made)], token

    def _arrived(self, number: int, made: jax.Array) -> jax.Array:
        if not self._wanted[number]:
            return self._nobodys[number]
        here, block = blocks_of(made), self._results[number]
        return self._found[number]([_shaped(here[place], block) for place in self._wanted[number]])

    # The program of a device

    def _run(self, *stacked: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        blocks = [as_bits(x.reshape(block)) for x, block in zip(stacked, self._blocks, strict=True)]
        made: list[jax.Array | None] = [None] * len(blocks)
        me = lax.axis_index(_AXIS)
        for steps in self._runs:
            if len(steps) == 1:
                self._step(steps, np.int32(0), blocks, made, me)
                continue
            for kind in (kind for group in steps[0] for kind in group.kinds):
                if made[kind.array] is None:
                    made[kind.array] = jnp.zeros(self._results[kind.array], bits_dtype(self._arrays[kind.array].dtype))

            def again(
                number: Any, made: list[jax.Array | None], steps: Sequence[tuple[_Group, ...]] = steps
            ) -> list[jax.Array | None]:
                made = list(made)
                self._step(steps, number, blocks, made, me)
                return made

            made = lax.fori_loop(0, len(steps), again, made)
        found = []
        for x, block, array in zip(made, self._results, self._arrays, strict=True):
            # Nothing is sent of an array of no elements.
            whole = jnp.zeros(block, array.dtype) if x is None else from_bits(x, array.dtype)
            found.append(whole.reshape(_stacked(block, 1)))
        return tuple(found), jnp.zeros(1, jnp.uint8)

    def _step(
        self, steps: Sequence[tuple[_Group, ...]], number: Any, blocks: Sequence[jax.Array],
        made: list[jax.Array | None], me: jax.Array,
    ) -> None:  # fmt: skip
        """One of several steps that differ in places alone."""
        received = self._sent(steps, number, blocks, made, me)
        for same in zip(*steps, strict=True):
            self._unpack(same, number, received, made, me)

    def _sent(
        self, steps: Sequence[tuple[_Group, ...]], number: Any, blocks: Sequence[jax.Array],
        made: Sequence[jax.Array | None], me: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """What this device receives in a step."""
        groups = steps[0]
        words = max(sum(map(self._words, group.kinds)) for group in groups)
        buffer = None
        for same in zip(*steps, strict=True):
            group = same[0]
            rows = [{s: a for (s, _), a in zip(one.pairs, one.taken, strict=True)} for one in same]
            starts = self._known(rows, number, me)
            packed = self._pack(group.kinds, starts, blocks, made)
            packed = jnp.pad(packed, (0, words - len(packed)))
            senders = {s for s, _ in group.pairs}
            buffer = packed if buffer is None else jnp.where(self._whether(senders, me), packed, buffer)
        assert buffer is not None  # a step has a message
        pairs = [pair for group in groups for pair in group.pairs]
        return buffer if pairs[0][0] == pairs[0][1] else lax.ppermute(buffer, _AXIS, pairs)

    def _pack(
        self, kinds: Sequence[_Kind], starts: Sequence[Any], blocks: Sequence[jax.Array],
        made: Sequence[jax.Array | None],
    ) -> jax.Array:  # fmt: skip
        parts, rest = [], list(starts)
        for kind in kinds:
            block = blocks[kind.array] if kind.from_source else made[kind.array]
            assert block is not None  # a relay has received before it sends
            start, first, rest = rest[: block.ndim], rest[block.ndim], rest[block.ndim + 1 :]
            x = _cut(block, start, kind.sizes).reshape(-1)
            parts.append(to_words(_cut(x, [first], (kind.length,)) if kind.length is not None else x, self._word))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _unpack(
        self, same: Sequence[_Group], number: Any, received: jax.Array, made: list[jax.Array | None], me: jax.Array
    ) -> None:
        group = same[0]
        rows = [{r: a for (_, r), a in zip(one.pairs, one.given, strict=True)} for one in same]
        rest = list(self._known(rows, number, me))
        receivers, offset = {r for _, r in group.pairs}, 0
        for kind in group.kinds:
            dtype, block = bits_dtype(self._arrays[kind.array].dtype), self._results[kind.array]
            start, first, rest = rest[: len(block)], rest[len(block)], rest[len(block) + 1 :]
            values = from_words(lax.slice(received, (offset,), (offset + self._words(kind),)), dtype)
            offset += self._words(kind)
            old = made[kind.array]
            if kind.length is None and kind.sizes == block and old is None:
                made[kind.array] = values.reshape(block)  # whoever gets it otherwise writes over it
                continue
            old = jnp.zeros(block, dtype) if old is None else old
            if kind.length is not None:
                slice_ = _cut(old, start, kind.sizes)
                values = lax.dynamic_update_slice(slice_.reshape(-1), values, [first])
            values = values.reshape(kind.sizes)
            if any(self._place[d] not in receivers for d in self._to[kind.array]):
                values = jnp.where(self._whether(receivers, me), values, _cut(old, start, kind.sizes))
            made[kind.array] = lax.dynamic_update_slice(old, values, start) if block else values

    def _words(self, kind: _Kind) -> int:
        count = prod(kind.sizes) if kind.length is None else kind.length
        return count * item_bytes(self._arrays[kind.array].dtype) // np.dtype(self._word).itemsize

    def _known(self, rows: Sequence[Mapping[int, tuple[int, ...]]], number: Any, me: jax.Array) -> Sequence[Any]:
        """Numbers that each place has of its own in each of several steps, as this device's in one of them; plain
        numbers where all are alike."""
        some = [next(iter(row.values())) for row in rows]
        table = np.array(
            [[row.get(p, other) for p in range(len(self._devices))] for row, other in zip(rows, some, strict=True)],
            np.int32,
        )
        same = (table == table[0, 0]).all(axis=(0, 1))
        if same.all():
            return list(table[0, 0])
        mine = jnp.asarray(table)[number, me]
        return [table[0, 0, column] if same[column] else mine[column] for column in range(len(same))]

    def _whether(self, places: set[int], me: jax.Array) -> jax.Array:
        """Whether this device is one of some."""
        return jnp.asarray(np.isin(np.arange(len(self._devices)), sorted(places)))[me]

    # What is sent, from the plan

    def _grouped(self, step: Sequence[Message]) -> tuple[_Group, ...]:
        """Disjoint messages by the kinds of their pieces."""
        found: dict[tuple[_Kind, ...], list[tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]]] = {}
        for message in step:
            kinds, taken, given = [], [], []
            for piece in message.pieces:
                i, count = piece.move, piece.stop - piece.start
                held = holds(self._from[i].get(message.sender), piece.slice)
                origin = self._from[i][message.sender] if held else self._to[i][message.sender]
                sizes = tuple(b - a for a, b in piece.slice)
                length = None if count == prod(sizes) else count
                kinds.append(_Kind(array=i, from_source=held, sizes=sizes, length=length))
                taken += [*_begins(piece, origin), piece.start]
                given += [*_begins(piece, self._to[i][message.receiver]), piece.start]
            pair = (self._place[message.sender], self._place[message.receiver])
            found.setdefault(tuple(kinds), []).append((pair, tuple(taken), tuple(given)))
        return tuple(
            _Group(
                kinds=kinds,
                pairs=tuple(pair for pair, _, _ in messages),
                taken=tuple(taken for _, taken, _ in messages),
                given=tuple(given for _, _, given in messages),
            )
            for kinds, messages in found.items()
        )


def _steps(plan: ReshardPlan, held: Sequence[Mapping[int, Box]]) -> list[tuple[Message, ...]]:
    """Everything that is sent, as groups of disjoint messages: what devices keep, the rounds, copies inside domains.

    The last wait until the end, so that equal ones are sent together, except where a relay passes on what it has been
    given by its neighbour.
    """
    kept, waiting = local_messages(plan)
    found, later = [kept], list(waiting)
    for one in round_messages(plan):
        for step in one.steps:
            relays = {m.sender for m in step for p in m.pieces if not holds(held[p.move].get(m.sender), p.slice)}
            if any(message.receiver in relays for message in later):
                found += multicast(_joined(later))
                later = []
            found.append(step)
        later += one.spread
    return [step for step in (*found, *multicast(_joined(later))) if step]


def _joined(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The same between each two devices as one message, parts of a slice that follow each other as one piece."""
    found: dict[tuple[int, int], list[Piece]] = {}
    for message in messages:
        found.setdefault((message.sender, message.receiver), []).extend(message.pieces)
    for pieces in found.values():
        pieces.sort(key=lambda p: (p.move, p.slice, p.start))
        for i in range(len(pieces) - 1, 0, -1):
            one, other = pieces[i - 1], pieces[i]
            if (one.move, one.slice, one.stop) == (other.move, other.slice, other.start):
                pieces[i - 1 : i + 1] = [replace(one, stop=other.stop)]
    return as_messages(found)


def _runs(steps: Sequence[tuple[_Group, ...]]) -> list[list[tuple[_Group, ...]]]:
    """The steps in order, those that follow each other and differ in places alone together: they are a loop."""
    found: list[list[tuple[_Group, ...]]] = []
    for step in steps:
        before = found[-1][0] if found else ()
        if [(g.kinds, g.pairs) for g in before] == [(g.kinds, g.pairs) for g in step]:
            found[-1].append(step)
        else:
            found.append([step])
    return found


def _begins(piece: Piece, origin: Box) -> list[int]:
    return [a - o for (a, _), (o, _) in zip(piece.slice, origin, strict=True)]


def _cut(block: jax.Array, start: Sequence[Any], sizes: tuple[int, ...]) -> jax.Array:
    return block if block.shape == sizes else lax.dynamic_slice(block, list(start), sizes)


def _stacked(block: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Shape of `count` blocks along the first dim; a scalar's block is a vector of one."""
    return (count * block[0], *block[1:]) if block else (count,)


def _shaped(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Without a call where nothing is to be done, which is so for all but scalars."""
    return block if block.shape == shape else block.reshape(shape)


def _ghost(array: jax.ShapeDtypeStruct, target: Sharding) -> jax.Array:
    if any(d.process_index == jax.process_index() for d in target.device_set):
        return jnp.zeros(())  # never asked for
    return jax.make_array_from_single_device_arrays(array.shape, target, [], dtype=array.dtype)
