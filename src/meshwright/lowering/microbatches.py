"""How results of microbatches combine, for plans of one stage and of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax.jaxpr import open_jaxpr
from ..plan import ParameterPlan
from ..program.reduction import Reduction
from ..program.trace import Program
from ..sharding import Spec
from .collectives import run_conversion
from .local_value import planned_conversion

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


def share_of_loss(program: Program) -> float:
    """What of the loss of a microbatch counts: the gradients of these shares add up to that of the batch.

    The loss is scaled and not the gradients, so that cotangents are those of the whole batch for whatever looks at them
    (a function whose own derivative clips them).
    """
    return 1.0 / program.microbatches if program.reduction == "mean" else 1.0


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


def summed_spec(parameter: ParameterPlan) -> Spec:
    """In which the gradients of a parameter are added up."""
    if parameter.scattered:
        return parameter.storage
    return Spec(parameter.use.dims, partial=parameter.use.broadcast)


def to_be_added(gradient: Any, parameter: ParameterPlan, sizes: Mapping[str, int]) -> Any:
    """The gradient of a microbatch, on one device, as it is added up.

    Args:
      gradient: as the backward pass leaves it.
      parameter: of which.
      sizes: of the mesh.
    """
    if not parameter.scattered:
        return gradient
    conversion = planned_conversion(Spec(parameter.use.dims, partial=parameter.use.broadcast), parameter.storage)
    # The barrier keeps it here: XLA's TPU compiler would scatter the sum of all microbatches in its place.
    return lax.optimization_barrier(run_conversion(gradient, conversion, sizes, differentiated=False))


def nothing_added(used: jax.Array, parameter: ParameterPlan, sizes: Mapping[str, int]) -> jax.Array:
    """Zeros, on one device, that gradients are added to.

    Args:
      used: the parameter on the device, as it is used.
      parameter: which.
      sizes: of the mesh.
    """
    if not parameter.scattered:
        return jnp.zeros_like(used)
    # Longer than the parameter's own shape where its dims are padded.
    dims = zip(used.shape, parameter.use.dims, strict=True)
    shape = tuple(extent * prod(sizes[axis] for axis in axes) for extent, axes in dims)
    return jnp.zeros(parameter.storage.local_shape(shape, sizes), used.dtype)


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
