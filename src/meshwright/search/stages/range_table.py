"""Tables of ways to run ranges of layers, estimated from their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from ..inter.problem import Option

# Ranges solved whole can be faster than their parts by themselves, but are taken to need this share of the seconds at
# least. Chosen; the most that is known is 0.7 % of a step (docs/stages.md, *The gap*).
PARTS_ALONE = 0.97

# What is summed up for a range, in this order. In a table workspace is part of what is there throughout, and in its
# place is how far a range is up its ladder (`Ladder.number_at`).
FORWARD, BACKWARD, WEIGHT, ONCE, CONSTANT, KEPT, WORKSPACE = range(7)
AGAIN, FIELDS = WORKSPACE, 7

# Ranges of layers, `[2, range]`: the first layer of each, and one past the last.
Ranges = np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class RangeTable:
    """Ways to run ranges of layers on submeshes of one kind.

    Args:
      ways: number of the logical mesh, one for each way.
      ranges: that are of interest; those for which there is a way first.
      fields: `[way, field, in flight, range]`, of those alone; seconds infinite where a way is none.
      left: further logical meshes with what they take at least, by range: another one is better on every range of
        interest.
      layers: of the program, and one more.
    """

    ways: tuple[int, ...]
    ranges: Ranges
    fields: np.ndarray
    left: tuple[tuple[int, np.ndarray], ...]
    layers: int

    @cached_property
    def fastest(self) -> np.ndarray:
        """Seconds of a microbatch that no way is below, `[in flight, first, last]`."""
        return self._least(self.fields[:, FORWARD] + self.fields[:, BACKWARD])

    @cached_property
    def fastest_forward(self) -> np.ndarray:
        """The same, forward alone."""
        return self._least(self.fields[:, FORWARD])

    def _least(self, seconds: np.ndarray) -> np.ndarray:
        _, in_flight, ranges = seconds.shape
        found = np.full((in_flight, self.layers, self.layers), np.inf)
        found[:, *self.ranges[:, :ranges]] = PARTS_ALONE * seconds.min(axis=0, initial=np.inf)
        return found

    @cached_property
    def _places(self) -> np.ndarray:
        """Where each range is, `[first, last]`; -1 where it is not."""
        found = np.full((self.layers, self.layers), -1, dtype=np.int32)
        found[*self.ranges] = np.arange(self.ranges.shape[1])
        return found

    def ways_of(self, first: int, last: int, in_flight: int) -> list[tuple[int, list[float]]]:
        """The ways of a range, logical mesh and fields, at a place among the numbers in flight."""
        place = int(self._places[first, last])
        if not 0 <= place < self.fields.shape[3]:
            return []
        fields = self.fields[:, :, in_flight, place].tolist()
        return [(way, one) for way, one in zip(self.ways, fields, strict=True) if one[FORWARD] < inf]

    def left_of(self, first: int, last: int) -> list[tuple[float, int]]:
        """What a range takes at least on the meshes that are left."""
        place = int(self._places[first, last])
        return [(float(low[place]), number) for number, low in self.left if place >= 0 and np.isfinite(low[place])]


def option_of(fields: Sequence[float], number: int) -> Option:
    """The option that a range's fields are, on the logical mesh of this number."""
    forward, backward, weight, once, constant, kept, _ = fields
    return Option(
        forward_seconds=forward, backward_seconds=backward, weight_seconds=weight, per_step_seconds=once,
        constant_bytes=constant, in_flight_bytes=kept, tag=number,
    )  # fmt: skip


def mixed(
    plain: np.ndarray, again: np.ndarray, limits: np.ndarray, times: np.ndarray, segments: np.ndarray
) -> np.ndarray:
    """Ways to run ranges of which some segments are a rung higher up the ladder than the others, as few as fit memory:
    fields as in a table, with the share of the former in the place of AGAIN, and infinite where none has to be, or not
    even all are enough. A range of 4 segments that holds 10 bytes, or 2 with all of them a rung higher, has 3 there
    where 5 bytes are what there is:

    >>> plain, again = (np.array([[1.0], [2.0], [0.0], [0.0], [0.0], [held], [0.0]]) for held in (10.0, 2.0))
    >>> mixed(plain, again, np.array([5.0]), np.array([[1.0]]), np.array([4]))[[KEPT, AGAIN], 0, 0].tolist()
    [4.0, 0.75]

    Args:
      plain: fields where all segments are on a rung, `[field, range]`.
      again: where they are on the next one, and hold less.
      limits: bytes on a device, `[range]`.
      times: microbatches in flight, `[in flight, 1]`.
      segments: how many each range has, `[range]`.
    """
    held, least = (one[CONSTANT] + times * one[KEPT] for one in (plain, again))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.ceil((held - limits) / (held - least) * segments) / segments
        possible = (share > 0) & (share < 1) & (least <= limits)
        share = np.where(possible, share, 0.0)
        found = (1 - share) * plain[:, None] + share * again[:, None]
    found[AGAIN] = share
    found[:, ~possible] = np.inf
    return found
