"""What is equal is printed once: the members of a sequence, grouped by what is to be printed of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from ..plan.words import number_runs, number_words

_Shown = TypeVar("_Shown", bound=Hashable)

# A group of more separate runs of numbers is printed as a group for each run. Six runs are about 50 characters.
_MOST_RUNS = 6


def grouped(shown: Sequence[_Shown]) -> list[tuple[tuple[int, ...], _Shown]]:
    """The positions of equal elements, and the element, in the order of the first positions.

    Neighbours are always in one group, others where their numbers can be said in a few words.

    >>> grouped("abbab")
    [((0, 3), 'a'), ((1, 2, 4), 'b')]
    """
    members: dict[_Shown, list[int]] = {}
    for position, one in enumerate(shown):
        members.setdefault(one, []).append(position)
    groups: list[tuple[tuple[int, ...], _Shown]] = []
    for one, positions in members.items():
        if number_words(positions).count(",") < _MOST_RUNS:
            groups.append((tuple(positions), one))
        else:
            groups += [(tuple(range(*run)), one) for run in number_runs(positions)]
    return sorted(groups, key=lambda group: group[0])
