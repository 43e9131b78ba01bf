"""Specs of one value or operand, one for each choice, as the key of a table."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from ...sharding import Spec


class SpecRow(tuple[Spec, ...]):
    """An interned tuple of specs, hashed once: tables are looked up by rows a hundred thousand times a search, and
    equal rows are one object.

    >>> row = SpecRow([Spec.replicated(1)])
    >>> row == (Spec.replicated(1),), row is SpecRow([Spec.replicated(1)])
    (True, True)
    """

    _hash: int

    def __new__(cls, specs: Iterable[Spec]) -> SpecRow:
        """The row of these specs."""
        given = tuple(specs)
        known = _KNOWN.get(given)
        if known is None:
            known = super().__new__(cls, given)
            known._hash = hash(given)
            _KNOWN[given] = known
        return known

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def distinct(self) -> bool:
        """Whether no two of them are the same."""
        return len(set(self)) == len(self)

    @cached_property
    def without_broadcast(self) -> SpecRow:
        """The row of values that have no cotangent."""
        return SpecRow(spec.without_broadcast() for spec in self)


# Layouts of operators on meshes of two axes: a few thousand rows, whatever is planned.
_KNOWN: dict[tuple[Spec, ...], SpecRow] = {}
