"""What a search for stages begins with: the best plan under any preset, where that is soon found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import gcd, inf

from .plan_request import Planning, PlanRequest
from .presets.incumbent import Incumbent
from .presets.prices import PresetPrices
from .program.batch import batch_extents
from .program.equal_stages import main_scan
from .search.alternative import Alternative, merged, preset_words
from .search.considered import said_once
from .search.restrictions.pins import Pins
from .search.result import NothingFaster

# Presets may be looked at for this share of the time, or for so many seconds of it: where there is little, one of them
# is a better beginning than what a search finds without. However little there is, a few are looked at.
_SHARE, _LEAST_SECONDS, _BEYOND_LIMIT_SECONDS = 1 / 2, 6.0, 2.0

# Where none is priced by then it may be that none fits: after so many times as long they are given up.
_GIVEN_UP = 3.0


class BestUnderPresets:
    """The best plan under any preset: at once what a step of it takes, and the plan where nothing else is as fast.

    Args:
      asked: the request.
      prices: of presets.
      counts: numbers of microbatches to choose from.
      seconds: that may be spent until a step is known, and once more until the plan is.

    Attributes:
      priced: the best by its price, or the one that has become the plan; None if there is none.
    """

    def __init__(self, asked: PlanRequest, prices: PresetPrices, counts: Sequence[int], seconds: float) -> None:
        self._asked, self._prices, self._seconds = asked, prices, seconds
        self._is_plan = False
        self._until = time.perf_counter() + seconds
        self._incumbent = Incumbent(
            prices, counts, remat=asked.remat, late=lambda: time.perf_counter() > self._until,
            given_up=lambda: time.perf_counter() > self._until + (_GIVEN_UP - 1) * seconds,
            tell=asked.tell,
        )  # fmt: skip
        self.priced = self._incumbent.priced()

    @property
    def step_seconds(self) -> float:
        """Of the best; infinite where there is none."""
        return self.priced.step_seconds if self.priced is not None else inf

    def planning(self) -> Planning | None:
        """The plan, written out: it may take longer than was thought, if what is faster does not fit; None if nothing
        does."""
        when = "" if self._asked.left_seconds > 0 else " before the time was over"
        self._until = time.perf_counter() + self._seconds
        found = self._incumbent.planned()
        self.priced, self._is_plan = found.priced if found is not None else None, True
        if found is None:
            return None
        note = f"found under the preset {found.priced.preset}: the search found nothing faster{when}"
        plan = replace(found.result.plan, notes=(*found.result.plan.notes, note))
        return Planning.of(replace(found.result, plan=plan), self._asked.cluster)

    def beaten_by(self, found: Planning) -> Planning:
        """A faster plan, with the best preset among its alternatives."""
        alternatives = found.alternatives
        if self.priced is not None:
            what = preset_words(self.priced.microbatches, str(self.priced.preset), fits=self._is_plan)
            alternatives = merged(alternatives, [Alternative(what=what, step_seconds=self.step_seconds)])
        return replace(found, alternatives=alternatives)


def best_under_presets(asked: PlanRequest) -> BestUnderPresets | None:
    """The best plan under any preset, if the request leaves everything open that presets decide, the cluster is of one
    kind, and the program is a scan over its layers: else a preset takes as long to price as stages to search. None too
    where no preset fits.

    Args:
      asked: the request.
    """
    free = not asked.mesh and asked.pins == Pins() and asked.schedule is None and asked.submeshes is None
    alike = len({(host.devices, host.device) for host in asked.cluster.hosts}) == 1
    if not free or not alike or asked.cluster.num_devices == 1:
        return None
    prices = PresetPrices(
        asked.traces, asked.args, asked.cluster, batch_axis=asked.batch_axis, reduction=asked.reduction
    )
    counts = [asked.microbatches] if asked.microbatches is not None else _divisors(asked)
    program = prices.any_program(counts)
    if not program.marked or main_scan(program) is None:
        return None
    limit = asked.time_limit_seconds
    seconds = max(_SHARE * limit, min(limit, _LEAST_SECONDS), _BEYOND_LIMIT_SECONDS)
    best = BestUnderPresets(asked, prices, counts, seconds)
    return best if best.priced is not None else None


def proven(planning: Planning, nothing: NothingFaster) -> Planning:
    """The same plan with its gap and what else was considered, now that a search has found nothing faster.

    Args:
      planning: of a plan that was known.
      nothing: what the search said.
    """
    found = planning.bounded(nothing.least_seconds)
    return replace(found, considered=said_once(planning.considered, nothing.considered))


def _divisors(asked: PlanRequest) -> list[int]:
    """All numbers of microbatches into which the batch can be cut."""
    extent = gcd(*batch_extents(asked.args, asked.batch_axis))
    return [n for n in range(1, extent + 1) if extent % n == 0] or [1]
