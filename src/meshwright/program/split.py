"""How one equation is cut over mesh axes, and where this device's blocks lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import lax

from .factors import Dims, Rule


def mesh_order(axes: Sequence[str]) -> tuple[str, ...]:
    """Axes in the order of the mesh at hand."""
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes)


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
        """The axes that split a dim of these factors, major first."""
        return next((self.axes[f] for f in dim if self.axes[f]), ())

    def local_shape(self, shape: Sequence[int], dims: Dims) -> tuple[int, ...]:
        """Shape of this device's block of a tensor of global `shape`."""
        return tuple(n // self.blocks(dim) for n, dim in zip(shape, dims, strict=True))

    def blocks(self, dim: tuple[int, ...]) -> int:
        """Into how many blocks a dim of these factors is cut."""
        return prod(self.sizes[axis] for axis in self.dim_axes(dim))

    def offset(self, extent: int, dim: tuple[int, ...]) -> Any:
        """Global position of the first element of this device's block of a dim of global `extent`."""
        return lax.axis_index(self.dim_axes(dim)) * (extent // self.blocks(dim))

    def reduced_axes(self) -> tuple[str, ...]:
        """The axes over which the results are partial."""
        return tuple(
            a for f, axes in zip(self.rule.factors, self.axes, strict=True) if f.kind == "reduction" for a in axes
        )
