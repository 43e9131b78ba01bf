"""Where to cut a program into rematerialised segments, and the graph with the cuts made.

Rematerialising a segment keeps what enters it and computes its inside again in the backward pass. The best cuts keep
few bytes at segment borders and leave no segment too large, since one segment's inside lives at a time: for a bound on
the inside, a dynamic program over the candidate borders minimises the bytes kept; the bound is swept. What is kept
inside all the same is another question (`ladder`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from .graph import Graph, Operator, Path, once_for_each
from .residuals import kept_values

# Runs of equations by the nesting path of their level: the first of each, and one past the last.
Runs = Mapping[Path, Sequence[tuple[int, int]]]

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
