"""What JAX makes of `ragged_dot_general` where a backend has no kernel for it: rows times the matrices of all groups,
masked."""

from __future__ import annotations

from typing import Any

import jax
from jax._src.lax.lax import _ragged_dot_general_impl  # 0.10 to 0.12

from .jaxpr import ClosedJaxpr, Equation


def products_of_all_groups(equation: Equation) -> ClosedJaxpr:
    """The program that a CPU runs for a product of groups of rows."""
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]

    def run(*operands: Any) -> Any:
        return _ragged_dot_general_impl(*operands, **equation.params)

    return jax.make_jaxpr(run)(*avals)
