"""Which sums of a loop XLA's GPU compiler sends beside the next trip.

Its collective pipeliner (`xla/service/collective_pipeliner.cc` of openxla/xla, on by default for reduce-scatters) takes
one whose result the loop does nothing with but stack it: the gradients of a scan's layers. The first trip is then run
before the loop, each trip sends what the one before it made, and what the last one made is sent behind the loop.

Known limits: of two scatters in a row, over two axes of a mesh, the second is not sent again behind the loop. In the
order for little memory, of GPUs before Ampere, the first trip may recompute later here than in XLA's (gpt3-125m as a
rematerialised scan with ZeRO-3 on 8 V100s, whose logits are most of its memory: 12 % too low).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshwright._jax.jaxpr import called_body, is_literal, open_jaxpr

_FORMATTING = frozenset(("convert_element_type", "reshape", "squeeze", "expand_dims", "transpose"))


class Late(NamedTuple):
    """A collective that sends what the trip before made.

    Args:
      path: the identities of the calls that it is in, and its own. (Calls of one body share its equations.)
      equation: the collective.
    """

    path: tuple[int, ...]
    equation: Any


def scatters_of_stacks(jaxpr: Any, first: int) -> dict[int, Late]:
    """The reduce-scatters of a loop's body of which nothing but stacked results are made: by the position of the
    result.

    Args:
      jaxpr: the body.
      first: the position of the first stacked result.
    """
    found = {rank: _scatter_of(jaxpr, atom) for rank, atom in enumerate(jaxpr.outvars[first:], start=first)}
    return {rank: late for rank, late in found.items() if late is not None}


def _scatter_of(jaxpr: Any, atom: Any) -> Late | None:
    """The reduce-scatter that a variable is, but for its type and shape, if nothing else reads it."""
    if is_literal(atom) or _reads(jaxpr.eqns, atom) + sum(one is atom for one in jaxpr.outvars) > 1:
        return None
    for equation in jaxpr.eqns:
        for rank, made in enumerate(equation.outvars):
            if made is not atom:
                continue
            if equation.primitive.name == "reduce_scatter":  # over two axes of a mesh one after the other: the first
                return _scatter_of(jaxpr, equation.invars[0]) or Late((id(equation),), equation)
            if equation.primitive.name in _FORMATTING:
                return _scatter_of(jaxpr, equation.invars[0])
            inner = open_jaxpr(called_body(equation))
            found = None if inner is None else _scatter_of(inner, inner.outvars[rank])
            return None if found is None else Late((id(equation), *found.path), found.equation)
    return None


def _reads(equations: Sequence[Any], atom: Any) -> int:
    return sum(operand is atom for equation in equations for operand in equation.invars)
