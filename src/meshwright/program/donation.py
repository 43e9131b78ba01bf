"""Which arguments of a step it takes over, as the step says it.

A step says so by what it is: `jax.jit(step, donate_argnums=...)` names them; and a first argument that comes back as
the first result is a training state where `meshwright.value_and_grad` differentiates by leaves of it, or by what is
computed from them (parameters cast to another dtype, taken out of one flat array). A first argument that merely comes
back in the shape it had (`(x, parameters) -> x'`) is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._jax.grad import marked_calls_inside, value_and_grad_p
from .._jax.jaxpr import ClosedJaxpr, Equation, Jaxpr, is_literal, jit_donations, open_jaxpr, scan_parts
from ..errors import PlanError


def donated_inputs(traced: ClosedJaxpr, inlined: ClosedJaxpr, state_inputs: int) -> frozenset[int]:
    """The inputs that a step itself says it takes over.

    Args:
      traced: the step.
      inlined: the same without `jit` calls.
      state_inputs: how many of the leading inputs come back as the leading outputs.
    """
    named = jit_donations(traced)
    if named:
        return named
    if not state_inputs:
        return frozenset()
    inputs = open_jaxpr(inlined).invars
    differentiates, _ = _walk(open_jaxpr(inlined), [i < state_inputs for i in range(len(inputs))])
    return frozenset(range(state_inputs)) if differentiates else frozenset()


def named_inputs(donate: Any, args: Sequence[Any]) -> frozenset[int]:
    """The inputs of the arguments that `donate=` names.

    Args:
      donate: a number of an argument or several, negative ones from the end.
      args: of the step.

    Raises:
      PlanError: if it names anything else.
    """
    numbers = [donate] if _is_number(donate) else donate
    known = isinstance(numbers, Sequence) and not isinstance(numbers, str) and all(map(_is_number, numbers))
    if not known or any(not -len(args) <= n < len(args) for n in numbers):
        raise PlanError(
            refused="what is to be donated", got=repr(donate),
            needed=f"numbers of arguments, as of jax.jit's donate_argnums, of which the step has {len(args)}",
            where="donate=", try_="donate=0, donate=() for nothing, or leaving it out",
        )  # fmt: skip
    sizes = [len(jax.tree.leaves(arg)) for arg in args]
    wanted = {n % len(args) for n in numbers}
    return frozenset(
        i for n, size in enumerate(sizes) if n in wanted for i in range(sum(sizes[:n]), sum(sizes[:n]) + size)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _walk(jaxpr: Jaxpr, given: Sequence[bool]) -> tuple[bool, list[bool]]:
    """Whether a marked call differentiates by what depends on some inputs of a program, and which results depend on
    them.

    Args:
      jaxpr: the program.
      given: for each of its inputs, whether it is one of those.
    """
    depends = {var for var, is_one in zip(jaxpr.invars, given, strict=True) if is_one}
    found = False
    for equation in jaxpr.eqns:
        read = [not is_literal(atom) and atom in depends for atom in equation.invars]
        if not any(read):
            continue
        made = [True] * len(equation.outvars)
        if equation.primitive is value_and_grad_p:
            found = found or any(read[equation.params["num_consts"] :])
            made = [False] * len(made)  # gradients depend on whatever the loss reads: that makes nothing a parameter
        elif equation.primitive.name in ("scan", "cond", "while") and marked_calls_inside(equation):
            inside, made = _walk_inside(equation, read)
            found = found or inside
        depends.update(var for var, is_one in zip(equation.outvars, made, strict=True) if is_one)
    return found, [not is_literal(atom) and atom in depends for atom in jaxpr.outvars]


def _walk_inside(equation: Equation, read: Sequence[bool]) -> tuple[bool, list[bool]]:
    """As `_walk`, of a loop or a branch."""
    params, name = equation.params, equation.primitive.name
    if name == "cond":
        walked = [_walk(open_jaxpr(branch), read[1:]) for branch in params["branches"]]
        made = [any(column) for column in zip(*(outs for _, outs in walked), strict=True)]
        return any(found for found, _ in walked), made if not read[0] else [True] * len(made)
    if name == "scan":
        parts = scan_parts(equation)
        body, first, carries, given = open_jaxpr(parts.body), parts.num_consts, parts.num_carry, list(read)
    else:
        body, first, given = open_jaxpr(params["body_jaxpr"]), params["body_nconsts"], read[params["cond_nconsts"] :]
        carries, given = len(given) - first, list(given)
    while True:  # a carry that depends on them in one trip makes others depend on them in the next
        found, made = _walk(body, given)
        carried = [a or b for a, b in zip(given[first : first + carries], made, strict=False)]
        if carried == given[first : first + carries]:
            return found, made
        given[first : first + carries] = carried
