"""What a part of a program takes by itself, as a row of numbers that ranges of parts are summed up from."""

from __future__ import annotations

from typing import Any, NamedTuple

from .stage_solver import SolvedStage

# A row of a column of `stage_estimates`: seconds forward, backward, of weight gradients, of receiving, once, shared
# once; bytes throughout and in flight; 1 for a part that has no layout. And its workspace, bytes.
PartRow = tuple[tuple[float, ...], float]

NO_PART: PartRow = (*(0.0,) * 8, 1.0), 0.0

# A part counts as what it takes at least. Where more than this is uncertain it is solved to the end; of a large part,
# for which that takes a tenth of a second, where more than the second is. What is left open, mostly less than 3
# percent, costs less to solve where it matters, in ranges.
_LOOSE, _LOOSE_IF_LARGE = 0.03, 0.5

# Operators of a large part.
_LARGE = 150


def may_be_loose(operators: int) -> float:
    """How much of the seconds of a part of so many operators may be uncertain."""
    return _LOOSE_IF_LARGE if operators > _LARGE else _LOOSE


class KnownParts(NamedTuple):
    """What has been found out of parts, to be sent to another process.

    Args:
      rows: by a part, a kind of submesh, a logical mesh, rematerialisation, a price and microbatches in flight.
      lenient: parts, kinds and logical meshes that cannot have their ZeRO stage in its strict form.
    """

    rows: dict[tuple[Any, ...], PartRow]
    lenient: list[tuple[int, int, int]]


def part_row(stage: SolvedStage, share: float) -> PartRow:
    """Of a part what it takes at least.

    Args:
      stage: the part as solved.
      share: of its seconds, what is certain to be needed.
    """
    boundary, fixed = stage.boundary
    one = stage.seconds
    seconds = (
        one.forward_seconds, one.backward_seconds, one.weight_seconds, boundary,
        one.synchronise_seconds + one.update_seconds, fixed,
    )  # fmt: skip
    row = (*(share * each for each in seconds), one.constant_bytes, one.in_flight_bytes, 0.0)
    return row, one.workspace_bytes
