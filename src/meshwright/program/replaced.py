"""Custom derivatives that give an operand something else than a derivative: its next value.

So training in 8 bits keeps its scaling factors and the largest numbers of earlier steps (Flax's `Fp8DotGeneralOp`): the
step takes what comes in the place of their gradients for the new ones. Over microbatches derivatives add up, and these
do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .._jax.jaxpr import Equation, Jaxpr, Vjp, consts_of, is_literal, is_traced, open_jaxpr, source_line
from .._jax.plain import programs_in
from ..errors import PlanError
from .rules import Rules

# What a value is where all cotangents are zero, "other" for no zero, or hardly one.
_Known = Literal["zero", "other", "unknown"]

# Zero where an operand is.
_PRODUCTS = frozenset(["conv_general_dilated", "dot_general", "mul"])
# Made of these operands alone, or of all: zero where all of these are, and where one of them is known not to be, so is
# what is made.
_ALL = """abs add add_any broadcast_in_dim concatenate convert_element_type copy cumsum neg pad reduce_max reduce_min
    reduce_precision reduce_sum reshape rev sign sin slice sqrt square squeeze sub tanh transpose"""
_MOVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_ALL.split(), ()),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "gather": (0,),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
}


def replaced(derivative: Vjp) -> list[bool]:
    """For each operand, of those that may have a cotangent, whether what the rule gives is none, as far as can be told:
    it is not zero where the cotangents of the results are.

    Args:
      derivative: of the call.
    """
    forward, backward = open_jaxpr(derivative.forward), open_jaxpr(derivative.backward)
    made = _kinds(forward, consts_of(derivative.forward), ["other"] * len(forward.invars))
    kept = made[len(derivative.results) :]
    zeros: list[_Known] = ["zero"] * sum(derivative.results)
    return [one == "other" for one in _kinds(backward, consts_of(derivative.backward), [*kept, *zeros])]


def refuse_replaced(jaxpr: Jaxpr, moving: Sequence[bool], rules: Rules, microbatches: int) -> None:
    """Refuse to cut a batch whose loss function has such derivatives.

    Args:
      jaxpr: the loss function.
      moving: for each of its inputs whether it has a gradient.
      rules: of its equations.
      microbatches: that are asked for.

    Raises:
      PlanError: if it has.
    """
    depends = {var for var, one in zip(jaxpr.invars, moving, strict=True) if one}
    for equation in jaxpr.eqns:
        for inner in map(open_jaxpr, programs_in(equation)):
            refuse_replaced(inner, [True] * len(inner.invars), rules, microbatches)
        given = [not is_literal(atom) and atom in depends for atom in equation.invars]
        if any(given) and equation.primitive.name != "stop_gradient":
            depends.update(equation.outvars)
        if equation.primitive.name != "custom_vjp_call" or not any(given):
            continue
        try:
            derivative = rules.derivative(equation)
        except (TypeError, ValueError):  # a function that is not differentiable
            continue
        of = [one for one, smooth in zip(given, derivative.operands, strict=True) if smooth]
        if any(one and wanted for one, wanted in zip(replaced(derivative), of, strict=True)):
            raise PlanError(
                refused=f"microbatches={microbatches}",
                got="a custom derivative that gives an operand its next value in place of a gradient, as training in 8 "
                "bits does for its scaling factors",
                needed="derivatives, which add up over microbatches", where=source_line(equation) or "",
                try_="microbatches=1",
            )  # fmt: skip


def _kinds(jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[_Known]) -> list[_Known]:
    """Of what inputs are known to be, what outputs are."""
    known: dict[Any, _Known] = dict(zip(jaxpr.invars, given, strict=True))
    known.update((var, _of_array(const)) for var, const in zip(jaxpr.constvars, consts, strict=True))

    def read(atom: Any) -> _Known:
        return _of_array(atom.val) if is_literal(atom) else known[atom]

    for equation in jaxpr.eqns:
        made = _made(equation, [read(atom) for atom in equation.invars])
        known.update(dict.fromkeys(equation.outvars, made))
    return [read(atom) for atom in jaxpr.outvars]


def _of_array(array: Any) -> _Known:
    if is_traced(array):
        return "unknown"
    return "other" if np.any(array) else "zero"


def _made(equation: Equation, given: Sequence[_Known]) -> _Known:
    name = equation.primitive.name
    if name in _PRODUCTS or name == "div":
        if "zero" in (given[:1] if name == "div" else given):
            return "zero"
        # What multiplies may be a mask.
        return "other" if "unknown" not in given and any(map(is_literal, equation.invars)) else "unknown"
    if name == "sub" and list(given) == ["other", "other"]:
        return "unknown"
    if name == "select_n":
        return given[1] if len(set(given[1:])) == 1 else "unknown"
    if name not in _MOVES:
        return "unknown"
    places = _MOVES[name]
    read = [given[at] for at in places] if places else list(given)
    if "unknown" in read:
        return "unknown"
    return "other" if "other" in read else "zero"
