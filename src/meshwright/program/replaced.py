"""Custom derivatives that give an operand something else than a derivative: its next value.

So training in 8 bits keeps its scaling factors and the largest numbers of earlier steps (Flax's `Fp8DotGeneralOp`): the
step takes what comes in the place of their gradients for the new ones. Over microbatches derivatives add up, and these
do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .._jax.jaxpr import Equation, Jaxpr, Vjp, is_literal, open_jaxpr, source_line
from .._jax.plain import programs_in
from ..errors import PlanError
from .rules import Rules

# What a value is where all cotangents are zero.
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
    """For each operand with a cotangent whether that is certainly none: it is not zero where the cotangents of the
    results are.

    Args:
      derivative: of the call.
    """
    backward = open_jaxpr(derivative.backward)
    given = len(backward.invars) - sum(derivative.results)
    return [one == "other" for one in _where_cotangents_are_zero(backward, given)]


def refuse_replaced(jaxpr: Jaxpr, rules: Rules, microbatches: int) -> None:
    """Refuse to cut a batch whose loss function has such derivatives.

    Raises:
      PlanError: if it has.
    """
    for equation in jaxpr.eqns:
        for inner in programs_in(equation):
            refuse_replaced(open_jaxpr(inner), rules, microbatches)
        if equation.primitive.name != "custom_vjp_call":
            continue
        try:
            derivative = rules.derivative(equation)
        except (TypeError, ValueError):  # a function that is not differentiable
            continue
        if any(replaced(derivative)):
            raise PlanError(
                refused=f"microbatches={microbatches}",
                got="a custom derivative that gives an operand its next value in place of a gradient, as training in 8 "
                "bits does for its scaling factors",
                needed="derivatives, which add up over microbatches", where=source_line(equation) or "",
                try_="microbatches=1",
            )  # fmt: skip


def _where_cotangents_are_zero(backward: Jaxpr, given: int) -> list[_Known]:
    known: dict[Any, _Known] = dict.fromkeys(backward.constvars, "other")
    known.update((var, "other" if at < given else "zero") for at, var in enumerate(backward.invars))

    def read(atom: Any) -> _Known:
        if is_literal(atom):
            return "other" if np.any(atom.val) else "zero"
        return known[atom]

    for equation in backward.eqns:
        made = _made(equation, [read(atom) for atom in equation.invars])
        known.update(dict.fromkeys(equation.outvars, made))
    return [read(atom) for atom in backward.outvars]


def _made(equation: Equation, given: Sequence[_Known]) -> _Known:
    name = equation.primitive.name
    if name in _PRODUCTS or name == "div":
        if "zero" in (given[:1] if name == "div" else given):
            return "zero"
        return "unknown" if "unknown" in given else "other"
    if name == "select_n":
        return given[1] if len(set(given[1:])) == 1 else "unknown"
    if name not in _MOVES:
        return "unknown"
    places = _MOVES[name]
    read = [given[at] for at in places] if places else list(given)
    if "unknown" in read:
        return "unknown"
    return "other" if "other" in read else "zero"
