"""How values get from the devices of one stage to those of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ..._jax.random import is_key
from ...memory.transfers import CHUNK_BYTES, KEPT_BYTES
from ...resharding import Move, Network, ReshardError, plan_reshard
from ..agree import exchange_texts
from ..placing import ghost
from ..resharding.layouts import block_boxes, layout_of, network_of
from ..resharding.mover import Mover, most_bytes
from ..resharding.one_program import OneProgram
from ..resharding.words import as_bits, from_bits, item_bytes
from ..watch import watch

# Of relayed data. More would save less than an eighth of the time, and where every chunk goes between other devices
# each is a part of the program.
_MOST_CHUNKS = 8

# Blocks of a call's values on a device, before and after, that one program moves: what it needs beside them is at most
# four times as much, which is two chunks. Larger ones go round by round, in chunks.
_MOST_BYTES = CHUNK_BYTES // 2

# How long a process waits for the others to say what they plan.
_AGREE_SECONDS = 300.0


def _something() -> str:
    return "values from other devices"


class Transport(Protocol):
    """Moves values between stages.

    Between processes every process that has a device of either side calls `move`, all in one order.
    """

    def move(
        self, values: Sequence[jax.Array], targets: Sequence[NamedSharding], about: Callable[[], str] = _something
    ) -> list[jax.Array]:
        """The values, all of one stage, in other layouts on the devices of another.

        Args:
          values: on the mesh of the sending stage; of a process without a device of it, arrays without shards.
          targets: the layouts on the receiving stage's mesh.
          about: says what is moved and between which processes.

        Returns: the arrays there; of a process without a device of it, arrays without shards.
        """
        ...


_Way = Callable[[Sequence[jax.Array]], tuple[list[jax.Array], Any]]
"""Values to where they are needed, and what is ready when they are there (None if nobody else has a part in it)."""


class PlannedTransport:
    """By the plans of `meshwright.resharding`: all values of a call planned together, what many devices of a host need
    sent there once, relayed where that helps, and all of it one program (`runtime.resharding.one_program`). Values of
    more than some megabytes go round by round (`runtime.resharding.mover`), so that no device needs more than two
    chunks beside them.

    Plans and programs are made when values of their shapes and layouts are first moved; processes then compare their
    plans before a byte moves. Inside one process, unless it is said to be several machines, JAX copies the blocks where
    that does not take them through the host.

    Args:
      network: the machines of the devices, by id; None for each process as one machine, all alike.
    """

    def __init__(self, network: Network | None = None) -> None:
        self._network = network
        self._ways: dict[Any, _Way] = {}
        self._zeros: dict[Any, jax.Array] = {}
        self._kept: dict[Any, int] = {}

    def move(
        self, values: Sequence[jax.Array], targets: Sequence[NamedSharding], about: Callable[[], str] = _something
    ) -> list[jax.Array]:
        """See `Transport`."""
        keys = [is_key(value) for value in values]
        if any(keys):
            plain = [jax.random.key_data(v) if k else v for k, v in zip(keys, values, strict=True)]
            there = [NamedSharding(t.mesh, t.spec) if k else t for k, t in zip(keys, targets, strict=True)]
            moved = self.move(plain, there, about)
            return [
                jax.random.wrap_key_data(m, impl=jax.random.key_impl(v)) if k else m
                for k, v, m in zip(keys, values, moved, strict=True)
            ]
        # The same in every process, whether it has shards of a value or not: a new one is agreed on with the others.
        which = (tuple((v.shape, v.dtype, _layout(v.sharding)) for v in values), tuple(map(_layout, targets)))
        with watch.over(about):  # where a process has one CPU device, issuing a collective waits for it
            way = self._ways.get(which)
            if way is None:
                way = self._ways[which] = self._way(values, targets, about)
            moved, token = way(values)
        if token is not None:
            watch.follow(about, token)
        return moved

    def _way(self, values: Sequence[jax.Array], targets: Sequence[NamedSharding], about: Callable[[], str]) -> _Way:
        devices = {d for s in (*(v.sharding for v in values), *targets) for d in s.device_set}
        processes = sorted({d.process_index for d in devices})
        # The memory of CPU devices is the host's; and collectives of many of them in one process want a thread each.
        near = all(d.platform == "cpu" for d in devices) or all(map(_same_blocks, values, targets))
        if self._network is None and len(processes) == 1 and near:
            return lambda values: (jax.device_put(list(values), list(targets)), None)
        moves = [
            Move(
                name=f"value {i}", shape=v.shape, item_bytes=item_bytes(v.dtype), source=layout_of(v.sharding, v.shape),
                destination=layout_of(t, v.shape),
            )
            for i, (v, t) in enumerate(zip(values, targets, strict=True))
        ]  # fmt: skip
        network = self._network or network_of(devices)
        sources = [v.sharding for v in values]
        small = sum(map(_block_bytes, (*values, *values), (*sources, *targets))) <= _MOST_BYTES
        limits: dict[str, int] = (
            {"most_chunks": _MOST_CHUNKS} if small else {"most_transfer_bytes": most_bytes(devices, CHUNK_BYTES)}
        )
        plan = plan_reshard(network, moves, **limits)
        if len(processes) > 1:
            _agree(plan.fingerprint, processes, about)
        arrays = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        if small:
            return OneProgram(plan, arrays, sources, targets, nothing=self._nothing)
        mover = Mover(plan, arrays, sources, targets, chunk_bytes=CHUNK_BYTES)
        return lambda values: (mover(values), None)

    def _nothing(self, shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
        found = self._zeros.get((shape, dtype, device))
        if found is None:
            found = jax.device_put(np.zeros(shape, dtype), device)
            kept = self._kept.get(device, 0) + found.nbytes
            if kept <= KEPT_BYTES:
                self._kept[device], self._zeros[shape, dtype, device] = kept, found
        return found


def _layout(sharding: Sharding) -> Any:
    """Equal for shardings that differ in how they are written alone."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    dims = [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in sharding.spec]
    while dims and not dims[-1]:
        dims.pop()
    return sharding.mesh, tuple(dims), sharding.memory_kind


