"""The sharding spec of a value: one state per mesh axis.

A value is, over each axis of a mesh,

* *replicated*: every device holds the same numbers;
* *sharded* on a dim: every device holds one block of that dim;
* *partial*: every device holds a summand, the value is their sum;
* *broadcast*: replicated, and its cotangent is partial. This is the dual of partial (a broadcast forward is a sum
  backward): the operand of an operator is in this state over every axis that splits a factor the operand lacks.

An axis that a spec does not mention is replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Spec:
    """Sharding of one value.

    Args:
      dims: for each dim of the value, the axes that split it, major first.
      partial: axes over which the value is a sum of its shards.
      broadcast: axes over which the value is replicated and its cotangent partial.

    Raises:
      ValueError: if an axis has two states.

    >>> Spec(dims=(("x",), ()), partial=frozenset({"y"}))
    Spec(x, - | partial y)
    """

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()
    broadcast: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Specs are the keys of every table of the search: hashed once.
        return hash((self.dims, self.partial, self.broadcast))

    def __post_init__(self) -> None:
        split = tuple(axis for dim in self.dims for axis in dim) if any(self.dims) else ()
        # The search makes very many specs: this is looked up in the instance, without a descriptor.
        self.__dict__["sharded_axes"] = split
        axes = (*split, *self.partial, *self.broadcast)
        if len(axes) > 1 and len(set(axes)) != len(axes):
            raise ValueError(
                f"refused the sharding spec {self!r}: got an axis with two states, needed each axis once; "
                "try to remove the axis from all places but one"
            )

    @classmethod
    def replicated(cls, rank: int) -> Spec:
        """The spec of a value of `rank` dims that every device holds whole."""
        return cls(dims=((),) * rank)

    @cached_property
    def sharded_axes(self) -> tuple[str, ...]:
        """The axes that split a dim, in dim order."""
        raise AssertionError("set when the spec is made")

    @property
    def is_replicated(self) -> bool:
        """Whether every axis is replicated."""
        return not self.sharded_axes and not self.partial and not self.broadcast

    def dim_of(self, axis: str) -> int | None:
        """The dim that `axis` splits, or None."""
        return next((d for d, axes in enumerate(self.dims) if axis in axes), None)

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Into how many blocks the value is cut."""
        count = 1
        for axis in self.sharded_axes:
            count *= sizes[axis]
        return count

    def local_shape(self, shape: Iterable[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one device's block of a value of global `shape`; every split divides its dim."""
        local = []
        for extent, axes in zip(shape, self.dims, strict=True):
            for axis in axes:
                extent //= sizes[axis]
            local.append(extent)
        return tuple(local)

    def divides(self, shape: Iterable[int], sizes: Mapping[str, int]) -> bool:
        """Whether every dim of `shape` splits evenly."""
        for extent, axes in zip(shape, self.dims, strict=True):
            for axis in axes:
                if extent % sizes[axis]:
                    return False
                extent //= sizes[axis]
        return True

    def without_broadcast(self) -> Spec:
        """The spec of the same value where it has no cotangent."""
        return Spec(self.dims, self.partial) if self.broadcast else self

    def __repr__(self) -> str:
        parts = [", ".join("".join(axes) if axes else "-" for axes in self.dims)]
        if self.partial:
            parts.append("partial " + " ".join(sorted(self.partial)))
        if self.broadcast:
            parts.append("broadcast " + " ".join(sorted(self.broadcast)))
        return f"Spec({' | '.join(parts)})"
