"""Where to cut a program into rematerialised segments, and the graph with the cuts made.

Rematerialising a segment keeps what enters it and computes its inside again in the backward pass. The best cuts keep
few bytes at segment borders and leave no segment too large, since one segment's inside lives at a time: for a bound on
the inside, a dynamic program over the candidate borders minimises the bytes kept; the bound is swept.

Not all of a segment need be computed again: of what the backward pass reads, what is dear to make may be kept
(`kept_results`). So there are several ways to rematerialise a segment, each of which keeps less than the one before: a
`Ladder`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from sys import maxsize

from .graph import Graph, Operator, Path, once_for_each
from .kept_results import is_opaque, kept_results
from .parameter_values import values_of_parameters
from .residuals import kept_values

# Runs of equations by the nesting path of their level: the first of each, and one past the last.
Runs = Mapping[Path, Sequence[tuple[int, int]]]

# Ways to rematerialise a range: nothing; every segment on the lower rung of its ladder, where it keeps what is dear to
# make; and every one on the last rung, where it keeps nothing but what enters it.
NONE, SELECTIVE, ALL = 0, maxsize // 2, maxsize

# What is between them: the first segments on one, the others on the other one.
LEGS = ((NONE, ALL), (NONE, SELECTIVE), (SELECTIVE, ALL))

# Of shares that are computed.
_ROUNDING = 1e-6

# Of the lower rung: bytes moved again for a byte that is not kept (`kept_results`). Chosen, not measured: in 16 bits a
# product takes that much whose sums have 600 terms; scores of attention, of 64 or 128, take less with all around them.
SELECTIVE_PRICE = 6.0

# A lower rung that keeps more than this share of what nothing rematerialised keeps is none. GPT-3's and Llama's keep a
# third and less; with fused attention Llama's stages 0.87 to 0.90 (which is 7 % of the step of 70B on 128 H100s), and
# stages of GPT-3 all. What networks of convolutions keep is each result of one, 1.0 and more.
MOST_KEPT = 0.95

# Candidate borders considered: those that the fewest bytes cross.
_MAX_BORDERS = 160


@dataclass(frozen=True, slots=True)
class Segments:
    """What is rematerialised.

    Args:
      runs: equations that are rematerialised together.
      kept: paths of equations among them whose results are kept all the same.
    """

    runs: Runs = field(default_factory=dict)
    kept: frozenset[Path] = frozenset()

    def __bool__(self) -> bool:
        return any(self.runs.values())


@dataclass(frozen=True, slots=True)
class _Rung:
    """A way to rematerialise one segment: runs of one level, and what is kept inside."""

    level: Path
    runs: tuple[tuple[int, int], ...]
    kept: frozenset[Path] = frozenset()


@dataclass(frozen=True, slots=True)
class Ladder:
    """The ways to rematerialise a program.

    Each segment is on no rung, on a lower one or on the last, and of a program that is in between the first segments
    are higher than the others: what is made first waits longest for the backward pass. These ways have numbers: none
    (0); the first few segments on the last rung and the others on none; the first few, or all, on the lower rung and
    the others on none; the first few, or all, on the last rung and the others on the lower one.

    Args:
      rungs: each keeps less than the one before: a way for each segment. One or two, or none where nothing can be
        rematerialised.
    """

    rungs: tuple[tuple[_Rung, ...], ...]

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self.rungs[0]) if self.rungs else 0

    @property
    def top(self) -> int:
        """The largest number: all segments on the last rung."""
        return max(self.segments * (2 * len(self.rungs) - 1) - (len(self.rungs) > 1), 0)

    def number(self, remat: int) -> int:
        """The number that a number, SELECTIVE or ALL stands for."""
        if remat == SELECTIVE and len(self.rungs) > 1:
            return 2 * self.segments - 1
        return min(remat, self.top)

    def number_at(self, share: float) -> int:
        """The number that is so far between none (0) and all segments on the last rung (1). Each third of the way is
        one of `LEGS`, in their order; within it the share is that of the segments that are higher than the others, at
        least one of them. Where there are too few segments or rungs for that, it is 0 or the largest number."""
        if not 0 < share < 1 or not self.rungs:
            return self.top if share >= 1 else 0
        leg = min(max(ceil(3 * share - _ROUNDING) - 1, 0), 2)
        more = max(ceil((3 * share - leg) * self.segments - _ROUNDING), 1)
        if len(self.rungs) == 1:
            return more if leg == 0 and more < self.segments else self.top
        if leg == 0:
            return min(more, self.segments - 1)
        return leg * self.segments - 1 + more

    def leg(self, remat: int) -> range:
        """The numbers of the ways that have some segments on the same rung as this one and some on the same other."""
        number, count = self.number(remat), self.segments
        if len(self.rungs) < 2 or number < count:
            return range(1, count)
        return range(count, 2 * count) if number < 2 * count else range(2 * count, self.top)

    def levels(self, remat: int) -> tuple[int, int, float]:
        """How far up the first segments are and how far the others, each NONE, SELECTIVE or ALL; and which share of all
        segments the first are."""
        number, count = self.number(remat), max(self.segments, 1)
        if len(self.rungs) < 2 or number < count:
            return ALL, NONE, number / count
        leg, more = divmod(number - count, count)
        return (ALL if leg else SELECTIVE), (SELECTIVE if leg else NONE), (more + 1) / count

    def at(self, remat: int) -> Segments:
        """What is rematerialised in the way of a number."""
        rungs = {SELECTIVE: self.rungs[:1], ALL: self.rungs[-1:], NONE: ()}
        first, others, share = self.levels(remat)
        count = round(share * self.segments)
        chosen = [one for rung in rungs[first] for one in rung[:count]]
        chosen += [one for rung in rungs[others] for one in rung[count:]]
        runs: dict[Path, list[tuple[int, int]]] = {}
        for one in chosen:
            runs.setdefault(one.level, []).extend(one.runs)
        kept = frozenset[Path]().union(*(one.kept for one in chosen))
        return Segments({level: tuple(sorted(own)) for level, own in runs.items() if own}, kept)


def ladder_of(
    graph: Graph, runs: Runs, *, kept: Callable[[Graph], Collection[int]] = kept_values,
    price: float = SELECTIVE_PRICE, most_kept: float = MOST_KEPT,
) -> Ladder:  # fmt: skip
    """The ladder of a program with these segments: first with what is dear inside them kept, where that saves enough,
    and then without.

    Args:
      graph: of the program.
      runs: its segments.
      kept: what a graph's backward pass keeps: `residuals.kept_values`, or where both passes are one program
        `kept_in_one_program`.
      price: of memory on the lower rung (`kept_results`).
      most_kept: on the lower rung, as a share of what is kept where nothing is rematerialised; else there is none.
    """
    every = sorted(((*level, run[0]), level, run) for level, own in runs.items() for run in own)
    if not every:
        return Ladder(())
    last = tuple(_Rung(level, (run,)) for _, level, run in every)
    both = Ladder((tuple(_selective(graph, level, run, price) for _, level, run in every), last))
    selective, nothing = (_bytes(one, kept(one)) for one in (rematerialise(graph, both.at(SELECTIVE)), graph))
    if both.rungs[0] == last or selective > most_kept * nothing:
        return Ladder((last,))
    return both


def _bytes(graph: Graph, values: Collection[int]) -> float:
    makers = {v: graph.operators[graph.producer[v][0]] for v in values if v in graph.producer}
    return sum(graph.values[v].bytes * operator.repeats for v, operator in makers.items())


def _selective(graph: Graph, level: Path, run: tuple[int, int], price: float) -> _Rung:
    """A segment on the lower rung: without the calls that are dear, and with what is dear kept."""
    depth = len(level)
    own = list(_operators(graph, level, run))
    calls = [op for op in own if is_opaque(graph, op, price)]
    # In a loop, what such a call has gathered of parameters would be kept for all trips; and regions of the user's own
    # make what enters them again, whatever is kept around them.
    if any(op.region is not None for op in own) or (level and any(_reads_parameters(graph, op) for op in calls)):
        return _Rung(level, (run,))
    opaque = sorted({op.path[depth] for op in calls})
    pieces = [(a + 1, b) for a, b in pairwise([run[0] - 1, *opaque, run[1]]) if b - a > 1]
    kept, saves = frozenset[Path](), bool(opaque)
    for a, b in pieces:
        inside = [op for op in own if a <= op.path[depth] < b]
        made = {v for op in inside for v in op.results if v is not None}
        # What others read is kept for them: it enters another segment, or an operator whose derivative reads it.
        numbers = {op.index for op in inside}
        later = {v for v in made if any(user not in numbers for user, _ in graph.consumers.get(v, ()))}
        found = kept_results(graph, inside, depth + 1, later, price)
        kept |= found
        saves |= any(op.path in found and not later.issuperset(op.results) for op in inside)
    return _Rung(level, tuple(pieces), kept) if saves else _Rung(level, (run,))


def _reads_parameters(graph: Graph, operator: Operator) -> bool:
    return not values_of_parameters(graph).isdisjoint(operator.operands)


def _operators(graph: Graph, level: Path, run: tuple[int, int]) -> Iterator[Operator]:
    """The operators of a run, in program order, with those that are nested in them."""
    depth = len(level)
    for operator in graph.operators:
        path = operator.path
        if len(path) > depth and path[:depth] == level and run[0] <= path[depth] < run[1]:
            yield operator


@once_for_each
def layer_segments(graph: Graph) -> dict[Path, tuple[tuple[int, int], ...]]:
    """Segments for rematerialisation: runs of top-level equations, and whole bodies of the scans among them."""
    found: dict[Path, tuple[tuple[int, int], ...]] = {}
    scans = sorted({op.path[: op.path.index(-1)] for op in graph.operators if -1 in op.path and op.differentiated})
    outermost = [path for path in scans if len(path) == 1]
    for path in outermost:
        inside = [op.path[len(path)] for op in graph.operators if op.path[: len(path)] == path and -1 not in op.path]
        if inside:
            found[path] = ((0, max(inside) + 1),)
    borders = _best_cuts(graph, {path[0] for path in outermost})
    if borders:
        found[()] = borders
    return found


def _best_cuts(graph: Graph, scans: set[int]) -> tuple[tuple[int, int], ...]:
    kept = kept_values(graph)
    first = min((op.path[0] for op in graph.operators), default=0)
    last = max((op.path[0] for op in graph.operators), default=-1)
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    for op in graph.operators:
        for v in op.results:
            if v is not None and graph.values[v].differentiated:
                born[v] = op.path[0]
        for v in op.operands:
            if v in born:
                dies[v] = max(dies.get(v, 0), op.path[0])
    crossing = [0.0] * (last + 2)
    inside = [0.0] * (last + 2)
    for v, at in born.items():
        size = graph.values[v].bytes
        for position in range(at + 1, dies.get(v, at) + 1):
            crossing[position] += size
        if v in kept and at not in scans:
            inside[at] += size
    total = sum(inside)
    if not total:
        return ()
    starts = sorted(range(first + 1, last + 1), key=lambda p: (crossing[p], p))[:_MAX_BORDERS]
    borders = [first, *sorted(starts), last + 1]
    prefix = [0.0]
    for size in inside:
        prefix.append(prefix[-1] + size)
    best: tuple[float, list[int]] | None = None
    for share in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        cuts = _cuts_within(borders, crossing, prefix, total / share)
        largest = max(prefix[b] - prefix[a] for a, b in pairwise(cuts))
        cost = sum(crossing[c] for c in cuts[1:-1]) + largest
        if best is None or cost < best[0]:
            best = (cost, cuts)
    if best is None or best[0] >= total:
        return ()
    pieces = []
    for a, b in pairwise(best[1]):
        # A scan rematerialises its own body; around it lie separate segments.
        start = a
        for position in sorted(s for s in scans if a <= s < b):
            pieces.append((start, position))
            start = position + 1
        pieces.append((start, b))
    return tuple((a, b) for a, b in pieces if b - a > 1)


def _cuts_within(borders: Sequence[int], crossing: Sequence[float], prefix: Sequence[float], bound: float) -> list[int]:
    """Borders with the fewest bytes kept, no segment of more than two of them holding more than `bound` inside."""
    cost, before = [0.0], [0]
    nearer = deque([0])  # borders before the next one within the bound, each with fewer bytes kept than those after it
    for position, border in enumerate(borders[1:], start=1):
        while nearer[0] < position - 1 and prefix[border] - prefix[borders[nearer[0]]] > bound:
            nearer.popleft()
        before.append(nearer[0])
        cost.append(cost[nearer[0]] + crossing[border])
        while nearer and cost[nearer[-1]] >= cost[-1]:
            nearer.pop()
        nearer.append(position)
    cuts = [len(borders) - 1]
    while cuts[-1]:
        cuts.append(before[cuts[-1]])
    return [borders[i] for i in reversed(cuts)]


def rematerialise(graph: Graph, segments: Segments) -> Graph:
    """The graph with the operators of each segment marked as rematerialised together, and those whose results are
    kept."""

    def region(path: Path) -> Path | None:
        for depth in range(len(path)):
            for start, stop in segments.runs.get(path[:depth], ()):
                if start <= path[depth] < stop and -1 not in path[:depth]:
                    return (*path[:depth], start)
        return None

    def marked(operator: Operator) -> Operator:
        found = region(operator.path) if operator.region is None else None
        return operator if found is None else operator.rematerialised(found, kept=operator.path in segments.kept)

    return replace(graph, operators=tuple(map(marked, graph.operators)))
