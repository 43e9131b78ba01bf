"""The best plan under any preset: what a search for stages begins with.

A search that knows a good plan looks at less, knows which number of microbatches to look at first, has something to
give when its time is over, and never gives anything worse. Of a program that is one scan over its layers a preset is
priced in tenths of a second: all of them are looked at, the least bound first, until none left can be better.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import inf

from ..errors import MemoryExceeded, PlanError
from .candidates import candidates_for
from .planned import PlannedPreset, planned_preset
from .preset import Preset
from .prices import PresetPrices


def incumbent(
    prices: PresetPrices,
    counts: Sequence[int],
    *,
    remat: str | None,
    margin: float,
    late: Callable[[], bool],
    tell: Callable[[str], None] = lambda text: None,
) -> PlannedPreset | None:
    """The best plan under a preset that computes what one device does, if any fits.

    Args:
      prices: of presets, for the step and the cluster.
      counts: numbers of microbatches to choose from.
      remat: "none", "layer", or None for the better of each stage.
      margin: a device has to hold so many times what is predicted.
      late: whether the time is over: then the best that is known is taken.
      tell: called with a few words at each part of the work.
    """
    tell("the best preset")
    # PipeDream's gradients are of older weights.
    presets = [preset for preset in candidates_for(prices.cluster) if preset.schedule != "pipedream"]
    queue: list[tuple[float, int, int, bool]] = []
    for number, preset in enumerate(presets):
        if late():
            break
        if preset.remat not in (None, remat) and remat is not None:
            continue
        queue += [(least, -count, number, False) for count, least in _least(prices, preset, counts, remat).items()]
    heapq.heapify(queue)
    too_few: dict[int, int] = {}
    below = inf
    while queue:
        least, minus, number, priced = heapq.heappop(queue)
        count, preset = -minus, presets[number]
        if count < too_few.get(number, 0):
            continue  # fewer microbatches keep more
        wanted = preset.remat or remat
        try:
            if priced:
                return planned_preset(prices, preset, [count], remat=wanted, margin=margin, tell=tell)
            if least < below and not late():
                found = prices.priced(preset, count, remat=wanted, below_seconds=below)
                if found is not None:
                    below = found.step_seconds
                    heapq.heappush(queue, (found.step_seconds, minus, number, True))
        except MemoryExceeded:
            too_few[number] = max(count, too_few.get(number, 0))
            below = min((seconds for seconds, *_, priced in queue if priced), default=inf)
        except PlanError:
            continue  # some steps cannot be cut so
    return None


def _least(prices: PresetPrices, preset: Preset, counts: Sequence[int], remat: str | None) -> dict[int, float]:
    """Seconds that a preset takes at least, by the numbers of microbatches in which it may fit."""
    try:
        prices.check(preset)
    except PlanError:
        return {}
    mine = [count for count in sorted(counts) if prices.allows(preset, count)]
    for fewest in mine:
        try:
            floor = prices.floor(preset, fewest, remat=preset.remat or remat)
        except PlanError:
            continue  # some steps cannot be cut so
        limits = prices.limits(preset)
        found = {count: floor.step_seconds(count, limits) for count in mine if count >= fewest}
        return {count: least for count, least in found.items() if least < inf}
    return {}
