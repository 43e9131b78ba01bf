"""What a loop over layers hands from its forward to its backward trips.

JAX stores all that derivatives read, of a transformer two to three times what its layers keep without a loop, and no
compiler moves work from one loop to another. A body of which every equation is known to be cheap or not is therefore
differentiated under a policy that stores what is not: products, reductions, collectives. What is cheap is made again,
and weights are gathered again: of a model stored over all devices (ZeRO-3) a device would hold all layers otherwise.

Of bodies that hold anything else JAX stores all that derivatives read, but for gathered weights: functions with a
derivative of their own say what they store; of random bits a mask is a quarter; the order of convolutions on CPU is
mended in loops (`_jax.convolutions`), not in what is made again there. Bodies with loops, branches or rematerialised
parts are left to JAX: these make their own choice under a policy and would run again.

Known limit: a product that sums in a wider type than it is read in is stored in the wider one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._jax.gathered_again import AGAIN
from .._jax.jaxpr import Equation, Jaxpr, open_jaxpr
from .._jax.liveness_collectives import NAMES as COLLECTIVES
from .._jax.passes import is_cheap as makes_little_work
from ..program.residuals import is_cheap
from .collectives import GATHERED

# Costly, and not under a policy.
_LEFT_TO_JAX = frozenset({"cond", "conv_general_dilated", "custom_vjp_call", "random_bits", "while"})
_INNER = frozenset({"checkpoint", "cond", "remat", "remat2", "scan", "while"})


def policy_of(body: Jaxpr, *, gathers_weights: bool) -> Callable[..., bool] | None:
    """The policy of a loop's body, as `jax.checkpoint` asks it; None to leave it to JAX.

    Args:
      body: of the loop.
      gathers_weights: whether its plan gathers any of the parameters in it.
    """
    if _is_all_known(body):
        return _is_dear
    return _is_no_weight if gathers_weights and not _has_inner(body) else None


def _is_dear(primitive: Any, *operands: Any, **params: Any) -> bool:
    dear = primitive.name in COLLECTIVES or not is_cheap(primitive.name)
    return (dear and _is_no_weight(primitive, *operands, **params)) or params.get("name") == GATHERED


def _is_no_weight(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Weights have been gathered; what else has been has a name, under which it is stored."""
    del operands, params
    return primitive.name not in AGAIN


def _is_all_known(body: Jaxpr) -> bool:
    """Whether all that a body computes is known to be cheap or not."""
    return all(map(_is_known, body.eqns))


def _has_inner(body: Jaxpr) -> bool:
    """Whether there is anything in a body that has a policy of its own or would run again under one."""
    return any(equation.primitive.name in _INNER for equation in body.eqns)


def _is_known(equation: Equation) -> bool:
    name = equation.primitive.name
    if name == "custom_jvp_call":
        return _is_all_known(open_jaxpr(equation.params["call_jaxpr"]))
    if name in COLLECTIVES or not is_cheap(name):
        return name not in _LEFT_TO_JAX
    return name == "split" or (bool(equation.outvars) and makes_little_work(equation))
