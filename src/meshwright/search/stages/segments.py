"""The rematerialised segments of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from ...program.cut import Cut
from ...program.graph import Graph
from ...program.residuals import kept_values
from ...program.segments import Runs, Segments, layer_segments, rematerialise
from ..intra.workspace import worst_moments


def stage_segments(cut: Cut, layers: Sequence[tuple[int, int]]) -> Runs:
    """The segments that a stage may rematerialise.

    Either each of its layers, or the segments that suit its graph best, whichever keeps less with two microbatches in
    flight; scans compute the body of each trip again.
    """
    first, last = cut.equations
    best = dict(layer_segments(cut.graph))
    scans = sorted({path[0] for path in best if path})
    inside = {path: tuple(runs) for path, runs in best.items() if path}
    fitted = [(max(a, first), min(b, last)) for a, b in best.get((), ())]
    tries: list[Runs] = []
    for runs in (fitted, [piece for layer in layers for piece in _between_scans(layer, scans)]):
        long = tuple((a, b) for a, b in runs if b - a > 1)
        tries.append({**inside, (): long} if long else inside)
    return min(tries, key=lambda runs: _held_bytes(rematerialise(cut.graph, Segments(runs))))


def _between_scans(layer: tuple[int, int], scans: Sequence[int]) -> list[tuple[int, int]]:
    """The equations of a layer around its scans."""
    found, start = [], layer[0]
    for scan in scans:
        if layer[0] <= scan < layer[1]:
            found.append((start, scan))
            start = scan + 1
    return [*found, (start, layer[1])]


def _held_bytes(graph: Graph) -> float:
    """Of two microbatches in flight, with what one of them computes again."""
    worst = max((moment.bytes(graph) for moment in worst_moments(graph)), default=0.0)
    return worst + 2 * sum(graph.values[value].bytes for value in kept_values(graph))


def moved_segments(segments: Segments, by: int) -> Segments:
    """Segments of a range for the same program `by` equations further on."""

    def moved(path: tuple[int, ...]) -> tuple[int, ...]:
        return (path[0] + by, *path[1:]) if path else ()

    runs = {
        moved(path): tuple((a + by, b + by) if not path else (a, b) for a, b in own)
        for path, own in segments.runs.items()
    }
    return Segments(runs, frozenset(map(moved, segments.kept)))
