"""Algorithms of an operator: every way to split it over a mesh.

An algorithm assigns each mesh axis to one factor of the operator, or to none. Operand and result specs follow from the
factor rule alone (see `Spec` for the states):

* a dim is split by the axes of its leading factor;
* a result is partial over the axes of reduction factors;
* an operand is `broadcast` over the axes of factors it does not have, so that its cotangent is summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

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
    used = [axis for split in axes for axis in split]
    reduced = frozenset(axis for is_one, split in zip(reductions, axes, strict=True) if is_one for axis in split)

    def dims_of(tensor: Dims) -> tuple[tuple[str, ...], ...]:
        return tuple(next((axes[f] for f in dim if axes[f]), ()) for dim in tensor)

    operands = []
    for tensor, moving in zip(operands_of, differentiated, strict=True):
        dims = dims_of(tensor)
        missing = frozenset(used) - {a for dim in dims for a in dim} if moving else frozenset()
        operands.append(Spec(dims, broadcast=missing))
    partial = frozenset() if combines_at_once else reduced
    results = tuple(Spec(dims_of(tensor), partial=partial) for tensor in results_of)
    return Algorithm(axes, tuple(operands), results)


@lru_cache(maxsize=1 << 14)
def _assignments(rule: Rule, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    candidates = rule.splittable()
    found = []
    for choice in product((None, *candidates), repeat=len(sizes)):
        axes: list[list[str]] = [[] for _ in rule.factors]
        left = [factor.size for factor in rule.factors]
        for (axis, size), factor in zip(sizes, choice, strict=True):
            if factor is None:
                continue
            if left[factor] % size:
                break
            left[factor] //= size
            axes[factor].append(axis)
        else:
            found.append(tuple(tuple(split) for split in axes))
    return tuple(found)


def algorithms(
    rule: Rule, sizes: Mapping[str, int], differentiated: Sequence[bool], *, combines_at_once: bool = False
) -> tuple[Algorithm, ...]:
    """All algorithms of an operator over the axes `sizes`, the unsplit one first, in a fixed order."""
    return _algorithms(rule, tuple(sizes.items()), tuple(differentiated), combines_at_once)


@lru_cache(maxsize=1 << 14)
def _algorithms(
    rule: Rule, sizes: tuple[tuple[str, int], ...], differentiated: tuple[bool, ...], combines_at_once: bool
) -> tuple[Algorithm, ...]:
    # What an assignment means does not depend on how large factors are.
    kinds = tuple(factor.kind == "reduction" for factor in rule.factors)
    return tuple(
        _meaning(rule.operands, rule.results, kinds, axes, differentiated, combines_at_once)
        for axes in _assignments(rule, sizes)
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


def shared_algorithms(
    rule: Rule, sizes: Mapping[str, int], differentiated: Sequence[bool]
) -> tuple[tuple[Algorithm, frozenset[str]], ...]:
    """Algorithms of an operator whose results' cotangents may stay partial over unused axes, with those axes."""
    found = []
    for algorithm in algorithms(rule, sizes, differentiated):
        used = {axis for split in algorithm.axes for axis in split}
        free = [axis for axis in sizes if axis not in used]
        marks = _subsets(free) if any(differentiated) else [frozenset[str]()]
        found.extend((with_broadcast(algorithm, m, differentiated) if m else algorithm, m) for m in marks)
    return tuple(found)


def _subsets(axes: Sequence[str]) -> list[frozenset[str]]:
    found = [frozenset[str]()]
    for axis in axes:
        found += [subset | {axis} for subset in found]
    return found
