"""The roles of mesh axes: they restrict a search to the plans of a family (data, tensor or expert parallel).

A preset is no planner of its own. It gives every axis a role, roles remove choices, and the rest is solved like any
other problem. `program.origins` says which dims an axis may split, so models may be written in any way:

* `batch`: operators that have the batch split it over the axis, nothing else is split over it, and parameters are used
  whole; ZeRO-3 also lets a parameter, and a cast of it, be split until it is gathered.
* `tensor`: products split a weight index that is no stream (heads, feed-forward width) over the axis; between them
  operators may, and all that has the vocabulary splits it. What residual additions run over stays whole, which leaves
  Megatron's column, row and vocabulary splits. With `sequence_parallel` operators on the stream split their sequence,
  and the sums become reduce-scatters (Korthikanti et al. 2022).
* `expert`: products with a stack of experts split the stack, everything else the batch (GShard, Lepikhin et al. 2020).

An operator that cannot satisfy a role (the axis does not divide its size) is left whole over the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ...program.factors import Factor
from ...program.graph import GROUPED, Graph, Operator
from ...program.origins import Origin, dim_origins, operator_origins
from ...sharding import Spec
from ..prices.choices import Choices, OperatorChoice, ParameterChoice

Role = Literal["batch", "tensor", "expert"]

# What tensor axes split.
_INNER = ("weight", "vocabulary")

_Choice = TypeVar("_Choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The role of each axis of the mesh.

    Args:
      axes: the role of each axis by its name.
      batch: the dims of inputs that hold the batch, as `Origin.inputs` has them.
      sequence_parallel: whether tensor axes split the sequence where they can split no weight.
      gathered: whether batch axes may split parameters, to be gathered at use (ZeRO-3).
    """

    axes: Mapping[str, Role]
    batch: frozenset[tuple[str, int]]
    sequence_parallel: bool = False
    gathered: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for roles that allow the same choices."""
        return type(self), tuple(self.axes.items()), self.batch, self.sequence_parallel, self.gathered

    @property
    def storing(self) -> frozenset[str]:
        """The axes that may split optimizer state further than parameters."""
        return frozenset(axis for axis, role in self.axes.items() if role != "tensor")

    @property
    def summing(self) -> frozenset[str]:
        """The axes over which every gradient is summed."""
        return frozenset(axis for axis, role in self.axes.items() if role == "batch")

    def is_batch(self, origin: Origin | None) -> bool:
        """Whether an index is the batch."""
        return origin is not None and not self.batch.isdisjoint(origin.inputs)

    def _is(self, origin: Origin | None, kind: str) -> bool:
        return origin is not None and origin.kind == kind and not self.is_batch(origin)

    def operator(
        self, operator: Operator, origins: Sequence[Origin], choices: Sequence[OperatorChoice], *, of_parameters: bool
    ) -> Choices:
        """Of all algorithms of an operator, whose factors have these origins (`operator_origins`), those that the
        roles allow; `of_parameters` if it depends on parameters alone."""
        for axis, role in self.axes.items():
            wanted, required = self._factors(operator, origins, role, of_parameters=of_parameters)

            def factor(choice: OperatorChoice, axis: str = axis) -> int | None:
                return next((f for f, axes in enumerate(choice.algorithm.axes) if axis in axes), None)

            choices = _narrowed(choices, factor, wanted, required=required)
        return Choices(choices)

    def _factors(
        self, operator: Operator, told: Sequence[Origin], role: Role, *, of_parameters: bool
    ) -> tuple[set[int], bool]:
        """The factors an axis may split, and whether it has to split one of them if it can."""
        origins = dict(enumerate(told))
        batch = {f for f, o in origins.items() if self.is_batch(o)}
        if role == "batch":
            return (set(origins), False) if of_parameters and self.gathered else (batch, True)
        if role == "expert":
            experts = {f for f, o in origins.items() if self._is(o, "expert")}
            if of_parameters:
                return experts, False
            if not operator.matmul:
                return batch | experts, True
            if operator.name in GROUPED:
                return experts, True
            stacked = {f for f in experts if all(_has(tensor, f) for tensor in operator.rule.operands)}
            return (stacked if stacked and not _leads_batch(operator, batch) else batch or experts), True
        vocabularies = {f for f, o in origins.items() if self._is(o, "vocabulary")}
        if vocabularies:
            return vocabularies, True
        weights = {f for f, o in origins.items() if self._is(o, "weight")}
        if operator.matmul or of_parameters or not self.sequence_parallel:
            return weights, operator.matmul
        sequence = {f for f, o in origins.items() if self._is(o, "data") and operator.rule.factors[f].kind != "spatial"}
        streams = any(self._is(o, "stream") for o in origins.values())
        return weights | sequence, streams and not weights

    def wanted(self, operator: Operator, origins: Sequence[Origin], axis: str) -> set[int]:
        """The factors of an operator that an axis of the mesh is to split."""
        return self._factors(operator, origins, self.axes[axis], of_parameters=False)[0]

    def _required(self, graph: Graph, role: Role) -> Iterator[tuple[Operator, Factor, Origin]]:
        """What axes of a role must split."""
        for operator, origins in zip(graph.operators, operator_origins(graph), strict=True):
            wanted, required = self._factors(operator, origins, role, of_parameters=False)
            for f in wanted.intersection(operator.rule.splittable) if required else ():
                yield operator, operator.rule.factors[f], origins[f]

    def can_split(self, graph: Graph, role: Role, size: int) -> bool:
        """Whether some operator has what an axis of this role and size must split."""
        return any(
            factor.size % size == 0 and (role != "expert" or self._is(origin, "expert"))
            for _, factor, origin in self._required(graph, role)
        )

    def can_split_sequence(self, graph: Graph, size: int) -> bool:
        """Whether tensor axes of this size would split the sequence of some operator."""
        return any(
            factor.size % size == 0 and self._is(origin, "data") and not operator.matmul
            for operator, factor, origin in self._required(graph, "tensor")
        )

    def parameter(self, origins: Sequence[Origin | None], choices: Sequence[ParameterChoice]) -> list[ParameterChoice]:
        """The choices of a parameter, whose dims have these origins, that the roles allow."""
        return [
            choice
            for choice in choices
            if all(self._may_split(origins, choice.use, axis) for axis in choice.use.sharded_axes)
            and self.storing.issuperset(set(choice.storage.sharded_axes) - set(choice.use.sharded_axes))
        ]

    def _may_split(self, origins: Sequence[Origin | None], use: Spec, axis: str) -> bool:
        role = self.axes.get(axis)
        dim = use.dim_of(axis)
        if role is None or dim is None:
            return True
        if role == "batch":
            return self.gathered
        return any(self._is(origins[dim], kind) for kind in (_INNER if role == "tensor" else ("expert",)))

    def input(self, graph: Graph, value: int, specs: Sequence[Spec]) -> tuple[Spec, ...]:
        """The specs of an input, or of a value received from another stage, that the roles allow."""
        origins = dict(enumerate(dim_origins(graph, value)))
        batch = {d for d, o in origins.items() if self.is_batch(o)}
        for axis, role in self.axes.items():
            if role == "tensor":
                kinds = (*_INNER, "data") if self.sequence_parallel else _INNER
                wanted = {d for d, o in origins.items() if any(self._is(o, kind) for kind in kinds)}
            else:
                wanted = batch | {d for d, o in origins.items() if role == "expert" and self._is(o, "expert")}
            specs = _narrowed(specs, lambda spec, axis=axis: spec.dim_of(axis), wanted, required=role != "tensor")
        return tuple(specs)


def _has(tensor: Sequence[Sequence[int]], factor: int) -> bool:
    return any(factor in dim for dim in tensor)


def _leads_batch(operator: Operator, batch: set[int]) -> bool:
    """Whether all operands of a product have the batch: then none is a stack of parameters."""
    return any(all(_has(tensor, f) for tensor in operator.rule.operands) for f in batch)


def _narrowed(
    choices: Sequence[_Choice], place: Callable[[_Choice], int | None], wanted: set[int], *, required: bool
) -> Sequence[_Choice]:
    """The choices that split one of the `wanted` places, and unless that is required and possible those that split
    none."""
    split = [c for c in choices if place(c) in wanted]
    if required and split:
        return split
    return [c for c in choices if place(c) is None or place(c) in wanted]
