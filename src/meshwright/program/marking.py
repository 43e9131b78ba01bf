"""The mark of a step's loss function, `meshwright.value_and_grad`, in words: what a step has, and how to set it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from .._jax.grad import value_and_grad_p
from .._jax.jaxpr import ClosedJaxpr, Equation, Jaxpr, open_jaxpr, source_line

_HOW_TO_MARK = (
    "meshwright.value_and_grad in place of jax.value_and_grad, outside of loops and without checks of checkify in its "
    "function (in place of nnx.value_and_grad, over "
    "the state that nnx.split gives, as in examples/flax_nnx.py; in place of eqx.filter_value_and_grad, over the "
    "arrays that eqx.partition gives, as in examples/equinox_mlp.py)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The calls of `meshwright.value_and_grad` in a step, of which one outside of loops is a mark.

    Args:
      got: what the step has, in words.
      advice: what to do for it to have one mark.
    """

    got: str
    advice: str


NO_MARKS = Marks(got="a step with no call of meshwright.value_and_grad", advice=_HOW_TO_MARK)


def marks_of(outer: ClosedJaxpr) -> Marks:
    """Those of a step.

    Args:
      outer: the traced step, derivatives not written out.
    """
    jaxpr = open_jaxpr(outer)
    top = [one for one in jaxpr.eqns if one.primitive is value_and_grad_p]
    inside = [one for one in _marks(jaxpr) if all(one is not other for other in top)]
    if not top and not inside:
        return NO_MARKS
    got = f"a step with {len(top) or 'no'} call{'s' * (len(top) > 1)} of meshwright.value_and_grad"
    if inside:
        got += f" at its top level, and one in a loop or branch at {source_line(inside[0])}"
    if top:
        advice = (
            "jax.value_and_grad in place of meshwright's for all but the one that takes the most work, or one "
            "meshwright.value_and_grad of several parameters, or a step for each loss"
        )
    else:
        advice = (
            "meshwright.value_and_grad outside of loops and branches; of the whole batch in the place of a loop that "
            "accumulates gradients, which microbatches= does"
        )
    return Marks(got=got, advice=advice)


def _marks(jaxpr: Jaxpr) -> Iterator[Equation]:
    for equation in jaxpr.eqns:
        if equation.primitive is value_and_grad_p:
            yield equation
            continue
        for leaf in jax.tree.leaves(dict(equation.params), is_leaf=lambda x: hasattr(open_jaxpr(x), "eqns")):
            if hasattr(open_jaxpr(leaf), "eqns"):
                yield from _marks(open_jaxpr(leaf))
