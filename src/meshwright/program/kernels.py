"""Kernels that declare a sharding rule (`jax.experimental.custom_partitioning`), as operators of a plan.

A factor may be split where the kernel's partition function takes and makes the blocks that the rule says, and sends
nothing itself: the plan prices and issues all communication. A *reduction* may be split where what a device runs ends
in a sum over its axes: that sum is left out, and the result is partial, as that of a matrix product. Factors that need
replication, permutations, and those that the partition function handles in another way are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._jax.jaxpr import Equation, evaluate, source_line
from .._jax.partitioned import (
    Layout,
    NotPartitioned,
    declared_rule,
    is_partitioned_kernel as is_partitioned_kernel,
    partitioned,
)
from .._jax.shardy import Lowered, LoweredOp
from ..errors import PlanError
from .factors import Dims, Rule, compose, whole_rule
from .split import Split


def kernel_rule(equation: Equation) -> tuple[Rule, str]:
    """The rule of a kernel, with every factor whole that cannot be split, and why the last of these cannot.

    Args:
      equation: of which `is_partitioned_kernel` says that it is one.
    """
    operands = [tuple(atom.aval.shape) for atom in equation.invars]
    results = [tuple(var.aval.shape) for var in equation.outvars]
    try:
        declared = declared_rule(equation)
    except NotPartitioned as error:
        return whole_rule(operands, results), str(error)
    shapes = dict(enumerate([*operands, *results]))
    numbers = tuple(shapes)
    first, last = numbers[: len(operands)], numbers[len(operands) :]
    op = LoweredOp(name="custom_partitioning", operands=first, results=last, rule=declared)
    rule = compose(Lowered(operands=first, results=last, ops=(op,), shapes=shapes), operands)
    made = {factor for tensor in rule.results for dim in tensor for factor in dim}
    why = "its sharding rule lets no dim be split"
    # One axis for each factor that can be split, alone and together with those before it.
    axes: list[tuple[str, ...]] = [()] * len(rule.factors)
    sizes: dict[str, int] = {}
    for index in rule.splittable:
        factor, axis = rule.factors[index], f"axis{index}"
        # A permutation moves data between blocks; what is no reduction and not in the result is one all the same.
        if factor.kind == "spatial" or (factor.kind == "parallel" and index not in made):
            continue
        pieces = next((n for n in (2, 3, 5, 7) if factor.size % n == 0), factor.size)
        alone = [(axis,) if other == index else () for other in range(len(axes))]
        together = [(axis,) if other == index else those for other, those in enumerate(axes)]
        try:
            _function(equation, rule, alone, {axis: pieces})
            _function(equation, rule, together, {**sizes, axis: pieces})
        except NotPartitioned as error:
            why = str(error)
            continue
        axes, sizes = together, {**sizes, axis: pieces}
    return rule.with_whole([index for index in rule.splittable if not axes[index]]), why


def evaluate_kernel(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """A kernel's results on one device's blocks.

    Raises:
      PlanError: if its partition function will not have the blocks of the plan.
    """
    try:
        closed = _function(equation, split.rule, split.axes, split.sizes)
    except NotPartitioned as error:
        shown = ", ".join(f"{axis}={size}" for axis, size in split.sizes.items())
        raise PlanError(
            refused="a kernel on blocks", got=f"over {shown}: {error}",
            needed="a partition function that has the blocks of its sharding rule", where=source_line(equation),
            try_="marking its dims by need_replication_factors= of def_partition, or a mesh of one axis",
        ) from error  # fmt: skip
    return evaluate(closed, *operands)


def _function(equation: Equation, rule: Rule, axes: Sequence[tuple[str, ...]], sizes: Mapping[str, int]) -> Any:
    def layouts(tensors: Sequence[Dims]) -> list[Layout]:
        return [[next((axes[f] for f in dim if axes[f]), ()) for dim in tensor] for tensor in tensors]

    summed = frozenset(a for f, those in zip(rule.factors, axes, strict=True) if f.kind == "reduction" for a in those)
    return partitioned(equation, layouts(rule.operands), layouts(rule.results), sizes, summed)
