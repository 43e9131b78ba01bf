"""Groups of devices in a torus: what a collective over one axis of a logical mesh reaches there.

An axis of a row-major logical mesh takes, of every torus dim it touches, k positions that are s apart. Along a dim of N
positions, w bytes/s each way on a link (Google's "How to Scale Your Model", chapter on sharding, for s = 1):

* The dim closes to a ring and the axis takes all of it (k s = N): data goes both ways round, 2 w; the s groups that
  lie between each other share the links, so 2 w / s.
* Otherwise the positions are a line, whose ends have one neighbour: w / s.

A gather (or a sum) over several dims runs over all of them at once, on parts of the data in different orders of dims,
so bandwidths add. Its steps are what the farthest data has to go: half a ring, a whole line. In an exchange every byte
goes k s / 4 hops along a ring, split over two links, k s / 2 at worst crosses the middle of a line: per device

    k s / 8 w  or  k s / 4 w   seconds for each byte of the local buffer, the worst dim.

Known limits: dims of different bandwidths are taken to be used in proportion; a part of a torus is the first devices of
it, and keeps the rings that are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from .errors import ClusterError, check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class TorusPart:
    """What an axis has of one torus dim: `count` positions, `stride` apart; `ring`: whether they close to a ring."""

    count: int
    stride: int
    ring: bool

    @property
    def links(self) -> float:
        """Bandwidth of a gather along it, in links."""
        return (2 if self.ring else 1) / self.stride

    @property
    def steps(self) -> int:
        """Hops that the farthest data takes."""
        return self.stride * (ceil((self.count - 1) / 2) if self.ring else self.count - 1)

    @property
    def exchange_seconds(self) -> float:
        """Of an exchange along it, for each byte of the local buffer, on links of 1 byte/s."""
        return self.count * self.stride / (8 if self.ring else 4)


def axis_parts(shape: Sequence[int], wraps: Sequence[bool], stride: int, size: int) -> tuple[TorusPart, ...] | None:
    """What an axis of `size` devices, `stride` apart in the row-major order, takes of each dim of a torus.

    Args: `shape`, `wraps` of the torus.
    Returns None where the axis cuts a dim into parts that are not equal: then it is no part of this torus.

    >>> axis_parts((4, 4), (True, True), 4, 4)
    (TorusPart(count=4, stride=1, ring=True),)
    >>> [part.count for part in axis_parts((4, 4), (True, True), 2, 8)]
    [4, 2]
    """
    parts = []
    inner = 1  # devices in one position of the dim
    for length, wraps_round in reversed(list(zip(shape, wraps, strict=True))):
        # An axis is the digits of a device's number from `stride` to `stride * size`, a dim those from `inner`.
        first, end = max(stride, inner), min(stride * size, inner * length)
        if first < end:
            if end % first or first % inner or (inner * length) % end or (stride * size) % end:
                return None
            count, apart = end // first, first // inner
            parts.append(
                TorusPart(count=count, stride=apart, ring=wraps_round and count > 2 and count * apart == length)
            )
        inner *= length
    return tuple(reversed(parts)) if prod(part.count for part in parts) == size else None


def check_torus(devices: int, shape: tuple[int, ...], wraps: tuple[bool, ...]) -> None:
    """Refuse a torus that does not hold `devices` or has no word on each dim. Raises ClusterError."""
    if not shape and not wraps:
        return
    for size in shape:
        check_count("Host", "torus", size)
    if len(wraps) != len(shape) or not all(isinstance(wrap, bool) for wrap in wraps):
        raise _refused("torus_wraps", repr(list(wraps)), f"{len(shape)} times true or false, one for each dim",
                       repr([size > 2 for size in shape]).lower())  # fmt: skip
    if devices > prod(shape):
        raise _refused("torus", f"{devices} devices in a torus of {_text(shape)}", f"at most {prod(shape)}",
                       "a larger torus")  # fmt: skip
    if any(wrap and size < 3 for wrap, size in zip(wraps, shape, strict=True)):
        raise _refused("torus_wraps", f"a ring of 2 or fewer in {_text(shape)}", "rings of at least 3",
                       "false: two devices are joined once")  # fmt: skip


def slice_shape(chips: int, shapes: Sequence[Sequence[int]], most: int) -> tuple[int, ...] | None:
    """The shape of a slice of `chips`: one of `shapes`, or the evenest one of three multiples of 4; None if there is
    none, or more than `most` chips.

    >>> slice_shape(2048, [(4, 4, 4)], 4096)
    (8, 16, 16)
    """
    if chips > most:
        return None
    for shape in shapes:
        if prod(shape) == chips:
            return tuple(shape)
    if len(shapes[0]) != 3 or chips % 64:
        return None
    cubes = chips // 64
    divisors = [size for size in range(1, cubes + 1) if cubes % size == 0]
    found = [
        (4 * x, 4 * y, 4 * (cubes // (x * y)))
        for x in divisors
        for y in divisors
        if x <= y and cubes % (x * y) == 0 and cubes // (x * y) >= y
    ]
    return min(found, key=lambda shape: (max(shape) / min(shape), shape))


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _refused(field: str, got: str, needed: str, try_: str) -> ClusterError:
    return ClusterError(refused="this host", got=got, needed=needed, where=f"Host.{field}", try_=try_)
