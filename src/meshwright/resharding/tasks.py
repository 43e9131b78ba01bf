"""From tensors and layouts to unit tasks, and from unit tasks to classes.

The blocks of the source and of the destination cut a tensor into *data slices*; bringing one slice to every device that
needs it is a *unit task* (Zhuang et al., MLSys 2023). Unit tasks with the same sender domains and the same receiver
domains (those that need the slice and do not hold it) are interchangeable: they form a *class*. The bytes of a class
are laid end to end on a *tape*, so that what follows splits ranges of a tape and never looks at slices; all tensors
of a tree share the classes. Cost: linear in the unit tasks, in NumPy; Python runs once per distinct pair of device
sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .errors import ReshardError
from .layout import Box, Layout
from .network import Network

# Of a tensor: its copies on many devices are still counted in 64 bits.
_MOST_BYTES = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One tensor that changes its layout.

    >>> from meshwright.resharding.layout import DeviceMesh
    >>> mesh = DeviceMesh(devices=(0,), shape=(1,), axes=("x",))
    >>> whole = Layout(mesh=mesh, spec=())
    >>> Move(name="w", shape=(4, 2), item_bytes=4, source=whole, destination=whole).bytes
    32

    Args:
      name: for messages.
      shape: global shape.
      item_bytes: bytes of one element as it is stored.
      source: where it is.
      destination: where it is needed.

    Raises:
      ReshardError: a spec is longer than the rank, an extent is negative, or an element has no bytes.
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    source: Layout
    destination: Layout

    def __post_init__(self) -> None:
        if (
            any(n < 0 for n in self.shape)
            or self.item_bytes < 1
            or math.prod(self.shape) * self.item_bytes > _MOST_BYTES
        ):
            raise ReshardError(
                refused="a tensor", got=f"shape {self.shape}, {self.item_bytes} bytes an element",
                needed="extents >= 0 and at least one byte, no more than a pebibyte in all", where=self.name,
                try_="what the array says",
            )  # fmt: skip
        for side, layout in (("source", self.source), ("destination", self.destination)):
            try:
                layout.splits(len(self.shape))
            except ReshardError as error:
                raise error.inside(f"{self.name}, {side}") from None

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes


class SliceGrid:
    """The data slices of one tensor: per dim the cuts of either layout; a slice is one cell of the grid.

    >>> from meshwright.resharding.layout import DeviceMesh
    >>> two = DeviceMesh(devices=(6, 7), shape=(2,), axes=("x",))
    >>> grid = SliceGrid((6,), Layout(mesh=two, spec=(("x",),)), Layout(mesh=two, spec=()))
    >>> grid.count, grid.box(1)
    (2, ((3, 6),))
    """

    def __init__(self, shape: tuple[int, ...], source: Layout, destination: Layout) -> None:
        rank = len(shape)
        starts, sizes, source_block, destination_block = [], [], [], []
        splits = (source.splits(rank), destination.splits(rank))
        for n, k, m in zip(shape, *splits, strict=True):
            source_size, destination_size = -(-n // k), -(-n // m)
            cuts = np.union1d(_cuts(n, k), _cuts(n, m))
            starts.append(cuts[:-1])
            sizes.append(np.diff(cuts))
            source_block.append(cuts[:-1] // max(source_size, 1))
            destination_block.append(cuts[:-1] // max(destination_size, 1))
        self.starts, self.sizes = starts, sizes
        self._boxes: dict[int, Box] = {}
        self.shape = tuple(len(s) for s in starts)
        self.count = math.prod(self.shape)
        self.elements = _outer(sizes, np.multiply, 1)
        self.source_block = _mixed_radix(source_block, splits[0])
        self.destination_block = _mixed_radix(destination_block, splits[1])

    def box(self, index: int) -> Box:
        """The box of slice `index` in the tensor."""
        if index not in self._boxes:
            self._boxes[index] = self._box(index)
        return self._boxes[index]

    def _box(self, index: int) -> Box:
        cell = np.unravel_index(index, self.shape) if self.shape else ()
        begins = [int(s[i]) for s, i in zip(self.starts, cell, strict=True)]
        return tuple((b, b + int(n[i])) for b, n, i in zip(begins, self.sizes, cell, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskClass:
    """Unit tasks with the same senders and receivers.

    Args:
      senders: domains that hold all of it, ascending.
      receivers: domains that need it and do not hold it, ascending.
      first: the class's first entry in the arrays of `Demand`.
      last: one past its last.
      bytes: length of its tape.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    first: int
    last: int
    bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """Every unit task of a move of many tensors, by class.

    The arrays have one entry per unit task, ordered by class, then by the sets of devices (`_turns`), tensor and slice.

    Args:
      network: the machines.
      moves: the tensors.
      grids: the slices of each tensor.
      patterns: pairs (devices that hold, devices that need), by number.
      classes: the classes, ordered by senders and receivers.
      move: the tensor of each unit task.
      slice: its slice.
      pattern: its pair of device sets.
      start: where it begins on the tape of its class, in bytes.
      bytes: its length, in bytes.
      item_bytes: bytes of an element of it.
    """

    network: Network
    moves: tuple[Move, ...]
    grids: tuple[SliceGrid, ...]
    patterns: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    classes: tuple[TaskClass, ...]
    move: np.ndarray
    slice: np.ndarray
    pattern: np.ndarray
    start: np.ndarray
    bytes: np.ndarray
    item_bytes: np.ndarray

    @property
    def unit_tasks(self) -> int:
        """How many unit tasks there are, those that need no network included."""
        return len(self.move)

    @cached_property
    def unit(self) -> int:
        """Bytes whose multiples are boundaries of elements on every tape, if widths of elements divide each other."""
        return int(self.item_bytes.max(initial=1))

    @cached_property
    def needed_bytes(self) -> int:
        """The least bytes that must pass between domains: each domain receives what it lacks once."""
        return sum(c.bytes * len(c.receivers) for c in self.classes)

    def align(self, number: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Positions on the tapes of classes `number`, moved down to the nearest boundary of an element or the end."""
        if self._same_width:
            return position // self.unit * self.unit
        begins, starts = self._places
        entry = np.searchsorted(starts, begins[number] + position, side="right") - 1
        inside = (position - self.start[entry]) // self.item_bytes[entry] * self.item_bytes[entry]
        return np.where(position >= np.diff(begins)[number], position, self.start[entry] + inside)

    def settled(self, number: np.ndarray, position: np.ndarray, within: int) -> np.ndarray:
        """As `align`; and where a unit task begins or ends at most `within` bytes away, there. The end stays."""
        found = self.align(number, position)
        if not within or self.unit_tasks == len(self.classes):
            return found
        begins, starts = self._places
        place = begins[number] + found
        after = np.searchsorted(starts, place, side="right")
        low, high = starts[after - 1], np.append(starts, begins[-1])[after]
        near = np.where(place - low <= within, low, np.where(high - place <= within, high, place))
        return np.where(found >= np.diff(begins)[number], found, near - begins[number])

    def aligned(self, number: int, position: int) -> int:
        """As `align`, for one position."""
        if self._same_width:
            return position // self.unit * self.unit
        return int(self.align(np.array([number]), np.array([position]))[0])

    @cached_property
    def _same_width(self) -> bool:
        return bool((self.item_bytes == self.unit).all())

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each tape begins, and each unit task, when all tapes are laid end to end."""
        begins = np.cumsum([0, *(task.bytes for task in self.classes)])
        counts = [task.last - task.first for task in self.classes]
        return begins, np.repeat(begins[:-1], counts) + self.start


def demand_of(network: Network, moves: Sequence[Move]) -> Demand:
    """The unit tasks of `moves`, by class.

    Args:
      network: the machines; every device of every mesh must be in one of its hosts.
      moves: the tensors, all planned together.

    Returns:
      the demand.

    Raises:
      ReshardError: a mesh has a device that no host has.
    """
    check_devices(network, moves)
    interned: dict[tuple[int, ...], int] = {}
    known: dict[tuple[tuple[int, ...], Layout, Layout], tuple[SliceGrid, np.ndarray]] = {}
    columns: list[np.ndarray] = []
    grids = []
    for number, move in enumerate(moves):
        key = (move.shape, move.source, move.destination)
        if key not in known:
            known[key] = _grid_and_sets(key, interned)
        grid, sets = known[key]
        grids.append(grid)
        entry = np.empty((5, grid.count), dtype=np.int64)
        entry[0] = number
        entry[1] = np.arange(grid.count)
        entry[2] = sets
        entry[3] = grid.elements * move.item_bytes
        entry[4] = move.item_bytes
        columns.append(entry)
    table = np.concatenate(columns, axis=1) if columns else np.empty((5, 0), dtype=np.int64)

    sets_of = tuple(interned)
    pairs, pattern = np.unique(table[2], return_inverse=True)
    patterns = tuple((sets_of[p // _SETS], sets_of[p % _SETS]) for p in pairs.tolist())
    keys = _class_keys(network, patterns)
    order_of = {key: i for i, key in enumerate(sorted(set(keys)))}
    class_of_pattern = np.array([order_of[key] for key in keys], dtype=np.int64)
    number_of = class_of_pattern[pattern] if len(keys) else np.empty(0, dtype=np.int64)

    # Wide elements first: then a multiple of the widest is a boundary of an element everywhere on the tape.
    turn = _turns(pairs, class_of_pattern)[pattern] if len(keys) else pattern
    order = np.lexsort((table[1], table[0], turn, -table[4], number_of))
    sizes = table[3][order]
    begins = np.cumsum(sizes) - sizes
    bounds = np.searchsorted(number_of[order], np.arange(len(order_of) + 1))
    classes = []
    start = np.empty_like(begins)
    for (senders, receivers), i in order_of.items():
        first, last = int(bounds[i]), int(bounds[i + 1])
        start[first:last] = begins[first:last] - begins[first]
        total = int(sizes[first:last].sum())
        classes.append(TaskClass(senders=senders, receivers=receivers, first=first, last=last, bytes=total))
    return Demand(
        network=network, moves=tuple(moves), grids=tuple(grids), patterns=patterns, classes=tuple(classes),
        move=table[0][order], slice=table[1][order], pattern=pattern[order], start=start, bytes=sizes,
        item_bytes=table[4][order],
    )  # fmt: skip


def _turns(pairs: np.ndarray, class_of: np.ndarray) -> np.ndarray:
    """The places of the patterns on the tapes: neighbours have other senders and other receivers, where there are some.

    A chunk of a tape then goes between many devices at once, and not from one after the other to one. With holders i
    and needers j of a class numbered, patterns go by (j - i) modulo their number, then by i.
    """
    ranks, counts = [], []
    for ends in (pairs // _SETS, pairs % _SETS):
        known, place = np.unique(np.stack([class_of, ends]), axis=1, return_inverse=True)
        first = np.searchsorted(known[0], np.arange(int(class_of.max()) + 2))
        ranks.append(place.ravel() - first[class_of])
        counts.append(np.diff(first)[class_of])
    diagonal = (ranks[1] - ranks[0]) % np.maximum(*counts)
    places = np.empty(len(pairs), dtype=np.int64)
    places[np.lexsort((ranks[0], diagonal, class_of))] = np.arange(len(pairs))
    return places


# Two numbers of device sets in one integer.
_SETS = 1 << 31


def _grid_and_sets(
    key: tuple[tuple[int, ...], Layout, Layout], interned: dict[tuple[int, ...], int]
) -> tuple[SliceGrid, np.ndarray]:
    """The slices of a tensor, and for each the numbers of its two device sets as one integer."""
    shape, source, destination = key
    grid = SliceGrid(shape, source, destination)
    holders, needers = (
        np.array([interned.setdefault(devices, len(interned)) for devices in layout.block_devices(len(shape))])
        for layout in (source, destination)
    )
    return grid, holders[grid.source_block] * _SETS + needers[grid.destination_block]


def _class_keys(
    network: Network, patterns: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    domains: dict[tuple[int, ...], frozenset[int]] = {}
    keys: dict[tuple[frozenset[int], frozenset[int]], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    found = []
    for pattern in patterns:
        for devices in pattern:
            if devices not in domains:
                domains[devices] = frozenset(network.domain_of[d] for d in devices)
        senders, needers = domains[pattern[0]], domains[pattern[1]]
        if (senders, needers) not in keys:
            keys[senders, needers] = (tuple(sorted(senders)), tuple(sorted(needers - senders)))
        found.append(keys[senders, needers])
    return found


def check_devices(network: Network, moves: Sequence[Move]) -> None:
    """Refuse meshes with a device that no host has.

    Raises:
      ReshardError: if there is one.
    """
    checked: set[int] = set()
    for move in moves:
        for side, layout in (("source", move.source), ("destination", move.destination)):
            if id(layout.mesh) in checked:
                continue
            checked.add(id(layout.mesh))
            missing = [d for d in layout.mesh.devices if d not in network.domain_of]
            if missing:
                raise ReshardError(
                    refused=f"the {side} mesh", got=f"device {missing[0]}, which does not exist",
                    needed=f"devices of the network, of which there are {len(network.domain_of)}", where=move.name,
                    try_="the ids that the hosts of the network list",
                )  # fmt: skip


def _cuts(extent: int, blocks: int) -> np.ndarray:
    size = -(-extent // blocks)
    return np.minimum(np.arange(blocks + 1, dtype=np.int64) * size, extent)


def _outer(parts: list[np.ndarray], operation: np.ufunc, empty: int) -> np.ndarray:
    total = np.array([empty], dtype=np.int64)
    for part in parts:
        total = operation.outer(total, part).ravel()
    return total


def _mixed_radix(parts: list[np.ndarray], radix: Sequence[int]) -> np.ndarray:
    """Of each cell of a grid the number of its block, blocks in row-major order."""
    strides = [math.prod(radix[i + 1 :]) for i in range(len(radix))]
    return _outer([p * s for p, s in zip(parts, strides, strict=True)], np.add, 0)
