"""Why a stage is as it is: what its layout saves, and what it makes necessary, a line for each reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ..plan import ParameterPlan, Stage
from .strategy import AxisRole
from .table import counted, format_bytes


def reasons(microbatches: int, stage: Stage, roles: Sequence[AxisRole]) -> Iterator[str]:
    """The reasons of one stage that tell it from others.

    Args:
      microbatches: that it computes in a step.
      stage: to be explained.
      roles: of its axes.
    """
    for role in roles:
        if role.summed:
            by = " by one device, a parameter server" if role.central else ""
            yield f"gradients of {_parameters_of(role.summed)} summed over {role.axis}{by}: {_cause(role)}"
    scattered = [p for p in stage.parameters if p.scattered]
    if microbatches > 1 and any(not p.scattered for role in roles for p in role.summed):
        others = " of the other parameters" if scattered else ""
        yield f"gradients{others} of the {microbatches} microbatches are added up first: one sum over devices a step"
    if scattered:
        yield f"gradients of {_parameters_of(scattered)} scattered in each microbatch: added up in parts (ZeRO-2)"
    yield from _storage(stage, [role.axis for role in roles if role.stored])
    for role in roles:
        if role.gathered:
            yield f"{_parameters_of(role.gathered)} split over {role.axis}: stored split, gathered at use (ZeRO-3)"
        if role.used_split:
            yield f"{_parameters_of(role.used_split)} split over {role.axis}: each device computes with its part only"
    yield from _unsummed(stage)
    if ranges := stage.rematerialised_segments:
        what = f"activations of {counted(ranges, 'range')} of equations"
        but = " but for what is dear to compute" if stage.kept_inside else ""
        yield f"rematerialised: {what} computed again in the backward pass{but}"


def details(stage: Stage) -> Iterator[str]:
    """What a stage does to communicate less, for a page that has room for one stage in full."""
    links = sum(bool(operator.broadcast) for operator in stage.operators)
    if links:
        operators = counted(links, "operator")
        yield f"{operators} on the way of a gradient leave its sum over devices to be taken once, later"
    if stage.settled:
        yield f"{counted(len(stage.settled), 'value')} with several readers moved once for all of them"


def _unsummed(stage: Stage) -> Iterator[str]:
    """Gradients of which nothing is left to be summed at the end of a step: of what every axis splits there never was,
    else it may have been done where they are made."""
    axes = {axis for axis, size in stage.mesh if size > 1}
    unsummed = [p for p in stage.parameters if not p.use.broadcast]
    whole = [p for p in unsummed if axes - {axis for dim in p.use.dims for axis in dim}]
    split = len(unsummed) - len(whole)
    if split:
        parameters = counted(split, "parameter")
        yield f"no reduction needed for the gradients of {parameters}: each device has all of its part"
    if whole:
        yield (
            f"gradients of {_parameters_of(whole)} that are not split over every axis: complete where the backward "
            f"pass makes them, by its own sums or because devices compute the same"
        )


def _cause(role: AxisRole) -> str:
    if role.over_batch:
        return f"the batch is split over {role.axis}"
    if role.input_dims:
        return f"inputs are split over {role.axis} on dim {', '.join(map(str, role.input_dims))}"
    return f"the operators that read them are split over {role.axis} along a dim they lack"


def _storage(stage: Stage, axes: Sequence[str]) -> Iterator[str]:
    """ZeRO-1 and 2, with the memory they save: the plan gives the optimizer state of all parameters together."""
    stored = [p for p in stage.parameters if p.stored_axes]
    if not stored:
        return
    sizes = stage.sizes
    factors = {p.storage.shards(sizes) / p.use.shards(sizes) for p in stage.parameters}
    held = sum(prod(p.shape) / p.storage.shards(sizes) for p in stage.parameters)
    would = sum(prod(p.shape) / p.use.shards(sizes) for p in stage.parameters)
    saved = stage.memory.optimizer * (would / held - 1) if held else 0.0
    # Exact where every parameter is split further by the same factor, whatever the optimizer keeps of each.
    about = "" if len(factors) == 1 else "about "
    saying = f": saves {about}{format_bytes(saved)} a device" if saved > 0 else ""
    yield f"optimizer state of {_parameters_of(stored)} split over {' '.join(axes)} (ZeRO-1/2){saying}"


def _parameters_of(parameters: Sequence[ParameterPlan]) -> str:
    return counted(len(parameters), "parameter")
