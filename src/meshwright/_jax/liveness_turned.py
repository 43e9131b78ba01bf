"""How a loop's body reads the slices of a stack: whether the stack has to lie otherwise for it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from meshwright._jax.jaxpr import open_jaxpr, scan_parts

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Primitives whose one result may have the shape of their operands although they are no arithmetic.
OWN_KERNEL = frozenset(
    """attention attention_backward cholesky cholesky_update cumlogsumexp cummax cummin cumprod cumsum
    custom_partitioning
    dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper fft ffi_call householder_product io_callback
    ormqr pallas_call pbroadcast ppermute pure_callback random_bits reduce_window reduce_window_max reduce_window_min
    reduce_window_sum scaled_dot scaled_matmul_wrapper select_and_gather_add select_and_scatter select_and_scatter_add
    sort symmetric_product threefry2x32 triangular_solve tridiagonal_solve""".split()  # noqa: SIM905 (a table)
)


def called_body(equation: Any) -> Any:
    """The body of a call, if the equation is one: as many inputs and outputs, of the same shapes."""
    for key in _CALLS:
        body = equation.params.get(key)
        inner = open_jaxpr(body)
        if not hasattr(inner, "eqns") or len(inner.invars) != len(equation.invars):
            continue
        shapes = [getattr(atom.aval, "shape", None) for atom in inner.outvars]
        if shapes == [getattr(var.aval, "shape", None) for var in equation.outvars]:
            return body
    return None


def has_turned_slices(jaxpr: Any, var: Any) -> bool:
    """Whether a loop takes slices of a variable that are turned, in a body or a call inside."""
    for equation in jaxpr.eqns:
        places = [place for place, atom in enumerate(equation.invars) if atom is var]
        if not places:
            continue
        found: Iterable[bool] = ()
        if equation.primitive.name == "scan":
            parts = scan_parts(equation)
            inner, first = open_jaxpr(parts.body), parts.num_consts + parts.num_carry
            found = (place >= first and is_turned(inner, inner.invars[place]) for place in places)
        elif equation.primitive.name == "optimization_barrier":
            found = (has_turned_slices(jaxpr, equation.outvars[place]) for place in places)
        elif (inner := open_jaxpr(called_body(equation))) is not None:
            found = (has_turned_slices(inner, inner.invars[place]) for place in places)
        if any(found):
            return True
    return False


def is_turned(jaxpr: Any, var: Any, seen: set[Any] | None = None) -> bool:
    """Whether something reads a variable only after it has moved another dim of it to the end, or gathers it along
    another dim than the first that is not of one."""
    seen = set() if seen is None else seen
    if var in seen:
        return False
    seen.add(var)
    for equation in jaxpr.eqns:
        for place, atom in enumerate(equation.invars):
            if atom is not var:
                continue
            if equation.primitive.name == "transpose":
                order, shape = equation.params["permutation"], atom.aval.shape
                if order[-1] != len(shape) - 1:
                    return True
            elif equation.primitive.name == "all_gather":
                if math.prod(atom.aval.shape[: equation.params["all_gather_dimension"]]) > 1:
                    return True
            elif (inner := open_jaxpr(called_body(equation))) is not None:
                if is_turned(inner, inner.invars[place], seen):
                    return True
            elif equation.primitive.name not in OWN_KERNEL and len(equation.outvars) == 1:
                (made,) = equation.outvars
                if made.aval.shape == atom.aval.shape and is_turned(jaxpr, made, seen):
                    return True
    return False
