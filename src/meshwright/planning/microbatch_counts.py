"""Into how many microbatches a batch may be cut: the numbers that planning considers."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ..presets.roles_in_program import check_interleaved
from ..program.batch import batch_extents
from .request import PlanRequest

# The most microbatches tried where the user names no number. Chosen, not measured.
_MOST_MICROBATCHES = 1024


def microbatch_counts(asked: PlanRequest) -> list[int]:
    """The number asked for; or of those that divide the batch about one for each power of two, with a preset enough for
    its stages, and each to be cut into its blocks; of interleaved stages multiples of the ranks.

    Raises:
      PlanError: if interleaved stages cannot have that number, or any.
    """
    preset, extents = asked.preset, batch_extents(asked.args, asked.batch_axis)
    if asked.microbatches is not None:
        if preset is not None:
            check_interleaved(preset, asked.microbatches, extents)
        return [asked.microbatches]
    if preset is not None and preset.chunks > 1:
        each = gcd(*extents) // preset.stages
        found = _dividing(asked, [preset.stages * n for n in even_divisors(each, each)]) if each else []
        check_interleaved(preset, found[0] if found else 1, extents)
        return found
    most = _MOST_MICROBATCHES if preset is None else max(extents, default=1)
    found = _dividing(asked, even_divisors(gcd(*extents), most)) or [1]
    return [m for m in found if preset is None or m >= preset.stages] or found[-1:]


def even_divisors(extent: int, most: int) -> list[int]:
    """For each power of two the divisors of a batch from there to the next that leave the most factors of two: in their
    number, for ranks that take turns, or in a microbatch, for devices that share one.

    >>> even_divisors(64, 16)
    [1, 2, 4, 8, 16]
    >>> even_divisors(1520, 64)
    [1, 2, 4, 5, 8, 10, 16, 19, 38, 40]
    """

    def twos(number: int) -> int:
        return number & -number

    found: set[int] = set()
    for first in (1 << power for power in range(most.bit_length())):
        there = [n for n in range(first, min(2 * first, most + 1)) if extent % n == 0]
        if there:
            found |= {max(there, key=twos), max(there, key=lambda n: twos(extent // n))}
    return sorted(found)


def finer_counts(asked: PlanRequest, count: int) -> list[int]:
    """Twice and four times as many microbatches, as far as the batch can be cut so and nobody has said how many."""
    return _dividing(asked, [2 * count, 4 * count]) if asked.microbatches is None else []


def _dividing(asked: PlanRequest, counts: Sequence[int]) -> list[int]:
    """Of these numbers of microbatches those into which the batch can be cut."""
    blocks = asked.preset.blocks if asked.preset is not None else 1
    extents = batch_extents(asked.args, asked.batch_axis)
    return [m for m in counts if all(extent % (m * blocks) == 0 for extent in extents)]
