"""The algorithms that carry out a collective, each as lines: seconds over bytes.

A group of devices is seen level by level (`cluster.Level`): k devices in each host, h hosts, out of each of which the
group has so many bytes/s. For S bytes in the sense of `cost.collective`, x = 2 for an all-reduce and 1 for its halves:

ring       n-1 steps, every link once round: latency x (n-1) mean hop, transfer x (n-1)/n S / b, b the slowest level
           (Thakur, Rabenseifner, Gropp 2005).
tree       all-reduce only: a chain in each host, two complementary binary trees over hosts (Sanders, Speck, Traff
           2009, as NCCL uses it). Latency 2 ((k-1) a + log2(h) a'), transfer 2 S / b at every level (an inner node
           receives and sends twice, for one half), S / b between two units, which have no inner node.
switch     where a switch sums and copies (NVLink SHARP): each device sends its S and receives its 1/k of the sum, and
           the other way round for the copies: (1 + 1/k) S each way, four steps, and trees over hosts. Of a gather or
           scatter inside one host the half of it that is meant: S, two steps. Rings have more bandwidth for those.
memory     all kinds where all devices share memory: everybody waits for everybody, n-1 steps whatever the kind (for a
           permute everybody in the program), and then passes over the buffer once: summing what all have written
           there (a permute: what one has), copying it, or exchanging its parts, each at a rate of its own.
torus      gathers and sums over all dims at once inside, then rings over slices on what is left.
direct     exchange: every device to every other one. Steps inside a host are taken one after the other, messages
           to other hosts are under way eight at a time (as NCCL and MPI libraries do).
by axis    several axes one after the other, each by its own best algorithm and with a launch of its own: for a
           reduction or gather the first axis with all of the buffer, each next one with what is left after division,
           in the order that is the fastest (hierarchical, multi-rail collectives); for an exchange the whole buffer
           along each.

**Chunks.** A step of latency a and a transfer of w seconds do not just add up. The message is cut into chunks; with
chunks that take r step latencies, all L seconds of latency are paid for (1 + r) L, and every chunk's own step makes the
transfer (1 + 1/r) W. The best r gives (sqrt L + sqrt W)^2, and this square is what measured curves follow over three
orders of magnitude (docs/clusters.md). Chunks are limited by buffers, r <= R (`Link.chunk_steps`), and bandwidths are
those of large messages, so W is stated for r = R. Every r is a line in bytes; a dozen of them make the curve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import ceil, log2, prod

from ..cluster import Axis, Level
from ..cluster.hardware import slowest_link

# Messages to other hosts that one device has under way at a time.
_MESSAGES_UNDER_WAY = 8
# A device asks the switch for its part of the sum, then sends it to be copied; each is a message and its answer.
_SWITCH_STEPS = 4
# Where devices share memory a sum takes as long as its scatter (measured). Cutting a part out of it, which is a copy,
# is not priced: by this much the scatter, which leaves the same, is the cheaper one.
_WHOLE = 1.001
# Chunk sizes tried, halving from the largest.
_HALVINGS = 8

_KINDS = ("device", "host", "leaf")


@dataclass(frozen=True, slots=True)
class Line:
    """`fixed_seconds` plus `seconds_per_byte` for each byte, by an algorithm called `name`."""

    fixed_seconds: float
    seconds_per_byte: float
    name: str


def lower_envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """The lines that are the lowest somewhere over bytes > 0, in the order in which they are, from few bytes to many.

    >>> [line.name for line in lower_envelope([Line(0, 2, "a"), Line(9, 1, "b"), Line(9, 1.5, "c")])]
    ['a', 'b']
    """
    hull: list[Line] = []
    for line in sorted(lines, key=lambda one: (one.fixed_seconds, one.seconds_per_byte)):
        if hull and line.seconds_per_byte >= hull[-1].seconds_per_byte:
            continue
        while len(hull) >= 2 and _meet(hull[-2], line) <= _meet(hull[-2], hull[-1]):
            hull.pop()
        hull.append(line)
    return tuple(hull)


def _meet(early: Line, late: Line) -> float:
    """Bytes from which `late` is the lower one."""
    return (late.fixed_seconds - early.fixed_seconds) / (early.seconds_per_byte - late.seconds_per_byte)


def lines_of(kind: str, axes: Sequence[Axis]) -> tuple[Line, ...]:
    """The lower envelope of all ways to do a collective over `axes`, all larger than 1."""
    group = _Group(axes)
    ways = [line for way in group.ways(kind) for line in way]
    # Where one meeting and one pass do it for any group, nobody meets for each axis.
    if len(axes) > 1 and kind != "permute" and not group.memory:
        ways += _by_axis(kind, axes)
    return lower_envelope(ways)


class _Group:
    """The devices that take part: levels, innermost first, of the product of axes."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = axes
        self.size = prod(axis.size for axis in axes)
        found = (_merged(kind, axes) for kind in _KINDS)
        # What has one unit at every level has links nevertheless.
        self.levels = [level for level in found if level is not None and level.size > 1] or list(axes[0].levels[:1])
        self.launch_seconds = max(level.link.launch_seconds for level in self.levels)
        self.slowest = min(self.levels, key=lambda level: level.bandwidth_bytes_per_second)
        self.inner = self.levels[0] if self.levels[0].kind == "device" else None
        self.outer = self.levels[1:] if self.inner else self.levels
        shared = self.inner and not self.outer and self.inner.link.sum_bandwidth_bytes_per_second
        self.memory = self.inner if shared else None
        self.is_torus = self.inner is not None and self.inner.torus_exchange_seconds is not None

    def ways(self, kind: str) -> Iterable[tuple[Line, ...]]:
        if self.memory:
            yield self._memory(kind, self.memory)
        elif kind == "permute":
            yield self._permute()
        elif kind == "all_to_all":
            yield self._direct()
        elif self.is_torus:
            yield self._torus(2 if kind == "all_reduce" else 1)
        else:
            sums = kind == "all_reduce"
            yield self._ring(2 if sums else 1)
            if sums and self.outer:
                yield self._tree()
            if self.inner and self.inner.link.reduction_bandwidth_bytes_per_second and (sums or not self.outer):
                yield self._switch(self.inner, half=not sums)

    def _ring(self, times: int) -> tuple[Line, ...]:
        share = times * (self.size - 1) / self.size
        hops = 0.0
        units = self.size
        for place, level in enumerate(self.levels):
            outside = 0 if place + 1 == len(self.levels) else units / level.size
            hops += (units - outside) * level.link.latency_seconds
            units /= level.size
        return self._chunked("ring", share * hops, share / self.slowest.bandwidth_bytes_per_second)

    def _tree(self) -> tuple[Line, ...]:
        chain = (self.inner.size - 1) * self.inner.link.latency_seconds if self.inner else 0.0
        transfer = max(_tree_share(level) for level in self.levels)
        return self._chunked("tree", 2 * (chain + self._tree_steps()), transfer)

    def _switch(self, inner: Level, *, half: bool) -> tuple[Line, ...]:
        inside = (1 if half else 1 + 1 / inner.size) / inner.link.reduction_bandwidth_bytes_per_second
        latency = _SWITCH_STEPS / (2 if half else 1) * inner.link.latency_seconds + 2 * self._tree_steps()
        return self._chunked("switch", latency, max([inside, *map(_tree_share, self.outer)]))

    def _memory(self, kind: str, inner: Level) -> tuple[Line, ...]:
        if kind == "all_to_all":
            transfer = self._exchange()
        elif kind == "all_gather":
            transfer = 1 / inner.bandwidth_bytes_per_second
        else:  # a permute writes all that it reads, as a sum of one does
            transfer = 1 / inner.link.sum_bandwidth_bytes_per_second
            transfer *= _WHOLE if kind == "all_reduce" else 1.0
        # A permute says who sends to whom, and so has no groups: all devices of the program meet.
        meeting = inner.beside if kind == "permute" else inner.size
        return self._chunked("memory", (meeting - 1) * inner.link.latency_seconds, transfer)

    def _tree_steps(self) -> float:
        return sum(ceil(log2(level.size)) * level.link.latency_seconds for level in self.outer)

    def _torus(self, times: int) -> tuple[Line, ...]:
        latency = sum(level.steps * level.link.latency_seconds for level in self.levels)
        transfer = sum((level.size - 1) / level.size / level.bandwidth_bytes_per_second for level in self.levels)
        return self._chunked("torus", times * latency, times * transfer)

    def _direct(self) -> tuple[Line, ...]:
        latency = self.inner.steps * self.inner.link.latency_seconds if self.inner else 0.0
        if self.outer:
            away = self.size - (self.inner.size if self.inner else 1)
            latency += self.outer[-1].link.latency_seconds * (1 + away / _MESSAGES_UNDER_WAY)
        return self._chunked("direct", latency, self._exchange())

    def _exchange(self) -> float:
        """Seconds of an exchange for each byte of the local buffer."""
        if len(self.axes) == 1:
            (axis,) = self.axes
            reached = axis.exchange_bandwidth_bytes_per_second or axis.bandwidth_bytes_per_second
            return (axis.size - 1) / axis.size / reached
        worst, inside = 0.0, 1
        for level in self.levels:
            if level.torus_exchange_seconds is not None:
                seconds = level.torus_exchange_seconds * level.size / self.size
            else:
                # What leaves a unit; inside a host it is each device's own link that counts.
                sent = (level.size - 1) / self.size if level is self.inner else inside * (1 - inside / self.size)
                seconds = sent / (level.bandwidth_bytes_per_second * level.link.exchange_efficiency)
            worst = max(worst, seconds)
            inside *= level.size
        return worst

    def _permute(self) -> tuple[Line, ...]:
        latency = max(level.link.latency_seconds for level in self.levels)
        bandwidth = self.slowest.bandwidth_bytes_per_second
        if self.slowest.torus_exchange_seconds is not None:  # a neighbour is reached by one link
            bandwidth = min(bandwidth, self.slowest.link.bandwidth_bytes_per_second)
        return self._chunked("direct", latency, 1 / bandwidth)

    def _chunked(self, name: str, latency: float, transfer: float) -> tuple[Line, ...]:
        """Lines for `latency` seconds and `transfer` seconds for each byte, in chunks of all sizes."""
        most = self.levels[-1].link.chunk_steps
        if not most or not latency:
            return (Line(self.launch_seconds + latency, transfer, name),)
        chunks = [most * 2.0**-halvings for halvings in range(_HALVINGS)]
        return tuple(
            Line(self.launch_seconds + latency * (1 + chunk), transfer * (1 + 1 / chunk) / (1 + 1 / most), name)
            for chunk in chunks
        )


