"""Bounds on staged plans: two small dynamic programs over the least that each range of layers takes on each submesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

import numpy as np

from .problem import InterOpProblem
from .submeshes import Submesh


def most_seconds(problem: InterOpProblem, bound: float) -> dict[Submesh, np.ndarray]:
    """The longest that each range of layers may take on each submesh, in one microbatch, if the plan it is a part of
    is to be of interest: `[layers + 1, layers + 1]`; below 0 for none.

    Args:
      problem: the numbers, with its `least`.
      bound: seconds that a plan may take.
    """
    assert problem.least is not None
    tables = [problem.least(submesh) for submesh in {problem.kind(one): one for one in problem.submeshes}.values()]
    number = {kind: n for n, kind in enumerate(dict.fromkeys(map(problem.kind, problem.submeshes)))}
    seconds, passage = (np.array(one) for one in zip(*tables, strict=True))
    if problem.order != "zero_bubble":
        passage = seconds
    positions = positions_of(problem)
    ends = [(positions[one.first], positions[one.stop], number[problem.kind(one)]) for one in problem.submeshes]
    starts, stops, kinds = np.array(ends).T
    shape, loose = (problem.layers + 1, len(positions)), sorted(problem.loose)
    # What a microbatch takes at least in the layers before a layer on all devices before a position, in any number of
    # stages, and in the longest of these; and the same of those after them.
    total, period, total_after, period_after = (np.full(shape, inf) for _ in range(4))
    total[0, 0] = period[0, 0] = total_after[-1, -1] = period_after[-1, -1] = 0.0
    for stop in range(1, len(positions)):
        mine = stops == stop
        before, of = starts[mine], kinds[mine]
        total[:, stop] = (total.T[before, :, None] + passage[of]).min(axis=(0, 1), initial=inf)
        period[:, stop] = np.maximum(period.T[before, :, None], seconds[of]).min(axis=(0, 1), initial=inf)
        total[loose, stop] = np.where(np.isfinite(total[loose, stop]), 0.0, inf)
    for start in reversed(range(len(positions) - 1)):
        mine = starts == start
        after, of = stops[mine], kinds[mine]
        total_after[:, start] = (passage[of] + total_after.T[after, None, :]).min(axis=(0, 2), initial=inf)
        longest = np.maximum(seconds[of], period_after.T[after, None, :])
        period_after[:, start] = longest.min(axis=(0, 2), initial=inf)
        total_after[loose, start] = np.where(np.isfinite(total_after[loose, start]), 0.0, inf)
    around = total.T[starts, :, None] + total_after.T[stops, None, :]
    possible = np.isfinite(around)
    others = np.where(possible, np.maximum(period.T[starts, :, None], period_after.T[stops, None, :]), 0.0)
    count, before = problem.microbatches, np.where(possible, total.T[starts, :, None], 0.0)
    most = (bound - before) / count
    if problem.order != "zero_bubble":  # of which a stage's weight gradients may take no time of a microbatch's way
        most = np.minimum(most, bound - np.where(possible, around, 0.0))
    most = np.where(possible & (count * others <= bound), most, -inf)
    return dict(zip(problem.submeshes, most, strict=True))


def positions_of(problem: InterOpProblem) -> dict[int, int]:
    """Devices at which stages begin or end, numbered."""
    ends = {end for submesh in problem.submeshes for end in (submesh.first, submesh.stop)}
    return {device: number for number, device in enumerate(sorted({0, problem.devices, *ends}))}


class LeastBefore:
    """For all layers before a layer on all devices before a position, what a microbatch takes in them at least, and in
    the longest of their stages: with the last stage at a known place, from those before it. Submeshes that cost the
    same are looked at together.

    Args:
      positions: of devices.
      tables: seconds of every range on a submesh at each place, and what of them stages after it wait for: each
        `[place, first, last]`, the same arrays for submeshes that cost the same.
      loose: layers at which stages begin that may not wait for those before them.
    """

    def __init__(
        self, positions: Mapping[int, int], tables: Mapping[Submesh, tuple[np.ndarray, np.ndarray]],
        loose: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._loose = sorted(loose)
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
          total: what a microbatch takes at least in the stages before it.
          period: in the longest of them.
        """
        sums, periods = np.full_like(total, inf), np.full_like(period, inf)
        for seconds, passage, (starts, stops), possible in self._groups:
            if not possible[place]:
                continue
            summed = (total[:, None, starts] + passage[place][:, :, None]).min(axis=0)
            longest = np.maximum(period[:, None, starts], seconds[place][:, :, None]).min(axis=0)
            np.minimum.at(sums.T, stops, summed.T)
            np.minimum.at(periods.T, stops, longest.T)
        sums[self._loose] = np.where(np.isfinite(sums[self._loose]), 0.0, inf)
        return sums, periods
