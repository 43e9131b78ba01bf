"""Sums of single numbers over devices that may wait: what is linear in a summand stays one.

A loss is a sum over the batch, divided by a constant. Summed over devices where it is divided, in every microbatch,
all devices meet each time for one number; left as summands they are summed once a step, beside the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..sharding import Spec

_NOWHERE: frozenset[str] = frozenset()


def partial_axes(name: str, operands: Sequence[Spec], differentiated: Sequence[bool]) -> frozenset[str]:
    """The axes over which a single number that an operator makes of single numbers is left as summands.

    >>> partial, whole = Spec((), partial=frozenset({"data"})), Spec(())
    >>> sorted(partial_axes("div", (partial, whole), (True, False)))
    ['data']
    >>> sorted(partial_axes("mul", (partial, whole), (True, True)))  # the cotangent of `whole` would be summands too
    []

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
    if name == "neg":
        return operands[0].partial
    if name not in ("add", "sub", "mul", "div"):
        return _NOWHERE
    first, second = operands[0].partial, operands[1].partial
    if name in ("add", "sub"):
        return first if first == second else _NOWHERE
    if not second and not differentiated[1]:
        return first
    return second if name == "mul" and not first and not differentiated[0] else _NOWHERE