def _tree_share(level: Level) -> float:
    """Seconds of a tree's traffic at a level for each byte; between two units there is no node with two children."""
    return (1 if level.size == 2 else 2) / level.bandwidth_bytes_per_second


def _merged(kind: str, axes: Sequence[Axis]) -> Level | None:
    """One level of the product of axes."""
    found = []
    for axis in axes:
        for level in axis.levels:
            if level.kind == kind and level.size > 1:
                # Groups of this axis that the other axes join into one share what leaves a unit, so it adds up.
                joined = prod(
                    inner.size for other in axes if other is not axis for inner in other.levels
                    if _KINDS.index(inner.kind) < _KINDS.index(kind)
                )  # fmt: skip
                found.append((level, level.bandwidth_bytes_per_second * joined))
    if len(found) < 2:
        return None if not found else _with_bandwidth(*found[0])
    levels = [level for level, _ in found]
    size = prod(level.size for level in levels)
    apart = all(level.own_links for level in levels)
    bandwidths = [bandwidth for _, bandwidth in found]
    exchange = [level.torus_exchange_seconds for level in levels if level.torus_exchange_seconds is not None]
    return Level(
        kind=kind, size=size, link=slowest_link([level.link for level in levels]),
        bandwidth_bytes_per_second=sum(bandwidths) if apart else min(bandwidths),
        steps=sum(level.steps for level in levels) if exchange else size - 1,
        torus_exchange_seconds=max(exchange, default=None), own_links=apart,
        beside=max(level.beside for level in levels),
    )  # fmt: skip


