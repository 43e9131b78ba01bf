"""The equations of a program together with arrays they really meet: what rules are validated on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from meshwright._jax.jaxpr import (
    ClosedJaxpr,
    Equation,
    bind,
    consts_of,
    inline,
    is_literal,
    is_remat,
    open_jaxpr,
    scan_parts,
)
from meshwright.program.rules import is_call


def collect(
    closed: ClosedJaxpr, args: Sequence[Any], *, key: Callable[[Equation], Any] | None = None
) -> list[tuple[Equation, list[Any]]]:
    """Every equation of an inlined program with the arrays it meets; of loops the first trip.

    Args:
      closed: the program, `jit` calls inlined.
      args: its inputs.
      key: equations with equal keys are given once; all are by default.

    Returns: equations and their operands, literals included, in program order.
    """
    equations: list[Equation] = []
    seen: set[Any] = set()

    def walk(program: Any, operands: Sequence[Any], kept: list[list[Any]]) -> list[Any]:
        jaxpr = open_jaxpr(program)
        env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        env.update(zip(jaxpr.constvars, consts_of(program), strict=True))
        for equation in jaxpr.eqns:
            given = [a.val if is_literal(a) else env[a] for a in equation.invars]
            for body, inner in _inside(equation, given):
                walk(body, inner, kept)
            described = key(equation) if key is not None else len(equations)
            if not (equation.primitive.name == "scan" or is_remat(equation)) and described not in seen:
                seen.add(described)
                equations.append(equation)
                kept.append(given)
            env.update(zip(equation.outvars, bind(equation, *given), strict=True))
        return kept

    kept = jax.jit(lambda *leaves: walk(closed, leaves, []))(*args)
    return list(zip(equations, kept, strict=True))


def _inside(equation: Equation, operands: Sequence[Any]) -> Iterable[tuple[Any, Sequence[Any]]]:
    """The programs inside an equation, each with operands for one run."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        parts = scan_parts(equation)
        first_xs = parts.num_consts + parts.num_carry
        yield parts.body, [*operands[:first_xs], *(x[0] for x in operands[first_xs:])]
    elif is_remat(equation):
        yield params["jaxpr"], operands
    elif name == "while":
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        yield inline(params["cond_jaxpr"]), [*operands[: split[0]], *operands[split[1] :]]
        yield inline(params["body_jaxpr"]), operands[split[0] :]
    elif name == "cond":
        for branch in params["branches"]:
            yield inline(branch), operands[1:]
    elif is_call(equation):
        yield inline(params["call_jaxpr"]), operands