def _block_bytes(value: jax.Array, sharding: Sharding) -> int:
    """Of a device's part of a value."""
    return prod(sharding.shard_shape(value.shape)) * item_bytes(value.dtype)


def _same_blocks(value: jax.Array, target: NamedSharding) -> bool:
    """Whether every block of the target is one of the source's: then JAX does not pass through the host."""
    have = set(block_boxes(value.sharding, value.shape).values())
    return have.issuperset(block_boxes(target, value.shape).values())


def _agree(fingerprint: str, processes: Sequence[int], about: Callable[[], str]) -> None:
    """Refuse a plan that is not that of all processes that take part in it."""
    said = exchange_texts(fingerprint, among=processes, about=about(), timeout_seconds=_AGREE_SECONDS)
    for process, other in said.items():
        if other != fingerprint:
            raise ReshardError(
                refused="to move values between stages", got=f"the plan {other} in process {process}",
                needed=f"one plan in all processes; here it is {fingerprint}", where=about(),
                try_="the same plan, network and versions in every process",
            )  # fmt: skip


class LocalTransport:
    """The naive one between devices of one process: whatever JAX does, through the host where layouts differ."""

    def move(
        self, values: Sequence[jax.Array], targets: Sequence[NamedSharding], about: Callable[[], str] = _something
    ) -> list[jax.Array]:
        """See `Transport`."""
        return jax.device_put(list(values), list(targets))


