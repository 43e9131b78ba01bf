"""Arrays of which each stage has some rows: a stacked parameter whose loop is cut over stages, its gradient, its
optimizer state.

The update of such a parameter is one equation for all rows, and each stage evaluates it for its own. Which dim of which
value the rows are follows from the factor rules, as the layouts inside a stage do: the dim's factor is split over the
stages, into parts that need not be equal. A reduction over it (of a norm, of a test that all is finite) leaves a
*contribution* on each stage, which `surroundings` has the stages exchange. What reads across rows gets all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._jax.jaxpr import Equation
from ...program.local import COMBINE
from ...program.rules import Rules


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


def follow_rows(equation: Equation, rules: Rules, operands: Sequence[Rows | None]) -> Following | None:
    """How rows pass through an equation that holds no program; None if it needs all rows at once."""
    found = next((rows for rows in operands if rows is not None), None)
    if found is None:
        return Following(None, tuple(operands), (None,) * len(equation.outvars), None)
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
        return None

    def rows_in(dims: Sequence[Sequence[int]]) -> Rows | None:
        place = next((d for d, dim in enumerate(dims) if factor in dim), None)
        return None if place is None else Rows(place, found.total, found.parts)

    results = tuple(rows_in(dims) for dims in rule.results)
    combine = None
    if rule.factors[factor].kind == "reduction":
        combine = COMBINE.get(equation.primitive.name)
        if combine is None or any(results):  # parts that do not combine
            return None
    elif not all(results):
        return None
    return Following(factor, tuple(rows_in(dims) for dims in rule.operands), results, combine)


def combined(kind: str | Rows, parts: Sequence[Any]) -> Any:
    """The value whose contributions are `parts`, in the order of stages: their sum, their extreme, or all rows."""
    if isinstance(kind, Rows):
        first_row = {stage: first for stage, first, _ in kind.parts}
        in_order = sorted(zip(sorted(first_row), parts, strict=True), key=lambda one: first_row[one[0]])
        return jnp.concatenate([part for _, part in in_order], axis=kind.dim)
    join = {"sum": jnp.add, "max": lax.max, "min": lax.min}[kind]
    total = parts[0]
    for part in parts[1:]:
        total = join(total, part)
    return total
