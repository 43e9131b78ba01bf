"""What a microbatch is given and how results of microbatches combine, for plans of one stage and of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._jax.jaxpr import Equation, bind, is_literal, open_jaxpr
from .._jax.random import is_key
from ..program.reduction import Reduction
from ..program.trace import Program

_COMBINED: Mapping[Reduction, Callable[[Any, Any], Any]] = {
    "mean": jnp.add,
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "same": lambda kept, last: last,
}


def reduction_of(program: Program, output: int) -> Reduction:
    """How an output of the core (the loss, auxiliary results) combines over microbatches."""
    if program.marked and output == 0:
        return "mean" if program.reduction == "mean" else "sum"
    return program.aux_reductions[output - 1] if program.aux_reductions else "same"


def combined(how: Reduction, position: Any, kept: Any, new: Any) -> Any:
    """A result of the microbatches so far, one more taken in.

    Args:
      how: it combines.
      position: of the microbatch; what is kept before the first does not count.
      kept: so far.
      new: of this microbatch.
    """
    if how == "same":
        return new
    return jnp.where(position == 0, new, _COMBINED[how](kept, new))


def finished(how: Reduction, count: int, kept: Any) -> Any:
    """The result of all microbatches, of which there were `count`."""
    return kept / count if how == "mean" and count > 1 else kept


def grown_dims(program: Program) -> tuple[int | None, ...]:
    """For each output of the core (the loss, auxiliary results) the dim that grows with the batch, or None."""
    core = open_jaxpr(program.core).outvars
    if program.marker is None:
        return (None,) * len(core)
    whole = open_jaxpr(program.outer).eqns[program.marker].outvars[: len(core)]
    return tuple(
        next((d for d, (x, y) in enumerate(zip(a.aval.shape, b.aval.shape, strict=True)) if x != y), None)
        for a, b in zip(core, whole, strict=True)
    )


def raw_keys(core: Any) -> dict[Any, Equation]:
    """The inputs of a core that are the words of a PRNG key, with the equation that makes a key of them."""
    inputs = set(open_jaxpr(core).invars)
    wraps = (e for e in open_jaxpr(core).eqns if e.primitive.name == "random_wrap")
    return {e.invars[0]: e for e in wraps if not is_literal(e.invars[0]) and e.invars[0] in inputs}


def of_microbatch(x: Any, position: Any, wrap: Equation | None) -> Any:
    """An input that microbatches do not cut, as one of them has it: a key becomes a key of its own.

    Args:
      x: the input.
      position: of the microbatch.
      wrap: what makes a key of it, if it is the words of one (`raw_keys`).
    """
    if is_key(x):
        return _fold_in(x, position)
    if wrap is not None:
        (key,) = bind(wrap, x)
        return jax.random.key_data(_fold_in(key, position))
    return x


def _fold_in(key: Any, position: Any) -> Any:
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, position)
