"""Numbers of nodes and edges laid end to end, to be summed over choices by one look-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np


class FlatNodes:
    """One or several numbers for each choice of each node.

    >>> float(FlatNodes([np.array([1.0, 2.0]), np.array([10.0])]).sum(np.array([1, 0])))
    12.0

    Args:
        rows: of each node, shape (k_v,).
        more: the same of further numbers.

    Attributes:
        numbers: of all nodes, shape (choices of all nodes,), or where there are more (choices of all nodes, numbers).
        starts: of each node, where its own begin.
    """

    def __init__(self, rows: Sequence[np.ndarray], *more: Sequence[np.ndarray]) -> None:
        each = [np.concatenate(one) if one else np.zeros(0) for one in (rows, *more)]
        self.numbers = np.stack(each, axis=1) if more else each[0]
        self.starts = np.cumsum([0, *map(len, rows)], dtype=int)[:-1]

    def sum(self, choices: np.ndarray) -> np.ndarray:
        """The numbers of these choices, one for each node, together.

        Args:
            choices: shape (nodes,), or (nodes, cases).
        """
        starts = self.starts if choices.ndim == 1 else self.starts[:, None]
        return self.numbers[starts + choices].sum(axis=0)


class FlatEdges:
    """A number for each pair of choices of some pairs of nodes.

    >>> float(FlatEdges([(0, 1, np.array([[1.0, 2.0], [3.0, 4.0]]))]).sum(np.array([1, 0])))
    3.0

    Args:
        edges: two nodes each, and their table. Pairs may have the same array; it is held once.
    """

    def __init__(self, edges: Sequence[tuple[int, int, np.ndarray]]) -> None:
        tables = {id(table): table for _, _, table in edges}
        self._numbers = np.concatenate([np.zeros(0), *(table.ravel() for table in tables.values())])
        starts = dict(zip(tables, accumulate((table.size for table in tables.values()), initial=0), strict=False))
        self._starts = np.array([starts[id(table)] for _, _, table in edges], dtype=int)
        self._first = np.array([u for u, _, _ in edges], dtype=int)
        self._second = np.array([v for _, v, _ in edges], dtype=int)
        self._height, self._width = np.array([table.shape for _, _, table in edges], dtype=int).reshape(-1, 2).T

    @classmethod
    def of(cls, edges: Mapping[tuple[int, int], np.ndarray]) -> FlatEdges:
        """Those of a problem."""
        return cls([(u, v, table) for (u, v), table in edges.items()])

    def sum(self, choices: np.ndarray) -> np.ndarray:
        """The numbers of these choices, one for each node, together.

        Args:
            choices: shape (nodes,), or (nodes, cases).
        """
        return self.between(choices, choices).sum(axis=0)

    def between(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Of each pair the number of one choice of its first node and one of its second.

        Args:
            first: a choice of each node, shape (nodes,), or (nodes, cases).
            second: the same.
        """
        starts, width = self._starts, self._width
        if first.ndim == 2:
            starts, width = starts[:, None], width[:, None]
        return self._numbers[starts + first[self._first] * width + second[self._second]]

    def beside(self, choices: np.ndarray, nodes: FlatNodes) -> np.ndarray:
        """Of each choice of each node the numbers with these choices of its neighbours together, node after node.

        Args:
            choices: shape (nodes,).
            nodes: with the same choices.
        """
        (upper, row), (lower, column) = self._rows, self._columns
        first = self._starts[upper] + row * self._width[upper] + choices[self._second][upper]
        second = self._starts[lower] + choices[self._first][lower] * self._width[lower] + column
        at = np.concatenate([nodes.starts[self._first][upper] + row, nodes.starts[self._second][lower] + column])
        numbers = self._numbers[np.concatenate([first, second])]
        return np.bincount(at, numbers, minlength=len(nodes.numbers))

    @cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Each row of each table: the pair, and the row."""
        return _each(self._height)

    @cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Each column of each table: the pair, and the column."""
        return _each(self._width)


def _each(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers below each of these sizes, one after the other: whose they are, and themselves."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
