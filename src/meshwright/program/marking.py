"""The mark of a step's loss function, `meshwright.value_and_grad`, in words: what a step has, and how to set it."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from .._jax.grad import value_and_grad_p
from .._jax.jaxpr import ClosedJaxpr, Equation, Jaxpr, open_jaxpr, source_line

HOW_TO_MARK = (
    "meshwright.value_and_grad in place of jax.value_and_grad, outside of loops and without checks of checkify in its "
    "function (in place of nnx.value_and_grad, over "
    "the state that nnx.split gives, as in examples/flax_nnx.py; in place of eqx.filter_value_and_grad, over the "
    "arrays that eqx.partition gives, as in examples/equinox_mlp.py)"
)

# What a step has that is planned whole.
UNMARKED = "a step without one call of meshwright.value_and_grad outside of loops"


def marks_words(outer: ClosedJaxpr) -> str:
    """How many calls of `meshwright.value_and_grad` a step has, and which are inside loops, where they are no mark.

    Args:
      outer: the traced step.
    """
    jaxpr = open_jaxpr(outer)
    top = sum(equation.primitive is value_and_grad_p for equation in jaxpr.eqns)
    inside = [source_line(one) for one in _marks(jaxpr) if all(one is not other for other in jaxpr.eqns)]
    found = f"a step with {top or 'no'} call{'s' * (top > 1)} of meshwright.value_and_grad"
    return f"{found}{' at its top level' if inside else ''}" + (f", and one in a loop at {inside[0]}" if inside else "")


def _marks(jaxpr: Jaxpr) -> Iterator[Equation]:
    for equation in jaxpr.eqns:
        if equation.primitive is value_and_grad_p:
            yield equation
            continue
        for leaf in jax.tree.leaves(dict(equation.params), is_leaf=lambda x: hasattr(open_jaxpr(x), "eqns")):
            if hasattr(open_jaxpr(leaf), "eqns"):
                yield from _marks(open_jaxpr(leaf))
