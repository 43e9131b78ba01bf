"""Which kernels XLA's GPU compiler runs as one that writes several results.

Two kernels of arithmetic or reductions over as many elements become one where they read one array of that size, or one
reads what the other writes, unless a third would have to run between them (multi-output fusion). Sums, gathers and
scatters of one group of devices become one up to 30 MiB, in program order (collective combiners).

An order that leaves some kernels to the end, as that of the latency-hiding scheduler, computes activations that only
gradients of weights read beside the cotangents; and what is sent together is there until the last of it can be sent
(the logits, for the loss, until the weights are new).

Cost: one bit set of ancestors per kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright._jax.dataflow import Kind, Program, Use
from meshwright.memory.fusion import Kernel, joined
from meshwright.memory.kernel_order import ancestors

# Of the results that collectives sent together have: kDefaultAllReduceCombineThreshold of openxla/xla's
# collective_utils.h, and the same of gathers and scatters.
_TOGETHER_BYTES = 30 * 2**20 + 7


def with_several_results(program: Program, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels with those that run as one joined, each after those that it needs.

    Args:
      program: theirs.
      kernels: each after those that it needs.
    """
    groups = _Groups(program, kernels)
    groups.join_collectives()
    kernels = groups.ordered()
    producer = {value: kernel for kernel in kernels for value in kernel.writes}
    return [_reading_rows(program, kernel, producer) for kernel in kernels]


def _reading_rows(program: Program, kernel: Kernel, producer: Mapping[int, Kernel]) -> Kernel:
    """A kernel that reads an array beside a reduction of it, as in a softmax, computes that reduction itself (XLA has a
    Triton kernel for both): it reads whole rows before it writes, and so cannot write over the array."""
    if not kernel.fusible:
        return kernel
    reduced: set[int] = set()
    for value in kernel.uses:
        maker = producer.get(value)
        if maker is not None and maker.operation.kind is Kind.REDUCE:
            elements = program.values[value].elements
            reduced.update(one for one in maker.uses if program.values[one].elements > elements)
    changed = {value: Use.REPEATED for value, use in kernel.uses.items() if use is Use.SAME and value in reduced}
    return replace(kernel, uses={**kernel.uses, **changed}) if changed else kernel


