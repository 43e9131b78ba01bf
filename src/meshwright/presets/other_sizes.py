"""What to try in place of a preset whose sizes do not suit the devices or the program, as it is written in Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import TYPE_CHECKING

from ..program.trace import Program
from ..search.restrictions.roles import Roles

if TYPE_CHECKING:
    from .preset import Preset, PresetAxis


def for_devices(preset: Preset, devices: int) -> str:
    """Presets of the family for so many devices: with one size as the others leave it, or else with the nearest sizes.

    >>> from meshwright.presets import gpipe, megatron
    >>> for_devices(megatron(tp=2, pp=2, dp=4), 8), for_devices(gpipe(3), 8)
    ('megatron(tp=1, pp=2, dp=4) or megatron(tp=2, pp=2, dp=2)', 'gpipe(stages=2, dp=4)')

    Args:
      preset: whose sizes do not multiply to the devices, nor leave a size that does.
      devices: how many there are.
    """
    given = [axis for axis in preset.axes if axis.size is not None]
    known = preset.stages * prod(axis.size or 1 for axis in given)
    found = []
    for axis in given if len(given) == len(preset.axes) and not preset.stages_follow else ():
        rest = known // (axis.size or 1)
        if devices % rest == 0:
            found.append(str(preset.sized({axis.name: devices // rest})))
    if found:
        return " or ".join(sorted(found))
    if preset.stages_follow and len(preset.axes) == 1:
        several = [n for n in _divisors(devices) if n < devices]  # these pipelines have two stages at least
        sizes = sorted(several, key=lambda n: (abs(n - (preset.axes[0].size or 1)), n))
        return str(preset.sized({preset.axes[0].name: sizes[0]})) if sizes else "data_parallel()"
    stages = _nearest(preset.stages, devices) if preset.stages > 1 else 1
    if preset.stages > 1 and stages == 1:
        return "data_parallel()"
    left = devices // stages
    inner: dict[str, int] = {}
    for axis in reversed(preset.axes[1:]):
        inner[axis.name] = _nearest(axis.size or 1, left)
        left //= inner[axis.name]
    return str(preset.sized({**inner, preset.axes[0].name: left}, stages))


def for_program(preset: Preset, program: Program, roles: Roles, axis: PresetAxis) -> str:
    """What suits a program in which a tensor or expert axis finds nothing to split: another size of it, or none."""
    data = preset.axes[0]
    devices = prod(one.size or 1 for one in preset.axes)
    graph = program.graph
    extents = {extent for p in graph.parameters for extent in graph.values[graph.inputs[p]].shape}
    for size in sorted(_divisors(devices), key=lambda n: (abs(n - (axis.size or 1)), n)):
        # What the axis does not take is left to the data axis, which has to have something to split itself.
        left = devices // size
        splits = size == 1 or (size != axis.size and roles.can_split(graph, axis.role, size))
        if splits and (left == 1 or roles.can_split(graph, "batch", left)):
            if size == preset.stages == 1 and not preset.zero:
                return "data_parallel()"
            other = preset.sized({axis.name: size, data.name: left})
            stored = not preset.zero or left == 1 or any(extent % left == 0 for extent in extents)
            return str(other) if stored else without_zero(other)
    return "leaving out preset="


def for_batch(program: Program, batch: Iterable[tuple[str, int]], size: int) -> str:
    """Numbers of microbatches and batches that an axis of this size divides. The dims of inputs that hold the batch are
    (name, dim)."""
    shapes = {program.graph.values[v].name: program.graph.values[v].shape for v in program.graph.inputs}
    extents = sorted({shapes[name][dim] * program.microbatches for name, dim in batch})
    fewer = [n for n in range(1, program.microbatches) if extents and all(e % (n * size) == 0 for e in extents)]
    larger = _larger(extents, size * program.microbatches)
    tries = [*([f"microbatches={max(fewer)}"] if fewer else []), *([f"a batch of {larger}"] if larger else [])]
    return ", or ".join(tries) or "leaving out preset="


def without_zero(preset: Preset) -> str:
    """The plans of a preset with all sizes, with optimizer state that is not split."""
    if preset.family == "zero":
        return "data_parallel()"
    pipeline = f", pp={preset.stages}" if preset.stages > 1 else ""
    return f"megatron(tp={preset.size('tensor')}{pipeline}, dp={preset.size('batch')})"


def check_interleaved(preset: Preset, microbatches: int, extents: Sequence[int]) -> None:
    """Refuse numbers of microbatches, of batches of these extents, that ranks with several stages each cannot take
    turns with.

    Raises:
      PlanError: if it is no multiple of the ranks.
    """
    ranks, block = preset.stages, preset.stages * preset.blocks
    if preset.chunks == 1 or microbatches % ranks == 0:
        return
    batch = gcd(*extents)
    counts = [n for n in range(ranks, batch + 1, ranks) if batch % (n * preset.blocks) == 0]
    nearest = min(counts, key=lambda n: (abs(n - microbatches), n), default=None)
    larger = _larger(extents, block)
    raise preset.refusal(
        f"{microbatches} microbatches", f"a multiple of {ranks}: stages are interleaved",
        f"microbatches={nearest}, or chunks=1" if nearest is not None
        else f"chunks=1, or microbatches={ranks} and a batch of {larger}", "microbatches=",
    )  # fmt: skip


def _larger(extents: Sequence[int], block: int) -> str:
    """The next extents that a block divides."""
    return " and ".join(str(-(-extent // block) * block) for extent in extents)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(size: int, devices: int) -> int:
    """The divisor of the devices that is nearest to a size; more than 1 if the size is and there is one."""
    return min((n for n in _divisors(devices) if n > 1 or size == 1 or devices == 1), key=lambda n: (abs(n - size), n))
