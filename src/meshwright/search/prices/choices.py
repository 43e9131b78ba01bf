"""The choices of each node of the intra-operator problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, product
from typing import NamedTuple

from ...program.graph import Graph, Operator, once_for_each
from ...program.parameter_values import values_of_parameters
from ...program.residuals import is_cheap
from ...sharding import Algorithm, Spec, Splits, algorithms_in, shared_algorithms_in, splits_of
from .spec_row import SpecRow


@dataclass(frozen=True, slots=True)
class OperatorChoice:
    """An algorithm, and for a scan's link the axes its value is broadcast over."""

    algorithm: Algorithm
    broadcast: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ParameterChoice:
    """As of `plan.ParameterPlan`: a use spec, a storage spec, and whether gradients are scattered."""

    use: Spec
    storage: Spec
    scattered: bool = False


class Choices(tuple[OperatorChoice, ...]):
    """An operator's choices, with the specs of its operands and results under each; many operators share one."""

    @cached_property
    def operands(self) -> tuple[SpecRow, ...]:
        """Of every operand, the spec that each choice reads."""
        return tuple(map(SpecRow, zip(*(one.algorithm.operands for one in self), strict=True)))

    @cached_property
    def results(self) -> tuple[SpecRow, ...]:
        """Of every result, the spec that each choice makes."""
        return tuple(map(SpecRow, zip(*(one.algorithm.results for one in self), strict=True)))


def operator_choices(graph: Graph, operator: Operator, sizes: Mapping[str, int], *, of_parameters: bool) -> Choices:
    """Every algorithm of an operator.

    Args:
      of_parameters: whether it depends on parameters alone. Then its cotangents may also stay partial (a derivative is
        linear in its cotangents), so that a cast or reshape of a parameter does not force the sum of its gradient. That
        of a call need not be: a custom rule may clip what it is given.
    """
    moving = tuple(v is not None and graph.values[v].differentiated for v in operator.operands)
    shared = operator.name in ("scan_const", "scan_slice") or (
        of_parameters and operator.differentiated and not operator.is_call
    )
    splits = splits_of(operator.rule, tuple(sizes.items()))
    return _operator_choices(splits, moving, shared, operator.combine in ("max", "min"))


@lru_cache(maxsize=1 << 14)
def _operator_choices(splits: Splits, moving: tuple[bool, ...], shared: bool, combines: bool) -> Choices:
    if shared:
        return Choices(OperatorChoice(a, mark) for a, mark in shared_algorithms_in(splits, moving))
    return Choices(OperatorChoice(a) for a in algorithms_in(splits, moving, combines))


def reads_rows(graph: Graph, operator: Operator) -> bool:
    """Whether an operator makes of parameters what a loop reads row by row: the loop's slice, or what is moved or cast
    before it (a stack whose layers are not its first dim)."""
    return operator.name == "scan_slice" or not _stacks(graph).isdisjoint(operator.results)


class LoopRows(NamedTuple):
    """Of a stack of which a loop reads rows: the dim along which they lie, and the value that is a row."""

    dim: int
    row: int


def loop_rows(graph: Graph, value: int) -> LoopRows | None:
    """How a loop reads rows of a parameter, as it is, cast or transposed; None where no loop does."""
    for index, _ in graph.consumers.get(value, ()):
        operator, made = graph.operators[index], graph.operators[index].results[0]
        if made is None:
            continue
        if operator.name == "scan_slice":
            return LoopRows(0, made)
        if operator.name in ("convert_element_type", "transpose") and (found := loop_rows(graph, made)) is not None:
            # Neither cuts or joins dims: one of the operand has the same factors.
            return found._replace(dim=operator.rule.operands[0].index(operator.rule.results[0][found.dim]))
    return None


@once_for_each
def _stacks(graph: Graph) -> frozenset[int]:
    """Values of parameters of which loops read rows, themselves or what is made of them by what is cheap."""
    of_parameters, found = values_of_parameters(graph), set[int | None]()
    for operator in reversed(graph.operators):
        if operator.name == "scan_slice" or (is_cheap(operator.name) and not found.isdisjoint(operator.results)):
            found |= of_parameters.intersection(operator.operands)
    return frozenset(v for v in found if v is not None)


def spec_choices(shape: Sequence[int], sizes: Mapping[str, int], *, broadcast: bool) -> tuple[Spec, ...]:
    """Every spec of a value: each axis replicated, splitting a dim, or (with `broadcast`) replicated with a partial
    cotangent. Axes that split one dim together come in both orders only where both are used by some operator, so the
    mesh order is taken."""
    return _spec_choices(tuple(shape), tuple(sizes.items()), broadcast)


@lru_cache(maxsize=1 << 12)
def _spec_choices(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], broadcast: bool) -> tuple[Spec, ...]:
    states: list[int | str] = ["replicated", *(["broadcast"] if broadcast else []), *range(len(shape))]
    found = []
    for choice in product(states, repeat=len(sizes)):
        split: list[list[str]] = [[] for _ in shape]
        left = list(shape)
        marks = []
        for (axis, size), state in zip(sizes, choice, strict=True):
            if state == "broadcast":
                marks.append(axis)
            elif isinstance(state, int):
                if left[state] % size:
                    break
                left[state] //= size
                split[state].append(axis)
        else:
            found.append(Spec(tuple(tuple(s) for s in split), broadcast=frozenset(marks)))
    return tuple(found)


def parameter_choices(
    shape: Sequence[int], sizes: Mapping[str, int], *, scattered: bool = False, rows_dim: int | None = None
) -> tuple[ParameterChoice, ...]:
    """Use specs, each with the optimizer state as the parameter or split further, over axes that leave it whole.

    Args:
      shape: of the parameter.
      sizes: of the mesh.
      scattered: whether the gradients of microbatches may be scattered: those that wait for a sum, over all axes.
      rows_dim: the dim along which a loop reads rows; None for none. What is scattered is scattered within a row.
    """
    return _parameter_choices(tuple(shape), tuple(sizes.items()), scattered, rows_dim)


@lru_cache(maxsize=1 << 12)
def _parameter_choices(
    shape: tuple[int, ...], of: tuple[tuple[str, int], ...], scattered: bool, rows_dim: int | None
) -> tuple[ParameterChoice, ...]:
    sizes, found = dict(of), []
    for use in spec_choices(shape, sizes, broadcast=True):
        plain = Spec(use.dims)
        found.append(ParameterChoice(use, plain))
        free = [axis for axis in sizes if axis not in use.sharded_axes]
        for count in range(1, len(free) + 1):
            for axes in combinations(free, count):
                storage = _split_further(shape, plain, axes, sizes)
                if storage is not None:
                    found.append(ParameterChoice(use, storage))
        if scattered and use.broadcast:
            storage = _split_further(shape, plain, free, sizes, rows_dim)
            if storage is not None:
                found.append(ParameterChoice(use, storage, scattered=True))
    return tuple(found)


def _split_further(
    shape: Sequence[int], spec: Spec, axes: Sequence[str], sizes: Mapping[str, int], but: int | None = None
) -> Spec | None:
    """`spec` with `axes` added, each on the first dim it divides, `but` one; None if one fits nowhere."""
    for axis in axes:
        local = spec.local_shape(shape, sizes)
        dim = next((d for d, extent in enumerate(local) if d != but and extent % sizes[axis] == 0), None)
        if dim is None:
            return None
        spec = Spec((*spec.dims[:dim], (*spec.dims[dim], axis), *spec.dims[dim + 1 :]))
    return spec
