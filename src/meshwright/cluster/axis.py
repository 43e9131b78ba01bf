"""One axis of a logical mesh: the links that a collective along it crosses, level by level.

A group of the axis is a tree of units: devices in a host, hosts under one leaf switch, leaves in the cluster. Each
level that the group really has is a `Level`, innermost first. What a collective costs on them is the business of
`cost.collective`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .errors import check_count, check_number, check_text, check_type
from .hardware import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The units of one level that a group has, and what joins them.

    `kind`: "device" (the units are devices of one host), "host" (hosts joined by NICs) or "leaf" (leaf switches joined
    by the rest of the fabric). `size`: units of this level in each unit of the next. `link`: what joins them; its
    bandwidth is that of one link. `bandwidth_bytes_per_second`: out of one unit, for one group while all groups of the
    axis talk; on a torus, of all links that the group has at a device. `steps`: how far the farthest data has to go.
    `torus_exchange_seconds`: of an exchange on a torus, for each byte of the local buffer; None without a torus.
    `own_links`: whether other axes use other links at this level (wires, torus), so that bandwidths of axes add up.
    `beside`: units that all groups together have in one unit of the next level, where these share memory; by default
    those of this group.

    >>> link = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-6)
    >>> Level(kind="device", size=4, link=link, bandwidth_bytes_per_second=1e9).steps
    3
    """

    kind: str
    size: int
    link: Link
    bandwidth_bytes_per_second: float
    steps: int = 0
    torus_exchange_seconds: float | None = None
    own_links: bool = False
    beside: int = 0

    def __post_init__(self) -> None:
        check_text("Level", "kind", self.kind)
        check_count("Level", "size", self.size)
        check_type("Level", "link", self.link, Link)
        check_number("Level", "bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, above=True)
        if not self.steps:
            object.__setattr__(self, "steps", self.size - 1)
        if not self.beside:
            object.__setattr__(self, "beside", self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a logical mesh, with what a collective along it crosses.

    `latency_seconds`: one hop of a ring over a group. `bandwidth_bytes_per_second`: of that ring, per group, while all
    groups of the axis talk. `launch_seconds`: fixed cost of one collective.
    `exchange_bandwidth_bytes_per_second`: per device in an all-to-all (see `logical_mesh`); None means the ring's.
    `levels`: innermost first; by default one, with these very numbers.

    >>> Axis(name="x", size=2, latency_seconds=1e-6, bandwidth_bytes_per_second=1e9, launch_seconds=5e-6).size
    2
    """

    name: str
    size: int
    latency_seconds: float
    bandwidth_bytes_per_second: float
    launch_seconds: float
    exchange_bandwidth_bytes_per_second: float | None = None
    levels: tuple[Level, ...] = ()
    # Prices are looked up by axis a million times in a search: hashed once.
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        check_text("Axis", "name", self.name)
        check_count("Axis", "size", self.size)
        check_number("Axis", "latency_seconds", self.latency_seconds)
        check_number("Axis", "bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, above=True)
        check_number("Axis", "launch_seconds", self.launch_seconds)
        if self.exchange_bandwidth_bytes_per_second is not None:
            check_number(
                "Axis", "exchange_bandwidth_bytes_per_second", self.exchange_bandwidth_bytes_per_second, above=True
            )
        if not self.levels:
            link = Link(
                bandwidth_bytes_per_second=self.bandwidth_bytes_per_second, latency_seconds=self.latency_seconds,
                launch_seconds=self.launch_seconds,
            )  # fmt: skip
            only = Level(
                kind="device", size=self.size, link=link, bandwidth_bytes_per_second=self.bandwidth_bytes_per_second
            )
            object.__setattr__(self, "levels", (only,))
        parts = (
            self.name, self.size, self.latency_seconds, self.bandwidth_bytes_per_second, self.launch_seconds,
            self.exchange_bandwidth_bytes_per_second, self.levels,
        )  # fmt: skip
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Built anew: hashes of texts differ between processes.
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        return _axis_of, (values,)


def _axis_of(values: dict[str, Any]) -> Axis:
    return Axis(**values)
