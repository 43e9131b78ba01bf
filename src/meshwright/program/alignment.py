"""Which rows of a result belong to which examples, operator by operator.

A microbatch has a piece of each array of the batch. That is the program of the whole batch on fewer examples only where
every operator keeps the examples in their places: what it computes of an example goes where the example is. The batch
dim of a value is made of *runs*, in each of which all examples follow each other: one run in an array of the batch
(batch, or batch x tokens with the batch as the major part), two where two views of the batch are concatenated, one for
each token where the tokens are the major part. A value that is the same for all examples has none. Where the batch was
cut into blocks (a `shard_map` over it), the dims that count the blocks are its *majors*: the run goes through all.

`aligned` says of one equation, known at two batch sizes, how the batch lies in its results, or that examples meet in
it: those of other microbatches would be needed. Operators on elements, and those that move, sum or pair whole dims, are
read from their parameters; of any other one the factor rule has to say that the batch passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .._jax.jaxpr import Equation
from .local import ON_ELEMENTS
from .positions import Positions
from .rules import Rules


@dataclass(frozen=True, slots=True)
class Lie:
    """How the batch lies in a value.

    Args:
      runs: of its batch dim; 0 if all examples have the same, or it has none.
      majors: the dims that count blocks of the batch.
      along: of a value that is the same for all examples, the dims along which it may differ.
    """

    runs: int = 0
    majors: tuple[int, ...] = ()
    along: frozenset[int] = frozenset()


NO_BATCH = Lie()


@dataclass(frozen=True, slots=True)
class Side:
    """An operand or result at both batch sizes.

    Args:
      full: its shape for the whole batch.
      small: for a microbatch.
      lie: of an operand, how the batch lies in it.
      positions: that an operand holds.
    """

    full: tuple[int, ...]
    small: tuple[int, ...]
    lie: Lie = NO_BATCH
    positions: Positions | None = None

    @property
    def runs(self) -> int:
        """Of its batch dim."""
        return self.lie.runs

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


def shape_of(atom: Any) -> tuple[int, ...]:
    """Of a value; () if it has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def aligned(full: Equation, small: Equation, operands: Sequence[Side], ratio: int, rules: Rules) -> list[Lie | None]:
    """How the batch lies in each result; None where examples meet.

    Args:
      full: an equation of no inner program, in the program of the whole batch.
      small: the same of a microbatch.
      operands: of it.
      ratio: how many microbatches there are.
      rules: to ask for those of unknown operators.
    """
    found: list[Lie | None] = []
    for x, y in zip(full.outvars, small.outvars, strict=True):
        at = _At(full, small, operands, Side(shape_of(x), shape_of(y)))
        dims = at.result.dims
        if len(dims) > 1 or any(at.result.full[d] != ratio * at.result.small[d] for d in dims):
            found.append(None)
        elif not dims and not any(side.dims for side in operands):
            found.append(Lie(int(at.result.full != at.result.small)))
        elif full.primitive.name in ("reshape", "squeeze", "expand_dims"):
            found.append(_reshape(at))
        elif any(side.lie.majors for side in operands):
            found.append(_in_blocks(at))
        else:
            runs = _runs(at, rules)
            found.append(None if runs is None else Lie(runs, (), _along(at) if runs == 0 else frozenset()))
    return found


def _runs(at: _At, rules: Rules) -> int | None:
    name = at.full.primitive.name
    if name in _HOW:
        return _HOW[name](at)
    if name in ON_ELEMENTS or name.startswith("random_") or name in _ALSO_ON_ELEMENTS:
        return _together(at)
    return _of_last_dims(at, 2) if name in _OF_MATRICES else _by_rule(at, rules)


def _along(at: _At) -> frozenset[int]:
    """The dims along which a result that is the same for all examples may differ."""
    name = at.full.primitive.name
    if name == "broadcast_in_dim":
        (shape, dims) = at.operands[0].full, at.params["broadcast_dimensions"]
        return frozenset(d for d, extent in zip(dims, shape, strict=True) if extent > 1)
    if name in ON_ELEMENTS:
        return frozenset().union(*(side.lie.along for side in at.operands))
    return frozenset(range(len(at.result.full)))


