"""Calls that `jax.vmap` wrote out, one for each row, as one call over rows.

A `jax.debug.print` under `jax.vmap` becomes as many prints as there are rows, each of a row of its operands: a program
that grows with the batch. Here such a series is found and taken as one call, with the whole arrays as its operands, and
the dim of each whose rows it goes through. Several `vmap`s are several levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .effects import NAMES, outside_effects
from .jaxpr import Equation, is_literal, source_line

# Of one `vmap`, for each operand of a call its dims, the one that it goes through in front of those of a row; None for
# an operand that all calls share.
Level = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One call, or a series of calls that differ in the rows they read.

    Args:
      equation: the first call.
      atoms: its operands: arrays that have all rows, or what all calls read.
      levels: the outermost first.
      sizes: how many rows each has.
    """

    equation: Equation
    atoms: tuple[Any, ...]
    levels: tuple[Level, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def line(self) -> tuple[str, str]:
        """What it is called, and where."""
        return self.equation.primitive.name, source_line(self.equation)


def series_in(equations: Sequence[Equation], known: Mapping[tuple[str, str], tuple[Level, ...]]) -> list[Any]:
    """The equations, each series of calls as one `Series` in the place of its first call.

    Args:
      equations: of a program, in order.
      known: the levels of calls, by `Series.line`, in the same program with more rows: one row alone is a series only
        if it is one there.
    """
    made = {var: equation for equation in equations for var in equation.outvars}
    effects = [equation for equation in equations if outside_effects(equation)]
    found: list[Any] = [
        Series(equation=one, atoms=tuple(one.invars)) if one.primitive.name in NAMES else one for one in effects
    ]
    while True:
        joined: list[Any] = []
        position = 0
        while position < len(found):
            taken, one = _joined(found, position, made, known)
            joined.append(one)
            position += taken
        if len(joined) == len(found) and all(a is b for a, b in zip(joined, found, strict=True)):
            break
        found = joined
    firsts = {id(one.equation): one for one in found if isinstance(one, Series) and one.levels}
    kept = {id(one.equation if isinstance(one, Series) else one) for one in found}
    return [firsts.get(id(one), one) for one in equations if id(one) in kept or not outside_effects(one)]


def _joined(
    found: Sequence[Any], position: int, made: Mapping[Any, Equation], known: Mapping[Any, tuple[Level, ...]]
) -> tuple[int, Any]:
    """How many series from one on are the rows of one, and this one; 1 and what was there if they are not."""
    first = found[position]
    if not isinstance(first, Series):
        return 1, first
    rows = [_row(atom, made) for atom in first.atoms]
    for count in dict.fromkeys(row.count for row in rows if row is not None and row.number == 0):
        others = found[position : position + count]
        if len(others) < count or not all(_alike(first, other) for other in others):
            continue
        if count == 1:
            levels = known.get(first.line, ())
            level: Level = levels[-1 - len(first.levels)] if len(levels) > len(first.levels) else ()
            is_row = [
                row is not None and (row.dims, row.count) == (dims, 1) for row, dims in zip(rows, level, strict=False)
            ]
            if not level or not all(dims is None or one for dims, one in zip(level, is_row, strict=True)):
                continue
        else:
            level = tuple(_dims(column, made) for column in zip(*(one.atoms for one in others), strict=True))
            if () in level or not any(level):
                continue
        atoms = tuple(
            row.array if row is not None and dims is not None else atom
            for atom, row, dims in zip(first.atoms, rows, level, strict=True)
        )
        return count, replace(first, atoms=atoms, levels=(level, *first.levels), sizes=(count, *first.sizes))
    return 1, first


def _dims(column: Sequence[Any], made: Mapping[Any, Equation]) -> tuple[int, ...] | None:
    """Of operands that are the rows of one array, in order, its dims, as in a `Level`; None where all are the same, ()
    where they are neither."""
    first = column[0]
    if all(atom is first or (is_literal(atom) and is_literal(first) and atom.val == first.val) for atom in column):
        return None
    rows = [_row(atom, made) for atom in column]
    top = rows[0]
    if top is None or top.count != len(column):
        return ()
    same = (row is not None and row.array is top.array and row.dims == top.dims for row in rows)
    return top.dims if all(same) and [row.number for row in rows if row] == list(range(top.count)) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of an array: its number, of how many; `dims` as of a `Level`."""

    array: Any
    dims: tuple[int, ...]
    number: int
    count: int


def _row(atom: Any, made: Mapping[Any, Equation]) -> _Row | None:
    """What a value is a row of, as `jax.vmap` writes it: cut out, its dims in another order, without the dim of one."""

    def behind(value: Any, name: str) -> Equation | None:
        equation = None if is_literal(value) else made.get(value)
        return equation if equation is not None and equation.primitive.name == name else None

    squeeze = behind(atom, "squeeze")
    if squeeze is None or len(squeeze.params["dimensions"]) != 1:
        return None
    (source,), (at,) = squeeze.invars, squeeze.params["dimensions"]
    order = list(range(len(source.aval.shape)))
    if (turn := behind(source, "transpose")) is not None:
        (source,), order = turn.invars, list(turn.params["permutation"])
    dim = order.pop(at)
    dims = (int(dim), *map(int, order))
    cut = behind(source, "slice")
    if cut is None:
        return _Row(array=source, dims=dims, number=0, count=1) if turn is None else None
    (array,) = cut.invars
    starts, limits, shape = cut.params["start_indices"], cut.params["limit_indices"], array.aval.shape
    whole = all(starts[d] == 0 and limits[d] == shape[d] for d in order)
    alone = limits[dim] == starts[dim] + 1
    return _Row(array=array, dims=dims, number=int(starts[dim]), count=shape[dim]) if whole and alone else None


def _alike(one: Series, other: Any) -> bool:
    """Whether two calls differ in their operands alone."""
    if not isinstance(other, Series) or (one.levels, one.sizes, one.line) != (other.levels, other.sizes, other.line):
        return False
    ours, theirs = one.equation.params, other.equation.params
    return ours.keys() == theirs.keys() and all(ours[k] is theirs[k] or ours[k] == theirs[k] for k in ours)
