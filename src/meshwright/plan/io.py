"""Plans as JSON text: an exact round trip, and a refusal by name for every file that is not a plan.

The document mirrors the dataclasses of `plan.py` field by field, in their order, and is made from their annotations: a
field added there is saved, read and checked without a change here. Fields at their default are left out, sets are
sorted, floats keep every digit (`"inf"` stands for infinity, which JSON lacks), so equal plans give equal text.

Only the operators are written otherwise, since a program has thousands of them and few ways to split one: a table of
distinct ways, and for each run of neighbouring equations the row of each.

Every number in a plan is a position, a size or a duration, so every negative one is refused; but for the -1 that the
path of a scan's link has in the place of an equation (`program.graph`).
"""

from __future__ import annotations

import json
import math
import os
import secrets
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from ..errors import PlanError
from .check import AGAIN, check_plan, refusal
from .plan import SCHEMA, OperatorPlan, Plan, Stage

_WIDTH = 120


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON. A reader sees the old file or the new one, never a part.

    Args:
      plan: to be written.
      path: file to write; its directory exists.

    Raises:
      PlanError: if the plan could not be read back (an axis its mesh lacks, a NaN), or the file cannot be written.
    """
    path = Path(path)
    document = plan_to_dict(plan)
    plan_from_dict(document, source="the plan to be saved")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write("".join(_layout(document, 0, 0)) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise PlanError(
            refused="saving a plan", got=f"{type(error).__name__}: {error.strerror}", needed="a file to write",
            where=str(path), try_="a path in a directory that exists and is yours",
        ) from error  # fmt: skip


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that `save_plan` wrote.

    Args:
      path: the file.

    Raises:
      PlanError: if it cannot be read, or is no plan of this schema, with the place in the file.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except OSError as error:
        raise PlanError(
            refused="loading a plan", got=f"{type(error).__name__}: {error.strerror}", needed="a readable file",
            where=str(path), try_="the path that was given to `plan.save`",
        ) from error  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise PlanError(
            refused="loading a plan", got=f"text that is not JSON ({error})", needed="the JSON text of a plan",
            where=str(path), try_=AGAIN,
        ) from error  # fmt: skip
    return plan_from_dict(document, source=str(path))


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as dicts, lists, strings and numbers, with the schema's number first."""
    return {"schema": SCHEMA, **_encode(plan)}


def plan_from_dict(document: Any, *, source: str = "the plan") -> Plan:
    """The plan that `plan_to_dict` made this of.

    Args:
      document: what `json.loads` gives.
      source: what to call it in errors, such as its file's name.

    Raises:
      PlanError: if the schema is another one, a field is missing, unknown or of the wrong type, a number is NaN or
        negative, a sharding uses an axis that the mesh lacks or does not fit its shape, or mesh and devices disagree.
    """
    if not isinstance(document, Mapping):
        raise refusal(source, "", f"{_kind(document)}", "an object with the fields of a plan")
    version = document.get("schema")
    if version != SCHEMA or isinstance(version, bool):
        got = "no schema" if "schema" not in document else f"schema {version!r}"
        newer = isinstance(version, int) and version > SCHEMA
        raise refusal(source, "schema", got, f"schema {SCHEMA}", "a newer Meshwright" if newer else "planning again")
    plan: Plan = _decode(Plan, {key: value for key, value in document.items() if key != "schema"}, source, "")
    check_plan(plan, source=source)
    return plan


# The operators' own form


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to split an operator, shared by many."""

    name: str
    axes: tuple[tuple[str, ...], ...]
    broadcast: frozenset[str] = frozenset()


# A position in a path: -1 stands for the links of a scan.
_Place = NewType("_Place", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Equations that follow each other: the path of the first, and for each its row in the table of ways."""

    path: tuple[_Place, ...]
    ways: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operators:
    ways: tuple[_Way, ...]
    runs: tuple[_Run, ...]


def _pack(operators: Sequence[OperatorPlan]) -> _Operators:
    rows: dict[_Way, int] = {}
    runs: list[tuple[tuple[int, ...], list[int]]] = []
    for operator in operators:
        way = _Way(name=operator.name, axes=operator.axes, broadcast=operator.broadcast)
        row = rows.setdefault(way, len(rows))
        if runs and operator.path and operator.path == _step(runs[-1][0], len(runs[-1][1])):
            runs[-1][1].append(row)
        else:
            runs.append((operator.path, [row]))
    return _Operators(
        ways=tuple(rows), runs=tuple(_Run(path=tuple(map(_Place, path)), ways=tuple(ways)) for path, ways in runs)
    )


def _unpack(packed: _Operators, source: str, place: str) -> tuple[OperatorPlan, ...]:
    operators = []
    for number, run in enumerate(packed.runs):
        where = f"{place}.runs[{number}]"
        if len(run.ways) > 1 and not run.path:
            raise refusal(source, where, f"{len(run.ways)} operators without a path", "a path of at least one number")
        for offset, row in enumerate(run.ways):
            if row >= len(packed.ways):
                raise refusal(source, where, f"row {row}", f"one of the {len(packed.ways)} rows of {place}.ways")
            way = packed.ways[row]
            path = _step(run.path, offset)
            operators.append(OperatorPlan(path=path, name=way.name, axes=way.axes, broadcast=way.broadcast))
    return tuple(operators)


