"""Bounds on staged plans: two small dynamic programs over the least that each range of layers takes on each submesh."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import numpy as np

from .inter_op_problem import InterOpProblem
from .submeshes import Submesh


def most_seconds(problem: InterOpProblem, bound: float, alone_bound: float = inf) -> dict[Submesh, np.ndarray]:
    """The longest that each range of layers may take on each submesh, in one microbatch, if the plan it is a part of
    is to be of interest: `[layers + 1, layers + 1]`; below 0 for none.

    Args:
      problem: the numbers, with its `least`.
      bound: seconds that a plan may take.
      alone_bound: the same of plans of one stage.
    """
    assert problem.least is not None
    positions = positions_of(problem)
    tables = {submesh: problem.least(submesh) for submesh in problem.submeshes}
    if problem.order != "zero_bubble":
        tables = {submesh: (seconds, seconds) for submesh, (seconds, _) in tables.items()}
    total, period = least_before(problem, positions, tables)
    shape, rest = total.shape, problem.microbatches - 1
    total_after, period_after = np.full(shape, inf), np.full(shape, inf)
    total_after[-1, -1] = period_after[-1, -1] = 0.0
    for submesh in sorted(problem.submeshes, key=lambda one: -one.first):
        (seconds, passage), start, stop = tables[submesh], positions[submesh.first], positions[submesh.stop]
        summed = (passage + total_after[None, :, stop]).min(axis=1)
        longest = np.maximum(seconds, period_after[None, :, stop]).min(axis=1)
        total_after[:, start] = np.minimum(total_after[:, start], summed)
        period_after[:, start] = np.minimum(period_after[:, start], longest)
    # What stands in the sum of the stage itself: of a split backward perhaps nothing.
    times = rest + (problem.order != "zero_bubble")
    found = {}
    for submesh in problem.submeshes:
        start, stop = positions[submesh.first], positions[submesh.stop]
        around = total[:, start, None] + total_after[None, :, stop]
        most = np.full_like(around, -inf)
        possible = np.isfinite(around)
        others = np.maximum(period[:, start, None], period_after[None, :, stop])[possible]
        whole = submesh.first == 0 and submesh.stop == problem.devices
        left = (min(bound, alone_bound) if whole else bound) - around[possible]
        alone = left / times if times else np.full_like(left, inf)
        most[possible] = np.where(alone >= others, alone, left - rest * others)
        found[submesh] = most
    return found


def positions_of(problem: InterOpProblem) -> dict[int, int]:
    """Devices at which stages begin or end, numbered."""
    ends = {end for submesh in problem.submeshes for end in (submesh.first, submesh.stop)}
    return {device: number for number, device in enumerate(sorted({0, problem.devices, *ends}))}


def least_before(
    problem: InterOpProblem,
    positions: Mapping[int, int],
    tables: Mapping[Submesh, tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """For all layers before a layer on all devices before a position, in any number of stages, `[layer, position]`:
    what they add at least to the sum, and the least period.

    Args:
      problem: the numbers.
      positions: of devices.
      tables: seconds of every range on a submesh, and what it adds to the sum: each `[first, last]`.
    """
    shape = (problem.layers + 1, len(positions))
    total, period = np.full(shape, inf), np.full(shape, inf)
    total[0, 0] = period[0, 0] = 0.0
    for submesh in sorted(problem.submeshes, key=lambda one: one.stop):
        (seconds, passage), start, stop = tables[submesh], positions[submesh.first], positions[submesh.stop]
        summed = (total[:, start, None] + passage).min(axis=0)
        longest = np.maximum(period[:, start, None], seconds).min(axis=0)
        total[:, stop] = np.minimum(total[:, stop], summed)
        period[:, stop] = np.minimum(period[:, stop], longest)
    return total, period


class LeastBefore:
    """The same for stages of which the last is at a known place, from those before it; submeshes that cost the same
    together.

    Args:
      positions: of devices.
      tables: seconds of every range on a submesh at each place, and what it adds to the sum: each `[place, first,
        last]`, the same arrays for submeshes that cost the same.
    """

    def __init__(self, positions: Mapping[int, int], tables: Mapping[Submesh, tuple[np.ndarray, np.ndarray]]) -> None:
        alike: dict[tuple[int, int], list[Submesh]] = {}
        for submesh, (seconds, passage) in tables.items():
            alike.setdefault((id(seconds), id(passage)), []).append(submesh)
        self._groups = []
        for submeshes in alike.values():
            seconds, passage = tables[submeshes[0]]
            ends = np.array([(positions[one.first], positions[one.stop]) for one in submeshes]).T
            possible = np.isfinite(seconds).any(axis=(1, 2))
            self._groups.append((seconds, passage, ends, possible))

    def at(self, place: int, total: np.ndarray, period: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """With a stage at this place after what takes so much: each `[layer, position]`.

        Args:
          place: of the stage, from 0.
          total: what the stages before it add at least to the sum.
          period: their least period.
        """
        sums, periods = np.full_like(total, inf), np.full_like(period, inf)
        for seconds, passage, (starts, stops), possible in self._groups:
            if not possible[place]:
                continue
            summed = (total[:, None, starts] + passage[place][:, :, None]).min(axis=0)
            longest = np.maximum(period[:, None, starts], seconds[place][:, :, None]).min(axis=0)
            np.minimum.at(sums.T, stops, summed.T)
            np.minimum.at(periods.T, stops, longest.T)
        return sums, periods
