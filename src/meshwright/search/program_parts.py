"""A program in smaller parts than its layers, for estimates: what repeats is a part of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from ..program.staged import StagedProgram

# A layer is taken apart into this many equal blocks at most.
_MOST_BLOCKS = 8


def in_parts(program: StagedProgram) -> StagedProgram:
    """The program with layers of several equal blocks taken apart into these, wherever they repeat, and pieces of scans
    apart from what stands before and after them.

    A network of 48 blocks in 16 layers has 16 layers of three: solving a block is a third of the work. And the first
    and the last piece of a scan are no more work then than the others.
    """
    bounds = {a for a, _ in program.layers} | {program.equations} | _around_scans(program) | _between_blocks(program)
    if len(bounds) == len(program.layers) + 1:
        return program
    return replace(program, layers=tuple(pairwise(sorted(bounds))))


def _around_scans(program: StagedProgram) -> set[int]:
    """Where pieces of scans begin and end."""
    starts = set(program.piece_starts.values())
    return starts | {scan + 1 for pieces in program.pieces for scan in pieces}


def _between_blocks(program: StagedProgram) -> set[int]:
    """Where blocks of the most common layer begin and end, if it has several equal ones."""
    signatures: list[list[object]] = [[] for _ in range(program.equations)]
    values = program.graph.values
    for operator in program.graph.operators:
        shapes = tuple(values[v].shape for v in operator.results if v is not None)
        signatures[operator.path[0]].append((operator.name, operator.flops, operator.repeats, shapes))
    written = [repr(one) for one in signatures]
    counts = Counter(tuple(written[a:b]) for a, b in program.layers)
    common, _ = counts.most_common(1)[0]
    length = len(common)
    blocks = next(
        (k for k in range(min(_MOST_BLOCKS, length), 1, -1) if length % k == 0 and common == common[: length // k] * k),
        1,
    )
    if blocks == 1:
        return set()
    size, block = length // blocks, list(common[: length // blocks])
    anchor = next(a for a, b in program.layers if tuple(written[a:b]) == common) % size
    places = [p for p in range(anchor, program.equations, size) if written[p : p + size] == block]
    return {bound for place in places for bound in (place, place + size)}
