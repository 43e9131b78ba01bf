"""Specs of one value or operand, one for each choice, as the key of a table."""

from __future__ import annotations

from collections.abc import Iterable

from ..sharding import Spec


class SpecRow(tuple[Spec, ...]):
    """A tuple of specs that is hashed once: tables are looked up by them a hundred thousand times a search.

    >>> SpecRow([Spec.replicated(1)]) == (Spec.replicated(1),)
    True
    """

    _hash: int

    def __new__(cls, specs: Iterable[Spec]) -> SpecRow:
        """The row of these specs."""
        made = super().__new__(cls, specs)
        made._hash = tuple.__hash__(made)
        return made

    def __hash__(self) -> int:
        return self._hash
