"""A program cut into smaller parts than its layers, for estimates: each repeated block is a part of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ...program.staged import StagedProgram

# Blocks begin alike where so many equations do: fewer than a block has, and more than its normalisations, of which one
# stands in its middle (blocks of GPT-2, Gemma 3 and `meshwright.zoo` have 90 to 200, and normalisations up to 16).
_ALIKE = 48


def in_parts(program: StagedProgram) -> StagedProgram:
    """The program with repeated blocks as parts of their own, and pieces of scans apart from the equations around them.

    A network of 48 blocks in 16 layers has 16 layers of three: a block is a third of the work, and the first and last
    layer, or piece of a scan, then cost no more to solve than the others. Layers may also begin within blocks, at every
    other place: of a public Gemma 3 4B parts then have 847 equations that are not equal to others', of 3,697.
    """
    if program.is_whole:
        return program
    bounds = {a for a, _ in program.layers} | {program.equations} | _around_scans(program) | _between_blocks(program)
    if len(bounds) == len(program.layers) + 1:
        return program
    return replace(program, layers=tuple(pairwise(sorted(bounds))))


def _around_scans(program: StagedProgram) -> set[int]:
    """Where pieces of scans begin and end."""
    starts = set(program.piece_starts.values())
    return starts | {scan + 1 for pieces in program.pieces for scan in pieces}


def _between_blocks(program: StagedProgram) -> set[int]:
    """Where blocks begin: of the places at which layers begin, those that begin like the most others; and where others
    that are equal to them follow, up to the end of the last one. What rows a piece of a scan takes of its stacks is not
    parted from it: the rows of a body of equal layers repeat as blocks do, and compute nothing."""
    signatures: list[list[object]] = [[] for _ in range(program.equations)]
    values = program.graph.values
    for operator in program.graph.operators:
        shapes = tuple(values[v].shape for v in operator.results if v is not None)
        signatures[operator.path[0]].append((operator.name, operator.flops, operator.repeats, shapes))
    numbers: dict[str, int] = {}
    written = [numbers.setdefault(repr(one), len(numbers)) for one in signatures]
    begins: dict[tuple[int, ...], list[int]] = {}
    taken = {place for place in program.rows if place - 1 in program.rows}
    for place in sorted({*range(len(written) - _ALIKE + 1)} - taken):
        begins.setdefault(tuple(written[place : place + _ALIKE]), []).append(place)
    alike = (begins.get(tuple(written[first : first + _ALIKE]), []) for first, _ in program.layers[1:])
    found = [*max(alike, key=len, default=[])]
    blocks = sorted({tuple(written[a:b]) for a, b in pairwise(found)}, key=len, reverse=True)
    while found and (size := next((len(one) for one in blocks if _begins(written, found[-1], one)), 0)):
        found.append(found[-1] + size)
    return set(found)


def _begins(written: list[int], place: int, block: tuple[int, ...]) -> bool:
    return tuple(written[place : place + len(block)]) == block
