"""Dims of inputs that the planned program has longer (`padding`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .graph import Graph
from .origins import indices_of

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class PaddedDim:
    """A dim of an input that the planned program has longer, with all dims of the program that are the same index.

    Args:
      name: of the input.
      dim: of it.
      multiple: its extent in the planned program is the next multiple of this.
    """

    name: str
    dim: int
    multiple: int

    def extent(self, shape: Sequence[int]) -> int:
        """The padded extent, of an input of this shape."""
        return -(-shape[self.dim] // self.multiple) * self.multiple


def padded_shapes(graph: Graph, padded: Sequence[PaddedDim]) -> list[Extents]:
    """For each input the shape that it is to be read in: padded dims, and dims of the same index in proportion.

    Args:
      graph: of the program as it is.
      padded: the dims; those that the program does not have are left out.
    """
    indices = indices_of(graph)
    ratios: dict[int | None, Fraction] = {}
    for value in (graph.values[v] for v in graph.inputs):
        for one in padded:
            if one.name == value.name and one.dim < len(value.shape) and value.shape[one.dim]:
                index = indices.of_dim(value.index, one.dim)
                ratios[index] = Fraction(one.extent(value.shape), value.shape[one.dim])
    ratios.pop(None, None)
    found = []
    for value in graph.inputs:
        shape = []
        for dim, extent in enumerate(graph.values[value].shape):
            longer = extent * ratios.get(indices.of_dim(value, dim), Fraction(1))
            shape.append(int(longer) if longer.denominator == 1 else extent)
        found.append(tuple(shape))
    return found
