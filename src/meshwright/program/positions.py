"""Which index arrays count the examples of the batch (`arange(batch)` in `x[arange(batch), label]`).

Indexing the batch dim by such an array reads, for each example, that example alone, which stays right in a microbatch.
Any other index along the batch dim may read other examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._jax.jaxpr import Equation, is_literal

_HANDED_ON = (
    "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "squeeze", "stop_gradient",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Positions:
    """What an array of indices has of the examples' own positions.

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
