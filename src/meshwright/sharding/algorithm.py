"""Algorithms of an operator: every way to split it over a mesh.

An algorithm assigns each mesh axis to one factor of the operator, or to none. Operand and result specs follow from the
factor rule alone (see `Spec` for the states):

* a dim is split by the axes of its leading factor;
* a result is partial over the axes of reduction factors;
* an operand is `broadcast` over the axes of factors it does not have, so that its cotangent is summed.

A *circulating* factor (the key positions of attention) is split together with another (the query positions), by the
same axes: its blocks travel round a ring of the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from math import prod

from ..program.factors import Dims, Rule
from .spec import Spec


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to run an operator.

    Args:
      axes: for each factor of its rule, the axes that split it, major first.
      operands: the spec each operand must have.
      results: the spec each result has.
    """

    axes: tuple[tuple[str, ...], ...]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]


def algorithm_of(
    rule: Rule, axes: tuple[tuple[str, ...], ...], differentiated: Sequence[bool], *, combines_at_once: bool = False
) -> Algorithm:
    """The algorithm that an assignment of axes to factors means.

    Args:
      rule: the operator's factors.
      axes: for each factor the axes that split it.
      differentiated: for each operand, whether it has a cotangent.
      combines_at_once: whether partial results are combined inside the operator (maximum, minimum).
    """
    kinds = tuple(factor.kind == "reduction" for factor in rule.factors)
    return _meaning(rule.operands, rule.results, kinds, axes, tuple(differentiated), combines_at_once)