def _in_blocks(at: _At) -> Lie | None:
    """Of operators on a batch that was cut into blocks."""
    name, result = at.full.primitive.name, at.result
    cut = [side for side in at.operands if side.lie.majors]
    batch, majors = cut[0].batch, cut[0].lie.majors
    if any((side.batch, side.lie.majors) != (batch, majors) for side in cut):
        return None if name != "dot_general" else _dot_in_blocks(at)
    whole = {*majors, batch}
    if name in ON_ELEMENTS or name == "concatenate":
        others = [side for side in at.operands if side not in cut and side.full]
        same = all(
            not side.runs and side.lie.along.isdisjoint(majors) if side.dims else all(side.full[d] == 1 for d in majors)
            for side in others
        )
        return Lie(1, majors) if same and at.params.get("dimension") not in whole else None
    if name in ("slice", "split", "dynamic_slice"):
        side = at.operands[0]
        uncut = all(side.full[d] == result.full[d] and side.small[d] == result.small[d] for d in whole if d is not None)
        return Lie(1, majors) if uncut and result.batch == batch else None
    if name in ("broadcast_in_dim", "transpose"):
        to = at.params.get("broadcast_dimensions")
        if to is None:
            order = list(at.params["permutation"])
            to = [order.index(d) for d in range(len(order))]
        return Lie(1, tuple(to[d] for d in majors)) if to[batch or 0] == result.batch else None
    if name in _REDUCTIONS and len(at.operands) == 1:
        axes = set(at.params["axes"])
        if whole <= axes:
            return Lie()
        left = [d for d in range(len(at.operands[0].full)) if d not in axes]
        return Lie(1, tuple(left.index(d) for d in majors)) if whole.isdisjoint(axes) else None
    return _dot_in_blocks(at) if name == "dot_general" else None


def _dot_in_blocks(at: _At) -> Lie | None:
    """A product over all of the batch, or one for each example or block of it."""
    summed, paired = at.params["dimension_numbers"]
    first = [[*side.lie.majors, side.batch] if side.dims else [] for side in at.operands[:2]]
    if all(set(first[i]) <= set(summed[i]) for i in (0, 1)):
        pairs = [[list(summed[i]).index(d) for d in first[i]] for i in (0, 1)]
        return Lie() if pairs[0] == pairs[1] else None
    made: list[tuple[int, ...]] = []
    places: list[dict[int, int]] = []
    after = len(paired[0])
    for i, side in enumerate(at.operands[:2]):
        free = [d for d in range(len(side.full)) if d not in summed[i] and d not in paired[i]]
        place = {d: n for n, d in enumerate(paired[i])} | {d: after + n for n, d in enumerate(free)}
        after += len(free)
        places.append(place)
        if any(d not in place for d in first[i]):
            return None
        if first[i]:
            made.append(tuple(place[d] for d in first[i]))
    # Blocks that are paired with what is no batch would each meet another part of it.
    alone = [i for i in (0, 1) if not first[i]]
    meets = any(place in places[i].values() for i in alone for dims in made for place in dims)
    return Lie(1, made[0][:-1]) if len(set(made)) == 1 and not meets else None


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


def _reshape(at: _At) -> Lie | None:
    side, out = at.operands[0], at.result
    if side.batch is None or out.batch is None:
        return Lie(side.runs) if prod(side.small) == prod(out.small) else None
    start = side.lie.majors[0] if side.lie.majors else side.batch
    if any(d not in side.lie.majors and side.full[d] > 1 for d in range(start, side.batch)):
        return None
    # Of all elements in order: how many runs, and how long one is.
    runs = prod(side.full[:start]) * max(side.runs, 1)
    before, after = prod(out.full[: out.batch]), prod(out.full[out.batch + 1 :])
    if runs % before == 0:
        whole = all((prod(shape) // runs) % after == 0 for shape in (side.full, side.small))
        return Lie(runs // before) if whole else None
    first = next((d for d in range(out.batch) if prod(out.full[:d]) == runs), None)
    return None if first is None else Lie(1, tuple(d for d in range(first, out.batch) if out.full[d] > 1))


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


def _mixing(parameter: str, *, ordered: bool = True) -> Callable[[_At], int | None]:
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


_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
    "argmin", "psum", "pmax", "pmin",
)  # fmt: skip
_SCATTERS = "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max"
_HOW: Mapping[str, Callable[[_At], int | None]] = {
    "iota": _new, "random_bits": _new, "random_split": _new, "rng_bit_generator": _new, "rng_uniform": _new,
    "broadcast_in_dim": _broadcast, "transpose": _transpose,
     "dot_general": _dot, "conv_general_dilated": _convolution, "slice": _slice,
    "split": _split, "dynamic_slice": _dynamic_slice, "dynamic_update_slice": _dynamic_update_slice,
    "concatenate": _concatenate, "pad": _pad, "gather": _gather, "top_k": _top_k, "fft": _fft,
    "sort": _mixing("dimension", ordered=False), "rev": _mixing("dimensions", ordered=False),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _mixing("axis")),
    **dict.fromkeys(_REDUCTIONS, _reduce), **dict.fromkeys(_SCATTERS.split(), _scatter),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window_max",
         "select_and_scatter_add", "select_and_gather_add"), _window,
    ),
}  # fmt: skip
