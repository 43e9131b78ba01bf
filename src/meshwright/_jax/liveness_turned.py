"""How a loop's body reads the slices of a stack: whether the stack has to lie otherwise for it, and in which types."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from meshwright._jax.dataflow import GATHERS
from meshwright._jax.jaxpr import OWN_KERNEL, called_body, is_literal, open_jaxpr, scan_parts


def turned_slices(jaxpr: Any) -> set[Any]:
    """The variables of which a loop takes slices that are turned, in a body or a call inside."""
    found: set[Any] = set()
    for equation in reversed(jaxpr.eqns):
        turned: Iterable[int] = ()
        if equation.primitive.name == "scan":
            parts = scan_parts(equation)
            inner, first = open_jaxpr(parts.body), parts.num_consts + parts.num_carry
            turned = (place for place, var in enumerate(inner.invars) if place >= first and is_turned(inner, var))
        elif equation.primitive.name == "optimization_barrier":
            turned = (place for place, var in enumerate(equation.outvars) if var in found)
        elif (inner := open_jaxpr(called_body(equation))) is not None:
            of_call = turned_slices(inner)
            turned = (place for place, var in enumerate(inner.invars) if var in of_call)
        read = [equation.invars[place] for place in turned]
        found.update(atom for atom in read if not is_literal(atom))
    return found


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
            elif equation.primitive.name in GATHERS:
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


def read_as(jaxpr: Any, var: Any) -> set[Any]:
    """The types that a variable is converted to by all that reads it; None among them where something else does."""
    kinds: set[Any] = {None} if any(atom is var for atom in jaxpr.outvars) else set()
    for equation in jaxpr.eqns:
        places = [place for place, atom in enumerate(equation.invars) if atom is var]
        if not places:
            continue
        if equation.primitive.name == "convert_element_type":
            kinds.add(equation.outvars[0].aval.dtype)
        elif (inner := open_jaxpr(called_body(equation))) is not None:
            kinds = kinds.union(*(read_as(inner, inner.invars[place]) for place in places))
        else:
            kinds.add(None)
    return kinds