class _Groups:
    """Kernels by their positions, groups by that of one of their kernels; sets of kernels are bits."""

    def __init__(self, program: Program, kernels: Sequence[Kernel]) -> None:
        self._kernels = {kernel.position: kernel for kernel in kernels}
        self._above = ancestors(kernels)
        self._values = program.values
        self._producer = {value: kernel.position for kernel in kernels for value in kernel.writes}
        self._readers: dict[int, list[int]] = {}
        for kernel in kernels:
            for value in (*kernel.uses, *kernel.after):
                self._readers.setdefault(value, []).append(kernel.position)
        self._group = {kernel.position: kernel.position for kernel in kernels}
        self._members = {kernel.position: [kernel.position] for kernel in kernels}
        self._bits = {kernel.position: 1 << kernel.position for kernel in kernels}
        self._extent = {kernel.position: _extent(program, kernel) for kernel in kernels}
        for kernel in reversed(kernels):
            for value in kernel.writes:
                if elements := program.values[value].elements:
                    self._join_around(value, elements, kernel)

    def _join_around(self, value: int, elements: int, maker: Kernel) -> None:
        """Joins the readers of a value to each other, and then to its maker."""
        fitting = [
            position for position in self._readers.get(value, ())
            if self._extent[position] == elements and value in self._kernels[position].uses
        ]  # fmt: skip
        for at, position in enumerate(fitting):
            for other in fitting[at + 1 :]:
                self._join(position, other)
        if self._extent[maker.position] == elements:
            for position in fitting:
                self._join(maker.position, position)

    def join_collectives(self) -> None:
        """Joins collectives of a group in program order, while they are few enough bytes and none needs another."""
        latest: dict[tuple[str, str], tuple[int, int]] = {}  # a collective of each name and group, and its bytes
        for position, kernel in self._kernels.items():
            name, group = kernel.operation.name, kernel.operation.group
            size_bytes = sum(self._values[value].size_bytes for value in kernel.writes)
            if not group or size_bytes > _TOGETHER_BYTES:
                continue
            if (name, group) in latest:
                other, total_bytes = latest[name, group]
                if total_bytes + size_bytes <= _TOGETHER_BYTES and self._join(other, position):
                    latest[name, group] = other, total_bytes + size_bytes
                    continue
            latest[name, group] = position, size_bytes

    def _makers(self, group: int) -> set[int]:
        """The groups whose results a group needs."""
        found: set[int] = set()
        for position in self._members[group]:
            kernel = self._kernels[position]
            found.update(
                self._group[self._producer[value]] for value in (*kernel.uses, *kernel.after) if value in self._producer
            )
        found.discard(group)
        return found

    def _apart(self, first: int, second: int) -> bool:
        """Whether `second` needs a third group that needs `first`, or of `first` what is no array of its elements."""
        bits = self._bits[first]
        if any(self._above[maker] & bits for maker in self._makers(second) if maker != first):
            return True
        kernels = [self._kernels[position] for position in self._members[second]]
        return any(
            self._group.get(self._producer.get(value, -1)) == first
            and self._values[value].elements != self._extent[second]
            for kernel in kernels
            for value in (*kernel.uses, *kernel.after)
        )

    def _join(self, first: int, second: int) -> bool:
        one, other = self._group[first], self._group[second]
        if one == other or self._apart(one, other) or self._apart(other, one):
            return False
        both = self._above[one] | self._above[other]
        for group, beside in ((one, other), (other, one)):
            missing = both & ~self._above[group] & ~self._bits[beside]
            if missing:
                self._add_above(group, missing)
        self._above[one] = both
        self._bits[one] |= self._bits.pop(other)
        for position in self._members[other]:
            self._group[position] = one
        self._members[one] += self._members.pop(other)
        return True

    def _add_above(self, group: int, missing: int) -> None:
        """Adds what has to run before a group to it and to all that has to run after it."""
        stack = [group]
        while stack:
            group = stack.pop()
            if not missing & ~self._above[group]:
                continue
            self._above[group] |= missing
            for position in self._members[group]:
                for value in self._kernels[position].writes:
                    stack.extend(self._group[reader] for reader in self._readers.get(value, ()))

    def ordered(self) -> list[Kernel]:
        """One kernel for each group, after those that it needs, else in program order."""
        found: list[Kernel] = []
        seen: set[int] = set()
        for root in sorted(self._members):
            stack = [(root, False)]
            while stack:
                group, entered = stack.pop()
                if entered:
                    found.append(_as_one([self._kernels[position] for position in sorted(self._members[group])]))
                elif group not in seen:
                    seen.add(group)
                    stack.append((group, True))
                    stack.extend((maker, False) for maker in sorted(self._makers(group), reverse=True))
        return found


def _as_one(kernels: list[Kernel]) -> Kernel:
    if len(kernels) == 1:
        return kernels[0]
    writes = tuple(value for kernel in kernels for value in kernel.writes)
    uses: dict[int, Use] = {}
    for kernel in kernels:
        for value, use in kernel.uses.items():
            if value not in writes:
                uses[value] = joined(uses.get(value), use)
    after = frozenset[int]().union(*(kernel.after for kernel in kernels)).difference(uses, writes)
    named = next((one for one in kernels if one.operation.kind is Kind.ELEMENTWISE), kernels[0])
    return replace(
        named, position=kernels[0].position, uses=uses, writes=writes, after=after,
        members=sum(one.members for one in kernels),
    )  # fmt: skip


def _extent(program: Program, kernel: Kernel) -> int:
    """Over how many elements a kernel runs, 0 if it is none that runs together with others."""
    if not kernel.fusible or kernel.operation.kind not in (Kind.ELEMENTWISE, Kind.REDUCE):
        return 0
    values = kernel.uses if kernel.operation.kind is Kind.REDUCE else kernel.writes
    return max((program.values[value].elements for value in values), default=0)
