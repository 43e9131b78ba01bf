"""The best plan under any preset: what a search for stages begins with.

A search that knows a good plan looks at less, knows which number of microbatches to look at first, has something to
give when its time is over, and never gives anything worse. Of a program that is one scan over its layers a preset is
priced in tenths of a second: all of them are looked at, the least bound first, until none left can be better.

A bound is first told by the fewest microbatches that a preset can have, for all numbers at once; before interleaved
stages are looked at in a number, by the whole stages in that number, which all interleavings of them share; then by the
layouts of the stages. Only what is the fastest by that is cut into all of its stages and simulated.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from ..errors import MemoryExceeded, PlanError
from ..program.equal_stages import main_scan
from .candidates import candidates_for, settings_for
from .least import Floor
from .planned import PlannedPreset, planned_preset
from .preset import Preset
from .priced import PlacedPreset, PricedPreset
from .prices import PresetPrices

# A bubble, as a share of the step, for which more stages are worth a look.
_WORTH_CUTTING = 0.05

# What is known of a preset in a number of microbatches; of equal seconds the most certain comes first.
_PLANNED, _PRICED, _PLACED, _BOUND, _TOLD = range(5)


class Incumbent:
    """The best plan under a preset that computes what one device does, if any fits: first what it takes, and when it is
    asked for, the plan.

    Args:
      prices: of presets, for the step and the cluster.
      counts: numbers of microbatches to choose from.
      remat: "none", "layer", or None for the better of each stage.
      late: whether the time is over: then the best that is known is taken, or the first that is priced.
      given_up: whether so much more time is over that there may be none.
      tell: called with a few words at each part of the work.
    """

    def __init__(
        self,
        prices: PresetPrices,
        counts: Sequence[int],
        *,
        remat: str | None,
        late: Callable[[], bool],
        given_up: Callable[[], bool] = lambda: False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        tell("the best preset")
        self._prices, self._remat, self._late, self._tell = prices, remat, late, tell
        self._given_up = given_up
        # PipeDream's gradients are of older weights.
        self._presets = [preset for preset in candidates_for(prices.cluster) if preset.schedule != "pipedream"]
        settings = settings_for(prices.cluster, prices.needed_stages(), _layers(prices, counts))
        self._presets += [preset for preset in settings if preset not in self._presets]
        self._floors: dict[tuple[Preset, int], Floor] = {}
        self._queue: list[tuple[float, int, int, int]] = []
        self._counts = counts
        self._untold = deque(range(len(self._presets)))
        while self._untold and not (late() and (self._queue or given_up())):
            self._tell_next()
        self._placed: dict[tuple[int, int], PlacedPreset] = {}
        self._priced: dict[tuple[int, int], PricedPreset] = {}
        self._planned: dict[tuple[int, int], PlannedPreset] = {}
        self._too_few: dict[int, int] = {}

    def priced(self) -> PricedPreset | None:
        """The best by its price; its programs may need more memory than is counted."""
        found = self._first(_PRICED)
        return self._priced[found] if found is not None else None

    def planned(self) -> PlannedPreset | None:
        """The best whose programs fit."""
        found = self._first(_PLANNED)
        return self._planned[found] if found is not None else None

    def _first(self, known: int) -> tuple[int, int] | None:
        """The number of microbatches and of the preset of which so much is known, and no less of any that may be
        faster."""
        while self._queue or (self._untold and not self._priced):
            if self._placed and not self._priced and self._late():
                # There may be no time for what has the least bound.
                count, best = min(self._placed, key=lambda one: (self._placed[one].least_seconds, -one[0], one[1]))
                self._try(0.0, _PLACED, count, best)
                continue
            if self._given_up() and not self._priced:
                return None
            if not self._queue:
                self._tell_next()
                continue
            seconds, certain, minus, number = self._queue[0]
            if certain <= known:
                return -minus, number
            heapq.heappop(self._queue)
            if -minus < self._too_few.get(number, 0):
                self._placed.pop((-minus, number), None)
                continue  # fewer microbatches keep more
            self._try(seconds, certain, -minus, number)
        return None

    def _try(self, seconds: float, certain: int, count: int, number: int) -> None:
        """As `_look`, where what does not fit or suit is left."""
        try:
            self._look(seconds, certain, count, number)
        except MemoryExceeded:
            self._too_few[number] = max(count, self._too_few.get(number, 0))
        except PlanError:
            return  # some steps cannot be cut so

    def _look(self, seconds: float, certain: int, count: int, number: int) -> None:
        """Find out the next thing about a preset in a number of microbatches.

        Raises:
          PlanError: if there is no such thing.
          MemoryExceeded: if it does not fit.
        """
        preset = self._presets[number]
        remat = preset.remat or self._remat
        if certain == _PRICED:
            found = planned_preset(self._prices, preset, [count], remat=remat, tell=self._tell)
            self._planned[count, number] = found
            assert found.result.plan.predicted is not None  # presets are priced
            self._push(found.result.plan.predicted.step_seconds, _PLANNED, count, number)
        elif self._late() and self._priced:
            return
        elif certain == _TOLD and preset.chunks > 1:
            least = self._floor(preset, count).step_seconds(count, self._prices.limits(preset))
            if least < inf:
                self._push(max(least, seconds), _BOUND, count, number)
        elif certain == _PLACED:
            if (count, number) in self._placed:  # else it was timed out of turn
                self._time(count, number)
        else:
            placed = self._prices.placed(preset, count, remat=remat, below_seconds=self._best(_PLACED))
            if placed.stages is None:
                self._push(placed.least_seconds, _BOUND, count, number)
            else:
                self._placed[count, number] = placed
                self._push(placed.least_seconds, _PLACED, count, number)

    def _time(self, count: int, number: int) -> None:
        """Find out what a preset takes, now that it has its layouts.

        Raises:
          PlanError: if it does not suit the program after all.
          MemoryExceeded: if it does not fit.
        """
        below, placed = self._best(_PRICED), self._placed.pop((count, number))
        priced = self._prices.timed(placed, below_seconds=below)
        if priced is None:
            # What is slower than another price may yet be faster than what that one's programs leave room for.
            self._placed[count, number] = placed
            self._push(below, _PLACED, count, number)
            return
        self._priced[count, number] = priced
        self._push(priced.step_seconds, _PRICED, count, number)

    def _best(self, known: int) -> float:
        """Seconds of the best of which so much is known."""
        return min((seconds for seconds, certain, *_ in self._queue if certain <= known), default=inf)

    def _push(self, seconds: float, certain: int, count: int, number: int) -> None:
        heapq.heappush(self._queue, (seconds, certain, -count, number))

    def _tell_next(self) -> None:
        """Find out what the next preset takes at least."""
        number = self._untold.popleft()
        if self._remat is None or self._presets[number].remat in (None, self._remat):
            for count, least in self._told(self._presets[number]).items():
                self._push(least, _TOLD, count, number)

    def _told(self, preset: Preset) -> dict[int, float]:
        """Seconds that a preset takes at least, by the numbers of microbatches in which it may fit."""
        prices = self._prices
        try:
            prices.check(preset)
        except PlanError:
            return {}
        mine = [
            count for count in sorted(self._counts) if prices.allows(preset, count) and _is_worth_cutting(preset, count)
        ]
        for fewest in mine:
            try:
                floor = self._floor(preset, fewest)
            except PlanError:
                continue  # some steps cannot be cut so
            limits = prices.limits(preset)
            found = {count: floor.step_seconds(count, limits) for count in mine if count >= fewest}
            return {count: least for count, least in found.items() if least < inf}
        return {}

    def _floor(self, preset: Preset, count: int) -> Floor:
        """What a preset takes at least in so many microbatches or more; interleaved stages by what they are parts of.

        Raises:
          PlanError: if the preset does not suit the program.
        """
        whole = replace(preset, chunks=1, shown=())
        if (whole, count) not in self._floors:
            remat = preset.remat or self._remat
            # Its layouts may be asked for next, under its own name.
            asked = preset if preset.chunks == 1 else whole
            self._floors[whole, count] = self._prices.floor(asked, count, remat=remat)
        floor = self._floors[whole, count]
        return floor if preset.chunks == 1 else floor.interleaved(preset)


def _layers(prices: PresetPrices, counts: Sequence[int]) -> int:
    """Trips of the scan that the program is; 1 for any other program."""
    scan = main_scan(prices.any_program(counts))
    return scan[1] if scan is not None else 1


def _is_worth_cutting(preset: Preset, microbatches: int) -> bool:
    """Whether half as many stages of each group of devices would leave a pipeline idle for more than this: many are
    slow to look at."""
    return preset.chunks <= 2 or (preset.stages - 1) * 2 / preset.chunks > _WORTH_CUTTING * microbatches
