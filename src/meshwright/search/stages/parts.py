"""A program cut into smaller parts than its layers, for estimates: each repeated block is a part of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ...program.staged import StagedProgram

# A layer is taken apart into this many equal blocks at most.
_MOST_BLOCKS = 8


def in_parts(program: StagedProgram) -> StagedProgram:
    """The program with repeated blocks as parts of their own, and pieces of scans apart from the equations around them.

    A network of 48 blocks in 16 layers has 16 layers of three: solving a block is a third of the work, and the first
    and last layer, or piece of a scan, then cost no more to solve than the others.
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
    """Where blocks begin and end that are equal to those of the most common layer: what stands before the first,
    between two and after the last of them is a part of its own."""
    signatures: list[list[object]] = [[] for _ in range(program.equations)]
    values = program.graph.values
    for operator in program.graph.operators:
        shapes = tuple(values[v].shape for v in operator.results if v is not None)
        signatures[operator.path[0]].append((operator.name, operator.flops, operator.repeats, shapes))
    written = [repr(one) for one in signatures]
    if (found_block := _block(written, program.layers)) is None:
        return set()
    first, size = found_block
    block, layer_of = written[first : first + size], _layers(program)
    found: set[int] = set()
    place = 0
    while place + size <= program.equations:
        whole = layer_of[place] == layer_of[place + size - 1]
        if whole and written[place : place + size] == block:
            found |= {place, place + size}
            place += size
        else:
            place += 1
    return found


def _block(written: list[str], layers: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Where a block of the most common layer begins, and how long it is: all of it, or one of several equal ones. None
    where nothing repeats."""
    counts = Counter(tuple(written[a:b]) for a, b in layers)
    common, times = counts.most_common(1)[0]
    length = len(common)
    blocks = next(
        (k for k in range(min(_MOST_BLOCKS, length), 1, -1) if length % k == 0 and common == common[: length // k] * k),
        1,
    )
    if blocks == times == 1:
        return None
    return next(a for a, b in layers if tuple(written[a:b]) == common), length // blocks


def _layers(program: StagedProgram) -> list[int]:
    """Of each equation the layer."""
    return [number for number, (first, last) in enumerate(program.layers) for _ in range(first, last)]
