"""What a plan does over each mesh axis, in the words of the field: data, tensor and expert parallel, ZeRO.

A plan says how values and operators are split, not why. An axis *runs over the batch* if gradients are summed over it
and it splits dim 0 of an input, or (an input may be held whole, taking a block of it is free) the leading factor of
every matrix product that it splits: that is data parallel. Optimizer state split further than its parameter is
ZeRO-1 or 2. A parameter that is itself split may be used so (tensor parallel) or gathered first (ZeRO-3), which the
plan does not record; it is named only where collectives and matrix products leave one reading:

* nothing in the stage is gathered but what ZeRO-1 and 2 fetch: the parameters are used split;
* the axis splits no input, is summed over by no gradient, leaves some parameter whole, and never splits the leading
  factor of a matrix product: likewise;
* in every matrix product that it splits, the axis splits the leading factor, and it runs over the batch, or there is a
  gather and a reduce-scatter for each parameter that it splits: the parameters are gathered.

Where none holds, no name is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from ..plan import ParameterPlan, Stage
from ..sharding import Spec, convert

Holding = Literal["used split", "gathered", "unknown"]

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """What one mesh axis does in one stage.

    Args:
      axis: its name.
      input_dims: dims of inputs that it splits.
      over_batch: whether it splits the batch.
      summed: parameters whose gradients are summed over it.
      split: parameters that it splits.
      stored: parameters whose optimizer state it splits further than the parameter (ZeRO-1 and 2).
      holding: what becomes of the parameters it splits: "used split" as they are, "gathered" at use (ZeRO-3), or
        "unknown" where the plan does not tell, or none is split.
      exchanges: whether neighbours in the stage exchange borders.
    """

    axis: str
    input_dims: tuple[int, ...]
    over_batch: bool
    summed: tuple[ParameterPlan, ...]
    split: tuple[ParameterPlan, ...]
    stored: tuple[ParameterPlan, ...]
    holding: Holding
    exchanges: bool

    @property
    def experts(self) -> tuple[ParameterPlan, ...]:
        """Of the parameters used split, those that are stacks of experts by their name, split by expert."""
        if self.holding != "used split":
            return ()
        return tuple(
            p for p in self.split if len(p.shape) > 2 and "expert" in p.name.lower() and p.use.dim_of(self.axis) == 0
        )

    @property
    def names(self) -> tuple[str, ...]:
        """What the axis is called; empty where nothing certain can be said."""
        found = []
        if self.over_batch or self.holding == "gathered":
            found.append("data parallel")
        if self.exchanges and self.summed and any(self.input_dims) and not self.over_batch:
            found.append("spatial (borders exchanged)")
        if self.stored:
            found.append("ZeRO-1/2")
        if self.holding == "gathered":
            found.append("ZeRO-3")
        experts = self.experts
        tensors = [p for p in self.split if p not in experts] if self.holding == "used split" else []
        if tensors:
            ways = {side(p.shape, p.use.dim_of(self.axis)) for p in tensors} - {""}
            found.append(f"tensor parallel ({', '.join(sorted(ways))})" if ways else "tensor parallel")
        if experts:
            found.append("expert parallel")
        return tuple(found)


def axis_roles(stage: Stage) -> tuple[AxisRole, ...]:
    """The role of each axis of a stage's mesh, in mesh order."""
    return tuple(_role(axis, stage) for axis, _ in stage.mesh)


def side(shape: tuple[int, ...], dim: int | None) -> str:
    """Which side of a matrix a split of `dim` cuts: "row", "column", or "" for what is no matrix."""
    return ("row", "column")[dim] if len(shape) == 2 and dim is not None else ""


def _role(axis: str, stage: Stage) -> AxisRole:
    parameters = stage.parameters
    dims = {given.spec.dim_of(axis) for given in stage.inputs}
    # For each matrix product that the axis splits, whether it splits the leading factor: dim 0 of its first operand.
    leading = [
        axis in operator.axes[0]
        for operator in stage.operators
        if operator.name in _PRODUCTS and any(axis in axes for axes in operator.axes)
    ]
    always = bool(leading) and all(leading)
    summed = tuple(p for p in parameters if axis in p.use.broadcast)
    role = AxisRole(
        axis=axis,
        input_dims=tuple(sorted(d for d in dims if d is not None)),
        over_batch=bool(summed) and (0 in dims or (always and dims <= {None})),
        summed=summed,
        split=tuple(p for p in parameters if axis in p.use.sharded_axes),
        stored=tuple(p for p in parameters if axis in p.stored_axes),
        holding="unknown",
        exchanges=any(c.kind == "permute" for c in stage.communication),
    )
    gathers = _gathers(stage)
    scatters = sum(c.count for c in stage.communication if c.kind == "reduce_scatter")
    apart = not role.input_dims and not summed and len(role.split) < len(parameters)
    if not role.split:
        return role
    if gathers == 0 or (leading and not any(leading) and apart):
        return replace(role, holding="used split")
    paired = dims <= {None} and min(gathers, scatters) >= len(role.split)
    if always and (role.over_batch or 0 in dims or paired):
        return replace(role, holding="gathered")
    return role


def _gathers(stage: Stage) -> int:
    """All-gathers of a step that do not fetch what ZeRO-1 and 2 updated."""
    fetches = 0
    for parameter in stage.parameters:
        if prod(parameter.shape) > 1:
            steps = convert(parameter.storage, Spec(parameter.use.dims)) or ()
            fetches += sum(step.forward == "all_gather" for step in steps)
    return sum(c.count for c in stage.communication if c.kind == "all_gather") - fetches