@lru_cache(maxsize=1 << 17)
def _meaning(
    operands_of: tuple[Dims, ...],
    results_of: tuple[Dims, ...],
    reductions: tuple[bool, ...],
    axes: tuple[tuple[str, ...], ...],
    differentiated: tuple[bool, ...],
    combines_at_once: bool,
) -> Algorithm:
    used = {axis for split in axes for axis in split}
    reduced = frozenset(axis for is_one, split in zip(reductions, axes, strict=True) if is_one for axis in split)

    def dims_of(tensor: Dims) -> tuple[tuple[str, ...], ...]:
        return tuple(next((axes[f] for f in dim if axes[f]), ()) for dim in tensor)

    operands = []
    for tensor, moving in zip(operands_of, differentiated, strict=True):
        dims = dims_of(tensor)
        missing = used - {a for dim in dims for a in dim} if moving else set[str]()
        operands.append(Spec(dims, broadcast=frozenset(missing)))
    partial = frozenset() if combines_at_once else reduced
    # What an operator keeps for its derivative may have a dim that its result sums over.
    made = [(dims, partial.difference(*dims)) for dims in map(dims_of, results_of)]
    results = tuple(Spec(dims, partial=summed) for dims, summed in made)
    return Algorithm(axes, tuple(operands), results)


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """In which ways an operator can be split over a mesh: all that its algorithms follow from. There is one for all
    operators and meshes of which it is the same, whatever the sizes.

    Args:
      operands: as its rule has them.
      results: as its rule has them.
      reductions: for each factor whether it is summed over.
      groups: for each factor the axes that can split it together, in the order of the mesh.
      leaders: for each factor the one that is split with it, for a circulating one; else itself.
      axes: of the mesh.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reductions: tuple[bool, ...]
    groups: tuple[frozenset[tuple[str, ...]], ...]
    leaders: tuple[int, ...]
    axes: tuple[str, ...]


@lru_cache(maxsize=1 << 17)
def splits_of(rule: Rule, sizes: tuple[tuple[str, int], ...]) -> Splits:
    """The ways to split an operator over axes of these sizes.

    Args:
      rule: the operator's factors.
      sizes: names and sizes of the axes.
    """
    groups: list[frozenset[tuple[str, ...]]] = [frozenset()] * len(rule.factors)
    for index in rule.splittable:
        factor = rule.factors[index]
        if factor.with_factor is None or factor.with_factor in rule.splittable:
            groups[index] = _dividing(factor.size // factor.granule, sizes)
    leaders = (i if f.with_factor is None else f.with_factor for i, f in enumerate(rule.factors))
    return _splits(
        rule.operands, rule.results, tuple(factor.kind == "reduction" for factor in rule.factors), tuple(groups),
        tuple(leaders), tuple(axis for axis, _ in sizes),
    )  # fmt: skip


# One object for each, so that what follows from it is looked up by that.
_splits = lru_cache(maxsize=None)(Splits)


@lru_cache(maxsize=1 << 14)
def _dividing(size: int, axes: tuple[tuple[str, int], ...]) -> frozenset[tuple[str, ...]]:
    """The groups of axes that can split so many elements together."""
    found: list[tuple[str, ...]] = []
    for count in range(1, len(axes) + 1):
        found += [
            tuple(axis for axis, _ in group)
            for group in combinations(axes, count)
            if size % prod(extent for _, extent in group) == 0
        ]
    return frozenset(found)


def _assignments(splits: Splits) -> Iterator[tuple[tuple[str, ...], ...]]:
    candidates = [factor for factor, groups in enumerate(splits.groups) if groups]
    for choice in product((None, *candidates), repeat=len(splits.axes)):
        axes: list[tuple[str, ...]] = [()] * len(splits.groups)
        for axis, factor in zip(splits.axes, choice, strict=True):
            if factor is not None:
                for one in {factor, splits.leaders[factor]}:
                    axes[one] = (*axes[one], axis)
        split = [factor for factor, group in enumerate(axes) if group]
        if all(axes[f] in splits.groups[f] and axes[f] == axes[splits.leaders[f]] for f in split):
            yield tuple(axes)


def algorithms(
    rule: Rule, sizes: Mapping[str, int], differentiated: Sequence[bool], *, combines_at_once: bool = False
) -> tuple[Algorithm, ...]:
    """All algorithms of an operator over the axes `sizes`, the unsplit one first, in a fixed order."""
    return algorithms_in(splits_of(rule, tuple(sizes.items())), tuple(differentiated), combines_at_once)


@lru_cache(maxsize=1 << 14)
def algorithms_in(
    splits: Splits, differentiated: tuple[bool, ...], combines_at_once: bool = False
) -> tuple[Algorithm, ...]:
    """All algorithms of operators that can be split in these ways, the unsplit one first, in a fixed order.

    Args:
      splits: the ways.
      differentiated: for each operand, whether it has a cotangent.
      combines_at_once: whether partial results are combined inside the operator (maximum, minimum).
    """
    return tuple(
        _meaning(splits.operands, splits.results, splits.reductions, axes, differentiated, combines_at_once)
        for axes in _assignments(splits)
    )


def with_broadcast(algorithm: Algorithm, axes: frozenset[str], differentiated: Sequence[bool]) -> Algorithm:
    """The same algorithm with results `broadcast` over `axes`, hence differentiated operands too: a derivative is
    linear in the cotangents it is given."""
    operands = tuple(
        Spec(spec.dims, broadcast=spec.broadcast | axes) if moving else spec
        for spec, moving in zip(algorithm.operands, differentiated, strict=True)
    )
    results = tuple(Spec(spec.dims, spec.partial, spec.broadcast | axes) for spec in algorithm.results)
    return Algorithm(algorithm.axes, operands, results)


def shared_algorithms_in(
    splits: Splits, differentiated: tuple[bool, ...]
) -> tuple[tuple[Algorithm, frozenset[str]], ...]:
    """Algorithms whose results' cotangents may stay partial over unused axes, with those axes; as `algorithms_in`."""
    found = []
    for algorithm in algorithms_in(splits, differentiated):
        used = {axis for split in algorithm.axes for axis in split}
        free = [axis for axis in splits.axes if axis not in used]
        marks = _subsets(free) if any(differentiated) else [frozenset[str]()]
        found.extend((with_broadcast(algorithm, m, differentiated) if m else algorithm, m) for m in marks)
    return tuple(found)


def _subsets(axes: Sequence[str]) -> list[frozenset[str]]:
    found = [frozenset[str]()]
    for axis in axes:
        found += [subset | {axis} for subset in found]
    return found
