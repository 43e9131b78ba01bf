"""Spatial splits: convolutions and pooling over an image cut into strips, neighbours exchanging borders (*halos*).

A window of effective size k and stride s whose padding is `low` reads, for a block of any extent, `low` elements of the
block before and k - s - low of the block after. They arrive by one `permute` each, or several where a block is shorter
than the halo, and take the place of the padding; at the edges of the image what arrives is the padding's value. Two
dims are exchanged one after the other, so corners travel with the second. The derivative of a `permute` is the
`permute` back: the backward pass moves as many bytes as the forward one.

Known limits: only dims with one output for each stride of the input (SAME padding; VALID where the window is no longer
than its stride); no dilated input, so not the transposed convolutions of a decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._jax.attention_ring import permuted
from .._jax.jaxpr import Equation, bind
from .factors import Rule
from .groups import local_groups
from .split import Split, mesh_order

POOLS = ("reduce_window_max", "reduce_window_min", "reduce_window_sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """How a window slides over one spatial dim.

    Args:
      factor: the factor that counts its positions.
      position: of the dim in the equation's padding.
      dim: of the first operand.
      halo: elements needed before and after a block.
      spare: elements at the end of a block that no window of it reads.
    """

    factor: int
    position: int
    dim: int
    halo: tuple[int, int]
    spare: int


def spatial_rule(equation: Equation, rule: Rule) -> Rule:
    """`rule` with the halo of every spatial factor that can be split; the other spatial ones are whole."""
    halos = {window.factor: window.halo for window in _windows(equation, rule)}
    rule = rule.with_whole([i for i, f in enumerate(rule.factors) if f.kind == "spatial" and i not in halos])
    factors = tuple(replace(f, halo=halos[i]) if i in halos else f for i, f in enumerate(rule.factors))
    return replace(rule, factors=factors)


def _windows(equation: Equation, rule: Rule) -> list[_Window]:
    """The dims a window slides over that can be split."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        kernel = equation.invars[1].aval.shape
        places = zip(
            numbers.lhs_spec[2:], numbers.out_spec[2:], (kernel[d] for d in numbers.rhs_spec[2:]),
            params["window_strides"], params["lhs_dilation"], params["rhs_dilation"], params["padding"], strict=True,
        )  # fmt: skip
    elif name in POOLS:
        dims = range(equation.invars[0].aval.ndim)
        places = zip(
            dims, dims, params["window_dimensions"], params["window_strides"], params["base_dilation"],
            params["window_dilation"], params["padding"], strict=True,
        )  # fmt: skip
    else:
        return []
    found = []
    for position, (dim, out, size, stride, base, dilation, (low, _)) in enumerate(places):
        counted = rule.results[0][out]
        if len(counted) != 1 or rule.factors[counted[0]].kind != "spatial":
            continue
        # Positions and elements correspond only where every element has its share of positions.
        fits = rule.factors[counted[0]].size * stride == equation.invars[0].aval.shape[dim]
        if not fits or rule.operands[0][dim][:1] != counted or base != 1 or low < 0:
            continue
        after = (size - 1) * dilation + 1 - stride - low
        found.append(
            _Window(
                factor=counted[0], position=position, dim=dim, halo=(low, max(after, 0)), spare=max(-after, 0)
            )
        )  # fmt: skip
    return found


