"""Seconds of converting every spec of a value to every other, as tables: the edges of the search's problem.

A search asks for a million pairs of specs, most of them over and over. Among values of about one size a price is a
line in the bytes of the value, forward and backward, so it belongs to the pair alone; and it depends only on the dims
that one of the two splits, in their order, so values of every rank share it. What is left to look up is done by NumPy.

Sizes are told apart by powers of two: a collective is priced by the algorithm that is the fastest in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import log2

import numpy as np

from ..cluster import LogicalMesh
from ..cost.collective import KINDS, collective_lines
from ..sharding import Spec, convert

_Terms = tuple[float, float, float, float]


class ConversionPrices:
    """Prices of conversions on one logical mesh.

    Args:
      mesh: the logical mesh.
    """

    def __init__(self, mesh: LogicalMesh) -> None:
        self._axes = {axis.name: axis for axis in mesh.axes}
        self._sizes = {axis.name: axis.size for axis in mesh.axes}
        self._collectives: dict[tuple[str, tuple[str, ...]], tuple[np.ndarray, np.ndarray]] = {}
        self._terms: dict[object, _Terms] = {}
        self._by_rank: dict[tuple[int, int], _Known] = {}

    def lines(
        self, sources: Sequence[Spec], targets: Sequence[Spec], value_bytes: float, *, differentiated: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fixed seconds and seconds per byte of the whole value, forward and backward: each `[2, source, target]`.

        Around `value_bytes`. Infinite where no conversion exists. Without a cotangent what it would be does not matter.
        """
        if not differentiated:
            sources = [spec.without_broadcast() for spec in sources]
            targets = [spec.without_broadcast() for spec in targets]
        size = self._size(value_bytes)
        known = self._by_rank.setdefault((len(sources[0].dims) if sources else 0, size), _Known())
        rows, columns = known.positions(sources), known.positions(targets)
        found = known.terms[:, rows[:, None], columns]
        missing = np.isnan(found[0])
        if missing.any():
            pairs = {(rows[i], columns[j]): (i, j) for i, j in zip(*np.nonzero(missing), strict=True)}
            for (row, column), (i, j) in pairs.items():
                known.terms[:, row, column] = self._of(sources[i], targets[j], size)
            found = known.terms[:, rows[:, None], columns]
        return found[:2], found[2:]

    def _size(self, value_bytes: float) -> int:
        """The nearest power of two; where every collective is one line, all sizes are one."""
        if self._straight or value_bytes <= 0:
            return 0
        return round(log2(value_bytes))

    @cached_property
    def _straight(self) -> bool:
        axes = tuple(self._axes)
        each = [(axis,) for axis in axes if self._sizes[axis] > 1]
        groups = [*each, tuple(axes)] if each else []
        return all(len(self._lines(kind, group)[0]) == 1 for kind in KINDS for group in groups)

    def _of(self, source: Spec, target: Spec, size: int) -> _Terms:
        if source == target:
            return 0.0, 0.0, 0.0, 0.0
        dims = tuple((a, b) for a, b in zip(source.dims, target.dims, strict=True) if a or b)
        key = (dims, source.partial, source.broadcast, target.partial, target.broadcast, size)
        if key not in self._terms:
            self._terms[key] = self._price(
                Spec(tuple(a for a, _ in dims), source.partial, source.broadcast),
                Spec(tuple(b for _, b in dims), target.partial, target.broadcast),
                2.0**size,
            )
        return self._terms[key]

    def _price(self, source: Spec, target: Spec, size: float) -> _Terms:
        conversion = convert(source, target)
        if conversion is None:
            return np.inf, 0.0, np.inf, 0.0
        terms = [0.0, 0.0, 0.0, 0.0]
        for step in conversion:
            fraction = step.buffer_fraction(self._sizes)
            for place, kind in ((0, step.forward), (2, step.backward)):
                if kind is not None:
                    fixed, rate = self._line(kind, step.axes, fraction * size)
                    terms[place] += fixed
                    terms[place + 1] += rate * fraction
        return terms[0], terms[1], terms[2], terms[3]

    def _line(self, kind: str, axes: tuple[str, ...], size: float) -> tuple[float, float]:
        """A collective's seconds as fixed plus rate times bytes, around a buffer of `size` bytes."""
        fixed, rate = self._lines(kind, axes)
        fastest = int((fixed + rate * size).argmin())
        return float(fixed[fastest]), float(rate[fastest])

    def _lines(self, kind: str, axes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        key = (kind, axes)
        if key not in self._collectives:
            self._collectives[key] = collective_lines(kind, [self._axes[a] for a in axes])
        return self._collectives[key]


# Microbatches and rematerialisation change a program, not what a conversion costs on a mesh.
@lru_cache(maxsize=16)
def conversion_prices(mesh: LogicalMesh) -> ConversionPrices:
    """The one `ConversionPrices` of a mesh."""
    return ConversionPrices(mesh)


class _Known:
    """The specs of one rank met so far, and what is known of their pairs; NaN where nothing is."""

    def __init__(self) -> None:
        self.position: dict[Spec, int] = {}
        self.terms = np.full((4, 0, 0), np.nan)

    def positions(self, specs: Sequence[Spec]) -> np.ndarray:
        """Where each spec stands, room made for new ones."""
        found = np.array([self.position.setdefault(spec, len(self.position)) for spec in specs], dtype=np.intp)
        size = self.terms.shape[1]
        if len(self.position) > size:
            grown = np.full((4, *(max(2 * size, len(self.position)),) * 2), np.nan)
            grown[:, :size, :size] = self.terms
            self.terms = grown
        return found
