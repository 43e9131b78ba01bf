"""Which rows of a result belong to which examples, operator by operator.

A microbatch has a piece of each array of the batch. That is the program of the whole batch on fewer examples only where
every operator keeps the examples in their places: what it computes of an example goes where the example is. The batch
dim of a value is made of *runs*, in each of which all examples follow each other: one run in an array of the batch
(batch, or batch x tokens with the batch as the major part), two where two views of the batch are concatenated, one for
each token where the tokens are the major part. A value that is the same for all examples has none.

`aligned` says of one equation, known at two batch sizes, how many runs its results have, or that examples meet in it:
those of other microbatches would be needed. Operators on elements, and those that move, sum or pair whole dims, are
read from their parameters; of any other one the factor rule has to say that the batch passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from .._jax.jaxpr import Equation, is_literal
from .local import ON_ELEMENTS
from .rules import Rules


@dataclass(frozen=True, slots=True)
class Positions:
    """Integers that are the examples' own positions, as an index into arrays of the batch (`x[arange(batch), label]`).

    Args:
      extent: of the dim that they are positions in, for the whole batch.
      kind: "own"; "past", the same and the extent; "never", whether they are negative.
      columns: of index vectors, which of their numbers are positions; None if all are.
    """

    extent: int
    kind: str = "own"
    columns: tuple[int, ...] | None = None

    def column(self, number: int) -> bool:
        """Whether a number of an index vector is a position."""
        return self.kind == "own" and (self.columns is None or number in self.columns)


@dataclass(frozen=True, slots=True)
class Side:
    """An operand or result at both batch sizes.

    Args:
      full: its shape for the whole batch.
      small: for a microbatch.
      runs: of an operand; 0 if all examples have the same, or it has no batch dim.
      positions: that an operand holds.
    """

    full: tuple[int, ...]
    small: tuple[int, ...]
    runs: int = 0
    positions: Positions | None = None

    @property
    def dims(self) -> list[int]:
        """Those whose extents differ; of a microbatch of one example that is spread out by another way, none."""
        if len(self.full) != len(self.small):
            return []
        return [d for d, (x, y) in enumerate(zip(self.full, self.small, strict=True)) if x != y]

    @property
    def batch(self) -> int | None:
        """The batch dim."""
        return next(iter(self.dims), None)


@dataclass(frozen=True, slots=True)
class _At:
    """An equation at both batch sizes."""

    full: Equation
    small: Equation
    operands: Sequence[Side]
    result: Side

    @property
    def params(self) -> Mapping[str, Any]:
        return self.full.params


_HANDED_ON = (
    "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "squeeze", "stop_gradient",
)  # fmt: skip


def positions_of(full: Equation, small: Equation, held: Sequence[Positions | None]) -> Positions | None:
    """The examples' own positions, where an equation makes them, hands them on, or sees to it that an index
    is not negative.

    Args:
      full: an equation in the program of the whole batch.
      small: the same of a microbatch.
      held: by its operands.
    """
    name = full.primitive.name
    if name == "iota":
        along = full.params["dimension"]
        extent = full.params["shape"][along]
        return Positions(extent) if extent != small.params["shape"][along] else None
    if name == "concatenate" and full.params["dimension"] == full.outvars[0].aval.ndim - 1:
        columns: list[int] = []
        first = 0
        for atom, one in zip(full.invars, held, strict=True):
            width = atom.aval.shape[-1]
            columns += [first + i for i in range(width) if one is not None and one.column(i)]
            first += width
        extents = {one.extent for one in held if one is not None}
        return Positions(extents.pop(), columns=tuple(columns)) if columns and len(extents) == 1 else None
    first = held[0] if held else None
    if name == "select_n":
        is_index = first is not None and first.kind == "never" and held[1] == replace(first, kind="own")
        return held[1] if is_index else None
    if first is None or first.columns is not None:
        return None
    if name in _HANDED_ON:
        return first
    if first.kind == "own" and len(full.invars) == 2 and is_literal(full.invars[1]):
        value = full.invars[1].val
        if name == "lt" and value == 0:
            return replace(first, kind="never")
        if name == "add" and value == first.extent:
            return replace(first, kind="past")
    return None


def shape_of(atom: Any) -> tuple[int, ...]:
    """Of a value; () if it has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def aligned(full: Equation, small: Equation, operands: Sequence[Side], ratio: int, rules: Rules) -> list[int | None]:
    """The runs of each result; None where examples meet.

    Args:
      full: an equation of no inner program, in the program of the whole batch.
      small: the same of a microbatch.
      operands: of it.
      ratio: how many microbatches there are.
      rules: to ask for those of unknown operators.
    """
    name = full.primitive.name
    found: list[int | None] = []
    for x, y in zip(full.outvars, small.outvars, strict=True):
        at = _At(full, small, operands, Side(shape_of(x), shape_of(y)))
        dims = at.result.dims
        if len(dims) > 1 or any(at.result.full[d] != ratio * at.result.small[d] for d in dims):
            found.append(None)
        elif not dims and not any(side.dims for side in operands):
            found.append(1 if at.result.full != at.result.small else 0)
        elif name in _HOW:
            found.append(_HOW[name](at))
        elif name in ON_ELEMENTS or name.startswith("random_") or name in _ALSO_ON_ELEMENTS:
            found.append(_together(at))
        elif name in _OF_MATRICES:
            found.append(_of_last_dims(at, 2))
        else:
            found.append(_by_rule(at, rules))
    return found


