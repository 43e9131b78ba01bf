"""What to try where nothing fits: a less restricted request, planned, so that the advice is known to work.

A refusal for memory says how much is missing. What would mend it depends on the model, the batch and the cluster, and
is found the sure way: less restricted requests are planned, from what changes least, until one fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..errors import MemoryExceeded, PlanError, size_words
from ..presets import Preset, leaner, parse_preset
from .refine import NOT_COUNTED
from .request import Planning, PlanOptions

# Seconds that may be spent on advice, at most: what planning a large model takes; a refusal should not take longer.
_MOST_SECONDS = 20.0


def with_advice(
    refused: MemoryExceeded, plan: Callable[[PlanOptions], Planning], options: PlanOptions, devices: int, seconds: float
) -> MemoryExceeded:
    """The refusal of a request, for so many devices, with what does fit, if that is found in these seconds; `plan`
    finds a plan under other options."""
    until = time.perf_counter() + min(seconds, _MOST_SECONDS)
    for words, changed in _relaxed(options, devices):
        left = until - time.perf_counter()
        if left <= 0:
            break
        try:
            found = plan(replace(options, **changed, time_limit_seconds=left, check=None))  # compiling takes minutes
        except PlanError:
            continue
        if NOT_COUNTED in found.plan.notes:
            continue
        held = max(stage.memory.total for stage in found.plan.stages)
        fits = f"{words}, which fits ({size_words(held)} on a device)"
        return refused.named(refused.refused, f"{fits}; or {refused.try_}")
    return refused


def _relaxed(options: PlanOptions, devices: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of a request that need less memory: in words, and as options."""
    preset, count, remat = options.preset, options.microbatches, options.remat
    if count is not None:
        yield "leaving out microbatches=", {"microbatches": None}
    if remat in ("none", "selective"):
        yield 'remat="layer"', {"remat": "layer"}
    if preset is not None:
        others: list[Preset] = list(leaner((parse_preset(preset) if isinstance(preset, str) else preset).on(devices)))
        for other in others:
            yield f"preset={str(other)!r}", {"preset": other}
        for other in others if count is not None or remat in ("none", "selective") else ():
            changed = {"preset": other, "microbatches": None, "remat": None}
            yield f"preset={str(other)!r} without microbatches= and remat=", changed
        yield "leaving out preset=", {"preset": None, "stages": None}
        return
    for name in ("zero", "mesh", "submeshes"):
        if getattr(options, name) is not None:
            yield f"leaving out {name}=", {name: None} if name != "submeshes" else {name: None, "stages": None}
    if options.schedule is not None:
        yield "leaving out schedule=", {"schedule": None}
    if options.stages is not None:
        yield "leaving out stages=", {"stages": None, "mesh": None, "submeshes": None}
