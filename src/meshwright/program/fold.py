"""Pieces of one scan in a row as one scan again, in a graph: what is repeated more often is no more work to search.

A scan that was cut into pieces (`scan_split`) is, in a range that holds several of them, as many equal bodies one after
the other. Nothing distinguishes them but the rows of the stacked arrays they read. So a range may be looked at with the
first body alone, run as often as all of them together, on all their rows: the program that `merge_scans` writes out.

Known limits: pieces whose results are stacked, or that read rows of anything but an input of the program, stay apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .factors import Rule
from .graph import Graph, Operator
from .stacked import StackedRows

# What may stand between the rows of a stacked input and the scan that reads them.
_PER_ROW = frozenset(["convert_element_type", "copy", "transpose"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A range with the pieces of its scans folded.

    Args:
      operators: that are left, in order.
      same: for each value of a piece that is gone, the one that stands for it.
      rows: of equations that take rows out of an input, what they take now.
      shapes: of values that have more rows now.
    """

    operators: tuple[Operator, ...]
    same: Mapping[int, int]
    rows: Mapping[int, StackedRows]
    shapes: Mapping[int, tuple[int, ...]]


def fold_pieces(
    graph: Graph,
    inside: Sequence[Operator],
    pieces: Sequence[Sequence[int]],
    rows: Mapping[int, StackedRows],
    read_later: Mapping[int, bool],
) -> Folded | None:
    """Fold the pieces of each scan that a range holds several of; None if there are none, or some cannot be folded.

    Args:
      graph: the whole program.
      inside: operators of the range.
      pieces: for each scan that was cut, the equations of its pieces.
      rows: equations that take rows out of an input.
      read_later: values that somebody outside the range reads.
    """
    at: dict[int, list[Operator]] = {}
    for operator in inside:
        at.setdefault(operator.path[0], []).append(operator)
    groups = [[equation for equation in group if equation in at] for group in pieces]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return None
    gone: set[int] = set()
    same: dict[int, int] = {}
    changed: dict[int, Operator] = {}
    new_rows: dict[int, StackedRows] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for group in groups:
        bodies = [at[equation] for equation in group]
        names = [[operator.name for operator in body] for body in bodies]
        if any(one != names[0] for one in names) or "scan_stack" in names[0]:
            return None
        slices = [[operator for operator in body if operator.name == "scan_slice"] for body in bodies]
        stacks = [found[0].operands[0] if found else None for found in slices]
        trips = [graph.values[value].shape[0] for value in stacks if value is not None]
        if len(trips) < len(group) or not all(trips):
            return None
        for together in zip(*slices, strict=True):
            if not _stack(graph, together, rows, at, sum(trips), changed, new_rows, shapes):
                return None
        for operator in bodies[0]:
            changed[operator.index] = _oftener(changed.get(operator.index, operator), trips[0], sum(trips))
        for body in bodies[1:]:
            for ours, theirs in zip(bodies[0], body, strict=True):
                gone.add(theirs.index)
                pairs = zip(ours.results, theirs.results, strict=True)
                same.update({b: a for a, b in pairs if a is not None and b is not None})
    left = _without_dead(inside, gone, same, read_later)
    return Folded(
        operators=tuple(_renamed(changed.get(op.index, op), same) for op in left), same=same, rows=new_rows,
        shapes=shapes,
    )  # fmt: skip


def _stack(
    graph: Graph,
    slices: Sequence[Operator],
    rows: Mapping[int, StackedRows],
    at: Mapping[int, Sequence[Operator]],
    trips: int,
    changed: dict[int, Operator],
    new_rows: dict[int, StackedRows],
    shapes: dict[int, tuple[int, ...]],
) -> bool:
    """Make the first piece's operand the rows of all pieces; whether that can be done."""
    found: list[StackedRows] = []
    first = -1
    for number, link in enumerate(slices):
        value, equation, dim = link.operands[0], None, 0
        while value is not None:
            maker = graph.producer.get(value)
            operator = graph.operators[maker[0]] if maker is not None else None
            if operator is None or operator.path[0] not in at or len(operator.path) > 1:
                return False
            if number == 0:
                shape = graph.values[value].shape
                shapes[value] = tuple(trips if d == dim else n for d, n in enumerate(shape))
            if operator.path[0] in rows:
                equation = operator.path[0]
                break
            if operator.name not in _PER_ROW:
                return False
            (factor,) = operator.rule.results[0][dim]  # a dim is one factor where each row is converted by itself
            dim = next(d for d, factors in enumerate(operator.rule.operands[0]) if factor in factors)
            if number == 0:
                changed[operator.index] = replace(operator, rule=_with_rows(operator.rule, trips, dim))
            value = operator.operands[0]
        if equation is None:
            return False
        found.append(rows[equation])
        if number == 0:
            first = equation
    in_a_row = all((a.input, a.dim, a.last) == (b.input, b.dim, b.first) for a, b in pairwise(found))
    if not in_a_row:
        return False
    new_rows[first] = replace(found[0], last=found[-1].last)
    changed[slices[0].index] = replace(slices[0], rule=_with_rows(slices[0].rule, trips))
    return True


def _with_rows(rule: Rule, rows: int, dim: int = 0) -> Rule:
    """The rule of an operator whose operand has so many rows on a dim."""
    stacked = set(rule.operands[0][dim])
    factors = tuple(replace(f, size=rows) if number in stacked else f for number, f in enumerate(rule.factors))
    return replace(rule, factors=factors)


def _oftener(operator: Operator, trips: int, in_all: int) -> Operator:
    """An operator of a scan of `trips` trips in one of `in_all`."""

    def more(times: int) -> int:
        return times * in_all // trips

    if operator.path[1] != -1:
        return replace(
            operator, repeats=more(operator.repeats), outer_repeats=more(operator.outer_repeats),
            operand_repeats=tuple(map(more, operator.operand_repeats)),
        )  # fmt: skip
    if operator.name == "scan_const":
        return operator
    reads = operator.operand_repeats
    if operator.name == "scan_carry":
        reads = (reads[0], more(reads[1]))
    return replace(operator, repeats=more(operator.repeats), operand_repeats=reads)


def _without_dead(
    inside: Sequence[Operator], gone: set[int], same: Mapping[int, int], read_later: Mapping[int, bool]
) -> list[Operator]:
    """The operators that are left, without those that only what is gone read."""
    left = [operator for operator in inside if operator.index not in gone]
    while True:
        read = {same.get(v, v) for operator in left for v in operator.operands if v is not None}
        before = {v for operator in inside for v in operator.operands if v is not None}
        alive = [
            operator
            for operator in left
            if any(
                v is not None and (v in read or read_later.get(v, False) or v not in before) for v in operator.results
            )
        ]
        if len(alive) == len(left):
            return left
        left = alive


def _renamed(operator: Operator, same: Mapping[int, int]) -> Operator:
    if not any(v in same for v in operator.operands if v is not None):
        return operator
    return replace(operator, operands=tuple(None if v is None else same.get(v, v) for v in operator.operands))