_ALSO_ON_ELEMENTS = frozenset(["threefry2x32", "optimization_barrier", "real", "imag", "complex", "conj", "copy_p"])
_OF_MATRICES = frozenset(
    """cholesky eig eigh householder_product lu lu_pivots_to_permutation qr schur svd triangular_solve
    tridiagonal_solve""".split()  # noqa: SIM905 (a table)
)


def _merged(sides: Sequence[Side]) -> int | None:
    """The runs of what is made of operands element by element."""
    runs = {side.runs for side in sides if side.batch is not None and side.runs}
    return None if len(runs) > 1 else max(runs, default=0)


def _together(at: _At) -> int | None:
    where = {side.batch for side in at.operands if side.dims}
    return _merged(at.operands) if where <= {at.result.batch} or at.result.batch is None else None


def _new(at: _At) -> int | None:
    """Positions, and draws of the shape of the batch: an element for each example, in order."""
    return 1 if at.result.dims else _together(at)


def _broadcast(at: _At) -> int | None:
    side = at.operands[0]
    if side.batch is None:
        return 0
    return side.runs if at.params["broadcast_dimensions"][side.batch] == at.result.batch else None


def _transpose(at: _At) -> int | None:
    side = at.operands[0]
    return side.runs if at.params["permutation"][at.result.batch or 0] == side.batch else None