def windowed(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """A convolution or pooling on shards."""
    x, *rest = operands
    padding = list(equation.params["padding"])
    for window in _windows(equation, split.rule):
        axes = split.axes[window.factor]
        if axes:
            before, after = window.halo
            fill = _padding_value(equation)
            parts = [*_arriving(x, window.dim, before, axes, split.sizes, 1, fill)[::-1], x]
            parts += _arriving(x, window.dim, after, axes, split.sizes, -1, fill)
            x = lax.concatenate(parts, window.dim) if len(parts) > 1 else x
            padding[window.position] = (0, -window.spare)
    params = {**equation.params, "padding": tuple(padding), **local_groups(equation, split)}
    return bind(equation.replace(params=params), x, *rest)


def _padding_value(equation: Equation) -> Any:
    """What the operator reads beyond the edges."""
    dtype = equation.invars[0].aval.dtype
    worst = {"reduce_window_max": -1, "reduce_window_min": 1}.get(equation.primitive.name, 0)
    if worst == 0 or jnp.issubdtype(dtype, jnp.inexact):
        return worst * jnp.inf if worst else 0
    return jnp.iinfo(dtype).min if worst < 0 else jnp.iinfo(dtype).max


def _arriving(
    x: Any, dim: int, count: int, axes: tuple[str, ...], sizes: Mapping[str, int], step: int, fill: Any
) -> list[Any]:
    """The `count` elements next to this block, nearest first: from the blocks before (`step` 1) or after (-1)."""
    blocks = prod(sizes[axis] for axis in axes)
    extent, pieces = x.shape[dim], []
    for hop, width in enumerate(_hops(count, extent), 1):
        start = extent - width if step > 0 else 0
        piece = lax.slice_in_dim(x, start, start + width, axis=dim)
        pairs = [(i, i + step * hop) for i in range(blocks) if 0 <= i + step * hop < blocks]
        if not pairs:
            pieces.append(jnp.full_like(piece, fill))
            continue
        arrived = permuted(piece, pairs, axes, sizes, mesh_order(axes))
        if fill != 0:  # who has no sender receives zeros
            here = lax.axis_index(axes)
            arrived = jnp.where(here < hop if step > 0 else here >= blocks - hop, jnp.full_like(piece, fill), arrived)
        pieces.append(arrived)
    return pieces


def _hops(count: int, extent: int) -> list[int]:
    """How many elements come from the next block, the one after it, and so on."""
    return [min(extent, count - taken) for taken in range(0, count, extent)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloMove:
    """One `permute` of an operator split spatially.

    Args:
      axes: the mesh axes whose neighbours exchange, major first.
      size_bytes: what one device sends, forward; the backward pass sends as much over the same links.
    """

    axes: tuple[str, ...]
    size_bytes: float


def halo_bytes(
    rule: Rule, axes: Sequence[tuple[str, ...]], shape: Sequence[int], itemsize: float, sizes: Mapping[str, int]
) -> tuple[HaloMove, ...]:
    """What the halos of one operator cost to move, in the order it is done.

    Args:
      rule: the operator's factors.
      axes: of its algorithm: for each factor the axes that split it.
      shape: global shape of its first operand.
      itemsize: bytes of one of its elements.
      sizes: mesh axis sizes.

    >>> from .factors import Factor
    >>> rule = Rule(operands=(((0,), (1,)),), results=(((0,), (1,)),), factors=(
    ...     Factor(4, "parallel"), Factor(8, "spatial", halo=(1, 1))))
    >>> [move.size_bytes for move in halo_bytes(rule, [(), ("x",)], (4, 8), 4.0, {"x": 2})]
    [16.0, 16.0]
    """
    if not rule.operands:
        return ()
    local = [
        extent // prod(sizes[axis] for f in dim for axis in axes[f])
        for extent, dim in zip(shape, rule.operands[0], strict=True)
    ]
    moves = []
    for d, dim in enumerate(rule.operands[0]):
        factor = rule.factors[dim[0]] if dim else None
        if factor is None or factor.kind != "spatial" or not axes[dim[0]]:
            continue
        blocks = prod(sizes[axis] for axis in axes[dim[0]])
        across = prod(local[:d]) * prod(local[d + 1 :]) * itemsize
        for count in factor.halo:
            hops = _hops(count, local[d])[: blocks - 1]
            moves += [HaloMove(axes=axes[dim[0]], size_bytes=width * across) for width in hops]
        local[d] += sum(factor.halo)
    return tuple(moves)
