"""What a plan does over each mesh axis, in the words of the field: data, tensor, context and expert parallel, ZeRO.

A plan says how values and operators are split, not why. An axis *runs over the batch* if gradients are summed over it
and it splits dim 0 of an input, or (an input may be held whole, taking a block of it is free) the leading factor of
every matrix product that it splits: that is data parallel. Optimizer state split further than its parameter is
ZeRO-1 or 2 (they are one where a step is one microbatch), surely 2 where each microbatch scatters its gradients; a
parameter split and gathered at use is ZeRO-3; one used split is tensor or expert parallel. An axis that splits the
positions of attention is context parallel; of one that splits its heads and no weights the sequence is split everywhere
else, with an all-to-all between.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import ParameterPlan, Stage
from ..program.graph import GROUPED, GROUPS

# `meshwright.attention`, and of its factors those of query positions, heads and key positions (`program.attention`).
_ATTENTION, _QUERIES, _HEADS, _KEYS = "attention", 1, (2, 3), 5
# Operators whose blocks have borders.
_WINDOWED = ("conv_general_dilated", "reduce_window")

_PRODUCTS = ("dot_general", "conv_general_dilated", *GROUPED)


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
      exchanges: whether neighbours in the stage exchange borders.
      central: whether one device sums the gradients for all.
      attention: how it splits attention, in words, if it does not split its batch or weights.
      groups: whether it splits products of groups of rows by group.
    """

    axis: str
    input_dims: tuple[int, ...]
    over_batch: bool
    summed: tuple[ParameterPlan, ...]
    split: tuple[ParameterPlan, ...]
    stored: tuple[ParameterPlan, ...]
    exchanges: bool
    central: bool = False
    attention: tuple[str, ...] = ()
    groups: bool = False

    @property
    def gathered(self) -> tuple[ParameterPlan, ...]:
        """Of the parameters it splits, those gathered at use (ZeRO-3)."""
        return tuple(p for p in self.split if self.axis in p.gathered)

    @property
    def used_split(self) -> tuple[ParameterPlan, ...]:
        """Of the parameters it splits, those used as they are."""
        return tuple(p for p in self.split if self.axis not in p.gathered)

    @property
    def experts(self) -> tuple[ParameterPlan, ...]:
        """Of those used split, the stacks of experts split by expert: by their name, or read by products of groups."""

        def is_one(p: ParameterPlan) -> bool:
            dim = p.use.dim_of(self.axis)
            return len(p.shape) > 2 and (
                ("expert" in p.name.lower() and dim == 0) or (self.groups and dim == len(p.shape) - 3)
            )

        return tuple(filter(is_one, self.used_split))

    @property
    def names(self) -> tuple[str, ...]:
        """What the axis is called; empty where nothing certain can be said."""
        found = []
        if self.over_batch or self.gathered:
            found.append("data parallel (parameter server)" if self.central else "data parallel")
        if self.exchanges and self.summed and any(self.input_dims) and not self.over_batch:
            found.append("spatial (borders exchanged)")
        if any(not p.scattered for p in self.stored):
            found.append("ZeRO-1/2")
        if any(p.scattered for p in self.stored):
            found.append("ZeRO-2")
        if self.gathered:
            found.append("ZeRO-3")
        experts = self.experts
        # A vector split beside whole matrices is a detail, not a way to run the network.
        tensors = [p for p in self.used_split if p not in experts and len(p.shape) > 1]
        if tensors:
            ways = {side(p.shape, p.use.dim_of(self.axis)) for p in tensors} - {""}
            found.append(f"tensor parallel ({', '.join(sorted(ways))})" if ways else "tensor parallel")
        if experts or self.groups:
            found.append("expert parallel")
        found.extend(self.attention)
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
    windowed = any(operator.name.startswith(_WINDOWED) for operator in stage.operators)
    return AxisRole(
        axis=axis,
        input_dims=tuple(sorted(d for d in dims if d is not None)),
        over_batch=bool(summed) and (0 in dims or (always and dims <= {None})),
        summed=summed,
        split=tuple(p for p in parameters if axis in p.use.sharded_axes),
        stored=tuple(p for p in parameters if axis in p.stored_axes),
        exchanges=windowed and _has(stage, "permute") and stage.gradient_exchange == "collective",
        central=stage.gradient_exchange == "central",
        attention=_of_attention(axis, stage),
        groups=any(axis in one.axes[GROUPS] for one in stage.operators if one.name in GROUPED),
    )


def _has(stage: Stage, kind: str) -> bool:
    return any(one.kind == kind for one in stage.communication)


def _of_attention(axis: str, stage: Stage) -> tuple[str, ...]:
    """How an axis splits attention, but for its batch, and its heads where weights are split over the same axis."""
    splits_weights = any(axis in p.use.sharded_axes and axis not in p.gathered for p in stage.parameters)
    splits_weights |= not _has(stage, "all_to_all")
    found = set()
    for operator in stage.operators:
        if operator.name != _ATTENTION:
            continue
        if axis in operator.axes[_QUERIES]:
            found.add(f"context parallel ({'ring' if axis in operator.axes[_KEYS] else 'gathered keys'})")
        elif (
            any(axis in operator.axes[factor] for factor in _HEADS) and not splits_weights and _has(stage, "all_to_all")
        ):
            found.add("sequence parallel (all-to-all)")
    return tuple(sorted(found))