class ProcessTransport:
    """The naive one between devices of several processes, to compare with: one program for each value, in which blocks
    are permuted.

    Each block that a receiver needs is sent by one of the devices that have it, the one with the least to send so far.
    A round of the program permutes pieces of one shape between disjoint pairs of devices. A program is compiled once
    for each shape and pair of layouts.

    What many devices need is sent to each of them apart.
    """

    def __init__(self) -> None:
        self._programs: dict[Any, _Program] = {}

    def move(
        self, values: Sequence[jax.Array], targets: Sequence[NamedSharding], about: Callable[[], str] = _something
    ) -> list[jax.Array]:
        """See `Transport`."""
        return [self._move(value, target, about) for value, target in zip(values, targets, strict=True)]

    def _move(self, value: jax.Array, target: NamedSharding, about: Callable[[], str]) -> jax.Array:
        if is_key(value):
            data = self._move(jax.random.key_data(value), NamedSharding(target.mesh, target.spec), about)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        key = (value.shape, value.dtype, _layout(value.sharding), _layout(target))
        if key not in self._programs:
            self._programs[key] = _Program(value.shape, value.dtype, value.sharding, target)
        with watch.over(about):  # where a process has one CPU device, issuing a collective waits for it
            moved, token = self._programs[key](value)
        watch.follow(about, token)
        return moved


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of an array that goes from one device to another: positions of both, where it begins in the block of each,
    and its shape."""

    sender: int
    receiver: int
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    shape: tuple[int, ...]


class _Program:
    """Moves arrays of one shape from one layout to another."""

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, source: jax.sharding.Sharding, target: NamedSharding
    ) -> None:
        self._shape, self._dtype, self._target = shape, dtype, target
        sending, receiving = _blocks(shape, source), _blocks(shape, target)
        self._devices = list(dict.fromkeys([*sending, *receiving]))
        self._receivers = set(receiving)
        mesh = Mesh(np.array(self._devices, dtype=object), ("device",), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, PartitionSpec("device"))
        self._block = source.shard_shape(shape)
        self._result = target.shard_shape(shape)
        self._rounds = _rounds(_pieces(sending, receiving, self._devices))
        self._empty: dict[Any, jax.Array] = {}
        each = PartitionSpec("device")
        run = jax.shard_map(self._run, mesh=mesh, in_specs=each, out_specs=(each, each), check_vma=False)
        self._jitted = jax.jit(run)

    def _run(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """On one device: a block, with a leading dim of one, to the block it needs; and a byte that is there when the
        block is, for who only wants to know that."""
        x, me = as_bits(block.reshape(self._block)), lax.axis_index("device")
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        made = jnp.zeros(self._result, x.dtype)
        for pieces in self._rounds:
            count, rank = len(self._devices), len(self._shape)
            takes, gives = np.zeros((count, rank), np.int32), np.zeros((count, rank), np.int32)
            receives = np.zeros(count, bool)
            for piece in pieces:
                takes[piece.sender], gives[piece.receiver] = piece.source_start, piece.target_start
                receives[piece.receiver] = True
            start, stop = jnp.asarray(takes)[me], jnp.asarray(gives)[me]
            part = lax.dynamic_slice(x, [start[d] for d in range(rank)], pieces[0].shape)
            part = lax.ppermute(part, "device", [(p.sender, p.receiver) for p in pieces])
            moved = lax.dynamic_update_slice(made, part, [stop[d] for d in range(rank)])
            made = jnp.where(jnp.asarray(receives)[me], moved, made)
        made = made.astype(jnp.bool_) if self._dtype == jnp.bool_ else from_bits(made, self._dtype)
        return made.reshape(_stacked(self._result, 1)), jnp.zeros(1, jnp.uint8)

    def __call__(self, value: jax.Array) -> tuple[jax.Array, Any]:
        """The array in its new place, and what is ready when it is there."""
        have = {shard.device: shard.data for shard in value.addressable_shards}
        mine = [d for d in self._devices if d.process_index == jax.process_index()]
        blocks = [have[d].reshape(_stacked(self._block, 1)) if d in have else self._nothing(d) for d in mine]
        whole = jax.make_array_from_single_device_arrays(
            _stacked(self._block, len(self._devices)), self._sharding, blocks
        )
        moved, token = self._jitted(whole)
        arrived = [
            shard.data.reshape(self._result) for shard in moved.addressable_shards if shard.device in self._receivers
        ]
        if not arrived:
            return ghost(self._shape, self._dtype, self._target), token
        return jax.make_array_from_single_device_arrays(self._shape, self._target, arrived), token

    def _nothing(self, device: Any) -> jax.Array:
        """The block of a device that only receives."""
        if device not in self._empty:
            zeros = np.zeros(_stacked(self._block, 1), self._dtype)
            self._empty[device] = jax.device_put(zeros, device)
        return self._empty[device]


def _stacked(block: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Shape of `count` blocks along the first dim; a scalar's block is a vector of one."""
    return (count * block[0], *block[1:]) if block else (count,)


def _blocks(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[Any, tuple[tuple[int, int], ...]]:
    """For each device the part of an array it has: along each dim the first index and the one past the last."""
    return {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _pieces(
    sending: dict[Any, tuple[tuple[int, int], ...]],
    receiving: dict[Any, tuple[tuple[int, int], ...]],
    devices: Sequence[Any],
) -> list[_Piece]:
    """Who sends what to whom, so that every receiver has its block."""
    owners: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, block in sending.items():
        owners.setdefault(block, []).append(device)
    place = {device: i for i, device in enumerate(devices)}
    load = dict.fromkeys(sending, 0)
    found = []
    for receiver, block in receiving.items():
        for owned, candidates in owners.items():
            part = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, owned, strict=True)]
            if any(a >= b for a, b in part):
                continue
            near = receiver if receiver in candidates else min(candidates, key=lambda d: (load[d], place[d]))
            shape = tuple(b - a for a, b in part)
            load[near] += 0 if near is receiver else int(np.prod(shape, dtype=np.int64))
            found.append(
                _Piece(
                    place[near],
                    place[receiver],
                    tuple(a - c for (a, _), (c, _) in zip(part, owned, strict=True)),
                    tuple(a - c for (a, _), (c, _) in zip(part, block, strict=True)),
                    shape,
                )
            )
    return found


def _rounds(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces of one shape between disjoint pairs, each in the first round with room for it."""
    rounds: list[list[_Piece]] = []
    for piece in pieces:
        for taken in rounds:
            if taken[0].shape == piece.shape and all(
                piece.sender != other.sender and piece.receiver != other.receiver for other in taken
            ):
                taken.append(piece)
                break
        else:
            rounds.append([piece])
    return rounds