def _with_bandwidth(level: Level, bandwidth: float) -> Level:
    if bandwidth == level.bandwidth_bytes_per_second:
        return level
    return Level(
        kind=level.kind, size=level.size, link=level.link, bandwidth_bytes_per_second=bandwidth, steps=level.steps,
        torus_exchange_seconds=level.torus_exchange_seconds, own_links=level.own_links, beside=level.beside,
    )  # fmt: skip


def _by_axis(kind: str, axes: Sequence[Axis]) -> list[Line]:
    """One axis after the other, in the best order for each size."""
    if kind == "all_to_all":  # each has all of the buffer, whatever the order
        return _in_order(kind, axes)
    return [line for ordered in permutations(axes) for line in _in_order(kind, ordered)]


def _in_order(kind: str, ordered: Sequence[Axis]) -> list[Line]:
    parts: list[tuple[str, Axis, float]] = []  # kind, axis, share of the buffer
    share = 1.0
    for place, axis in enumerate(ordered):
        if kind != "all_reduce" or place + 1 == len(ordered):
            parts.append((kind, axis, share))
        else:
            parts += [("reduce_scatter", axis, share), ("all_gather", axis, share)]
        if kind != "all_to_all":
            share /= axis.size
    total = [Line(0.0, 0.0, "by axis")]
    for part, axis, share in parts:
        lines = lines_of(part, (axis,))
        total = list(lower_envelope(
            Line(a.fixed_seconds + b.fixed_seconds, a.seconds_per_byte + share * b.seconds_per_byte, "by axis")
            for a in total for b in lines
        ))  # fmt: skip
    return total
