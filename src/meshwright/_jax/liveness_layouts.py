"""How XLA's GPU compiler lays out the arrays around matrix products, and so which transpositions move anything.

A layout is the order in which an array's dims lie in memory. Arrays that arithmetic or a transposition ties to each
other get one layout, so that a transposition is another name for the same bytes. It is that of what leaves the program,
row-major, or else of the first product among them. A product reads and writes groups of dims (those it sums over, those
of either operand alone): each group in one piece and in order, the groups in any order. Where a layout has them
otherwise the array is copied: an operand before the product, a result after the arithmetic of one operand that follows
it. (XLA's `LayoutAssignment`, which begins with the products, and `MoveCopyToUsers`.)

Dims of size one, which lie anywhere, are not counted. Cost: next to linear in the number of operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from meshwright._jax.dataflow import Kind, Operation, Value

Dims = tuple[int, ...]


class Layouts:
    """The layouts of one program's values.

    Args:
      values: of the program, which may still grow.
      like: makes another value of the size and type of one.
    """

    def __init__(self, values: Sequence[Value], like: Callable[[int], int]) -> None:
        self._values, self._like = values, like
        self._tied: dict[int, tuple[int, Dims]] = {}  # to which older value, and which of its dims each dim is
        self._written: dict[int, tuple[Dims, ...]] = {}  # groups of dims of products' results
        self._read: dict[int, tuple[int, tuple[Dims, ...]]] = {}  # of what products read: whose groups of dims
        self._laid: dict[int, Dims] = {}  # of the oldest of values tied to each other: its dims as they lie

    def tie(self, value: int, source: int, dims: Sequence[int]) -> None:
        """Dim i of `value` is dim `dims[i]` of `source`; nothing, where they are tied another way already."""
        (newer, mine), (older, its) = self._oldest(value), self._oldest(source)
        if newer == older:
            return
        same = {mine[i]: its[dim] for i, dim in enumerate(dims)}
        if newer < older:
            newer, older, same = older, newer, {one: other for other, one in same.items()}
        self._tied[newer] = (older, tuple(same[dim] for dim in range(len(dims))))

    def writes(self, result: int, groups: Iterable[Sequence[int]]) -> None:
        """A product makes `result`, and each of these groups of its dims together."""
        self._written[result] = tuple(map(tuple, groups))

    def reads(self, operand: int, value: int, groups: Iterable[Sequence[int]]) -> None:
        """A product reads `operand`, which is `value` in another shape, and groups of the dims of `value` together."""
        self._read[operand] = (value, tuple(map(tuple, groups)))

    def settled(self, operations: Sequence[Operation], outputs: Sequence[int]) -> tuple[list[Operation], list[int]]:
        """The operations and outputs of a program with transpositions that move nothing as views, and with copies."""
        self._choose(operations, outputs)
        ends = self._ends(operations, outputs)
        instead: dict[int, int] = {}
        regrouped: dict[tuple[int, frozenset[Dims]], int] = {}
        found: list[Operation] = []

        def copy(value: int, source: int, name: str) -> int:
            made = self._like(value)
            found.append(Operation(kind=Kind.PERMUTE, name=name, reads=(source,), writes=(made,), expensive=True))
            return made

        for operation in operations:
            reads = [instead.get(value, value) for value in operation.reads]
            if operation.kind is Kind.CONTRACT:
                for place, value in enumerate(operation.reads):
                    if value in self._read and not self._lie_together(*self._read[value]):
                        source, groups = self._read[value]
                        wanted = source, frozenset(groups)  # one copy for all products that read these groups
                        if wanted not in regrouped:
                            regrouped[wanted] = copy(value, reads[place], "regroup")
                        reads[place] = regrouped[wanted]
            kind = Kind.VIEW if self._moves_nothing(operation, outputs) else operation.kind
            found.append(replace(operation, kind=kind, reads=tuple(reads)))
            for value in ends.intersection(operation.writes):
                instead[value] = copy(value, value, "copy")
        return found, [instead.get(value, value) for value in outputs]

    def _oldest(self, value: int) -> tuple[int, Dims]:
        """The oldest of the values that one is tied to, and which of its dims each dim is."""
        oldest, dims = value, tuple(range(self._values[value].rank))
        while oldest in self._tied:
            oldest, its = self._tied[oldest]
            dims = tuple(its[dim] for dim in dims)
        if oldest != value:  # chains get short
            self._tied[value] = oldest, dims
        return oldest, dims

    def _choose(self, operations: Sequence[Operation], outputs: Sequence[int]) -> None:
        """Lays out everything that is tied to the result of a product."""
        made = [value for operation in operations for value in operation.writes if value in self._written]
        found = [self._oldest(value) for value in made]
        around = {oldest for oldest, _ in found}
        for oldest, dims in (*map(self._oldest, outputs), *found):
            if oldest in around:
                self._laid.setdefault(oldest, dims)

    def _order(self, value: int) -> Dims:
        """The dims of a value as they lie, from the slowest to the fastest."""
        oldest, dims = self._oldest(value)
        place = {dim: mine for mine, dim in enumerate(dims)}
        return tuple(place[dim] for dim in self._laid.get(oldest, tuple(range(len(dims)))))

    def _lie_together(self, value: int, groups: Iterable[Dims]) -> bool:
        order = self._order(value)
        starts = ((order.index(group[0]), group) for group in groups if group)
        return all(order[start : start + len(group)] == group for start, group in starts)

    def _moves_nothing(self, operation: Operation, outputs: Sequence[int]) -> bool:
        """Whether an operation is a transposition of something laid out so that it only has another name."""
        if operation.name != "transpose" or self._oldest(operation.writes[0])[0] not in self._laid:
            return False
        (value,) = operation.writes
        as_written = tuple(range(self._values[value].rank))
        return value not in outputs or self._order(value) == as_written

    def _ends(self, operations: Sequence[Operation], outputs: Sequence[int]) -> set[int]:
        """The values that are copied because a product's result lies otherwise: the last of the arithmetic of one
        operand after it."""
        readers = Counter(value for operation in operations for value in operation.reads)
        readers.update(outputs)
        user = {value: operation for operation in operations for value in operation.reads}
        found: set[int] = set()
        for operation in operations:
            for value in self._written.keys() & set(operation.writes):
                if self._lie_together(value, self._written[value]):
                    continue
                oldest = self._oldest(value)[0]
                while readers[value] == 1 and (reader := user.get(value)) is not None and len(reader.reads) == 1:
                    if len(reader.writes) != 1 or self._oldest(reader.writes[0])[0] != oldest:
                        break
                    (value,) = reader.writes
                found.add(value)
        return found
