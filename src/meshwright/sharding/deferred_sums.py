"""Sums of single numbers over devices that may wait: what is linear in a summand stays one.

A loss is a sum over the batch, divided by a constant. Summed over devices where it is divided, in every microbatch,
all devices meet each time for one number; left as summands they are summed once a step, beside the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..program.graph import Graph, Operator
from .spec import Spec

_NOWHERE: frozenset[str] = frozenset()


def makes_a_number(graph: Graph, operator: Operator) -> bool:
    """Whether an operator makes one number of numbers, which are no integers: those are divided with a remainder."""
    if len(operator.results) != 1 or operator.is_link:
        return False
    values = [graph.values[v] for v in (*operator.operands, *operator.results) if v is not None]
    return all(value.shape == () and "float" in value.dtype for value in values)


def partial_axes(graph: Graph, operator: Operator, operands: Sequence[Spec]) -> frozenset[str]:
    """The axes over which what an operator makes is left as summands.

    Args:
      graph: it belongs to.
      operator: that makes a number of numbers.
      operands: how each is there.
    """
    name, of_operand = operator.name, [spec.partial for spec in operands]
    if name == "neg":
        return of_operand[0]
    if name not in ("add", "sub", "mul", "div"):
        return _NOWHERE
    first, second = of_operand
    if name in ("add", "sub"):
        return first if first == second else _NOWHERE
    # The cotangent of a factor would be made of summands too.
    moving = [v is not None and graph.values[v].differentiated for v in operator.operands]
    if not second and not moving[1]:
        return first
    return second if name == "mul" and not first and not moving[0] else _NOWHERE


def may_wait(graph: Graph, operator: Operator, value: int) -> bool:
    """Whether an operator takes a number it reads as summands, and leaves them to be summed later."""
    if not makes_a_number(graph, operator):
        return False
    partial, whole = Spec((), partial=frozenset({"some axis"})), Spec(())
    return bool(partial_axes(graph, operator, [partial if v == value else whole for v in operator.operands]))
