"""Kernels of operators that are no products: elementwise operations, what moves elements about, sums.

Compilers fuse chains of them, and what one takes goes mostly by what it writes. Sums are the exception: they write
little and read much. The derivative of a sum spreads its cotangent, which readers do on the way; where an operand is
spread over the result, the derivative is a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..cost.kernels import Kernel
from ..program.graph import Graph, Operator

_SUMS = frozenset(
    ["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"]
)
# Elementwise in what they make, and an operand may be spread over it.
_SPREADING = frozenset(["broadcast_in_dim", "add", "sub", "mul", "div", "max", "min", "pow", "select_n", "add_any"])


def is_plain(operator: Operator) -> bool:
    """Whether what an operator takes follows from its layout, and nothing is moved inside it: it runs one kernel, and
    one for its derivative."""
    if operator.is_link or operator.matmul or operator.name in ("dot_general", "conv_general_dilated"):
        return False
    return operator.combine not in ("max", "min") and all(one.kind != "spatial" for one in operator.rule.factors)


def plain_kernels(
    graph: Graph, operator: Operator, written: float, read: float, *, stored: bool
) -> tuple[Kernel, Kernel]:
    """What an operator that is no product runs forward and for its derivative.

    Args:
      graph: it belongs to.
      operator: no product.
      written: bytes, on a device.
      read: the same.
      stored: whether its result is written to memory.
    """
    kernel = Kernel("stored" if stored else "fused", 0.0, written)
    if operator.name in _SUMS:
        return replace(kernel, summed_bytes=read * _forward_sums(operator)), kernel
    sums = _derivative_sums(graph, operator) if operator.name in _SPREADING and operator.differentiated else 0
    return kernel, replace(kernel, summed_bytes=written * sums) if sums else kernel


def _forward_sums(operator: Operator) -> int:
    """In how many runs the dims lie that are summed: what is between two of them is read in short pieces."""
    made = {factor for dim in operator.rule.results[0] for factor in dim}
    return _runs(operator, operator.rule.operands[0], made)


def _derivative_sums(graph: Graph, operator: Operator) -> int:
    """The same of the result's cotangent, for all operands together that are spread over the result."""
    operands = zip(operator.operands, operator.rule.operands, strict=True)
    return sum(
        _runs(operator, operator.rule.results[0], {factor for dim in dims for factor in dim})
        for value, dims in operands
        if value is not None and graph.values[value].differentiated
    )


def _runs(operator: Operator, dims: Sequence[tuple[int, ...]], kept: set[int]) -> int:
    """Runs of neighbouring factors of these dims that are not kept."""
    factors = [factor for dim in dims for factor in dim if operator.rule.factors[factor].size > 1]
    summed = [factor not in kept for factor in factors]
    return sum(after and not before for before, after in pairwise([False, *summed]))
