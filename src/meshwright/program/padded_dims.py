"""Dims of inputs that the planned program has longer (`padding`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import PlanError
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

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"a dim padded to a multiple of {self.multiple}")

    def __str__(self) -> str:
        return f"dim {self.dim} of {self.name}"

    def extent(self, shape: Sequence[int]) -> int:
        """The padded extent, of an input of this shape."""
        return -(-shape[self.dim] // self.multiple) * self.multiple


def padded_shapes(graph: Graph, padded: Sequence[PaddedDim]) -> list[Extents]:
    """For each input the shape that it is to be read in: padded dims, and dims of the same index in proportion.

    Args:
      graph: of the program as it is.
      padded: the dims.

    Raises:
      PlanError: if there is no such input.
    """
    indices = indices_of(graph)
    ratios: dict[int | None, Fraction] = {}
    known = {value.name: value for value in (graph.values[v] for v in graph.inputs)}
    for one in padded:
        value = known.get(one.name)
        if value is None or one.dim >= len(value.shape):
            raise PlanError(
                refused="a padded dim of the plan", got=str(one),
                needed="a dim of an input that the loss function reads",
                where="padded", try_="planning again: a step's code and shapes are part of its plan",
            )  # fmt: skip
        if value.shape[one.dim]:
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
