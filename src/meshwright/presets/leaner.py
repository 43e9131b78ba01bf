"""Presets like one that does not fit, which keep less on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .families import FAMILIES, zero
from .preset import Preset


def leaner(preset: Preset) -> Iterator[Preset]:
    """From what changes least: optimizer state split over the data axis, then more stages, or tensor axes, in the place
    of data parallelism.

    >>> from meshwright.presets import megatron
    >>> [str(one) for one in leaner(megatron(tp=2, pp=2).on(16))][:2]
    ['megatron(tp=2, pp=2, dp=4, zero=1)', 'megatron(tp=2, pp=4, dp=2, zero=1)']
    """
    data = preset.size("batch")
    if data == 1 or preset.family not in FAMILIES:
        return
    if preset.family in ("data_parallel", "parameter_server", "zero"):
        yield from (zero(stage).on(data) for stage in (1, 3) if stage > (preset.zero or 0))
        return
    if preset.family == "megatron" and not preset.zero:
        preset = replace(preset, zero=1)
        yield preset
    times = [n for n in (2, 4) if data % n == 0]
    if preset.stages > 1:
        yield from (preset.sized({"data": data // n}, n * preset.stages) for n in times)
    if any(axis.role == "tensor" for axis in preset.axes):
        yield from (preset.sized({"model": n * preset.size("tensor"), "data": data // n}) for n in times)


def leaner_words(preset: Preset) -> str:
    """What to try where a preset, with all sizes, does not fit.

    >>> from meshwright.presets import data_parallel, gpipe
    >>> leaner_words(data_parallel().on(8)), leaner_words(gpipe(8).on(8))
    ('zero(stage=1) or zero(stage=3), or leaving out preset=', 'leaving out preset=, or more devices')
    """
    others = " or ".join(map(str, leaner(preset)))
    return f"{others}, or leaving out preset=" if others else "leaving out preset=, or more devices"
