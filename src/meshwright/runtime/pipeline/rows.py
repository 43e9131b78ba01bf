"""Arrays of which each stage has some rows: a stacked parameter whose loop is cut over stages, its gradient, its
optimizer state.

The update of such a parameter is one equation for all rows, and each stage evaluates it for its own. Which dim of which
value the rows are follows from the factor rules, as the layouts inside a stage do: the dim's factor is split over the
stages, into parts that need not be equal. A reduction over it (of a norm, of a test that all is finite) leaves a
*contribution* on each stage, which `surroundings` has the stages exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax.jaxpr import ClosedJaxpr, Equation, bind, consts_of, inline, is_literal, is_remat, open_jaxpr, source_line
from ...errors import PlanError
from ...program.local import COMBINE, evaluate_local
from ...program.rules import Rules, is_call
from ...program.split import Split

_AXIS = "rows"


@dataclass(frozen=True, slots=True)
class Rows:
    """Which dim of an array lies in parts on several stages.

    >>> Rows(0, 6, ((0, 0, 2), (3, 2, 6))).part(3)
    (2, 6)

    Args:
      dim: of the array.
      total: extent of the dim, in rows.
      parts: for each stage, the first row and the one past the last.
    """

    dim: int
    total: int
    parts: tuple[tuple[int, int, int], ...]

    @property
    def stages(self) -> frozenset[int]:
        """The stages that have a part."""
        return frozenset(stage for stage, _, _ in self.parts)

    def part(self, stage: int) -> tuple[int, int]:
        """First row of a stage and the one past its last."""
        return next((first, last) for number, first, last in self.parts if number == stage)

    def shape(self, shape: Sequence[int], stage: int) -> tuple[int, ...]:
        """Shape of a stage's part of an array of this shape."""
        first, last = self.part(stage)
        return tuple(n // self.total * (last - first) if d == self.dim else n for d, n in enumerate(shape))

    def take(self, x: Any, stage: int) -> Any:
        """A stage's part of a whole array."""
        first, last = self.part(stage)
        unit = x.shape[self.dim] // self.total
        index = tuple(slice(first * unit, last * unit) if d == self.dim else slice(None) for d in range(x.ndim))
        return x[index]


@dataclass(frozen=True, slots=True)
class Following:
    """How an equation treats the rows of its operands.

    Args:
      factor: that the rows are, None if no operand has rows.
      operands: for each operand the rows it is to be read in.
      results: for each result the rows it comes in.
      combine: how the parts of the results combine ("sum", "max", "min"), None if they are no contributions.
    """

    factor: int | None
    operands: tuple[Rows | None, ...]
    results: tuple[Rows | None, ...]
    combine: str | None


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


def follow_rows(equation: Equation, rules: Rules, operands: Sequence[Rows | None]) -> Following:
    """How rows pass through an equation.

    Raises:
      PlanError: it needs all rows at once.
    """
    found = next((rows for rows in operands if rows is not None), None)
    if found is None:
        return Following(None, tuple(operands), (None,) * len(equation.outvars), None)
    name = equation.primitive.name
    if is_call(equation) or name == "scan" or is_remat(equation):
        raise across_rows(equation, f"a {name} over them")
    rule = rules.rule(equation, differentiated=False)
    allowed = set(rule.splittable)
    factors = {
        next((f for f in rule.operands[i][rows.dim] if rule.factors[f].size > 1), -1)
        for i, rows in enumerate(operands)
        if rows is not None
    }
    (factor, *others) = sorted(factors)
    parts = {(rows.total, rows.parts) for rows in operands if rows is not None}
    if others or factor not in allowed or len(parts) > 1:
        raise across_rows(equation, f"{name}, which reads across rows")

    def rows_in(dims: Sequence[Sequence[int]]) -> Rows | None:
        place = next((d for d, dim in enumerate(dims) if factor in dim), None)
        return None if place is None else Rows(place, found.total, found.parts)

    results = tuple(rows_in(dims) for dims in rule.results)
    combine = None
    if rule.factors[factor].kind == "reduction":
        combine = COMBINE.get(name)
        if combine is None or any(results):
            raise across_rows(equation, f"{name}, whose parts do not combine")
    elif not all(results):
        raise across_rows(equation, f"{name}, which drops rows")
    return Following(factor, tuple(rows_in(dims) for dims in rule.operands), results, combine)


def at_rows(
    closed: ClosedJaxpr, rows: Mapping[Any, Rows], stage: int, rules: Rules, outputs: Sequence[Rows | None]
) -> ClosedJaxpr:
    """A program over whole arrays as the one over a stage's rows.

    Args:
      closed: the program.
      rows: for each of its variables that has rows, which.
      stage: whose rows.
      rules: of its equations.
      outputs: for each output the rows it is wanted in.
    """
    jaxpr = open_jaxpr(closed)

    def shape(var: Any) -> tuple[int, ...]:
        return rows[var].shape(var.aval.shape, stage) if var in rows else tuple(var.aval.shape)

    def taken(x: Any, has: Rows | None, wants: Rows | None) -> Any:
        return wants.take(x, stage) if wants is not None and has is None else x

    def run(*inputs: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts_of(closed), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            given = [a.val if is_literal(a) else env[a] for a in equation.invars]
            has = [None if is_literal(a) else rows.get(a) for a in equation.invars]
            following = follow_rows(equation, rules, has)
            given = [taken(x, h, w) for x, h, w in zip(given, has, following.operands, strict=True)]
            env.update(zip(equation.outvars, _evaluate(equation, rules, following, given, stage), strict=True))
        made = [a.val if is_literal(a) else env[a] for a in jaxpr.outvars]
        have = [None if is_literal(a) else rows.get(a) for a in jaxpr.outvars]
        return [taken(jnp.asarray(x), h, w) for x, h, w in zip(made, have, outputs, strict=True)]

    return inline(jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(shape(v), v.aval.dtype) for v in jaxpr.invars)))


def combined(kind: str, parts: Sequence[Any]) -> Any:
    """The value whose contributions are `parts`, in the order of stages."""
    join = {"sum": jnp.add, "max": lax.max, "min": lax.min}[kind]
    total = parts[0]
    for part in parts[1:]:
        total = join(total, part)
    return total


def _evaluate(
    equation: Equation, rules: Rules, following: Following, operands: Sequence[Any], stage: int
) -> Sequence[Any]:
    if following.factor is None or following.combine is not None:
        return bind(equation, *operands)  # a reduction takes any extent
    rows = next(r for r in following.operands if r is not None)
    first, last = rows.part(stage)
    rule = rules.rule(equation, differentiated=False)
    axes = tuple((_AXIS,) if f == following.factor else () for f in range(len(rule.factors)))
    # Extents divided by this fraction are those of the part, exactly.
    sizes: Any = {_AXIS: Fraction(rows.total, last - first)}
    return evaluate_local(equation, _RowSplit(rule, axes, sizes, first, rows.total), operands)


def across_rows(equation: Equation, got: str) -> PlanError:
    """The refusal of an equation that reads a stacked parameter across its rows."""
    return PlanError(
        refused="to update a stacked parameter whose layers are on several stages", got=got,
        needed="operations on each layer by itself, sums over all, or tests of all", where=source_line(equation),
        try_="layers that are no loop, or stages that do not cut it",
    )  # fmt: skip
