"""Where to cut a program into rematerialised segments, and the graph with the cuts made.

Rematerialising a segment keeps what enters it and computes its inside again in the backward pass. The best cuts keep
few bytes at segment borders and leave no segment too large, since one segment's inside lives at a time: a dynamic
program over the borders minimises their sum. What is kept inside all the same is another question (`ladder`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from .graph import Graph, Operator, Path, once_for_each
from .residuals import kept_values

# Runs of equations by the nesting path of their level: the first of each, and one past the last.
Runs = Mapping[Path, Sequence[tuple[int, int]]]

# Of the bytes that cross a border this share counts beside what is kept for it, each value once: of borders that are as
# good, the one that the fewest bytes cross, so that equal layers are cut at the same places. Chosen: with a third of it
# layers of mixtures and of GPT-3 are cut here and there.
_CROSSING = 0.03


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
    inside = np.zeros(last + 2 - first)
    for v, at in born.items():
        if v in kept and at not in scans:
            inside[at - first] += graph.values[v].bytes
    if not inside.any():
        return ()
    lives = [(at - first, dies[v] - first, graph.values[v].bytes) for v, at in born.items() if dies.get(v, at) > at]
    cuts = [first + cut for cut in _cheapest_cuts(np.array(lives).reshape(-1, 3), inside[:-1])]
    if len(cuts) < 3:
        return ()
    pieces = []
    for a, b in pairwise(cuts):
        # A scan rematerialises its own body; around it lie separate segments.
        start = a
        for position in sorted(s for s in scans if a <= s < b):
            pieces.append((start, position))
            start = position + 1
        pieces.append((start, b))
    return tuple((a, b) for a, b in pieces if b - a > 1)


def _cheapest_cuts(lives: np.ndarray, inside: np.ndarray) -> list[int]:
    """The borders of segments, both ends among them, that hold the fewest bytes: what crosses a border, once, and the
    inside of the segment that an average byte inside is in.

    Args:
      lives: of each value the equation that makes it, the last that reads it, and its bytes, `[values, 3]`.
      inside: bytes that each equation makes and a backward pass needs.
    """
    made, read, sizes = lives[:, 0].astype(int), lives[:, 1].astype(int), lives[:, 2]
    change = np.zeros(len(inside) + 1)
    np.add.at(change, made + 1, sizes)
    np.add.at(change, read + 1, -sizes)
    crossing = np.cumsum(change)  # bytes at the border before each equation, and at the end
    lowest = np.ones(len(crossing), dtype=bool)  # no fewer bytes cross a border beside it
    lowest[1:-1] = (crossing[1:-1] <= crossing[:-2]) & (crossing[1:-1] <= crossing[2:])
    borders = np.flatnonzero(lowest)
    before = np.concatenate([[0.0], np.cumsum(inside)])[borders]
    # Of each value the first border that it crosses, and the first that it does not any more.
    first, past = (np.searchsorted(borders, at, side="right") for at in (made, read))
    events: list[list[tuple[int, float]]] = [[] for _ in borders]
    for come, gone, size in zip(first.tolist(), past.tolist(), sizes.tolist(), strict=True):
        if come < gone:
            events[come].append((come - 1, size))
            events[gone].append((come - 1, -size))
    alive = np.zeros(len(borders))  # bytes at a border that were made between each earlier one and the next
    cost, best = np.zeros(len(borders)), [0] * len(borders)
    for border in range(1, len(borders)):
        for at, size in events[border]:
            alive[at] += size
        kept = alive[:border][::-1].cumsum()[::-1]  # those made since each earlier border
        held = (before[border] - before[:border]) ** 2 / before[-1]
        costs = cost[:border] + kept + held + _CROSSING * crossing[borders[border]]
        best[border] = int(costs.argmin())
        cost[border] = costs[best[border]]
    cuts = [len(borders) - 1]
    while cuts[-1]:
        cuts.append(best[cuts[-1]])
    return borders[cuts[::-1]].tolist()


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
