"""The best plan under any preset: what a search for stages begins with.

A search that knows a good plan looks at less, knows which number of microbatches to look at first, has something to
give when its time is over, and never gives anything worse. Of a program that is one scan over its layers a preset is
priced in tenths of a second: all of them are looked at, the least bound first, until none left can be better.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from ..errors import MemoryExceeded, PlanError
from ..program.equal_stages import main_scan
from .candidates import candidates_for, settings_for
from .least import Floor
from .planned import PlannedPreset, planned_preset
from .preset import Preset
from .prices import PresetPrices

# A bubble, as a share of the step, for which more stages are worth a look.
_WORTH_CUTTING = 0.05

# What is known of a preset in a number of microbatches; of equal seconds the most certain comes first.
_PLANNED, _PRICED, _BOUND = range(3)


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
    settings = settings_for(prices.cluster, prices.needed_stages(), _layers(prices, counts))
    presets += [preset for preset in settings if preset not in presets]
    queue: list[tuple[float, int, int, int]] = []
    floors: dict[Preset, Floor] = {}
    for number, preset in enumerate(presets):
        if late():
            break
        if remat is None or preset.remat in (None, remat):
            least_of = _least(prices, preset, counts, remat, floors)
            queue += [(least, _BOUND, -count, number) for count, least in least_of.items()]
    heapq.heapify(queue)
    planned: dict[tuple[int, int], PlannedPreset] = {}
    too_few: dict[int, int] = {}
    while queue:
        _, known, minus, number = heapq.heappop(queue)
        count, preset = -minus, presets[number]
        if known == _PLANNED:
            return planned[count, number]
        if count < too_few.get(number, 0):
            continue  # fewer microbatches keep more
        wanted = preset.remat or remat
        try:
            if known == _PRICED:
                found = planned_preset(prices, preset, [count], remat=wanted, margin=margin, tell=tell)
                assert found.plan.predicted is not None  # presets are priced
                planned[count, number] = found
                heapq.heappush(queue, (found.plan.predicted.step_seconds, _PLANNED, minus, number))
            elif not late():
                below = min((seconds for seconds, known, *_ in queue if known != _BOUND), default=inf)
                priced = prices.priced(preset, count, remat=wanted, below_seconds=below)
                # What is slower than another price may yet be faster than what that one's programs leave room for.
                new = (below, _BOUND) if priced is None else (priced.step_seconds, _PRICED)
                heapq.heappush(queue, (*new, minus, number))
        except MemoryExceeded:
            too_few[number] = max(count, too_few.get(number, 0))
        except PlanError:
            continue  # some steps cannot be cut so
    return None


def _least(
    prices: PresetPrices, preset: Preset, counts: Sequence[int], remat: str | None, floors: dict[Preset, Floor]
) -> dict[int, float]:
    """Seconds that a preset takes at least, by the numbers of microbatches in which it may fit."""
    try:
        prices.check(preset)
    except PlanError:
        return {}
    mine = [count for count in sorted(counts) if prices.allows(preset, count) and _is_worth_cutting(preset, count)]
    for fewest in mine:
        try:
            floor = _floor(prices, preset, fewest, preset.remat or remat, floors)
        except PlanError:
            continue  # some steps cannot be cut so
        limits = prices.limits(preset)
        found = {count: floor.step_seconds(count, limits) for count in mine if count >= fewest}
        return {count: least for count, least in found.items() if least < inf}
    return {}


def _layers(prices: PresetPrices, counts: Sequence[int]) -> int:
    """Trips of the scan that the program is; 1 for any other program."""
    scan = main_scan(prices.any_program(counts))
    return scan[1] if scan is not None else 1


def _is_worth_cutting(preset: Preset, microbatches: int) -> bool:
    """Whether half as many stages of each group of devices would leave a pipeline idle for more than this: many are
    slow to look at."""
    return preset.chunks <= 2 or (preset.stages - 1) * 2 / preset.chunks > _WORTH_CUTTING * microbatches


def _floor(prices: PresetPrices, preset: Preset, fewest: int, remat: str | None, floors: dict[Preset, Floor]) -> Floor:
    """What a preset takes at least in so many microbatches or more; interleaved stages by what they are parts of."""
    if preset.chunks == 1:
        return prices.floor(preset, fewest, remat=remat)
    whole = replace(preset, chunks=1, shown=())
    if whole not in floors:
        floors[whole] = prices.floor(whole, fewest, remat=remat)
    return floors[whole].interleaved(preset)
