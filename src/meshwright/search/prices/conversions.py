"""Seconds of converting every spec of a value to every other, as tables: the edges of the search's problem.

A search looks up a million pairs of specs, most of them repeatedly. The collectives of a conversion depend only on the
two specs, and there only on the first dim and the dims that one of the two splits, in their order: a few hundred kinds
of conversion stand for all pairs, on every mesh whose axes have the same names (`_Catalogue`). Among values of about
one size the price of a collective is linear in the bytes of the value. So for a mesh and a size only a few dozen
collectives are priced; the rest is looked up and added by NumPy.

Sizes are rounded to powers of two: a collective is priced by the algorithm that is the fastest at that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache, reduce
from math import log2
from operator import truediv

import numpy as np

from ...cluster import LogicalMesh
from ...cost.collective import KINDS, collective_lines
from ...sharding import Spec, convert
from .exposure import ALL, Exposure
from .spec_row import SpecRow

# A collective of a conversion: its kind, its axes, the axes that split its buffer, and whether it is strided.
_Move = tuple[str, tuple[str, ...], tuple[str, ...], bool]

# Numbers of moves: none at all, and what stands for a conversion that does not exist.
_NOTHING, _NEVER = 0, 1


class ConversionPrices:
    """Prices of conversions on one logical mesh.

    Args:
      mesh: the logical mesh.
      strided_seconds_per_byte: of the buffer of a collective that is strided (`sharding.conversion.Step`), beside it.
    """

    def __init__(self, mesh: LogicalMesh, strided_seconds_per_byte: float) -> None:
        self._strided = strided_seconds_per_byte
        self._axes = {axis.name: axis for axis in mesh.axes}
        self._sizes = {axis.name: axis.size for axis in mesh.axes}
        self._collectives: dict[tuple[str, tuple[str, ...]], tuple[np.ndarray, np.ndarray]] = {}
        # All moves in the catalogue, whatever the size: fixed seconds and seconds per byte of each algorithm, `[2,
        # move, algorithm]`, infinite where there are no more; the share of the value in a buffer; and what each byte of
        # a buffer takes beside.
        self._known_moves = np.zeros((2, 0, 1)), np.zeros(0), np.zeros(0)
        # By size: fixed seconds, seconds per byte and those of a start of every conversion, forward and backward.
        self._terms: dict[int, np.ndarray] = {}

    def table(
        self, sources: SpecRow, targets: SpecRow, value_bytes: float, *, differentiated: bool, forward_runs: float,
        backward: bool, times: float = 1.0, exposure: Exposure = ALL,
    ) -> np.ndarray:  # fmt: skip
        """Seconds from each source to each target, `[source, target]`, infinite where no conversion exists: so many
        times so many runs of the forward collectives, and one of the backward ones, on a value of so many bytes in all,
        as far as they are exposed. Without a cotangent what that would be does not matter."""
        if not differentiated:
            sources, targets = sources.without_broadcast, targets.without_broadcast
        numbers = _CATALOGUE.numbers(sources, targets)
        # Of these pairs alone: of a whole catalogue for every number of bytes they were a tenth of a search's memory.
        fixed, rate, start, back_fixed, back_rate, back_start = (
            terms.take(numbers) for terms in self._terms_of(self._size(value_bytes))
        )
        saved = 1 - exposure.starts
        gathered = fixed - saved * start + rate * value_bytes
        seconds = forward_runs * exposure.of_gather(gathered)
        if backward:
            summed = back_fixed - saved * back_start + back_rate * value_bytes
            seconds += exposure.of_sum(summed, is_scattered=gathered > 0.0, backward_runs=forward_runs)
        return times * seconds

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

    def _terms_of(self, size: int) -> np.ndarray:
        """Of all conversions in the catalogue: `[fixed, rate and start, forward and then backward; conversion]`."""
        known = self._terms.get(size, np.zeros((6, 0)))
        done = known.shape[1]
        if done < len(_CATALOGUE):
            moves, (forward, backward) = self._priced_moves(size), _CATALOGUE.moves_of(done)
            new = np.concatenate([moves[:, forward].sum(axis=1), moves[:, backward].sum(axis=1)])
            self._terms[size] = known = np.concatenate([known, new], axis=1)
        return known

    def _priced_moves(self, size: int) -> np.ndarray:
        """Fixed seconds and seconds per byte of the whole value of all moves in the catalogue, of the algorithm that is
        the fastest there, and seconds of one that moves next to nothing: `[3, move]`."""
        (fixed, rates), shares, strided = self._moves_by_algorithm()
        start = fixed.min(axis=1)
        start[_NEVER] = 0.0  # nothing is saved of what does not exist
        fastest = (fixed + rates * (shares * 2.0**size)[:, None]).argmin(axis=1)[:, None]
        fixed, rates = (np.take_along_axis(one, fastest, axis=1)[:, 0] for one in (fixed, rates))
        return np.array([fixed, (rates + strided) * shares, start])

    def _moves_by_algorithm(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lines, shares, strided = self._known_moves
        done = len(shares)
        if new := _CATALOGUE.moves[done:]:
            found = [self._lines_of(move, number) for number, move in enumerate(new, start=done)]
            longest = max(lines.shape[2], *(len(fixed) for fixed, _ in found))
            grown = np.zeros((2, done + len(new), longest))
            grown[0] = np.inf
            grown[:, :done, : lines.shape[2]] = lines
            for number, each in enumerate(found, start=done):
                grown[:, number, : len(each[0])] = each
            # Other meshes have axes of other names; nobody asks this one for what they convert.
            more = [reduce(truediv, (self._sizes.get(axis, 1) for axis in split), 1.0) for _, _, split, _ in new]
            shares = np.concatenate([shares, more])
            strided = np.concatenate([strided, [self._strided * one[3] for one in new]])
            self._known_moves = grown, shares, strided
        return self._known_moves

    def _lines_of(self, move: _Move, number: int) -> tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]:
        """Fixed seconds and seconds per byte of each algorithm of a move."""
        kind, axes, _, _ = move
        if number in (_NOTHING, _NEVER):
            return [0.0 if number == _NOTHING else np.inf], [0.0]
        return self._lines(kind, axes) if all(axis in self._axes for axis in axes) else ([np.nan], [np.nan])

    def _lines(self, kind: str, axes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        key = (kind, axes)
        if key not in self._collectives:
            self._collectives[key] = collective_lines(kind, [self._axes[a] for a in axes])
        return self._collectives[key]


# Microbatches and rematerialisation change a program, not what a conversion costs on a mesh.
@lru_cache(maxsize=64)
def conversion_prices(mesh: LogicalMesh, strided_seconds_per_byte: float) -> ConversionPrices:
    """The one `ConversionPrices` of a mesh."""
    return ConversionPrices(mesh, strided_seconds_per_byte)


class _Catalogue:
    """All kinds of conversion met so far, with their moves, numbered in order."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._move_numbers: dict[_Move, int] = {}
        self._by_rank: dict[int, _Pairs] = {}
        self._of_rows: dict[tuple[int, int], np.ndarray] = {}
        self._made_of: list[tuple[list[int], list[int]]] = []
        self._moves_of = np.zeros((2, 0, 0), dtype=np.intp)  # the same as an array, as far as somebody has asked
        # The first two are no collectives: see `_NOTHING` and `_NEVER`.
        self.moves: list[_Move] = [("nothing", (), (), False), ("never", (), (), False)]

    def __len__(self) -> int:
        return len(self._made_of)

    def moves_of(self, first: int) -> np.ndarray:
        """Numbers of the moves of all conversions from number `first` on: `[forward and backward, move, conversion]`,
        filled up with `_NOTHING`."""
        _, width, known = self._moves_of.shape
        if new := self._made_of[known:]:
            longest = max(width, *(len(moves) for both in new for moves in both))
            grown = np.full((2, longest, len(self)), _NOTHING, dtype=np.intp)
            grown[:, :width, :known] = self._moves_of
            for number, both in enumerate(new, start=known):
                for direction, moves in enumerate(both):
                    grown[direction, : len(moves), number] = moves
            self._moves_of = grown
        return self._moves_of[:, :, first:]

    def numbers(self, sources: SpecRow, targets: SpecRow) -> np.ndarray:
        """Of each pair its conversion, `[source, target]`."""
        if (known := self._of_rows.get((id(sources), id(targets)))) is not None:
            return known
        rank = len(sources[0].dims) if sources else 0
        pairs = self._by_rank.setdefault(rank, _Pairs())
        rows, columns = pairs.positions(sources), pairs.positions(targets)
        found = pairs.conversions[rows[:, None], columns]
        missing = found < 0
        if missing.any():
            for i, j in zip(*np.nonzero(missing), strict=True):
                if pairs.conversions[rows[i], columns[j]] < 0:
                    pairs.conversions[rows[i], columns[j]] = self._number(sources[i], targets[j])
            found = pairs.conversions[rows[:, None], columns]
        self._of_rows[id(sources), id(targets)] = found  # there is one of each row, for good
        return found

    def _number(self, source: Spec, target: Spec) -> int:
        pairs = enumerate(zip(source.dims, target.dims, strict=True))
        dims = tuple((a, b) for position, (a, b) in pairs if position == 0 or a or b)
        key = (dims, source.partial, source.broadcast, target.partial, target.broadcast)
        if key not in self._numbers:
            self._numbers[key] = len(self._made_of)
            # Dims that neither splits have nothing to do with it; what is along the first is not strided.
            steps = convert(
                Spec(tuple(a for a, _ in dims), source.partial, source.broadcast),
                Spec(tuple(b for _, b in dims), target.partial, target.broadcast),
            )
            if steps is None:
                self._made_of.append(([_NEVER], [_NEVER]))
            else:
                forward = [(s.forward, s.axes, s.still_split, s.strided) for s in steps if s.forward]
                backward = [(s.backward, s.axes, s.still_split, s.strided) for s in steps if s.backward]
                self._made_of.append(([*map(self._move, forward)], [*map(self._move, backward)]))
        return self._numbers[key]

    def _move(self, move: _Move) -> int:
        if move not in self._move_numbers:
            self._move_numbers[move] = len(self.moves)
            self.moves.append(move)
        return self._move_numbers[move]


class _Pairs:
    """The specs of one rank met so far, and the number of each pair's conversion; -1 for pairs not looked up yet."""

    def __init__(self) -> None:
        self._position: dict[Spec, int] = {}
        self._of_rows: dict[SpecRow, np.ndarray] = {}
        self.conversions = np.full((0, 0), -1, dtype=np.intp)

    def positions(self, specs: SpecRow) -> np.ndarray:
        """Where each spec stands, room made for new ones."""
        if specs in self._of_rows:
            return self._of_rows[specs]
        found = np.array([self._position.setdefault(spec, len(self._position)) for spec in specs], dtype=np.intp)
        self._of_rows[specs] = found
        size = len(self.conversions)
        if len(self._position) > size:
            grown = np.full((max(2 * size, len(self._position)),) * 2, -1, dtype=np.intp)
            grown[:size, :size] = self.conversions
            self.conversions = grown
        return found


# Facts about specs, the same for every search in the process.
_CATALOGUE = _Catalogue()
