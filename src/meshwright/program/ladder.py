"""The ways to rematerialise a program, from nothing to all of it: how much is kept, and what is computed again for it.

Not all of a segment need be computed again: of what the backward pass reads, what is dear to make may be kept. Minimum
cuts at ascending prices of memory (`kept_results`) are so many ways to rematerialise a segment, each of which keeps
less than the one before: the rungs of a `Ladder`. What goes at one price may go one result after the other: products of
the same number of terms are equally dear, and a loop is one segment, of which the first few trips cannot be on another
rung than the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from sys import maxsize

import numpy as np

from .graph import Graph, Operator, Path
from .kept_results import is_opaque, kept_results, moved_again
from .parameter_values import values_of_parameters
from .residuals import kept_values
from .segments import Runs, Segments, rematerialise

# Ways to rematerialise a range: nothing; every segment on the middle rung of its ladder, where it keeps what is dear to
# make; and every one on the last rung, where it keeps nothing but what enters it.
NONE, SELECTIVE, ALL = 0, maxsize // 2, maxsize

# Of the way up a ladder, how much is below the middle rung.
MIDDLE = 0.5

# Of shares that are computed.
_ROUNDING = 1e-12

# Of the middle rung: bytes moved again for a byte that is not kept (`kept_results`). Chosen, not measured: in 16 bits a
# product takes that much whose sums have 600 terms; scores of attention, of 64 or 128, take less with all around them.
SELECTIVE_PRICE = 6.0

# Of all rungs but the last. At 256 times the middle one's price all is made again but the longest of sums: convolutions
# of U-Nets have 11,000 terms. At a quarter of it little more is than compilers would make again by themselves.
PRICES = tuple(SELECTIVE_PRICE * 2.0**power for power in range(-2, 9))

# A rung that keeps more than this share of what nothing rematerialised keeps is none. GPT-3's and Llama's middle ones
# keep a third and less; with fused attention Llama's stages 0.87 to 0.90 (which is 7 % of the step of 70B on 128
# H100s), and stages of GPT-3 all. What networks of convolutions keep there is each result of one, 1.0 and more.
MOST_KEPT = 0.95

# What a rung keeps less than the one before, as a share of that, or it is none. Chosen, not measured.
_LESS = 0.02

# Of two rungs the distance that is taken for the least, as a share of what nothing rematerialised keeps: some segments
# keep as much on both. Chosen, not measured.
_APART = 1e-3

# A program of fewer segments than `_FEW` has about `_MANY` ways between two prices: results that go at one of them go
# one after the other (a loop is one segment, and products of as many terms all go at once); and prices below the middle
# one count. Others have some segments on a rung and some on none, which is better than a rung at a low price: what is
# cheap runs again on that too (moe-690m on two V100s: 17.7 s a step without such rungs, 18.2 with them).
_FEW, _MANY = 4, 8


@dataclass(frozen=True, slots=True)
class _Rung:
    """A way to rematerialise one segment.

    Args:
      level: of its equations.
      runs: of them.
      kept: of those the ones whose results are kept.
    """

    level: Path
    runs: tuple[tuple[int, int], ...]
    kept: frozenset[Path] = frozenset()


@dataclass(frozen=True, slots=True)
class Ladder:
    """The ways to rematerialise a program.

    Each segment is on no rung, or on one that keeps less than those below it. A program may be between two rungs: the
    first segments on the higher one, the others on the lower one, since what is made first waits longest for the
    backward pass. These ways have numbers: none (0), the first segment on the first rung, the first two, and so on
    until all are; then the first on the second rung and the others on the first; up to all on the last rung.

    Args:
      rungs: a way for each segment, what keeps most first. None where nothing can be rematerialised.
      middle: how many of them are up to the one that keeps what is dear to make; the last one where there is none.
      heights: of each number the bytes that it keeps less than 0, with a least distance to the one before.
    """

    rungs: tuple[tuple[_Rung, ...], ...]
    middle: int = 0
    heights: tuple[float, ...] = (0.0,)

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self.rungs[0]) if self.rungs else 0

    @property
    def top(self) -> int:
        """The largest number: all segments on the last rung."""
        return self.segments * len(self.rungs)

    def number(self, remat: int) -> int:
        """The number that a number, SELECTIVE or ALL stands for."""
        return self.segments * self.middle if remat == SELECTIVE else min(remat, self.top)

    def number_at(self, share: float) -> int:
        """The first number that is so far between none (0) and all segments on the last rung (1)."""
        return bisect_left(range(self.top), share - _ROUNDING, key=self.share_of)

    def share_of(self, number: int) -> float:
        """How far a number is between none (0) and all segments on the last rung (1), by what they keep less: at MIDDLE
        all are on the middle one, and on both sides of it equal shares are equal bytes."""
        middle, height = self.heights[self.number(SELECTIVE)], self.heights[number]
        if height <= middle:
            return MIDDLE * height / middle if middle else 0.0
        return MIDDLE + (1 - MIDDLE) * (height - middle) / (self.heights[-1] - middle)

    def levels(self, number: int) -> tuple[int, int, int]:
        """How many rungs up the first segments are, how many the others, and how many the first are."""
        below, first = divmod(number, max(self.segments, 1))
        return below + (first > 0), below, first

    def at(self, remat: int) -> Segments:
        """What is rematerialised in the way of a number."""
        above, below, first = self.levels(self.number(remat))
        chosen = [*self.rungs[above - 1][:first]] if above else []
        chosen += self.rungs[below - 1][first:] if below else []
        return _together(chosen)


def _together(rungs: Iterable[_Rung]) -> Segments:
    runs: dict[Path, list[tuple[int, int]]] = {}
    kept: set[Path] = set()
    for one in rungs:
        runs.setdefault(one.level, []).extend(one.runs)
        kept |= one.kept
    return Segments({level: tuple(sorted(own)) for level, own in runs.items() if own}, frozenset(kept))


def ladder_of(
    graph: Graph, runs: Runs, *, kept: Callable[[Graph], Collection[int]] = kept_values,
    prices: Sequence[float] | None = None, most_kept: float = MOST_KEPT,
) -> Ladder:  # fmt: skip
    """The ladder of a program with these segments: with what is dear inside them kept, at each price at which that
    saves something, and last without.

    Args:
      graph: of the program.
      runs: its segments.
      kept: what a graph's backward pass keeps: `residuals.kept_values`, or where both passes are one program
        `kept_in_one_program`.
      prices: of memory, ascending (`kept_results`); None for those that suit so many segments. The middle rung is the
        first of SELECTIVE_PRICE or more.
      most_kept: as a share of what is kept where nothing is rematerialised; a rung that keeps more is none.
    """
    every = sorted(((*level, run[0]), level, run) for level, own in runs.items() for run in own)
    if not every:
        return Ladder(())
    if prices is None:
        prices = [price for price in PRICES if price >= SELECTIVE_PRICE or len(every) < _FEW]
    segments = [_Segment(graph, level, run, prices) for _, level, run in every]
    last = tuple(one.whole for one in segments)

    segment_of = {op.index: number for number, one in enumerate(segments) for op in one.own}

    def held(rung: Sequence[_Rung]) -> np.ndarray:
        """Bytes that are kept of what each segment makes, and of what none makes."""
        marked, found = rematerialise(graph, _together(rung)), np.zeros(len(segments) + 1)
        for value in kept(marked):
            if value in graph.producer:
                maker = graph.operators[graph.producer[value][0]]
                found[segment_of.get(maker.index, -1)] += graph.values[value].bytes * maker.repeats
        return found

    nothing, least = held(()), held(last)
    most = most_kept * nothing.sum()
    rungs: list[tuple[_Rung, ...]] = []
    kept_bytes = [nothing]
    middle = 0
    for price, rung in _candidates(segments, prices):
        if not middle and rungs and price > SELECTIVE_PRICE:
            middle = len(rungs)
        if rung != last:
            inside = all(one.runs == whole.runs for one, whole in zip(rung, last, strict=True))
            here = least + np.array([*map(_Segment.held, segments, rung), 0.0]) if inside else held(rung)
            if here.sum() <= most:
                rungs.append(rung)
                kept_bytes.append(here)
                most = (1 - _LESS) * here.sum()
    less = -np.diff([*kept_bytes, least], axis=0)[:, :-1].ravel()
    heights = np.cumsum(np.maximum(less, _APART * nothing.sum() / len(segments)))
    return Ladder((*rungs, last), middle or len(rungs) or 1, (0.0, *heights.tolist()))


def _candidates(segments: Sequence[_Segment], prices: Sequence[float]) -> Iterator[tuple[float, tuple[_Rung, ...]]]:
    """What may be a rung, by the price at which it is one: what keeps most first, but for calls, which take part in
    rematerialisation from some price on and then keep nothing; what is around them may be kept then too."""
    before: tuple[_Rung, ...] = ()
    for number, price in enumerate(prices):
        rung = tuple(one.at(number, number) for one in segments)
        moved = bool(before) and any(a.runs != b.runs for a, b in zip(before, rung, strict=True))
        for lower in (*(range(number) if moved else ()), number):
            here = tuple(one.at(lower, number) for one in segments)
            if here != before:
                yield from ((price, one) for one in (_between(segments, before, here) if before else ()))
                yield price, here
                before = here


def _between(
    segments: Sequence[_Segment], below: Sequence[_Rung], above: Sequence[_Rung]
) -> Iterator[tuple[_Rung, ...]]:  # fmt: skip
    """Rungs between two, of few segments: what goes from one to the other goes one result after the other, the cheapest
    first."""
    if len(above) >= _FEW:
        return
    gone = [
        segment.by_price(low.kept - high.kept) if low.runs == high.runs else []
        for segment, low, high in zip(segments, below, above, strict=True)
    ]
    steps = min(ceil(_MANY / len(above)), max(map(len, gone)))
    for step in range(1, steps):
        left = [paths[ceil(step * len(paths) / steps) :] for paths in gone]
        yield tuple(replace(high, kept=high.kept.union(paths)) for high, paths in zip(above, left, strict=True))


class _Segment:
    """A segment at all prices.

    Args:
      graph: of the program.
      level: of its equations.
      run: of them.
      prices: of memory.
    """

    def __init__(self, graph: Graph, level: Path, run: tuple[int, int], prices: Sequence[float]) -> None:
        self._graph, self._level, self._run = graph, level, run
        self.whole = _Rung(level, (run,))
        self.own = list(_operators(graph, level, run))
        self._by_path = {op.path: op for op in self.own}
        self._prices = prices
        # Calls that are left out at each price, as equations of the level; None where there is but the last rung.
        self._calls = [self._left_out(price) for price in prices]
        self._rungs: dict[tuple[int, ...], list[_Rung]] = {}
        # With all calls inside, the bytes of what an operator makes but for what others read, which is kept anyway.
        self._sizes: dict[Path, float] = {}

    def _left_out(self, price: float) -> tuple[int, ...] | None:
        # Regions of the user's own make what enters them again, whatever is kept around them.
        if any(op.region is not None for op in self.own):
            return None
        calls = [op for op in self.own if is_opaque(self._graph, op, price)]
        # In a loop, what such a call has gathered of parameters would be kept for all trips.
        if self._level and any(_reads_parameters(self._graph, op) for op in calls):
            return None
        return tuple(sorted({op.path[len(self._level)] for op in calls}))

    def at(self, number: int, others: int) -> _Rung:
        """With what is dear at the price of this number kept, and without the calls that are at the price of another
        number."""
        calls = self._calls[others]
        if calls is None:
            return self.whole
        if calls not in self._rungs:
            self._rungs[calls] = self._without(calls)
        return self._rungs[calls][number]

    def held(self, rung: _Rung) -> float:
        """Bytes that a rung with all calls inside keeps, beside what is kept anyway."""
        return sum(self._sizes[path] for path in rung.kept)

    def by_price(self, paths: Collection[Path]) -> list[Path]:
        """Operators in the order in which they run again at ascending prices."""
        graph = self._graph

        def price(path: Path) -> float:
            operator = self._by_path[path]
            made = operator.repeats * sum(graph.values[v].bytes for v in operator.results if v is not None)
            return moved_again(graph, operator) / max(made, 1.0)  # arrays may have no elements

        return sorted(sorted(paths), key=price)

    def _without(self, calls: Sequence[int]) -> list[_Rung]:
        """The rungs at all prices, with these equations left out."""
        graph, depth, run = self._graph, len(self._level), self._run
        pieces = [(a + 1, b) for a, b in pairwise([run[0] - 1, *calls, run[1]]) if b - a > 1]
        kept = [frozenset[Path]() for _ in self._prices]
        sizes: dict[Path, float] = {}
        for a, b in pieces:
            inside = [op for op in self.own if a <= op.path[depth] < b]
            made = {v for op in inside for v in op.results if v is not None}
            # What others read is kept for them: it enters another segment, or an operator whose derivative reads it.
            numbers = {op.index for op in inside}
            later = {v for v in made if any(user not in numbers for user, _ in graph.consumers.get(v, ()))}
            for op in inside:
                own = (graph.values[v].bytes for v in op.results if v is not None and v not in later)
                sizes[op.path] = op.repeats * sum(own)
            for number, found in enumerate(kept_results(graph, inside, depth + 1, later, self._prices)):
                kept[number] |= found
        if not calls:
            self._sizes = sizes
        return [
            _Rung(self._level, tuple(pieces), one) if calls or any(sizes[path] for path in one) else self.whole
            for one in kept
        ]


def _reads_parameters(graph: Graph, operator: Operator) -> bool:
    return not values_of_parameters(graph).isdisjoint(operator.operands)


def _operators(graph: Graph, level: Path, run: tuple[int, int]) -> Iterator[Operator]:
    """The operators of a run, in program order, with those that are nested in them."""
    depth = len(level)
    for operator in graph.operators:
        path = operator.path
        if len(path) > depth and path[:depth] == level and run[0] <= path[depth] < run[1]:
            yield operator
