"""Presets like one that does not fit, which keep less on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .families import FAMILIES, zero
from .preset import Preset


def leaner(preset: Preset, devices: int) -> Iterator[Preset]:
    """From what changes least: optimizer state split over the data axis, then more stages, or tensor axes, in the place
    of data parallelism.

    >>> from meshwright.presets import megatron
    >>> [str(one) for one in leaner(megatron(tp=2, pp=2).on(16), 16)][:2]
    ['megatron(tp=2, pp=2, dp=4, zero=1)', 'megatron(tp=2, pp=4, dp=2, zero=1)']

    Args:
      preset: with all sizes.
      devices: that it is for.
    """
    data = next((axis.size or 1 for axis in preset.axes if axis.role == "batch"), 1)
    if data == 1 or preset.family not in FAMILIES:
        return
    if preset.family in ("data_parallel", "parameter_server", "zero"):
        yield from (zero(stage).on(devices) for stage in (1, 3) if stage > (preset.zero or 0))
        return
    arguments: dict[str, Any] = {axis.argument: axis.size for axis in preset.axes} | dict(preset.shown)

    def changed(**changes: Any) -> Preset:
        return FAMILIES[preset.family](**{**arguments, **changes})

    if preset.family == "megatron" and not preset.zero:
        arguments["zero"] = 1
        yield changed()
    times = [n for n in (2, 4) if data % n == 0]
    stages = "stages" if "stages" in arguments else "pp" if "pp" in arguments else None
    if stages is not None:
        yield from (changed(**{stages: n * arguments[stages]}, dp=data // n) for n in times)
    if "tp" in arguments:
        yield from (changed(tp=n * arguments["tp"], dp=data // n) for n in times)


def leaner_words(preset: Preset, devices: int) -> str:
    """What to try where a preset does not fit.

    >>> from meshwright.presets import data_parallel, gpipe
    >>> leaner_words(data_parallel().on(8), 8), leaner_words(gpipe(8).on(8), 8)
    ('zero(stage=1) or zero(stage=3), or leaving out preset=', 'leaving out preset=, or more devices')

    Args:
      preset: as of `leaner`.
      devices: the same.
    """
    others = " or ".join(map(str, leaner(preset, devices)))
    return f"{others}, or leaving out preset=" if others else "leaving out preset=, or more devices"
