"""What a step is in one number of microbatches, expected from two others that are traced.

Mostly the dims of arrays are linear in the size of a microbatch, or do not depend on it, and an operator has one index
that does: then two programs of the same equations say what any other is, in a fifth to a fifteenth of the time of
tracing it (`benchmarks/tracing.py`). A search looks at half a dozen numbers of microbatches and takes one, whose
program is traced when it is asked for and has to be the same. So two numbers and a third say that the step is such a
one.

Nothing is expected where a number that changes would be 1 or is: dims of one element are another structure. Known
limit: a step that is linear at three numbers and not at a fourth (a capacity with a least size, say) is priced at the
fourth as if it were, which may leave a better plan out; no plan is returned that is not of a traced program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from .._jax.jaxpr import ClosedJaxpr
from ..errors import PlanError
from .factors import Rule
from .staged import StagedProgram
from .trace import Program

Of = TypeVar("Of")


class Unexpected(Exception):
    """A step in some number of microbatches is not what two others let expect."""


class Expectations:
    """What is expected of one step, until it does not come true: then nothing is any more."""

    def __init__(self) -> None:
        self._trusted, self._met = True, False
        self._made: dict[int, StagedProgram] = {}

    def of(
        self, first: StagedProgram, second: StagedProgram, microbatches: int, trace: Callable[[], StagedProgram]
    ) -> StagedProgram | None:
        """A program in layers, as two of the same step in other numbers of microbatches let expect.

        Args:
          first: one.
          second: the other, of several microbatches.
          microbatches: of the program.
          trace: the program itself, cut like these.

        Returns:
          The program; its core and source are made when they are asked for, and that raises `Unexpected` where it is
          another one, or the step cannot be cut so. None where these two are not made of the same equations, or nothing
          can be said of so many microbatches.
        """
        expected = _on_the_line(first, second, microbatches) if self._trusted else None
        if expected is None:
            return None

        @cache
        def made() -> tuple[ClosedJaxpr, Program]:
            try:
                found = trace()
            except PlanError as error:
                raise Unexpected(str(error)) from error
            if found != expected:
                raise Unexpected(f"{microbatches} microbatches")
            self._met = True
            return found.trace()

        self._made[microbatches] = replace(expected, trace=made)
        return self._made[microbatches]

    def check(self) -> None:
        """Trace one of those that were expected, in the middle, unless some plan's has been.

        Raises:
          Unexpected: it is another one.
        """
        if self._made and not self._met:
            counts = sorted(self._made)
            self._made[counts[len(counts) // 2]].trace()

    def give_up(self) -> None:
        """From now on every number is to be traced."""
        self._trusted = False
        self._made.clear()


def _on_the_line(first: StagedProgram, second: StagedProgram, microbatches: int) -> StagedProgram | None:
    """As `Expectations.of`, made of the second's trace."""
    start, stop, here = (Fraction(1, count) for count in (first.microbatches, second.microbatches, microbatches))
    if first.layers != second.layers:
        return None
    parts = (first.graph, first.rows, first.scan_splits, first.piece_starts)
    others = (second.graph, second.rows, second.scan_splits, second.piece_starts)
    try:
        graph, rows, splits, starts = _Between((here - start) / (stop - start)).of(parts, others)
    except _Unlike:
        return None
    return replace(second, graph=graph, rows=rows, scan_splits=splits, piece_starts=starts, microbatches=microbatches)


class _Unlike(Exception):
    """Nothing is between two things."""


class _Between:
    """What is linear between two things, which have to live as long: of the same structure, their numbers on the lines
    through both.

    Args:
      share: of the way from the first to the second; more than 1 beyond it.
    """

    def __init__(self, share: Fraction) -> None:
        self._share = share
        self._known: dict[tuple[int, int], Any] = {}  # by `id`: rules are those of many operators

    def of(self, first: Of, second: Of) -> Of:
        """The thing between them: of dataclasses by the fields that make them equal, of mappings in the first's order.

        Raises:
          _Unlike: they are of another structure, or a number is none that there can be.
        """
        if first is second:
            return first
        key = id(first), id(second)
        if key not in self._known:
            self._known[key] = self._made(first, second)
        return self._known[key]

    def _made(self, first: Any, second: Any) -> Any:
        kind = type(first)
        if kind is not type(second):
            raise _Unlike
        if first == second:
            return first
        if kind is Rule and sum(a != b for a, b in zip(first.factors, second.factors, strict=False)) > 1:
            raise _Unlike  # what it computes is a product of its factors, and no line
        if is_dataclass(kind):
            made = {name: self.of(get(first), get(second)) for name, get in _fields_of(kind).items()}
            return kind(**made)
        if kind is tuple and len(first) == len(second):
            return tuple(map(self.of, first, second))
        if isinstance(first, Mapping) and first.keys() == second.keys():
            return {name: self.of(value, second[name]) for name, value in first.items()}
        if kind is float and first.is_integer() and second.is_integer():
            return float(self._number(int(first), int(second)))
        if kind is int:
            return self._number(first, second)
        raise _Unlike

    def _number(self, first: int, second: int) -> int:
        made = first + (second - first) * self._share
        if made.denominator != 1 or min(first, second, made) < 2:
            raise _Unlike
        return int(made)


@cache
def _fields_of(kind: Any) -> dict[str, Callable[[Any], Any]]:
    """What makes two of a kind of dataclass equal, by name."""
    return {one.name: attrgetter(one.name) for one in fields(kind) if one.compare}
