"""What a stage computes again in its backward pass instead of keeping it."""

from __future__ import annotations

from collections.abc import Sequence

from ..program.cut import Cut
from ..program.residuals import kept_values
from ..program.segments import Segments, layer_segments, rematerialise


def stage_segments(cut: Cut, layers: Sequence[tuple[int, int]]) -> tuple[Segments, float]:
    """What a stage rematerialises, and the bytes of the largest part that is computed again at one time.

    Either each of its layers, or the segments that suit its graph best, whichever keeps less with two microbatches in
    flight; scans compute the body of each trip again.
    """
    first, last = cut.equations
    best = dict(layer_segments(cut.graph))
    scans = sorted({path[0] for path in best if path})
    inside = {path: tuple(runs) for path, runs in best.items() if path}
    fitted = [(max(a, first), min(b, last)) for a, b in best.get((), ())]
    tries: list[Segments] = []
    for runs in (fitted, [piece for layer in layers for piece in _between_scans(layer, scans)]):
        long = tuple((a, b) for a, b in runs if b - a > 1)
        tries.append({**inside, (): long} if long else inside)
    kept_all = kept_values(cut.graph)
    priced = []
    for segments in tries:
        kept = kept_values(rematerialise(cut.graph, segments))
        again = _largest(cut, segments, kept_all - kept)
        priced.append((2 * sum(cut.graph.values[v].bytes for v in kept) + again, again))
    least = min(range(len(tries)), key=lambda n: priced[n])
    return tries[least], priced[least][1]


def _between_scans(layer: tuple[int, int], scans: Sequence[int]) -> list[tuple[int, int]]:
    """The equations of a layer around its scans."""
    found, start = [], layer[0]
    for scan in scans:
        if layer[0] <= scan < layer[1]:
            found.append((start, scan))
            start = scan + 1
    return [*found, (start, layer[1])]


def _largest(cut: Cut, segments: Segments, again: set[int]) -> float:
    """Bytes, of one trip of a scan's body, that the largest segment holds while it is computed again."""
    graph = cut.graph
    starts = {(*path, a): 0.0 for path, runs in segments.items() for a, _ in runs}
    for operator in rematerialise(graph, segments).operators:
        if operator.region in starts:
            starts[operator.region] += sum(graph.values[v].bytes for v in operator.results if v in again)
    return max(starts.values(), default=0.0)


def moved_segments(segments: Segments, by: int) -> dict[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Segments of a range for the same program `by` equations further on."""
    return {
        (path[0] + by, *path[1:]) if path else (): tuple((a + by, b + by) if not path else (a, b) for a, b in runs)
        for path, runs in segments.items()
    }
