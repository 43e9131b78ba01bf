"""Whether a plan stores parameters as a ZeRO stage was asked to: which of them no axis divides, and so are whole."""

from __future__ import annotations

from math import prod

from ..plan import ParameterPlan, Plan, Stage
from ..presets import Preset

# Parameters that are whole are named where they have this share of all elements: below it they cost a device no memory
# or traffic that anyone could see.
_SHARE = 0.01


def storage_notes(plan: Plan, zero: int | None, preset: Preset | None) -> tuple[str, ...]:
    """A note where ZeRO splits nothing, or leaves a part of the parameters whole; else none.

    Args:
      plan: that was found.
      zero: the ZeRO stage that was asked for; None for a choice.
      preset: that was asked for, or None.
    """
    if not zero:
        return ()
    what = f"zero={zero}" if preset is None else f"ZeRO stage {zero} of the preset {preset}"
    whole: dict[str, ParameterPlan] = {}
    names: set[str] = set()
    elements = left = 0
    sizes: set[int] = set()
    for stage in plan.stages:
        axes = _storing(stage, preset)
        if not axes:
            continue
        sizes.update(stage.sizes[axis] for axis in axes)
        for parameter in stage.parameters:
            names.add(parameter.name)
            elements += prod(parameter.shape)
            split = parameter.use if zero == 3 else parameter.storage
            if not axes.intersection(split.sharded_axes):
                whole[parameter.name] = parameter
                left += prod(parameter.shape)
    if not sizes:
        return (f"{what} splits nothing: there is one device to store each part of the parameters",)
    if left <= _SHARE * elements:
        return ()
    largest = max(whole.values(), key=lambda one: (prod(one.shape), one.name))
    shown = " or ".join(map(str, sorted(sizes)))
    if len(whole) == len(names):
        return (f"{what} splits nothing: no dim of a parameter is split over {shown} devices",)
    return (
        f"{what} leaves {len(whole)} of {len(names)} parameters whole ({100 * left / elements:.0f} % of all elements), "
        f"the largest {largest.name} of shape {largest.shape}: no dim of it is split over {shown} devices",
    )


def _storing(stage: Stage, preset: Preset | None) -> frozenset[str]:
    """The axes of a stage that may store parts of parameters."""
    roles = preset.roles if preset is not None else {}
    return frozenset(axis for axis, size in stage.mesh if size > 1 and roles.get(axis, "batch") != "tensor")
