"""Sums over the parts of ranges of layers, all parts on one logical mesh at one price of memory.

What several parts of a range have, a parameter that they read or a value that one makes and another one keeps, counts
once (`shared_inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...program.ladder import SELECTIVE
from .part_rows import AT_LEAST, PartRow, PartRows
from .range_table import CONSTANT, Ranges
from .shared_inputs import SharedInputs
from .solver import Place, StageSolver

# Prices of memory, in units of the whole program's seconds over the limit. Chosen, not measured.
PRICES: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)

# Pairs of layers of which sums are remembered before all are forgotten: half of the pairs are ranges, with seven sums
# each, so that they take 60 MB at most.
_MOST_NUMBERS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """All parts on one logical mesh at one price of memory; one entry more than there are parts.

    Args:
      sums: `[parts + 1, 9]`, running sums of `PartRow.sums`.
      each: `[3, parts + 1]`: what each part spends on the one collective that a range shares, seconds; and what it
        takes while its backward pass runs, and the cotangents of what it receives, bytes.
      twice: what these sums count more than once (`SharedInputs.running_sums`).
      unwritten: running sums of what only the last part of a range writes (`SharedInputs.unwritten`).
    """

    sums: np.ndarray
    each: np.ndarray
    twice: np.ndarray
    unwritten: np.ndarray


class SummedParts:
    """The parts of one program, summed up to ranges of its layers.

    Args:
      solver: of the program whose layers are the parts.
      starts: of each layer its first part, and the number of parts.
      microbatches: in a step.
      check: as of `PartRows`.
    """

    def __init__(
        self, solver: StageSolver, starts: np.ndarray, microbatches: int, check: Callable[[], None] = lambda: None
    ) -> None:
        self._solver, self._starts, self._microbatches = solver, starts, microbatches
        self._parts = PartRows(solver, check)
        self._shared_inputs: dict[tuple[int, bool], SharedInputs] = {}
        self._columns: dict[tuple[int, int, int, int, float], _Column] = {}
        self._weights: dict[tuple[int, int], float] = {}
        # All ranges, and where each is among them, `[first, last]`.
        self._ranges = np.array(np.triu_indices(len(starts), 1))
        self._numbers = np.zeros((len(starts), len(starts)), dtype=int)
        self._numbers[*self._ranges] = np.arange(self._ranges.shape[1])
        self._known: dict[tuple[int, int, int, int, float], np.ndarray] = {}

    @cached_property
    def steps(self) -> np.ndarray:
        """In how many steps the parts up to each layer get to the middle rung of their ladders, and from there to the
        last one: `[2, layers + 1]`.

        Of several stages in as many as they have segments. (Of llama3-70b on 128 H100s more steps are so many more ways
        to run ranges that the search is broken off after a minute, at 294.6 s a step; so it finds 288.5 after 47.)
        """
        ladders = [self._solver.ladder(part, part + 1) for part in range(int(self._starts[-1]))]
        each = [
            (one.number(SELECTIVE), one.top - one.number(SELECTIVE)) if self._solver.alone else (one.segments,) * 2
            for one in ladders
        ]
        return np.cumsum([(0, 0), *each], axis=0).T[:, self._starts]

    def least_bytes(self, kind: int, number: int, remat: int, ranges: Ranges) -> np.ndarray:
        """Bytes on a device that no layout of a range is below: throughout, for each microbatch in flight, and while
        computed again: `[3, range]`."""
        return self(kind, number, remat, AT_LEAST, 1, ranges)[CONSTANT:]

    def __call__(
        self, kind: int, number: int, remat: int, price: int, in_flight: float, ranges: Ranges,
        others: Sequence[float] = (),
    ) -> np.ndarray:  # fmt: skip
        """The parts of ranges, each by itself at one price of memory: `[field, range]`, with seconds that are infinite
        where there is no layout; `others` as of `PartRows.priced`."""
        key = kind, number, remat, price, in_flight
        if key not in self._known:
            # A few ranges take nearly as long as all, and others are asked for next, or the same ones again.
            if len(self._known) * self._numbers.size >= _MOST_NUMBERS:
                self._known.clear()
            self._known[key] = self._of_ranges(*key, self._ranges, others)
        return self._known[key][:, self._numbers[*ranges]]

    def _of_ranges(
        self, kind: int, number: int, remat: int, price: int, in_flight: float, ranges: Ranges, others: Sequence[float]
    ) -> np.ndarray:
        column = self._column(kind, number, remat, price, in_flight, others)
        forward, backward, weight, _, once, shared, constant, kept, missing = self._differences(column.sums, ranges)
        twice, once_twice, constant_twice, kept_twice = self._inputs(remat, price).twice(column.twice, ranges)
        # Inside the range nothing is received, and gradients are summed by one collective. What is written only for the
        # next part is not written forward, nor backward for its derivative and where it is computed again.
        unwritten = self._differences(column.unwritten, ranges, less_last=1)
        forward = np.maximum(forward - self._differences(column.sums[:, 3], ranges, less_first=1) - unwritten, 0.0)
        backward = np.maximum(backward - twice - (1 + (remat > 0)) * unwritten, 0.0)
        weight = np.minimum(np.maximum(weight - twice, 0.0), backward)
        fixed, workspace = self._largest(column.each[:2], ranges)
        once = np.maximum(once - once_twice - shared + fixed, 0.0)
        workspace = workspace + column.each[2][self._starts[ranges[0]]]
        forward = np.where(missing > 0, np.inf, forward)
        constant, kept = constant - constant_twice, kept - kept_twice
        return np.array([forward, backward, weight, once, constant, kept, workspace])

    def _differences(self, sums: np.ndarray, ranges: Ranges, *, less_first: int = 0, less_last: int = 0) -> np.ndarray:
        """Of running sums over parts those over ranges of layers, less so many parts at either end: `[..., range]`."""
        first, last = self._starts[ranges]
        return (sums[last - less_last] - sums[first + less_first]).T

    def _largest(self, each: np.ndarray, ranges: Ranges) -> np.ndarray:
        """Of numbers of the parts, with one more, the largest in each range of layers, `[..., range]`."""
        ends = self._starts[ranges].T.ravel()
        return np.maximum.reduceat(each, ends, axis=-1)[..., ::2]

    def _column(
        self, kind: int, number: int, remat: int, price: int, in_flight: float, others: Sequence[float] = ()
    ) -> _Column:
        key = kind, number, remat, price, in_flight
        if key not in self._columns:
            rows = self._rows(*key, others)
            each = [*((row.sums[5], row.workspace, row.cotangents) for row in rows), (0.0,) * 3]
            shared = self._inputs(remat, price)
            self._columns[key] = _Column(
                sums=np.cumsum([(0.0,) * len(rows[0].sums), *(row.sums for row in rows)], axis=0),
                each=np.array(each).T.copy(),
                twice=shared.running_sums([row.inputs for row in rows]),
                unwritten=shared.unwritten([row.outputs for row in rows]),
            )
        return self._columns[key]

    def _rows(
        self, kind: int, number: int, remat: int, price: int, in_flight: float, others: Sequence[float]
    ) -> list[PartRow]:
        """All parts on one logical mesh at one price of memory."""
        places = [Place(part, part + 1, kind, number) for part in range(int(self._starts[-1]))]
        if price == AT_LEAST:
            return [self._parts.at_least(place, remat) for place in places]
        unit = self.free_weight(kind, number) / self._solver.kind_of.devices[kind].usable_memory_bytes if price else 0.0
        prices = [unit * one for one in PRICES]
        return [self._parts.priced(place, remat, prices, price, in_flight, others) for place in places]

    def _inputs(self, remat: int, price: int) -> SharedInputs:
        loosely = price == AT_LEAST
        if (remat, loosely) not in self._shared_inputs:
            starts = self._starts.tolist()
            self._shared_inputs[remat, loosely] = SharedInputs(self._solver, starts, remat, loosely=loosely)
        return self._shared_inputs[remat, loosely]

    def free_weight(self, kind: int, number: int) -> float:
        """Seconds a step of all parts on one logical mesh: with the limit, the scale of prices."""
        if (kind, number) not in self._weights:
            total = np.sum([row.sums for row in self._rows(kind, number, 0, 0, 1, ())], axis=0)
            self._weights[kind, number] = float(self._microbatches * (total[0] + total[1]) + total[4])
        return self._weights[kind, number]