def _step(path: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The path of the equation `count` places after `path`, on the same level of nesting."""
    return (*path[:-1], path[-1] + count) if path else ()


# Data to JSON and back, by the dataclasses' annotations


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: Any
    default: Any


@cache
def _fields(kind: type) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    found = []
    for f in fields(kind):
        packed = kind is Stage and f.name == "operators"
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        found.append(_Field(f.name, _Operators if packed else hints[f.name], default))
    return tuple(found)


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        given = ((f, getattr(value, f.name)) for f in _fields(type(value)))
        return {
            f.name: _encode(_pack(v) if f.type is _Operators else v)
            for f, v in given
            if f.default is MISSING or v != f.default
        }
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    return "inf" if isinstance(value, float) and value == math.inf else value


def _decode(kind: Any, value: Any, source: str, place: str) -> Any:
    """`value` as a `kind`; `place` says where in `source` it stands."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [a for a in args if a is not type(None)]
        # Where a field takes a list or a number, the text says which it is.
        listed = [a for a in kinds if get_origin(a) is tuple]
        plain = [a for a in kinds if a not in listed]
        (kind,) = (listed if isinstance(value, list) else plain) or kinds
        return _decode(kind, value, source, place)
    if is_dataclass(kind):
        return _decode_object(kind, value, source, place)
    if origin in (tuple, frozenset):
        if not isinstance(value, list):
            raise refusal(source, place, _kind(value), "a list")
        if origin is tuple and args[-1] is not Ellipsis:
            if len(value) != len(args):
                raise refusal(source, place, f"{len(value)} entries", f"{len(args)} entries")
            kinds = args
        else:
            kinds = (args[0],) * len(value)
        return origin(_decode(k, v, source, f"{place}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    return _decode_scalar(kind, value, source, place)


def _decode_object(kind: Any, value: Any, source: str, place: str) -> Any:
    if not isinstance(value, Mapping):
        raise refusal(source, place, _kind(value), "an object")
    known = {f.name: f for f in _fields(kind)}
    for key in value:
        if key not in known:
            near = get_close_matches(str(key), [*known], n=1, cutoff=0.5)
            hint = f"{near[0]!r}" if near else "removing the field"
            raise refusal(source, place, f"the unknown field {key!r}", f"only {', '.join(known)}", hint)
    given = {}
    for name, f in known.items():
        inner = f"{place}.{name}" if place else name
        if name not in value:
            if f.default is MISSING:
                raise refusal(source, place, f"no field {name!r}", f"the fields {', '.join(known)}")
            continue
        read = _decode(f.type, value[name], source, inner)
        given[name] = _unpack(read, source, inner) if isinstance(read, _Operators) else read
    try:
        return kind(**given)
    except ValueError as error:
        raise refusal(source, place, str(error), f"a valid {kind.__name__}") from error


def _decode_scalar(kind: Any, value: Any, source: str, place: str) -> Any:
    if kind is str:
        if not isinstance(value, str):
            raise refusal(source, place, _kind(value), "a string")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise refusal(source, place, _kind(value), "true or false")
        return value
    if kind is float and value == "inf":
        return math.inf
    if kind is _Place:
        if value == -1 and not isinstance(value, bool):
            return -1
        kind = int
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise refusal(source, place, _kind(value), "a whole number" if kind is int else "a number")
    if not 0 <= value < math.inf:
        raise refusal(source, place, f"{value!r}", "a number that is not negative" if value < 0 else "a finite number")
    try:
        return kind(value)
    except OverflowError as error:
        raise refusal(source, place, f"a number of {len(str(value))} digits", "a number a float can hold") from error


# Text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the field {next(k for k in keys if keys.count(k) > 1)!r} twice in one object")
    return found


def _constant(name: str) -> float:
    raise ValueError(f"{name}, which JSON lacks")


def _layout(value: Any, indent: int, column: int) -> Iterator[str]:
    """JSON with every object and list on one line that fits on one, so that text diffs are short."""
    line = json.dumps(value)
    if column + len(line) < _WIDTH or not isinstance(value, (dict, list)):
        yield line
        return
    inner = indent + 1
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    yield opening
    entries = value.items() if isinstance(value, dict) else ((None, v) for v in value)
    column, separator = _WIDTH, ""
    for key, entry in entries:
        prefix = f"{json.dumps(key)}: " if key is not None else ""
        # Numbers share lines; everything else has its own.
        width = len(json.dumps(entry)) + 2 if isinstance(entry, (int, float)) and key is None else _WIDTH
        fresh = column + width > _WIDTH
        yield separator + ("\n" + " " * inner if fresh else " ") + prefix
        yield from _layout(entry, inner, inner + len(prefix))
        column = (inner if fresh else column) + width
        separator = ","
    yield "\n" + " " * indent + closing


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    shown = "" if isinstance(value, (dict, list, type(None))) else f" {value!r:.60}"
    return f"{names.get(type(value), 'the number')}{shown}"
