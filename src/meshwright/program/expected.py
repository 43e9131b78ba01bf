"""What a step is in one number of microbatches, expected from two others that are traced.

An array's dims, and what an operator computes, are linear in the size of a microbatch, or do not depend on it: then two
programs of the same equations say what any other is, in a twentieth of the time of tracing it. A search looks at half a
dozen numbers of microbatches and takes one, whose program is traced when it is asked for, and has to be the same.

Nothing is expected where a number that changes would be 1 or is: dims of one element are another structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from ..errors import PlanError
from .staged import StagedProgram
from .trace import Program

Of = TypeVar("Of")


class Unexpected(Exception):
    """A step in some number of microbatches is not what two others let expect."""


def expected(
    first: StagedProgram, second: StagedProgram, microbatches: int, trace: Callable[[], StagedProgram]
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
    sizes = [Fraction(1, count) for count in (first.microbatches, second.microbatches, microbatches)]
    if first.layers != second.layers:
        return None
    parts = (first.graph, first.rows, first.scan_splits, first.piece_starts)
    others = (second.graph, second.rows, second.scan_splits, second.piece_starts)
    try:
        graph, rows, *_ = _Between((sizes[2] - sizes[0]) / (sizes[1] - sizes[0])).of(parts, others)
    except Unexpected:
        return None
    program = replace(second, graph=graph, rows=rows, microbatches=microbatches)

    @cache
    def made() -> tuple[Any, Program]:
        try:
            found = trace()
        except PlanError as error:
            raise Unexpected(str(error)) from error
        if _looked_at(found) != _looked_at(program):
            raise Unexpected(f"{microbatches} microbatches")
        return found.trace()

    return replace(program, trace=made)


def _looked_at(program: StagedProgram) -> tuple[Any, ...]:
    """What a search knows of a program."""
    return (
        program.graph, program.rows, program.scan_splits, program.layers, program.piece_starts, program.split_dims,
        program.microbatches,
    )  # fmt: skip


class _Between:
    """What is linear between two things: of the same structure, their numbers on the lines through both.

    Args:
      share: of the way from the first to the second; more than 1 beyond it.
    """

    def __init__(self, share: Fraction) -> None:
        self._share = share
        self._known: dict[tuple[int, int], Any] = {}

    def of(self, first: Of, second: Of) -> Of:
        """The thing between them.

        Raises:
          Unexpected: they are of another structure, or a number is none that there can be.
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
            raise Unexpected
        if first == second:
            return first
        if is_dataclass(kind):
            own = [get(first) for get in _fields_of(kind).values()]
            made = [self.of(one, get(second)) for one, get in zip(own, _fields_of(kind).values(), strict=True)]
            return kind(**dict(zip(_fields_of(kind), made, strict=True)))
        if kind is tuple and len(first) == len(second):
            return tuple(map(self.of, first, second))
        if isinstance(first, Mapping) and first.keys() == second.keys():
            return {name: self.of(value, second[name]) for name, value in first.items()}
        if kind is float and first.is_integer() and second.is_integer():
            return float(self._number(int(first), int(second)))
        if kind is int:
            return self._number(first, second)
        raise Unexpected

    def _number(self, first: int, second: int) -> int:
        made = first + (second - first) * self._share
        if made.denominator != 1 or min(first, second, made) < 2:
            raise Unexpected
        return int(made)


@cache
def _fields_of(kind: Any) -> dict[str, Callable[[Any], Any]]:
    """What makes two of a kind of dataclass equal, by name."""
    return {one.name: attrgetter(one.name) for one in fields(kind) if one.compare}
