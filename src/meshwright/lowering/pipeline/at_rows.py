"""A program over whole arrays as the one over the rows that a stage has of some of them (`rows`).

Each equation is evaluated on the stage's rows where its operands have rows; a value that is whole is cut to the rows of
what it meets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax.jaxpr import ClosedJaxpr, Equation, bind, consts_of, inline, is_literal, open_jaxpr, scan_parts
from ..._jax.structured import body_in_line
from ...program.local import evaluate_local
from ...program.rules import Rules
from ...program.split import Split
from .rows import Following, Rows, follow_rows

_AXIS = "rows"


@dataclass(frozen=True, slots=True)
class _RowSplit(Split):
    """A split over stages, into parts that need not be equal.

    Args:
      first: first row of this part.
      total: rows in all.
    """

    first: int
    total: int

    def offset(self, extent: int, dim: tuple[int, ...]) -> Any:
        """Position of this part's first element."""
        del dim
        return jnp.int32(self.first * (extent // self.total))


@dataclass(frozen=True, slots=True)
class _Part:
    """What a stage has of a value: its rows of it, or all of it."""

    x: Any
    rows: Rows | None = None


def at_rows(
    closed: ClosedJaxpr, rows: Mapping[Any, Rows], stage: int, rules: Rules, outputs: Sequence[Rows | None]
) -> ClosedJaxpr:
    """A program over whole arrays as the one over a stage's rows.

    Args:
      closed: the program.
      rows: for each of its inputs that has rows, which.
      stage: whose rows.
      rules: of its equations.
      outputs: for each output the rows it is wanted in.
    """
    jaxpr = open_jaxpr(closed)
    at = _AtRows(stage, rules)

    def shape(var: Any) -> tuple[int, ...]:
        return rows[var].shape(var.aval.shape, stage) if var in rows else tuple(var.aval.shape)

    def run(*inputs: Any) -> list[Any]:
        given = [_Part(x, rows.get(var)) for var, x in zip(jaxpr.invars, inputs, strict=True)]
        made = at.program(closed, given)
        return [jnp.asarray(at.read(part, wanted)) for part, wanted in zip(made, outputs, strict=True)]

    return inline(jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(shape(v), v.aval.dtype) for v in jaxpr.invars)))