def _reshape(at: _At) -> int | None:
    side, out = at.operands[0], at.result
    if side.batch is None or out.batch is None:
        return side.runs if prod(side.small) == prod(out.small) else None
    # Of all elements in order: how many runs, and how long one is.
    runs = prod(side.full[: side.batch]) * max(side.runs, 1)
    before, after = prod(out.full[: out.batch]), prod(out.full[out.batch + 1 :])
    if runs % before or (prod(side.full) // runs) % after or (prod(side.small) // runs) % after:
        return None
    return runs // before


def _reduce(at: _At) -> int | None:
    """A reduction, whose result has no batch dim where it sums over it."""
    axes = at.params["axes"]
    if any(side.batch in axes for side in at.operands if side.dims):
        return 0
    return _merged(at.operands)


def _dot(at: _At) -> int | None:
    return _merged(at.operands)


def _convolution(at: _At) -> int | None:
    numbers, (lhs, rhs) = at.params["dimension_numbers"], at.operands[:2]
    if any(at.full.params[count] != at.small.params[count] for count in ("feature_group_count", "batch_group_count")):
        # A convolution for each example, of which the batch is the groups.
        allowed = lhs.batch in (None, numbers.lhs_spec[1]) and rhs.batch in (None, numbers.rhs_spec[0])
        return 1 if allowed and max(lhs.runs, rhs.runs) <= 1 else None
    if rhs.dims:
        # A sum over the examples, as the gradient of a kernel is.
        summed = lhs.batch == numbers.lhs_spec[1] and rhs.batch == numbers.rhs_spec[1]
        return _merged((lhs, rhs)) if summed else None
    return lhs.runs if lhs.batch == numbers.lhs_spec[0] else None


def _piece(side: Side, full: tuple[int, int, int], small: tuple[int, int, int]) -> int | None:
    """The runs of a slice (start, limit, stride) along the batch dim."""
    dim = side.batch
    assert dim is not None
    if not side.runs or (full == (0, side.full[dim], 1) and small == (0, side.small[dim], 1)):
        return side.runs
    lengths = side.full[dim] // side.runs, side.small[dim] // side.runs
    bounds = [[edge // length for edge in cut[:2]] for cut, length in zip((full, small), lengths, strict=True)]
    exact = all(edge % n == 0 for cut, n in zip((full, small), lengths, strict=True) for edge in cut[:2])
    if full[2] == small[2] == 1:
        return bounds[0][1] - bounds[0][0] if exact and bounds[0] == bounds[1] else None
    # One of every so many: of each example, or of each group of neighbours.
    start, stride = full[0], full[2]
    whole = small[0] == start < stride == small[2] and all(length % stride == 0 for length in lengths)
    ends = (full[1], side.full[dim]), (small[1], side.small[dim])
    return side.runs if whole and all(of_all - end < stride for end, of_all in ends) else None


def _slice(at: _At) -> int | None:
    side = at.operands[0]
    if side.batch is None or at.result.batch is None:
        return 0  # an example, which `growth` knows to be no sum
    cuts = []
    for params, shape in ((at.params, side.full), (at.small.params, side.small)):
        strides = params["strides"] or (1,) * len(shape)
        edges = params["start_indices"][side.batch], params["limit_indices"][side.batch]
        cuts.append((*edges, strides[side.batch]))
    return _piece(side, cuts[0], cuts[1])


def _split(at: _At) -> int | None:
    side, axis = at.operands[0], at.params["axis"]
    if side.batch != axis:
        return side.runs
    sizes = at.params["sizes"], at.small.params["sizes"]
    # Of equal parts any tells of all; of others none is told.
    if len(set(sizes[0])) > 1 or len(set(sizes[1])) > 1:
        return None if side.runs else 0
    return _piece(side, (0, sizes[0][0], 1), (0, sizes[1][0], 1))


def _dynamic_slice(at: _At) -> int | None:
    side = at.operands[0]
    if side.batch is None or at.result.batch is None:
        return 0
    return side.runs if at.result.full[side.batch] == side.full[side.batch] else None


def _dynamic_update_slice(at: _At) -> int | None:
    side, update = at.operands[:2]
    dim = at.result.batch
    if dim is None or update.full[dim] != side.full[dim] or update.small[dim] != side.small[dim]:
        return None
    return _merged((side, update))


def _concatenate(at: _At) -> int | None:
    along, dim = at.params["dimension"], at.result.batch
    if along != dim:
        return _together(at)
    if any(side.batch != dim for side in at.operands):
        return None
    runs = [max(side.runs, 1) for side in at.operands]
    lengths = {side.full[along] // n for side, n in zip(at.operands, runs, strict=True)}
    return sum(runs) if len(lengths) == 1 else None


def _pad(at: _At) -> int | None:
    side = at.operands[0]
    if side.batch is None:
        return None if at.result.dims else 0
    return side.runs if tuple(at.params["padding_config"][side.batch]) == (0, 0, 0) else None


def _along(parameter: str, *, ordered: bool = True) -> Callable[[_At], int | None]:
    """Of operators that mix what is along some dims.

    Args:
      parameter: that says which dims.
      ordered: whether they tell elements apart that are all the same.
    """

    def runs(at: _At) -> int | None:
        dims = at.params[parameter]
        dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
        if any(side.batch in dims for side in at.operands if side.dims):
            return 0 if not ordered and not any(side.runs for side in at.operands) else None
        return _together(at)

    return runs


def _of_last_dims(at: _At, count: int) -> int | None:
    """Of operators that see a number of last dims as a whole."""
    if any(side.batch is not None and side.batch >= len(side.full) - count for side in at.operands):
        return None
    return _merged(at.operands)


def _top_k(at: _At) -> int | None:
    side = at.operands[0]
    if side.batch == at.params.get("axis", len(side.full) - 1) % len(side.full):
        return 0 if not at.result.dims else None
    return side.runs


def _fft(at: _At) -> int | None:
    return _of_last_dims(at, len(at.params["fft_lengths"]))


def _window(at: _At) -> int | None:
    dim = at.operands[0].batch
    if dim is None:
        return None if at.result.dims else 0
    windows, strides = at.params["window_dimensions"], at.params["window_strides"]
    still = dim < len(windows) and windows[dim] == strides[dim] == 1
    return _together(at) if still and tuple(at.params["padding"][dim]) == (0, 0) else None


def _gather(at: _At) -> int | None:
    side, indices = at.operands[:2]
    if side.batch is None:
        return indices.runs
    numbers, dim, pair = at.params["dimension_numbers"], side.batch, (side, indices)
    if dim in numbers.operand_batching_dims:
        return _merged(pair)
    sizes = at.params["slice_sizes"][dim], at.small.params["slice_sizes"][dim]
    if sizes == (side.full[dim], side.small[dim]):
        return side.runs if not indices.dims else None
    if dim in numbers.start_index_map and _is_own(side, indices, numbers.start_index_map.index(dim)):
        return _merged(pair)
    return (0 if not at.result.dims else None) if side.runs else indices.runs


def _is_own(side: Side, indices: Side, column: int) -> bool:
    """Whether indices into the batch dim of an operand are the positions of the examples that they belong to."""
    positions, dim = indices.positions, side.batch
    assert dim is not None
    return positions is not None and positions.extent == side.full[dim] and positions.column(column) and side.runs <= 1


def _scatter(at: _At) -> int | None:
    side, indices, updates = at.operands[:3]
    dim = side.batch
    if dim is None:
        return 0 if not at.result.dims and _merged((indices, updates)) is not None else None
    numbers = at.params["dimension_numbers"]
    if dim in numbers.operand_batching_dims:
        return _merged((side, indices, updates))
    column = list(numbers.scatter_dims_to_operand_dims)
    if dim in column:
        own = _is_own(side, indices, column.index(dim))
        return _merged((side, indices, updates)) if own else None
    if updates.batch is None or indices.dims:
        return None
    return _merged((side, updates)) if updates.full[updates.batch] == side.full[dim] else None


def _by_rule(at: _At, rules: Rules) -> int | None:
    """Of any other operator the factor rule has to say that the batch passes through, or that it is summed over."""
    try:
        rules.prepare([(at.small, False)])
        rule = rules.rule(at.small, differentiated=False)
    except (KeyError, NotImplementedError, ValueError):
        return None
    place = next(i for i, v in enumerate(at.small.outvars) if shape_of(v) == at.result.small)
    leading = {f for f in (_lead(rule, rule.results[place], at.result.batch),) if f is not None}
    for side, dims in zip(at.operands, rule.operands, strict=True):
        if side.dims:
            factor = _lead(rule, dims, side.batch)
            if factor is None:
                return None
            kind = rule.factors[factor].kind
            if kind != "parallel" and not (kind == "reduction" and not at.result.dims):
                return None
            leading.add(factor)
    return _merged(at.operands) if len(leading) == 1 else None


def _lead(rule: Any, dims: Any, dim: int | None) -> int | None:
    return None if dim is None else next(iter(dims[dim]), None)


_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
_SCATTERS = "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max"
_HOW: Mapping[str, Callable[[_At], int | None]] = {
    "iota": _new, "random_bits": _new, "random_split": _new, "rng_bit_generator": _new, "rng_uniform": _new,
    "broadcast_in_dim": _broadcast, "transpose": _transpose, "reshape": _reshape, "squeeze": _reshape,
    "expand_dims": _reshape, "dot_general": _dot, "conv_general_dilated": _convolution, "slice": _slice,
    "split": _split, "dynamic_slice": _dynamic_slice, "dynamic_update_slice": _dynamic_update_slice,
    "concatenate": _concatenate, "pad": _pad, "gather": _gather, "top_k": _top_k, "fft": _fft,
    "sort": _along("dimension", ordered=False), "rev": _along("dimensions", ordered=False),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce), **dict.fromkeys(_SCATTERS.split(), _scatter),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window_max",
         "select_and_scatter_add", "select_and_gather_add"), _window,
    ),
}  # fmt: skip
