"""Gathers and scatters on shards: along an indexed dim each device serves the indices that fall into its block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._jax.jaxpr import Equation, bind
from .factors import Dims, Rule
from .split import Split


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


def gather(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """`gather` on shards; over a split indexed dim the result is a sum with one summand that is not zero."""
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
        fill = jnp.asarray(params["fill_value"], rows.dtype)
        result = jnp.where(spread(~valid & first), fill, result)
    return (result,)


def gather_whole(equation: Equation, rule: Rule) -> set[int]:
    """Factors of a gather that are not split: indexed dims of which a window is read."""
    numbers, window = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    return {f for d in numbers.start_index_map if window[d] != 1 for f in rule.operands[0][d]}


def scatter(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """Every kind of `scatter` on shards."""
    operand, indices, updates = operands
    params = dict(equation.params)
    numbers = params["dimension_numbers"]
    shape, dims = equation.invars[0].aval.shape, split.rule.operands[0]
    indexed = set(numbers.scatter_dims_to_operand_dims)
    if any(split.dim_axes(dims[d]) for d in indexed):
        extents = {d: shape[d] for d in indexed}
        ones = [1] * len(shape)
        clip = params["mode"] == lax.GatherScatterMode.CLIP
        indices, here, valid = _shift_indices(
            indices, numbers.scatter_dims_to_operand_dims, extents, ones, dims, split, clip
        )
        # Out of this block is out of bounds, hence dropped; all of them differ, in case they are promised to.
        outside = max(shape) + lax.iota(indices.dtype, here.size).reshape(here.shape)
        indices = jnp.where((here & valid)[..., None], indices, outside[..., None])
        params |= {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    if axes := split.reduced_axes():
        # Each block adds its own updates; the operand itself must enter the sum once.
        operand = jnp.where(lax.axis_index(axes) == 0, operand, jnp.zeros_like(operand))
    return bind(equation.replace(params=params), operand, indices, updates)


def scatter_whole(equation: Equation, rule: Rule) -> set[int]:
    """Factors of a scatter that are not split: indexed dims of which a window is written."""
    numbers = equation.params["dimension_numbers"]
    inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    indexed = numbers.scatter_dims_to_operand_dims
    return {f for d in indexed if d not in inserted for f in rule.operands[0][d]}
