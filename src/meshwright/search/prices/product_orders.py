"""Which operands of a product are copied into another order of dims, where a library has code for one order only.

XLA's CPU backend has code for [batch, M, K] x [batch, K, N]. The gradient of the left operand reads the right one as
[batch, N, K], that of the right one the left as [batch, K, M], and each is made in the order that the product reads. A
single matrix is read by columns as well as by rows; of batched matrices only right operands are, unless a loop slices
them, since a slice is copied in one order.

Dims of size one count: else a microbatch of one example would take less than half of one of two, and the bounds of the
search rely on the contrary.
"""

from __future__ import annotations

from collections.abc import Set
from functools import lru_cache

from ...program.factors import Rule
from ...program.graph import Graph, Operator


@lru_cache(maxsize=1 << 12)
def operand_factors(rule: Rule) -> tuple[Set[int], Set[int], Set[int]]:
    """The factors of the first two operands and of the result."""
    left, right, result = (
        {factor for dim in tensor for factor in dim} for tensor in (*rule.operands[:2], rule.results[0])
    )
    return left, right, result


@lru_cache(maxsize=1 << 12)
def product_factors(rule: Rule) -> tuple[Set[int], Set[int], Set[int], Set[int]]:
    """The factors of a product's batch, and of M, N and K."""
    left, right, result = operand_factors(rule)
    return left & right & result, (left & result) - right, (right & result) - left, (left & right) - result


def sliced_operands(graph: Graph, operator: Operator) -> frozenset[int]:
    """Positions of a product's operands that a loop slices out of a stack."""
    if operator.name != "dot_general":
        return frozenset()
    makers = (graph.producer.get(-1 if v is None else v) for v in operator.operands)
    return frozenset(i for i, made in enumerate(makers) if made and graph.operators[made[0]].name == "scan_slice")


@lru_cache(maxsize=1 << 12)
def product_orders(rule: Rule, sliced: frozenset[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Positions of operands that are copied into another order: for a product, for the gradient of its left operand,
    for that of its right one. What is made in another order has the position of the operand whose gradient it is."""
    batch, m, n, k = product_factors(rule)
    left, right = (_copied(rule, i, order, sliced) for i, order in enumerate(((batch, m, k), (batch, k, n))))
    by_left, by_right = (_copied(rule, i, order, sliced) for i, order in ((1, (batch, n, k)), (0, (batch, k, m))))
    return (*left, *right), (*by_left, *left), (*by_right, *right)


def _copied(rule: Rule, position: int, order: tuple[Set[int], ...], sliced: Set[int]) -> tuple[int, ...]:
    """The operand, unless its dims are in this order or can be read as if they were."""
    dims = rule.operands[position]
    roles = [next(i for i, factors in enumerate(order) if set(dim) & factors) for dim in dims if dim]
    by_columns = roles == [*[0] * (len(dims) - 2), 2, 1] and position not in sliced
    readable = roles == sorted(roles) or (by_columns and (position == 1 or len(dims) == 2))
    return () if readable else (position,)
