"""What a loop over layers hands from its forward to its backward trips.

JAX stores all that derivatives read, of a transformer two to three times what its layers keep without a loop, and no
compiler moves work from one loop to another. A body of which every equation is known to be cheap or not is therefore
differentiated under a policy that stores what is not: products, reductions, collectives. What is cheap is made again.

Bodies that hold anything else are left to JAX: loops and branches, which make their own choice under a policy and would
run again; functions with a derivative of their own, which say what they store; random bits, of which a mask is a
quarter; convolutions, whose order on CPU is mended in loops (`_jax.convolutions`), not in what is made again there.

Known limit: a product that sums in a wider type than it is read in is stored in the wider one.
"""

from __future__ import annotations

from typing import Any

from .._jax.jaxpr import Equation, Jaxpr, open_jaxpr
from .._jax.liveness_collectives import NAMES as COLLECTIVES
from .._jax.passes import is_cheap as makes_little_work
from ..program.residuals import is_cheap

# Costly, and not under a policy.
_LEFT_TO_JAX = frozenset({"cond", "conv_general_dilated", "custom_vjp_call", "random_bits", "while"})


def is_stored(primitive: Any, *operands: Any, **params: Any) -> bool:
    """The policy, as `jax.checkpoint` asks it."""
    del operands, params
    return primitive.name in COLLECTIVES or not is_cheap(primitive.name)


def chooses(body: Jaxpr) -> bool:
    """Whether all that a loop's body computes is known to be cheap or not."""
    return all(map(_is_known, body.eqns))


def _is_known(equation: Equation) -> bool:
    name = equation.primitive.name
    if name == "custom_jvp_call":
        return chooses(open_jaxpr(equation.params["call_jaxpr"]))
    if name in COLLECTIVES or not is_cheap(name):
        return name not in _LEFT_TO_JAX
    return name == "split" or (bool(equation.outvars) and makes_little_work(equation))
