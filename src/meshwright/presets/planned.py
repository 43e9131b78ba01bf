"""The best plan under a preset, with no search for stages: its microbatches, its rematerialisation, its layouts.

Numbers of microbatches are looked at in the order of what they take at least, as the fewest of them say (`least`),
until none left can be better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from ..errors import MemoryExceeded, PlanError
from ..plan import Plan
from ..refine import Refinement
from ..search.result import SearchResult
from ..search.stages.reserve import MissedMemory
from .leaner import leaner_words
from .least import Floor
from .preset import Preset
from .priced import PricedPreset
from .prices import PresetPrices


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPreset:
    """A preset with its plan.

    Args:
      priced: what it was made of.
      result: the plan, with the memory that its programs need.
    """

    priced: PricedPreset
    result: SearchResult


def planned_preset(
    prices: PresetPrices,
    preset: Preset,
    counts: Sequence[int],
    *,
    remat: str | None = None,
    finish: Callable[[Plan, PricedPreset], Plan] = lambda plan, priced: plan,
    late: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda text: None,
) -> PlannedPreset:
    """The best plan under a preset.

    Args:
      prices: of presets, for the step and the cluster.
      preset: with all sizes.
      counts: numbers of microbatches to choose from.
      remat: "none", "layer", or None for the better of each stage.
      finish: what is made of a plan before its programs are counted.
      late: whether the time is over: then the best that is known is taken.
      tell: called with a few words at each part of the work.

    Raises:
      PlanError: if the preset does not suit the program.
      MemoryExceeded: if nothing fits.
    """
    prices.check(preset)
    usable = prices.limits(preset)
    found: list[PricedPreset] = []

    def find(missed: MissedMemory) -> SearchResult:
        def limits(count: int) -> tuple[float, ...]:
            return tuple(missed.limit_of_rank(count, rank, size) for rank, size in enumerate(usable))

        considered: list[str] = []
        priced = _best(prices, preset, sorted(counts), remat, limits, considered, late, tell)
        found.append(priced)
        plan = finish(priced.plan(prices.submeshes), priced)
        return SearchResult(plan=plan, program=priced.program, considered=tuple(considered))

    cluster = prices.cluster
    result = Refinement(cluster.device, tell).run(
        find, what=f"the preset {preset} on {cluster.num_devices} x {cluster.device.kind}",
        where="the stages of the preset", try_=leaner_words(preset, cluster.num_devices),
    )  # fmt: skip
    return PlannedPreset(priced=found[-1], result=result)


def _floor(prices: PresetPrices, preset: Preset, counts: Sequence[int], remat: str | None) -> Floor:
    """Of the fewest microbatches that the step can be cut into."""
    refused: PlanError | None = None
    for count in counts:
        try:
            return prices.floor(preset, count, remat=remat)
        except PlanError as error:
            # These numbers need not have been the user's idea.
            refused = refused or error
    assert refused is not None
    raise refused


def _best(
    prices: PresetPrices, preset: Preset, counts: Sequence[int], remat: str | None,
    limits: Callable[[int], tuple[float, ...]], considered: list[str], late: Callable[[], bool],
    tell: Callable[[str], None],
) -> PricedPreset:  # fmt: skip
    """The fastest that fits by the search's count."""
    floor = _floor(prices, preset, counts, remat)
    best: PricedPreset | None = None
    nothing: MemoryExceeded | None = None
    refused: PlanError | None = None
    too_few = 0
    for least, count in sorted((floor.step_seconds(count, limits(count)), -count) for count in counts):
        count = -count
        if best is not None and least >= best.step_seconds:
            reason = "nothing that fits" if least == inf else f"not searched, {least:.6g} s at the very least"
            considered.append(f"{count} microbatches: {reason}")
            continue
        if best is not None and late():
            considered.append(f"{count} microbatches: not searched, out of time")
            continue
        if count < too_few:
            continue  # fewer microbatches keep more
        tell(f"{preset} in {count} microbatches")
        try:
            below = best.step_seconds if best is not None else float("inf")
            found = prices.priced(preset, count, remat=remat, below_seconds=below, limit_bytes=limits(count))
        except MemoryExceeded as error:
            considered.append(f"{count} microbatches: nothing that fits")
            nothing, too_few = error if count > too_few else nothing, max(too_few, count)
            continue
        except PlanError as error:
            # Some steps cannot be cut so finely: these numbers need not have been the user's idea.
            considered.append(f"{count} microbatches: {error}")
            refused = refused or error
            continue
        if found is None:
            considered.append(f"{count} microbatches: slower")
            continue
        considered.append(f"{count} microbatches: {found.step_seconds:.6g} s")
        best = found
    if best is None:
        raise nothing or refused or AssertionError("no number of microbatches")
    return best
