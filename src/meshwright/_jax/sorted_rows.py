"""A run of equations as one equation: the rows of a program that are sorted, worked on and brought back.

The equation holds its program as a parameter and means the same when written in line, which is what binding it does:
what JAX differentiates never has it. In the body of a loop that is run as it stands it is lowered in line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core as jex_core
from jax.interpreters import mlir

from .jaxpr import ClosedJaxpr, Equation, Jaxpr, evaluate, open_jaxpr

NAME = "sorted_rows"


@dataclass(frozen=True, eq=False, kw_only=True)
class SortedRows:
    """What is known of a run of equations over sorted rows (`program.sorted_rows`).

    Args:
      program: the equations; the first result is what is read outside, the others are kept for the derivative.
      sorts: positions of the sorts, which a block of rows may have by itself.
      own: of gathers and scatters that meet rows only with what is at the same place before sorting: by position, the
        dim of the operand, and the dim of the indices, that is the rows.
      counts: positions of equations that count the rows of each group.
      sums: positions of equations whose sums may be left to whoever reads the result, in which it is linear.
      once: operands that only one of the devices that share a sum adds: positions of equation and operand.
      groups: whether the groups may be split.
    """

    program: ClosedJaxpr
    sorts: frozenset[int]
    own: Mapping[int, tuple[int, int]]
    counts: frozenset[int]
    sums: frozenset[int]
    once: frozenset[tuple[int, int]]
    groups: bool
    key: str = field(init=False)

    def __post_init__(self) -> None:
        known = (
            sorted(self.sorts),
            sorted(self.own.items()),
            sorted(self.counts),
            sorted(self.sums),
            sorted(self.once),
            self.groups,
        )
        object.__setattr__(self, "key", f"{self.program}{known}")

    def __repr__(self) -> str:
        return self.key


class _Inline(jex_core.Primitive):
    """Binding it evaluates the program."""

    multiple_results = True

    def bind(self, *operands: Any, **params: Any) -> Any:
        return _evaluated(*operands, **params)

    def get_bind_params(self, params: Mapping[str, Any]) -> Any:
        return dict(params)


def _evaluated(*operands: Any, rows: SortedRows, **rest: Any) -> Any:
    del rest
    return evaluate(rows.program, *operands)


_primitive = _Inline(NAME)
mlir.register_lowering(_primitive, mlir.lower_fun(_evaluated, multiple_results=True))


def is_sorted_rows(equation: Equation) -> bool:
    """Whether an equation is such a run."""
    return equation.primitive.name == NAME


def program_of(jaxpr: Jaxpr, equations: Sequence[Equation], read: Sequence[Any], made: Sequence[Any]) -> ClosedJaxpr:
    """Equations of a program as a program of their own.

    Args:
      jaxpr: that they are in.
      equations: in order.
      read: the variables they read and do not make.
      made: those that are its results.
    """
    info = jaxpr.debug_info.with_unknown_names()
    return ClosedJaxpr(
        jaxpr.replace(constvars=[], invars=list(read), outvars=list(made), eqns=list(equations), debug_info=info), []
    )


def one_equation(rows: SortedRows, at: Equation) -> Equation:
    """The run as one equation.

    Args:
      rows: what is known of it.
      at: the equation whose line of the user's it gets.
    """
    body = open_jaxpr(rows.program)
    made: list[Any] = list(body.outvars)
    params = {"jaxpr": rows.program, "rows": rows}
    return at.replace(primitive=_primitive, params=params, invars=list(body.invars), outvars=made)
