"""Sums of single numbers over devices that may wait: what is linear in a summand stays one.

A loss is a sum over the batch, divided by a constant, and often added to others. Summed over devices where it is
divided, in every microbatch, all devices meet each time for one number; left as summands such numbers are summed once a
step, beside the gradients. Local programs leave them so (`lowering.evaluate`); searches know (`search.intra.problem`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..program.graph import Graph, Operator, once_for_each
from .spec import Spec

_NOWHERE: frozenset[str] = frozenset()


def makes_a_number(graph: Graph, operator: Operator) -> bool:
    """Whether an operator makes one number of numbers, which are no integers: those are divided with a remainder."""
    if len(operator.results) != 1 or operator.is_link:
        return False
    values = [graph.values[v] for v in (*operator.operands, *operator.results) if v is not None]
    return all(value.shape == () and "float" in value.dtype for value in values)


def partial_axes(name: str, operands: Sequence[Spec], differentiated: Sequence[bool]) -> frozenset[str]:
    """The axes over which a single number that an operator makes of single numbers is left as summands.

    >>> partial, whole = Spec((), partial=frozenset({"data"})), Spec(())
    >>> sorted(partial_axes("div", (partial, whole), (True, False)))
    ['data']
    >>> sorted(partial_axes("mul", (partial, whole), (True, True)))  # the cotangent of `whole` would be summands too
    []

    Of what is added each becomes a summand over the axes of all (a whole one by its equal share on every device):

    >>> other = Spec((), partial=frozenset({"model"}))
    >>> sorted(partial_axes("add", (partial, other), (True, True)))
    ['data', 'model']

    A number whose cotangent is made of summands as well is summed where the plan says, with its mark:

    >>> both = Spec((), partial=frozenset({"data"}), broadcast=frozenset({"model"}))
    >>> sorted(partial_axes("div", (both, whole), (True, False)))
    []

    Args:
      name: of its primitive.
      operands: how each is there.
      differentiated: whether a cotangent flows back through each.
    """
    if any(spec.broadcast for spec in operands):
        return _NOWHERE
    if name in ("add", "sub", "neg"):
        return _NOWHERE.union(*(spec.partial for spec in operands))
    if name not in ("mul", "div"):
        return _NOWHERE
    # The other factor is made whole, and may have no cotangent: that would be summands.
    first, second = operands[0].partial, operands[1].partial
    if first and not differentiated[1]:
        return first
    return second if name == "mul" and not differentiated[0] else _NOWHERE


@once_for_each
def waiting_reads(graph: Graph) -> frozenset[tuple[int, int]]:
    """Operators and the operands that they read as summands, if they are such: all that is made of them on the way out
    of the program is linear in them."""
    found: set[tuple[int, int]] = set()
    for operator in reversed(graph.operators):
        if not makes_a_number(graph, operator):
            continue
        (made,) = operator.results
        readers = graph.consumers.get(made, ()) if made is not None else ()
        # What several read is summed once for all of them.
        leaves = len(readers) == 0 and made in graph.outputs
        if leaves or (len(readers) == 1 and readers[0] in found):
            moving = [v is not None and graph.values[v].differentiated for v in operator.operands]
            found.update((operator.index, at) for at in range(len(moving)) if _is_linear(operator.name, at, moving))
    return frozenset(found)


def _is_linear(name: str, position: int, differentiated: Sequence[bool]) -> bool:
    """Whether an operator leaves one operand as summands, the others being whole."""
    some = frozenset({"an axis"})
    specs = [Spec((), partial=some if at == position else _NOWHERE) for at in range(len(differentiated))]
    return bool(partial_axes(name, specs, differentiated))