class _AtRows:
    def __init__(self, stage: int, rules: Rules) -> None:
        self._stage = stage
        self._rules = rules

    def read(self, part: _Part, rows: Rows | None) -> Any:
        """A value in the rows it is wanted in."""
        return rows.take(part.x, self._stage) if rows is not None and part.rows is None else part.x

    def program(self, closed: Any, operands: Sequence[_Part]) -> list[_Part]:
        """Evaluate a program."""
        jaxpr = open_jaxpr(closed)
        env: dict[Any, _Part] = dict(zip(jaxpr.invars, operands, strict=True))
        env.update((v, _Part(const)) for v, const in zip(jaxpr.constvars, consts_of(closed), strict=True))

        def find(atom: Any) -> _Part:
            return _Part(atom.val) if is_literal(atom) else env[atom]

        for equation in jaxpr.eqns:
            env.update(zip(equation.outvars, self._equation(equation, [find(a) for a in equation.invars]), strict=True))
        return [find(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Equation, operands: Sequence[_Part]) -> Sequence[_Part]:
        if all(part.rows is None for part in operands):
            return [_Part(x) for x in bind(equation, *(part.x for part in operands))]
        if (body := body_in_line(equation)) is not None:
            return self.program(body, operands)
        match equation.primitive.name:
            case "cond":
                return self._cond(equation, operands)
            case "scan":
                return self._scan(equation, operands)
            case "while":
                return self._while(equation, operands)
        following = follow_rows(equation, self._rules, [part.rows for part in operands])
        assert following is not None
        given = [self.read(part, rows) for part, rows in zip(operands, following.operands, strict=True)]
        if following.combine is not None:  # takes any extent
            return [_Part(x) for x in bind(equation, *given)]
        return list(map(_Part, self._on_rows(equation, following, given), following.results))

    def _on_rows(self, equation: Equation, following: Following, operands: Sequence[Any]) -> Sequence[Any]:
        rows = next(r for r in following.operands if r is not None)
        first, last = rows.part(self._stage)
        rule = self._rules.rule(equation, differentiated=False)
        axes = tuple((_AXIS,) if f == following.factor else () for f in range(len(rule.factors)))
        # Extents divided by this fraction are those of the part, exactly.
        sizes: Any = {_AXIS: Fraction(rows.total, last - first)}
        return evaluate_local(equation, _RowSplit(rule, axes, sizes, first, rows.total), operands)

    def _result_rows(self, closed: Any, operands: Sequence[_Part]) -> list[Rows | None]:
        """The rows in which a program's results come out."""
        found: list[Rows | None] = []

        def trace(values: Sequence[Any]) -> list[Any]:
            made = self.program(closed, [_Part(x, part.rows) for x, part in zip(values, operands, strict=True)])
            found[:] = [part.rows for part in made]
            return [part.x for part in made]

        jax.eval_shape(trace, [part.x for part in operands])
        return found

    def _cond(self, equation: Equation, operands: Sequence[_Part]) -> list[_Part]:
        index, *rest = operands
        branches = equation.params["branches"]
        rows = _merged(*(self._result_rows(branch, rest) for branch in branches))

        def on_rows(branch: Any) -> Any:
            def run(values: Sequence[Any]) -> list[Any]:
                made = self.program(branch, [_Part(x, part.rows) for x, part in zip(values, rest, strict=True)])
                return [self.read(part, r) for part, r in zip(made, rows, strict=True)]

            return run

        made = lax.switch(index.x, [on_rows(branch) for branch in branches], [part.x for part in rest])
        return list(map(_Part, made, rows))

    def _carried(
        self, body: Any, before: Sequence[_Part], carry: Sequence[_Part], after: Sequence[_Part]
    ) -> list[_Part]:
        """Carries in the rows in which the body of a loop leaves them."""
        while True:
            found = self._result_rows(body, [*before, *carry, *after])[: len(carry)]
            rows = _merged([part.rows for part in carry], found)
            if rows == [part.rows for part in carry]:
                return list(carry)
            carry = [_Part(self.read(part, r), r) for part, r in zip(carry, rows, strict=True)]

    def _scan(self, equation: Equation, operands: Sequence[_Part]) -> list[_Part]:
        parts = scan_parts(equation)
        first_xs = parts.num_consts + parts.num_carry
        consts, xs = operands[: parts.num_consts], operands[first_xs:]
        rows_of_xs = [_shifted(part.rows, -1) for part in xs]
        one = [_Part(jax.eval_shape(lambda x: x[0], part.x), r) for part, r in zip(xs, rows_of_xs, strict=True)]
        carry = self._carried(parts.body, consts, operands[parts.num_consts : first_xs], one)
        stacked: list[Rows | None] = []

        def body(carried: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            now = [_Part(x, part.rows) for x, part in zip(carried, carry, strict=True)]
            made = self.program(parts.body, [*consts, *now, *map(_Part, row, rows_of_xs)])
            stacked[:] = [_shifted(part.rows, 1) for part in made[len(carry) :]]
            kept = [self.read(part, have.rows) for part, have in zip(made, carry, strict=False)]
            return kept, [part.x for part in made[len(carry) :]]

        final, ys = lax.scan(
            body, [part.x for part in carry], [part.x for part in xs], length=parts.length, reverse=parts.reverse,
            unroll=parts.unroll,
        )  # fmt: skip
        return [*(replace(have, x=x) for have, x in zip(carry, final, strict=True)), *map(_Part, ys, stacked)]

    def _while(self, equation: Equation, operands: Sequence[_Part]) -> list[_Part]:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        tested, consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
        carry = self._carried(params["body_jaxpr"], consts, operands[num_cond + num_body :], [])

        def now(values: Sequence[Any]) -> list[_Part]:
            return [replace(have, x=x) for have, x in zip(carry, values, strict=True)]

        def condition(values: Sequence[Any]) -> Any:
            (go_on,) = self.program(params["cond_jaxpr"], [*tested, *now(values)])
            return go_on.x

        def body(values: Sequence[Any]) -> list[Any]:
            made = self.program(params["body_jaxpr"], [*consts, *now(values)])
            return [self.read(part, have.rows) for part, have in zip(made, carry, strict=True)]

        return now(lax.while_loop(condition, body, [part.x for part in carry]))


def _merged(*found: Sequence[Rows | None]) -> list[Rows | None]:
    return [next((rows for rows in one if rows is not None), None) for one in zip(*found, strict=True)]


def _shifted(rows: Rows | None, by: int) -> Rows | None:
    return None if rows is None else replace(rows, dim=rows.dim + by)
