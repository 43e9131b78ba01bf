"""The graph of operators: what the planner knows of a program. Pure data; needs no JAX to be searched.

Scans are flattened into it: an operator of a scan's body `repeats` as often as the scan, and *link* operators join the
body to the outside, so that one problem covers both:

* `scan_const`: a value the body reads every trip (outside value -> inside value);
* `scan_slice`: one row of a stacked input (outside `[trips, ...]` -> inside `[...]`);
* `scan_carry`: a loop-carried value (initial value, value after a trip -> value before a trip, final value);
* `scan_stack`: results stacked over the trips (inside `[...]` -> outside `[trips, ...]`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, wraps
from itertools import repeat
from math import prod
from operator import attrgetter, call
from typing import Any, TypeVar

from .factors import Rule

Path = tuple[int, ...]


# Operators with products of groups of rows (`program.ragged`, `program.sorted_rule`). Their first factor is the rows,
# or what leads them; their second one is the groups.
GROUPED = ("ragged_dot_general", "sorted_rows")
GROUPS = 1


@dataclass(frozen=True, kw_only=True)
class Value:
    """One array of the program.

    Args:
      index: its position in `Graph.values`.
      shape: global shape.
      dtype: NumPy name of the element type.
      itemsize: bytes of one element.
      differentiated: whether a cotangent flows back through it.
      constant: whether it depends on no input (masks, positions): computed where needed instead of moved.
      name: for reports, the input's path or the primitive that made it.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: float
    differentiated: bool
    constant: bool
    name: str

    @cached_property
    def bytes(self) -> float:
        """Bytes of the whole value."""
        return prod(self.shape) * self.itemsize

    def placed(self, index: int, shape: tuple[int, ...]) -> Value:
        """The same at another place in a graph, of another shape."""
        # Graphs of ranges are made by the thousand: `replace` takes ten times as long.
        new, own = object.__new__(Value), self.__dict__
        new.__dict__.update(
            index=index, shape=shape, dtype=own["dtype"], itemsize=own["itemsize"],
            differentiated=own["differentiated"], constant=own["constant"], name=own["name"],
        )  # fmt: skip
        return new


# What holds a program and is run as one operator.
CALLS = frozenset(["custom_jvp_call", "custom_vjp_call", "cond", "while"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One equation, or a link of a scan.

    Args:
      index: its position in `Graph.operators`.
      path: position of the equation in the jaxpr, one number for each level of nesting (a link: the scan's path, then
        -1 and the position among the scan's operands or results).
      name: primitive or link name.
      operands: value of each operand; None for a literal.
      results: value of each result; None for a result thrown away.
      rule: its factors.
      combine: how partial results of a split reduction combine: "sum", "max", "min", or None if it has no reduction.
      repeats: how often it runs in one evaluation of the program.
      outer_repeats: how often the scan it belongs to runs (a link), else `repeats`.
      operand_repeats: how often each operand is read; less than `repeats` where a scan's link reads from outside.
      region: the rematerialised region it is in (the path of its `jax.checkpoint`), None for none.
      kept: whether its results are kept although it is in one.
      flops: multiply-adds counted as two, of one run of the whole (unsplit) operator.
      matmul: whether the FLOPs are those of a matrix product or convolution.
      multiplied: the dtype that these multiply in; empty where it is none.
      backward_flops: of a call the FLOPs of products in one run of its derivative; None where they follow from those of
        the forward pass.
      differentiated: whether a cotangent passes through it.
      source: the user's line, for reports.
    """

    index: int
    path: Path
    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    rule: Rule
    combine: str | None
    repeats: int
    outer_repeats: int
    operand_repeats: tuple[int, ...]
    region: Path | None
    kept: bool
    flops: float
    matmul: bool
    multiplied: str
    backward_flops: float | None
    differentiated: bool
    source: str

    @property
    def is_call(self) -> bool:
        """Whether it holds a program and is run as one operator."""
        return self.name in CALLS

    @property
    def is_link(self) -> bool:
        """Whether it joins a scan's body to the outside."""
        return self.name.startswith("scan_")

    def placed(self, index: int, operands: tuple[int | None, ...], results: tuple[int | None, ...]) -> Operator:
        """The same at another place in a graph, between other values."""
        return self._but(index=index, operands=operands, results=results)

    def rematerialised(self, region: Path, *, kept: bool = False) -> Operator:
        """The same in a rematerialised region, its results kept or not."""
        return self._but(region=region, kept=kept)

    def _but(self, **changes: Any) -> Operator:
        # Graphs of ranges are made by the thousand: `replace` takes four times as long.
        new = object.__new__(Operator)
        deque(map(call, _SETTERS, repeat(new), _fields_of(self)), maxlen=0)
        for name, changed in changes.items():
            object.__setattr__(new, name, changed)
        return new


_NAMES = [one.name for one in fields(Operator)]
_SETTERS = [getattr(Operator, name).__set__ for name in _NAMES]
_fields_of = attrgetter(*_NAMES)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Operators and values of one program, in program order.

    Args:
      values: all arrays.
      operators: all operators.
      inputs: the value of each program input.
      outputs: the value of each program output (None: a literal or an input passed through untouched is its value).
      parameters: which inputs are differentiated, as positions in `inputs`.
      part_of: of a cut, the graph of the whole program and for each operator its index there; else None.
    """

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    parameters: tuple[int, ...]
    part_of: tuple[Graph, tuple[int, ...]] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def producer(self) -> Mapping[int, tuple[int, int]]:
        """For each value made by an operator: the operator and the position among its results."""
        return {
            value: (operator.index, position)
            for operator in self.operators
            for position, value in enumerate(operator.results)
            if value is not None
        }

    @cached_property
    def consumers(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """For each value: the operators that read it and the operand position."""
        found: dict[int, list[tuple[int, int]]] = {}
        for operator in self.operators:
            for position, value in enumerate(operator.operands):
                if value is not None:
                    found.setdefault(value, []).append((operator.index, position))
        return {value: tuple(users) for value, users in found.items()}

    @cached_property
    def runs(self) -> int:
        """How many operators one evaluation runs."""
        return sum(operator.repeats for operator in self.operators)

    def is_constant(self, operator: Operator) -> bool:
        """Whether what an operator makes depends on no input."""
        return all(v is None or self.values[v].constant for v in operator.results)

    def is_read_once(self, value: int) -> bool:
        """Whether one operator reads a value, beside those that make constants."""
        readers = self.consumers.get(value, ())
        return sum(not self.is_constant(self.operators[user]) for user, _ in readers) == 1

    @cached_property
    def flops(self) -> float:
        """Matrix-product and convolution FLOPs of one forward evaluation."""
        return sum(op.flops * op.repeats for op in self.operators if op.matmul)


Of = TypeVar("Of")
Found = TypeVar("Found")


def once_for_each(function: Callable[[Of], Found]) -> Callable[[Of], Found]:
    """A function of a graph, or of a program, that is worked out once for each, as a property of it that is kept; what
    it returns is not to be changed."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def known(of: Of) -> Found:
        kept = vars(of)
        if name not in kept:
            kept[name] = function(of)
        return kept[name]

    return known
