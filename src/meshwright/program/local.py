"""One equation evaluated on the shards of one device, inside a manual `shard_map`.

`restrict` says which factors of an equation can be split this way, `evaluate_local` does it. Most primitives are
*shape-free*: bound to shards with unchanged parameters they give the shards of the result. Those whose parameters hold
shapes or positions are rewritten here, one function each. An unknown primitive is tried on small shapes: if it gives
what its factor rule says, it is shape-free too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax.jaxpr import Equation, bind, result_avals
from .._jax.random import is_key, random_bits_block
from .factors import Dims, Rule

# Reductions whose partial results combine by one collective.
COMBINE: Mapping[str, str] = {
    "reduce_sum": "sum",
    "dot_general": "sum",
    "conv_general_dilated": "sum",
    "gather": "sum",
    "scatter-add": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
}


@dataclass(frozen=True, slots=True)
class Split:
    """How one equation is split.

    Args:
      rule: its factors.
      axes: for each factor the mesh axes that split it, major first.
      sizes: size of each axis.
    """

    rule: Rule
    axes: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]

    def dim_axes(self, dim: tuple[int, ...]) -> tuple[str, ...]:
        return next((self.axes[f] for f in dim if self.axes[f]), ())

    def local_shape(self, shape: Sequence[int], dims: Dims) -> tuple[int, ...]:
        return tuple(n // self.blocks(dim) for n, dim in zip(shape, dims, strict=True))

    def blocks(self, dim: tuple[int, ...]) -> int:
        return prod(self.sizes[axis] for axis in self.dim_axes(dim))

    def offset(self, extent: int, dim: tuple[int, ...]) -> Any:
        """Global position of the first element of this device's block of a dim of global `extent`."""
        return lax.axis_index(self.dim_axes(dim)) * (extent // self.blocks(dim))

    def reduced_axes(self) -> tuple[str, ...]:
        """The axes over which the results are partial."""
        return tuple(
            a for f, axes in zip(self.rule.factors, self.axes, strict=True) if f.kind == "reduction" for a in axes
        )


Evaluator = Callable[[Equation, Split, Sequence[Any]], Sequence[Any]]


def _result_shape(equation: Equation, split: Split) -> tuple[int, ...]:
    return split.local_shape(equation.outvars[0].aval.shape, split.rule.results[0])


def _broadcast_in_dim(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    shape = _result_shape(equation, split)
    return (lax.broadcast_in_dim(operands[0], shape, equation.params["broadcast_dimensions"]),)


def _reshape(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    return (lax.reshape(operands[0], _result_shape(equation, split)),)


def _iota(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    del operands
    aval, along = equation.outvars[0].aval, equation.params["dimension"]
    block = lax.broadcasted_iota(aval.dtype, _result_shape(equation, split), along)
    dim = split.rule.results[0][along]
    if split.dim_axes(dim):
        block = block + split.offset(aval.shape[along], dim).astype(aval.dtype)
    return (block,)


def _slice(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    params = equation.params
    limits = [
        limit // split.blocks(dim) for limit, dim in zip(params["limit_indices"], split.rule.operands[0], strict=True)
    ]
    return (lax.slice(operands[0], params["start_indices"], limits, params["strides"]),)


def _dynamic_slice(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    return (lax.dynamic_slice(operands[0], operands[1:], _result_shape(equation, split)),)


def _random_bits(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    shape = equation.params["shape"]
    dims = split.rule.results[0]
    local = split.local_shape(shape, dims)
    offsets = [split.offset(n, dim) if split.dim_axes(dim) else 0 for n, dim in zip(shape, dims, strict=True)]
    return (random_bits_block(operands[0], equation.params["bit_width"], shape, local, offsets),)


def _shift_indices(
    indices: Any,
    columns: Sequence[int],
    extents: Mapping[int, int],
    window: Sequence[int],
    dims: Dims,
    split: Split,
    clip: bool,
) -> tuple[Any, Any, Any]:
    """Global start indices to local ones for dims that are split; also which are in this block and which in range.

    Args:
      indices: `[..., columns]` start indices into the whole operand.
      columns: operand dim of each column.
      extents: global extent of each indexed dim.
      window: slice size of each operand dim.
      clip: whether out-of-range indices are clamped (they are in range then).
    """
    here = jnp.ones(indices.shape[:-1], bool)
    valid = jnp.ones(indices.shape[:-1], bool)
    shifted = []
    for column, dim in enumerate(columns):
        index = indices[..., column]
        last = extents[dim] - window[dim]
        if clip:
            index = jnp.clip(index, 0, last)
        valid &= (index >= 0) & (index <= last)
        if split.dim_axes(dims[dim]):
            local = extents[dim] // split.blocks(dims[dim])
            index = index - split.offset(extents[dim], dims[dim]).astype(index.dtype)
            here &= (index >= 0) & (index < local)
        shifted.append(index)
    return jnp.stack(shifted, axis=-1), here, valid


def _gather(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    operand, indices = operands
    params = equation.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    shape, dims = equation.invars[0].aval.shape, split.rule.operands[0]
    indexed = set(numbers.start_index_map)
    window = [
        size if d in indexed else size // split.blocks(dims[d]) if size > 1 else size
        for d, size in enumerate(params["slice_sizes"])
    ]
    masked = any(split.dim_axes(dims[d]) for d in indexed)
    if not masked:
        return (
            lax.gather(operand, indices, numbers, window, unique_indices=params["unique_indices"],
                       indices_are_sorted=params["indices_are_sorted"], mode=mode, fill_value=params["fill_value"]),
        )  # fmt: skip
    clip = mode == lax.GatherScatterMode.CLIP
    extents = {d: shape[d] for d in indexed}
    local, here, valid = _shift_indices(
        indices, numbers.start_index_map, extents, params["slice_sizes"], dims, split, clip
    )
    rows = lax.gather(operand, local, numbers, window, mode=lax.GatherScatterMode.CLIP)
    batch = [d for d in range(rows.ndim) if d not in numbers.offset_dims]
    spread = partial(lax.broadcast_in_dim, shape=rows.shape, broadcast_dimensions=batch)
    result = jnp.where(spread(here & valid), rows, jnp.zeros_like(rows))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        # The fill value must enter the sum over the blocks once.
        first = lax.axis_index(split.reduced_axes()) == 0
        fill = params["fill_value"]
        if fill is None:
            inexact = jnp.issubdtype(rows.dtype, jnp.inexact)
            fill = jnp.nan if inexact else jnp.iinfo(rows.dtype).min if rows.dtype != bool else True
        result = jnp.where(spread(~valid & first), jnp.asarray(fill, rows.dtype), result)
    return (result,)


def _scatter_add(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    operand, indices, updates = operands
    params = equation.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    shape, dims = equation.invars[0].aval.shape, split.rule.operands[0]
    indexed = set(numbers.scatter_dims_to_operand_dims)
    if any(split.dim_axes(dims[d]) for d in indexed):
        extents = {d: shape[d] for d in indexed}
        ones = [1] * len(shape)
        indices, here, valid = _shift_indices(
            indices, numbers.scatter_dims_to_operand_dims, extents, ones, dims, split,
            mode == lax.GatherScatterMode.CLIP,
        )  # fmt: skip
        # Out of this block is out of bounds: dropped.
        indices = jnp.where((here & valid)[..., None], indices, jnp.iinfo(indices.dtype).max)
        mode = lax.GatherScatterMode.FILL_OR_DROP
    if axes := split.reduced_axes():
        # Each block adds its own updates; the operand itself must enter the sum once.
        operand = jnp.where(lax.axis_index(axes) == 0, operand, jnp.zeros_like(operand))
    return (lax.scatter_add(operand, indices, updates, numbers, mode=mode),)


_EVALUATORS: Mapping[str, Evaluator] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "iota": _iota,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "random_bits": _random_bits,
    "gather": _gather,
    "scatter-add": _scatter_add,
}
_COMBINERS = {"max": lax.pmax, "min": lax.pmin}


def evaluate_local(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of `equation` on this device's shards.

    Results of a sum are left partial; a maximum or minimum is combined at once, since no later collective could.
    """
    if not any(split.axes):
        return bind(equation, *operands)
    name = equation.primitive.name
    combine = COMBINE.get(name)
    axes = split.reduced_axes()
    if axes and combine in _COMBINERS:
        # Only undifferentiated maxima are split (`restrict`); JAX has no derivative for their collective.
        operands = [lax.stop_gradient(x) for x in operands]
    evaluator = _EVALUATORS.get(name)
    results = evaluator(equation, split, operands) if evaluator else bind(equation, *operands)
    if axes and combine in _COMBINERS:
        results = [_COMBINERS[combine](r, axes) for r in results]
    return results


def restrict(equation: Equation, rule: Rule, *, differentiated: bool) -> Rule:
    """`rule` with every factor made whole that `evaluate_local` cannot split.

    Args:
      equation: an equation of plain arrays (no nested jaxpr of its own).
      rule: its composed Shardy rule.
      differentiated: whether a cotangent passes through it.
    """
    name = equation.primitive.name
    whole = {index for index, factor in enumerate(rule.factors) if factor.kind == "spatial"}
    combine = COMBINE.get(name)
    reductions = {index for index, factor in enumerate(rule.factors) if factor.kind == "reduction"}
    if combine is None or (combine != "sum" and differentiated):
        whole |= reductions
    # What is not summed must come out: Shardy leaves unrelated what it cannot relate (a reshape of 4 x 3 to 3 x 2 x 2).
    taken, made = (
        {factor for tensor in tensors for dim in tensor for factor in dim} for tensors in (rule.operands, rule.results)
    )
    whole |= taken - made - reductions
    if name == "reshape":
        whole |= made - taken
    shapes = [atom.aval.shape for atom in (*equation.invars, *equation.outvars)]
    for shape, dims in zip(shapes, (*rule.operands, *rule.results), strict=True):
        for extent, dim in zip(shape, dims, strict=True):
            if extent != prod(rule.factors[f].size for f in dim):
                whole.update(dim)  # a border or a window: the dim is not the factor's index
    if name == "gather":
        numbers, window = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        for d in numbers.start_index_map:
            if window[d] != 1:
                whole.update(rule.operands[0][d])
    elif name == "scatter-add":
        numbers = equation.params["dimension_numbers"]
        inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        for d in numbers.scatter_dims_to_operand_dims:
            if d not in inserted:
                whole.update(rule.operands[0][d])
    elif name == "dynamic_update_slice":
        for have, put, dim in zip(shapes[0], shapes[1], rule.operands[0], strict=True):
            if have != put:
                whole.update(dim)
    elif name == "reshape" and equation.params.get("dimensions") is not None:
        whole.update(range(len(rule.factors)))
    elif name == "conv_general_dilated":
        if equation.params["feature_group_count"] * equation.params["batch_group_count"] > 1:
            numbers = equation.params["dimension_numbers"]
            whole.update(*(rule.operands[1][d] for d in numbers.rhs_spec[:2]))
            if equation.params["batch_group_count"] > 1:
                whole.update(rule.operands[0][numbers.lhs_spec[0]])
    rule = rule.with_whole(sorted(whole))
    if name not in _EVALUATORS:
        rule = rule.with_whole([f for f in rule.splittable() if not _is_shape_free(equation, rule, f)])
    return rule


def _is_shape_free(equation: Equation, rule: Rule, factor: int) -> bool:
    """Whether the primitive, bound to blocks of one factor, gives results of the blocks' shapes."""
    size = rule.factors[factor].size
    pieces = next((p for p in (2, 3, 5, 7) if size % p == 0), size)

    def blocks(atoms: Sequence[Any], tensors: Sequence[Dims]) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(
                tuple(n // pieces if factor in dim else n for n, dim in zip(atom.aval.shape, dims, strict=True)),
                atom.aval.dtype,
            )
            for atom, dims in zip(atoms, tensors, strict=True)
        ]

    got = result_avals(equation, blocks(equation.invars, rule.operands))
    want = blocks(equation.outvars, rule.results)
    return got is not None and [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]


def has_keys(equation: Equation) -> bool:
    """Whether typed PRNG keys go in or out."""
    return any(is_key(atom.aval) for atom in (*equation.invars, *equation.outvars))
