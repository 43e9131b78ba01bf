"""The best plan under a preset, with no search for stages: its microbatches, its rematerialisation, its layouts.

Numbers of microbatches are looked at in the order of what they take at least, as the fewest of them say (`least`),
until none left can be better. The best is written out; if its programs hold more than the search counted, all are
priced again with as much less for the devices that could not hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf

from ..errors import MemoryExceeded, PlanError, size_words
from ..plan import Plan
from ..runtime.pipeline.stage_memory import StageMemory
from .leaner import leaner_words
from .least import Floor
from .preset import Preset
from .priced import PricedPreset
from .prices import PresetPrices
from .written import held_bytes, usable_bytes, written_out

# How often a plan whose programs hold too much is searched again with less memory.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPreset:
    """A preset with its plan.

    Args:
      priced: what it was made of.
      plan: with the memory that its programs need.
      considered: what was looked at, a line each.
    """

    priced: PricedPreset
    plan: Plan
    considered: tuple[str, ...]


def planned_preset(
    prices: PresetPrices,
    preset: Preset,
    counts: Sequence[int],
    *,
    remat: str | None = None,
    margin: float = 1.0,
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
      margin: a device has to hold so many times what is predicted.
      finish: what is made of a plan before its programs are counted.
      late: whether the time is over: then the best that is known is taken.
      tell: called with a few words at each part of the work.

    Raises:
      PlanError: if the preset does not suit the program.
      MemoryExceeded: if nothing fits.
    """
    prices.check(preset)
    usable, limits = prices.cluster.device.usable_memory_bytes, list(prices.limits(preset))
    known: dict[Hashable, StageMemory] = {}
    considered: list[str] = []
    leanest = float("inf")
    for _ in range(_ATTEMPTS):
        try:
            priced = _best(prices, preset, sorted(counts), remat, limits, considered, late, tell)
        except MemoryExceeded as error:
            if leanest == float("inf"):
                raise
            raise MemoryExceeded(
                refused=error.refused, got=f"{size_words(usable)} usable on a device",
                needed=f"about {size_words(leanest)} on a device, the predicted peak of the leanest plan found",
                where=error.where, try_=error.try_,
            ) from error  # fmt: skip
        tell("predicting memory")
        plan = finish(priced.plan(prices.submeshes), priced)
        plan = written_out(plan, priced.program, prices.cluster.device.platform, known=known)
        held = [margin * size for size in held_bytes(plan)]
        most = usable_bytes(plan)
        if all(size <= limit for size, limit in zip(held, most, strict=True)):
            return PlannedPreset(priced=priced, plan=plan, considered=tuple(considered))
        leanest = min(leanest, max(held))
        for rank, (size, counted, limit) in enumerate(zip(held, priced.counted_bytes, most, strict=True)):
            if size > limit:
                # What was not seen may be the same for any plan, or grow with what was: the milder of the two is tried.
                milder = max(limit - (size - counted), limit * counted / size)
                limits[rank] = max(min(0.98 * counted, milder), 1.0)
    raise MemoryExceeded(
        refused=f"the preset {preset} on {prices.cluster.num_devices} x {prices.cluster.device.kind}",
        got=f"{size_words(usable)} usable on a device",
        needed=f"about {size_words(leanest)} on a device, the predicted peak of the leanest plan found",
        where="the stages of the preset",
        try_=leaner_words(preset, prices.cluster.num_devices),
    )  # fmt: skip


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
    prices: PresetPrices, preset: Preset, counts: Sequence[int], remat: str | None, limits: Sequence[float],
    considered: list[str], late: Callable[[], bool], tell: Callable[[str], None],
) -> PricedPreset:  # fmt: skip
    """The fastest that fits by the search's count."""
    floor = _floor(prices, preset, counts, remat)
    best: PricedPreset | None = None
    nothing: MemoryExceeded | None = None
    refused: PlanError | None = None
    too_few = 0
    for least, count in sorted((floor.step_seconds(count, limits), -count) for count in counts):
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
            found = prices.priced(preset, count, remat=remat, below_seconds=below, limit_bytes=limits)
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
