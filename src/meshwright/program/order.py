"""What of a program depends on the order that a sort gives to rows, and in which way: the walk of `sorted_rows`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from .._jax.jaxpr import Equation, Jaxpr, is_dropped, is_literal, open_jaxpr, source_line
from .local import ON_ELEMENTS
from .ragged import is_ragged


class Refused(Exception):
    """A use of sorted rows that depends on their order, in words."""


@dataclass(frozen=True, slots=True, eq=False)
class Ordered:
    """A value that depends on the order.

    Args:
      dim: the dim that is the rows, or the places of rows.
      places: whether it has, for each element before sorting, something of its row; else it is rows.
      index: whether it is computed of the order itself, of which a device or a microbatch has another: it may only
        say which rows to read or write.
      numbers: the value of an index, were the order 0, 1, 2...; None of others.
    """

    dim: int
    places: bool = False
    index: bool = False
    numbers: Any = None


@dataclass(kw_only=True)
class Walk:
    """What was found.

    Args:
      inside: positions of the equations that read values that depend on the order.
      products: those of them that are products of groups.
      sorts: those that sort an order, which gives places.
      own: gathers and scatters between rows and what is at their place before sorting: the dim of the operand, and of
        the indices that are rows.
      kept: those whose results the derivative keeps.
      rows: the values that have rows.
      refusal: the first use of another kind.
    """

    inside: list[int] = field(default_factory=list)
    products: list[int] = field(default_factory=list)
    sorts: list[int] = field(default_factory=list)
    own: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    rows: set[Any] = field(default_factory=set)
    refusal: Refused | None = None


def followed(jaxpr: Jaxpr, sort: int, maker: Callable[[Any], Equation | None]) -> Walk:
    """Follow the results of an argsort through a program.

    Args:
      jaxpr: the program.
      sort: position of the sort.
      maker: the equation that makes a variable, None of inputs and literals.
    """
    walk, equations = Walk(), jaxpr.eqns
    keys, order = equations[sort].outvars
    if not _counts_up(maker(equations[sort].invars[1])):
        return walk
    extent = order.aval.shape[0]
    env: dict[Any, Ordered] = {keys: Ordered(0), order: Ordered(0, index=True, numbers=np.arange(extent))}
    follower = _Follower(env, walk, maker, extent)
    for position in range(sort + 1, len(equations)):
        equation = equations[position]
        if not any(not is_literal(a) and a in env for a in equation.invars):
            continue
        walk.inside.append(position)
        if is_ragged(equation):
            walk.products.append(position)
        try:
            made = follower.results(position, equation)
        except Refused as refusal:
            walk.refusal = walk.refusal or refusal
            # Products behind it tell whether this is a mixture at all.
            made = [Ordered(0)] * len(equation.outvars)
        for var, state in zip(equation.outvars, made, strict=True):
            if state is not None and not is_dropped(var):
                env[var] = state
    if any(not is_literal(a) and a in env for a in jaxpr.outvars):
        walk.refusal = walk.refusal or Refused(
            "sorted rows leave the function, or the body of the loop, that sorts them"
        )
    walk.rows = {var for var, state in env.items() if not state.places}
    return walk


def _counts_up(equation: Equation | None) -> bool:
    return equation is not None and equation.primitive.name == "iota" and len(equation.params["shape"]) == 1


@dataclass(slots=True)
class _Follower:
    env: dict[Any, Ordered]
    walk: Walk
    maker: Callable[[Any], Equation | None]
    extent: int

    def results(self, position: int, equation: Equation) -> Sequence[Ordered | None]:
        """How the results of an equation depend on the order; None of those that do not."""
        name = equation.primitive.name
        states = [None if is_literal(a) else self.env.get(a) for a in equation.invars]
        for i, state in enumerate(states):
            if state is not None and state.index and not (name in _ON_INDICES or i == _INDICES.get(name)):
                raise self._refusal(equation, "takes the order of rows for values")
        if name in ON_ELEMENTS or _is_on_elements(equation):
            found = self._on_elements(equation, states)
        elif name in _HOW:
            found = _HOW[name](self, position, equation, states)
        elif is_ragged(equation):
            found = self._product(position, equation, states)
        else:
            raise self._refusal(equation, "is no operator on rows alone")
        if found is not None and found.index and found.numbers is None:
            raise self._refusal(equation, "computes with the order of rows something else than an index")
        return [found] * len(equation.outvars)

    def _refusal(self, equation: Equation, why: str) -> Refused:
        return Refused(f"{equation.primitive.name} at {source_line(equation)} {why}")

    def _alike(self, equation: Equation, states: Sequence[Ordered | None]) -> Ordered:
        """The state of operands that have their rows in the same dim."""
        known = [state for state in states if state is not None]
        if any((one.dim, one.places, one.index) != (known[0].dim, known[0].places, known[0].index) for one in known):
            raise self._refusal(equation, "brings rows together with places, or with their order")
        return known[0]

    def _on_elements(self, equation: Equation, states: Sequence[Ordered | None]) -> Ordered:
        state = self._alike(equation, states)
        for atom, one in zip(equation.invars, states, strict=True):
            if one is None and not self._is_same_along(atom, state.dim):
                raise self._refusal(equation, "meets sorted rows with what is not sorted")
        return replace(state, numbers=self._numbers(equation, states))

    def _is_same_along(self, atom: Any, dim: int) -> bool:
        """Whether a value that does not depend on the order is the same for all rows."""
        shape = atom.aval.shape
        if not shape or shape[dim] == 1:
            return True
        equation = self.maker(atom)
        if equation is None:
            return False
        if equation.primitive.name == "broadcast_in_dim":
            return dim not in equation.params["broadcast_dimensions"]
        return equation.primitive.name in ON_ELEMENTS and all(self._is_same_along(a, dim) for a in equation.invars)

    def _numbers(self, equation: Equation, states: Sequence[Ordered | None]) -> Any:
        """What an operator makes of numbers that are known; None of others."""
        compute = _NUMBERS.get(equation.primitive.name)
        if compute is None or any(a.aval.dtype.kind not in "iub" for a in (*equation.invars, *equation.outvars)):
            return None  # floats round
        given = []
        for atom, state in zip(equation.invars, states, strict=True):
            number = self._constant(atom) if state is None else state.numbers
            if number is None:
                return None
            given.append(number)
        made = compute(equation, *given)
        return None if made is None else np.asarray(made).astype(equation.outvars[0].aval.dtype)  # may overflow

    def _constant(self, atom: Any) -> Any:
        if is_literal(atom):
            return np.asarray(atom.val)
        equation = self.maker(atom)
        return None if equation is None else self._numbers(equation, [None] * len(equation.invars))

    # One way for each kind of operator.

    def _view(self, position: int, equation: Equation, states: Sequence[Ordered | None]) -> Ordered:
        del position
        (state, *rest), before, after = states, equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        if state is None or rest:
            raise self._refusal(equation, "is no operator on rows alone")
        name = equation.primitive.name
        if name == "broadcast_in_dim":
            to = equation.params["broadcast_dimensions"][state.dim]
        elif name == "transpose":
            to = list(equation.params["permutation"]).index(state.dim)
        else:
            lead = prod(before[: state.dim])
            found = [d for d, n in enumerate(after) if n == before[state.dim] and prod(after[:d]) == lead]
            if not found:
                raise self._refusal(equation, "cuts sorted rows, or joins them")
            to = found[0]
        return replace(state, dim=to, numbers=self._numbers(equation, states))

    def _cut(self, position: int, equation: Equation, states: Sequence[Ordered | None]) -> Ordered:
        del position
        (state, *rest), params = states, equation.params
        whole = state is not None and not rest
        if equation.primitive.name == "slice" and state is not None:
            whole = whole and equation.outvars[0].aval.shape[state.dim] == self.extent
            whole = whole and (params["strides"] is None or params["strides"][state.dim] == 1)
        elif state is not None:
            whole = whole and params["axis"] != state.dim
        if state is None or not whole:
            raise self._refusal(equation, "takes some of the sorted rows")
        return replace(state, numbers=None)

    def _concatenate(self, position: int, equation: Equation, states: Sequence[Ordered | None]) -> Ordered:
        del position
        if None in states or equation.params["dimension"] == self._alike(equation, states).dim:
            raise self._refusal(equation, "puts sorted rows behind each other")
        return replace(self._alike(equation, states), numbers=None)

    def _sum(self, position: int, equation: Equation, states: Sequence[Ordered | None]) -> Ordered | None:
        del position
        state, axes = self._alike(equation, states), equation.params["axes"]
        if state.dim in axes:
            return None
        return replace(state, dim=state.dim - sum(d < state.dim for d in axes), numbers=None)

    def _dot(self, position: int, equation: Equation, states: Sequence[Ordered | None]) -> Ordered | None:
        self.walk.kept.append(position)
        (summed, batch), (left, right) = equation.params["dimension_numbers"], states
        where = [None if s is None else _place(s.dim, summed[i], batch[i]) for i, s in enumerate((left, right))]
        if None not in where and where[0] == where[1] and where[0] is not None:
            return None if where[0][0] == "summed" else Ordered(where[0][1])
        (known,) = [i for i, one in enumerate(where) if one is not None] if None in where else [None]
        if known is None or where[known] is None or where[known][0] != "free":  # pyrefly: ignore
            raise self._refusal(equation, "meets sorted rows with what is not sorted, or with each other")
        free = [d for d in range(equation.invars[known].aval.ndim) if d not in (*summed[known], *batch[known])]
        first = len(batch[0])
        if known == 1:
            first += equation.invars[0].aval.ndim - len(summed[0]) - len(batch[0])
        state = states[known]
        assert state is not None
        return Ordered(first + free.index(state.dim))

    def _product(self, position: int, equation: Equation, states: Sequence[Ordered | None]) -> Ordered:
        self.walk.kept.append(position)
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (summed, _), (batch, _) = numbers.dot_dimension_numbers
        (rows,) = numbers.lhs_ragged_dimensions
        left, *others = states
        if left is None or left.places or left.dim != rows or rows in summed or batch or any(others):
            raise self._refusal(equation, "is a product of groups of another kind")
        return Ordered(rows - sum(d < rows for d in summed))

    def _gather(self, position: int, equation: Equation, states: Sequence[Ordered | None]) -> Ordered | None:
        numbers, (read, at) = equation.params["dimension_numbers"], states
        operand, indices = (atom.aval for atom in equation.invars)
        if at is None or at.dim == indices.ndim - 1 or numbers.operand_batching_dims:
            raise self._refusal(equation, "reads sorted rows at places of its own")
        one_dim = len(numbers.start_index_map) == 1 and equation.params["slice_sizes"][numbers.start_index_map[0]] == 1
        if read is not None:  # rows that are brought back
            back = one_dim and not read.places and at.places and numbers.start_index_map[0] == read.dim
            if not back or self._ratio(at, operand.shape[read.dim]) != 1:
                raise self._refusal(equation, "reads sorted rows at other places than they came from")
            self.walk.own[position] = read.dim, at.dim
            return None
        if at.places:
            raise self._refusal(equation, "reads at the places of rows what is not sorted")
        self.walk.kept.append(position)
        if one_dim and self._ratio(at, operand.shape[numbers.start_index_map[0]]) is not None:
            self.walk.own[position] = numbers.start_index_map[0], at.dim
        elif at.index:
            raise self._refusal(equation, "reads what is not sorted at other places than rows came from")
        batch = [d for d in range(equation.outvars[0].aval.ndim) if d not in numbers.offset_dims]
        return Ordered(batch[at.dim])

    def _ratio(self, at: Ordered, extent: int) -> int | None:
        """How many elements in a row index one of a dim of this extent; None if they do not do so block by block."""
        if at.numbers is None or extent == 0 or self.extent % extent:
            return None
        numbers, ratio = np.asarray(at.numbers), self.extent // extent
        if numbers.size != self.extent or not np.array_equal(numbers.ravel(), np.arange(self.extent) // ratio):
            return None
        return ratio

    def _scatter(self, position: int, equation: Equation, states: Sequence[Ordered | None]) -> Ordered | None:
        numbers, (into, at, given) = equation.params["dimension_numbers"], states
        operand, indices, updates = (atom.aval for atom in equation.invars)
        dims = numbers.scatter_dims_to_operand_dims
        scattered = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
        if into is not None or at is None or at.places or at.dim == indices.ndim - 1 or given is None or given.places:
            raise self._refusal(equation, "writes sorted rows to places of its own")
        alike = given.dim == scattered[at.dim] and not numbers.operand_batching_dims
        ratio = (
            self._ratio(at, operand.shape[dims[0]]) if len(dims) == 1 and dims == numbers.inserted_window_dims else None
        )
        added = equation.primitive.name in ("scatter-add", "scatter_add")
        if not alike or ratio is None or (ratio != 1 and not added):
            raise self._refusal(equation, "writes sorted rows to other places than they came from")
        self.walk.own[position] = dims[0], at.dim
        return None

    def _sort(self, position: int, equation: Equation, states: Sequence[Ordered | None]) -> Ordered | None:
        keys = states[0]
        argsort = len(states) == 2 and equation.params["num_keys"] == 1 and _counts_up(self.maker(equation.invars[1]))
        if keys is None or keys.places or not argsort or self._ratio(keys, self.extent) != 1:
            raise self._refusal(equation, "sorts sorted rows by something else than their order")
        self.walk.sorts.append(position)
        return Ordered(0, places=True, index=True, numbers=np.arange(self.extent))


def _place(dim: int, summed: Sequence[int], batch: Sequence[int]) -> tuple[str, int]:
    """What a product does with a dim, and which of those it is."""
    if dim in summed:
        return "summed", list(summed).index(dim)
    return ("batch", list(batch).index(dim)) if dim in batch else ("free", -1)


def _is_on_elements(equation: Equation) -> bool:
    """Whether a call is of operators on elements alone."""
    if equation.primitive.name != "custom_jvp_call":
        return False
    body = open_jaxpr(equation.params["call_jaxpr"]).eqns
    return all(one.primitive.name in ON_ELEMENTS or _is_on_elements(one) or (one.primitive.name in ("jit", "pjit")
               and all(inner.primitive.name in ON_ELEMENTS for inner in open_jaxpr(one.params["jaxpr"]).eqns))
               for one in body)  # fmt: skip


# Which operators compute indices of indices, and which operand of others is one.
_ON_INDICES = frozenset((*ON_ELEMENTS, "broadcast_in_dim", "reshape", "squeeze", "expand_dims"))
_INDICES = {"gather": 1, "scatter": 1, "scatter-add": 1, "scatter_add": 1, "sort": 0}

_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
_HOW: Mapping[str, Callable[..., Ordered | None]] = {
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"), _Follower._view),
    **dict.fromkeys(("slice", "split"), _Follower._cut), "concatenate": _Follower._concatenate,
    **dict.fromkeys(_REDUCTIONS, _Follower._sum), "dot_general": _Follower._dot, "gather": _Follower._gather,
    **dict.fromkeys(("scatter-add", "scatter"), _Follower._scatter), "sort": _Follower._sort,
}  # fmt: skip


def _broadcast(equation: Equation, x: Any) -> Any:
    shape = equation.params["shape"]
    wide = [1] * len(shape)
    for d, n in zip(equation.params["broadcast_dimensions"], x.shape, strict=True):
        wide[d] = n
    return np.broadcast_to(x.reshape(wide), shape)


def _reshape(equation: Equation, x: Any) -> Any:
    return x.reshape(equation.outvars[0].aval.shape)


# Arithmetic of indices, as far as it is whole numbers: that of `//`, `%` and of what brings them into range.
_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "add": lambda _, x, y: x + y, "sub": lambda _, x, y: x - y, "mul": lambda _, x, y: x * y,
    "div": lambda _, x, y: np.trunc(x / y).astype(np.int64) if np.all(y) else None,
    "rem": lambda _, x, y: np.fmod(x, y) if np.all(y) else None,
    "sign": lambda _, x: np.sign(x), "max": lambda _, x, y: np.maximum(x, y), "min": lambda _, x, y: np.minimum(x, y),
    "clamp": lambda _, low, x, high: np.clip(x, low, high), "lt": lambda _, x, y: x < y, "gt": lambda _, x, y: x > y,
    "le": lambda _, x, y: x <= y, "ge": lambda _, x, y: x >= y, "eq": lambda _, x, y: x == y,
    "ne": lambda _, x, y: x != y, "and": lambda _, x, y: x & y, "or": lambda _, x, y: x | y, "not": lambda _, x: ~x,
    "select_n": lambda _, which, *cases: np.choose(which.astype(np.int64), np.broadcast_arrays(*cases)),
    "convert_element_type": lambda equation, x: x.astype(equation.params["new_dtype"]),
    "copy": lambda _, x: x, "stop_gradient": lambda _, x: x, "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "shift_right_logical": lambda _, x, y: x >> y, "shift_right_arithmetic": lambda _, x, y: x >> y,
}  # fmt: skip
