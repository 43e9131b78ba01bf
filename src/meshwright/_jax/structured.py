"""Equations that hold programs (`cond`, `while`, `scan`) taken apart: pruned to some of their results, and equations of
a branch moved out in front of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax._src.interpreters import partial_eval as pe  # dead-code elimination of a jaxpr; no public form up to 0.12

from .jaxpr import ClosedJaxpr, Equation, Jaxpr, Var, consts_of, inline, is_dropped, is_literal, is_remat, open_jaxpr


@dataclass(frozen=True, slots=True)
class InLine:
    """Equations of a program with variables of their own, to stand in another program.

    Args:
      equations: in order.
      names: for each variable of the program what it is now.
      constants: by variable.
    """

    equations: list[Equation] = field(default_factory=list)
    names: dict[Any, Any] = field(default_factory=dict)
    constants: dict[Any, Any] = field(default_factory=dict)

    def read(self, atom: Any) -> Any:
        """An operand as it is now."""
        return atom if is_literal(atom) else self.names.get(atom, atom)


def in_line(closed: Any, operands: Sequence[Any], positions: Collection[int] | None = None) -> InLine:
    """A program's equations, reading `operands` in place of its inputs.

    Args:
      closed: the program.
      operands: variables or literals.
      positions: of the equations to take; they read no others. None for all.
    """
    jaxpr = open_jaxpr(closed)
    found = InLine()
    found.names.update(zip(jaxpr.invars, operands, strict=True))
    for var, const in zip(jaxpr.constvars, consts_of(closed), strict=True):
        found.names[var] = fresh = Var(var.aval)
        found.constants[fresh] = const
    for position, equation in enumerate(jaxpr.eqns):
        if positions is None or position in positions:
            outvars = [var if is_dropped(var) else Var(var.aval) for var in equation.outvars]
            made = equation.replace(invars=[found.read(a) for a in equation.invars], outvars=outvars)
            found.names.update(zip(equation.outvars, outvars, strict=True))
            found.equations.append(made)
    return found


def body_in_line(equation: Equation) -> ClosedJaxpr | None:
    """The program of a call whose body means the same in line where nothing is differentiated; None for others."""
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return inline(equation.params["call_jaxpr"])
    if is_remat(equation):
        return ClosedJaxpr(open_jaxpr(equation.params["jaxpr"]), ())
    return None


def copy_of(var: Any, origin: Equation) -> Equation:
    """An equation that copies a variable, with the source line of another equation."""
    (made,) = open_jaxpr(jax.make_jaxpr(lambda x: jax.lax.copy_p.bind(x))(var.aval)).eqns
    return made.replace(invars=[var], outvars=[Var(var.aval)], source_info=origin.source_info)


def may_run_on(equation: Equation) -> bool:
    """Whether an equation might not end if it ran where its program would not have run it: it holds a `while`."""
    if equation.primitive.name == "while":
        return True
    params = equation.params
    held = [*params.get("branches", ()), *(params[n] for n in ("jaxpr", "call_jaxpr") if n in params)]
    return any(may_run_on(inner) for program in held for inner in open_jaxpr(program).eqns)


def move_out(equation: Equation, positions: Sequence[Collection[int]]) -> tuple[InLine, Equation]:
    """Equations of a `cond`'s branches in front of it, where they always run, and the `cond` that reads their results.

    Args:
      equation: the `cond`.
      positions: for each branch those of its equations to move; they read none that stay.
    """
    index, *operands = equation.invars
    front, branches, extra = InLine(), equation.params["branches"], []
    handed: list[list[Any]] = []
    for branch, moved in zip(branches, positions, strict=True):
        jaxpr, made = open_jaxpr(branch), in_line(branch, operands, moved)
        front.equations.extend(made.equations)
        front.constants.update(made.constants)
        stays = [e for place, e in enumerate(jaxpr.eqns) if place not in moved]
        read = {a for e in stays for a in e.invars if not is_literal(a)} | {
            a for a in jaxpr.outvars if not is_literal(a)
        }
        handed.append([v for place in sorted(moved) for v in jaxpr.eqns[place].outvars if v in read])
        extra += [made.names[var] for var in handed[-1]]
    programs = []
    for number, (branch, moved) in enumerate(zip(branches, positions, strict=True)):
        jaxpr = open_jaxpr(branch)
        more = [v if n == number else Var(v.aval) for n, variables in enumerate(handed) for v in variables]
        rest = [e for place, e in enumerate(jaxpr.eqns) if place not in moved]
        programs.append(_with(branch, invars=[*jaxpr.invars, *more], eqns=rest))
    params = {**equation.params, "branches": tuple(programs)}
    return front, equation.replace(invars=[index, *operands, *extra], params=params)


def pruned(equation: Equation, used: Sequence[bool]) -> Equation:
    """A `cond`, `while` or `scan` that makes some of its results, and reads what these need. (A `while` inside it stays
    whole.)"""
    made = _pruned_while(equation, used) if equation.primitive.name == "while" else _pruned(equation, used)
    wanted = {var for var, use in zip(equation.outvars, used, strict=True) if use}
    # Carries that only others read are made by several prunings, by each for itself.
    return made.replace(outvars=[var if var in wanted else Var(var.aval) for var in made.outvars])


def _pruned(equation: Equation, used: Sequence[bool]) -> Equation:
    operands = list(dict.fromkeys(a for a in equation.invars if not is_literal(a)))
    wanted = [var for var, use in zip(equation.outvars, used, strict=True) if use]
    held = equation.params["branches"][0] if equation.primitive.name == "cond" else equation.params["jaxpr"]
    alone = _with(held, constvars=[], invars=operands, outvars=wanted, eqns=[equation])
    kept, _ = pe.dce_jaxpr(open_jaxpr(alone), [True] * len(wanted), instantiate=True)
    (made,) = open_jaxpr(kept).eqns
    return made


def _pruned_while(equation: Equation, used: Sequence[bool]) -> Equation:
    params = equation.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
    _, tested = pe.dce_jaxpr(condition, [True], instantiate=False)
    need = [a or b for a, b in zip(used, tested[num_cond:], strict=True)]
    while True:
        _, read = pe.dce_jaxpr(body, need, instantiate=[False] * num_body + need)
        more = [a or b for a, b in zip(need, read[num_body:], strict=True)]
        if more == need:
            break
        need = more
    new_condition, tested = pe.dce_jaxpr(condition, [True], instantiate=[False] * num_cond + need)
    new_body, read = pe.dce_jaxpr(body, need, instantiate=[False] * num_body + need)
    consts = equation.invars[: num_cond + num_body]
    kept = [a for a, use in zip(consts, [*tested[:num_cond], *read[:num_body]], strict=True) if use]
    carries = [a for a, use in zip(equation.invars[num_cond + num_body :], need, strict=True) if use]
    changed: Mapping[str, Any] = {
        "cond_nconsts": sum(tested[:num_cond]), "body_nconsts": sum(read[:num_body]),
        "cond_jaxpr": ClosedJaxpr(open_jaxpr(new_condition), list(consts_of(params["cond_jaxpr"]))),
        "body_jaxpr": ClosedJaxpr(open_jaxpr(new_body), list(consts_of(params["body_jaxpr"]))),
    }  # fmt: skip
    outvars = [v for v, use in zip(equation.outvars, need, strict=True) if use]
    return equation.replace(invars=[*kept, *carries], outvars=outvars, params={**params, **changed})


def _with(closed: Any, **changes: Any) -> ClosedJaxpr:
    jaxpr: Jaxpr = open_jaxpr(closed)
    made = jaxpr.replace(**changes, debug_info=jaxpr.debug_info.with_unknown_names())
    return ClosedJaxpr(made, [] if "constvars" in changes else list(consts_of(closed)))
