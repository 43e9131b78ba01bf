"""Factor rules: how the dims of an operator's operands and results relate (GSPMD; Shardy's `op_sharding_rule`).

A matrix product is `([i, k], [k, j]) -> ([i, j])` with `k` a reduction. From the rule and an assignment of mesh axes to
factors follow local shapes, local FLOPs, the specs of operands and results and every collective, forward and backward.

An equation that lowers to several StableHLO operations gets the composition of their rules: dims that share a factor
anywhere are one factor, and a factor is split where one operation sees a dim as several (reshape).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the graph and its rules are searched without JAX
    from .._jax.shardy import Lowered

FactorKind = Literal["parallel", "reduction", "spatial", "circulating", "whole"]
Dims = tuple[tuple[int, ...], ...]

# Operations through which a partial sum may pass unchanged: they are linear and act on each element alone.
_LINEAR = frozenset(
    f"stablehlo.{name}" for name in ("convert", "reshape", "transpose", "broadcast_in_dim", "negate", "real")
)


@dataclass(frozen=True, slots=True)
class Factor:
    """One independent index of an operator.

    Args:
      size: its extent.
      kind: `parallel` may be split freely; `reduction` is summed over and leaves a partial result; `spatial` may be
        split if neighbours exchange borders; `circulating` may be split by what splits `with_factor`, each device
        seeing all blocks in turn; `whole` may not be split.
      halo: of a spatial factor, how many elements of its dim of the first operand a block needs from the block before
        it and from the one after it. Of a circulating one with a halo only these are sent.
      granule: its blocks are a multiple of so many elements.
      with_factor: of a circulating factor, the one that is split by the same axes.
    """

    size: int
    kind: FactorKind
    halo: tuple[int, int] = (0, 0)
    granule: int = 1
    with_factor: int | None = None


@dataclass(frozen=True, slots=True)
class InnerReduction:
    """A reduction inside a call: where what it reduces is split, an all-reduce completes it before it is read.

    Args:
      over: the factors that it reduces.
      dims: for each dim of its result the factors.
      size_bytes: of its result, unsplit.
      backward: whether the derivative makes it.
    """

    over: tuple[int, ...]
    dims: Dims
    size_bytes: float
    backward: bool


@dataclass(frozen=True)
class Rule:
    """The factors of one operator.

    Args:
      operands: for each operand, for each dim, the indices of its factors, major first.
      results: the same for results.
      factors: the factors by index.
      inside: of a call, what is reduced inside over factors that may be split.

    >>> matmul = Rule(
    ...     operands=(((0,), (2,)), ((2,), (1,))),
    ...     results=(((0,), (1,)),),
    ...     factors=(Factor(4, "parallel"), Factor(8, "parallel"), Factor(16, "reduction")),
    ... )
    >>> matmul.factors[2].kind
    'reduction'
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    factors: tuple[Factor, ...]
    inside: tuple[InnerReduction, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Rules are part of what tells operators apart, of which a search asks a hundred thousand times: hashed once.
        return hash((self.operands, self.results, self.factors, self.inside))

    @cached_property
    def splittable(self) -> tuple[int, ...]:
        """Factors that may be split, and can be: they lead every dim they are part of (a block of a minor factor is
        not a block of its dim), and are in one dim of each tensor (the diagonal is not a block)."""
        minor: set[int] = set()
        twice: set[int] = set()
        for tensor in (*self.operands, *self.results):
            seen: set[int] = set()
            for dim in tensor:
                real = [f for f in dim if self.factors[f].size > 1]
                minor.update(real[1:])
                twice.update(seen.intersection(real))
                seen.update(real)
        return tuple(
            index
            for index, factor in enumerate(self.factors)
            if factor.kind != "whole" and factor.size > 1 and index not in minor | twice
        )

    def with_whole(self, whole: Sequence[int]) -> Rule:
        """The same rule with the factors `whole` not to be split."""
        chosen = set(whole)
        factors = tuple(Factor(f.size, "whole") if i in chosen else f for i, f in enumerate(self.factors))
        return replace(self, factors=factors)


def factors_of(tensors: Iterable[Dims]) -> set[int]:
    """The factors that are anywhere in tensors."""
    return {factor for tensor in tensors for dim in tensor for factor in dim}


def whole_rule(operand_shapes: Sequence[Sequence[int]], result_shapes: Sequence[Sequence[int]]) -> Rule:
    """The rule of an operator nothing is known about: no dim may be split."""
    composer = Composer()
    return composer.rule([*map(composer.whole, operand_shapes)], [*map(composer.whole, result_shapes)])


class Composer:
    """Builds rules by identifying dims with each other.

    A *dim* is a list of atoms, major first; an atom is a node of a union-find forest that may have been split into
    smaller atoms since.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._kind: list[FactorKind] = []
        self._split: dict[int, tuple[int, int]] = {}
        self._reduced: list[tuple[Sequence[int], Sequence[Sequence[int]], float, bool]] = []

    def reduce(
        self, over: Sequence[int], result: Sequence[Sequence[int]], size_bytes: float, *, backward: bool
    ) -> None:
        """Say that atoms are reduced inside, to a tensor of these dims (`InnerReduction`)."""
        self._reduced.append((over, result, size_bytes, backward))

    def atom(self, size: int, kind: FactorKind = "parallel") -> int:
        """A new index that relates to nothing yet."""
        self._parent.append(len(self._parent))
        self._size.append(size)
        self._kind.append(kind)
        return len(self._parent) - 1

    def tensor(self, shape: Sequence[int]) -> list[list[int]]:
        """A tensor whose dims relate to nothing yet."""
        return [[self.atom(extent)] for extent in shape]

    def whole(self, shape: Sequence[int]) -> list[list[int]]:
        """A tensor none of whose dims may be split."""
        return [[self.atom(extent, "whole")] for extent in shape]

    def size(self, atom: int) -> int:
        """Extent of an atom."""
        return self._size[self._find(atom)]

    def _find(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def atoms(self, dim: Sequence[int]) -> list[int]:
        """The roots that make up a dim now."""
        found: list[int] = []
        for atom in dim:
            root = self._find(atom)
            found.extend(self.atoms(self._split[root]) if root in self._split else [root])
        return found

    def mark(self, dim: Sequence[int], kind: FactorKind) -> None:
        """Restrict every atom of `dim` to at most what `kind` allows."""
        order: tuple[FactorKind, ...] = ("parallel", "reduction", "spatial", "circulating", "whole")
        for root in self.atoms(dim):
            if order.index(kind) > order.index(self._kind[root]):
                self._kind[root] = kind

    def unify(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Say that two dims are the same index. Where their splits cannot be reconciled both become whole."""
        a, b = self.atoms(left), self.atoms(right)
        while a and b:
            x, y = self._find(a[0]), self._find(b[0])
            if x == y:
                a, b = a[1:], b[1:]
            elif self._size[x] == self._size[y]:
                self._merge(x, y)
                a, b = a[1:], b[1:]
            elif self._size[x] == 1:
                a = a[1:]
            elif self._size[y] == 1:
                b = b[1:]
            elif self._size[x] % self._size[y] == 0:
                a = [*self._divide(x, self._size[y]), *a[1:]]
            elif self._size[y] % self._size[x] == 0:
                b = [*self._divide(y, self._size[x]), *b[1:]]
            else:
                self.mark(left, "whole")
                self.mark(right, "whole")
                return

    def _merge(self, x: int, y: int) -> None:
        kind = self._kind[x]
        self._parent[x] = y
        self.mark([y], kind)

    def _divide(self, root: int, major: int) -> tuple[int, int]:
        kind = self._kind[root]
        self._split[root] = (self.atom(major, kind), self.atom(self._size[root] // major, kind))
        return self._split[root]

    def rule(self, operands: Sequence[Sequence[Sequence[int]]], results: Sequence[Sequence[Sequence[int]]]) -> Rule:
        """The rule over tensors given by their dims; factors are numbered in order of appearance."""
        index: dict[int, int] = {}
        factors: list[Factor] = []

        def number(tensor: Sequence[Sequence[int]]) -> Dims:
            dims = []
            for dim in tensor:
                numbered = []
                for root in self.atoms(dim):
                    if root not in index:
                        index[root] = len(factors)
                        factors.append(Factor(self._size[root], self._kind[root]))
                    numbered.append(index[root])
                dims.append(tuple(numbered))
            return tuple(dims)

        # Factors found in results are free of reduction there: a reduction never appears in a result.
        operand_dims = tuple(number(tensor) for tensor in operands)
        result_dims = tuple(number(tensor) for tensor in results)

        def outside(dim: Sequence[int]) -> tuple[int, ...]:
            return tuple(index[root] for root in self.atoms(dim) if root in index)

        # What is inside alone is never split.
        inside = (
            InnerReduction(outside(over), tuple(map(outside, result)), size, backward)
            for over, result, size, backward in self._reduced
        )
        split = (one for one in inside if any(factors[f].kind != "whole" for f in one.over))
        return Rule(operand_dims, result_dims, tuple(factors), tuple(split))


def compose(lowered: Lowered, operand_shapes: Sequence[Sequence[int]], *, masks: bool = False) -> Rule:
    """The rule of one equation from the annotated operations behind it.

    Args:
      lowered: the operations.
      operand_shapes: shapes of the equation's operands, literals included.
      masks: whether what follows a reduction only masks it (a gather's fill value), which our evaluator does blockwise.
    """
    composer = Composer()
    tensors: dict[int, list[list[int]]] = {}
    final = set(lowered.results)
    feeds: dict[int, list[int]] = {}
    for position, op in enumerate(lowered.ops):
        for operand in op.operands:
            feeds.setdefault(operand, []).append(position)

    def tensor(value: int) -> list[list[int]]:
        if value not in tensors:
            tensors[value] = composer.tensor(lowered.shapes[value])
        return tensors[value]

    def reaches_results_linearly(value: int) -> bool:
        return all(
            lowered.ops[user].name in _LINEAR and all(reaches_results_linearly(r) for r in lowered.ops[user].results)
            for user in feeds.get(value, ())
        )

    operands = [
        tensor(value) if value is not None else composer.tensor(shape)
        for value, shape in zip(lowered.operands, operand_shapes, strict=True)
    ]
    for op in lowered.ops:
        values = [*op.operands, *op.results]
        if op.rule is None:
            if op.name.startswith("chlo.") and len({lowered.shapes[v] for v in values}) == 1:
                # chlo operations over equal shapes are elementwise; Shardy meets them only after they are expanded.
                for value in values[1:]:
                    for left, right in zip(tensor(values[0]), tensor(value), strict=True):
                        composer.unify(left, right)
            elif op.name == "stablehlo.optimization_barrier" and len(op.operands) == 1:
                for left, right in zip(tensor(op.operands[0]), tensor(op.results[0]), strict=True):
                    composer.unify(left, right)
            else:
                kind: FactorKind = "parallel" if not op.operands else "whole"
                for value in values:
                    for dim in tensor(value):
                        composer.mark(dim, kind)
            continue
        rule = op.rule
        atoms = {name: composer.atom(size) for name, size in rule.sizes.items()}
        for value, dims in zip(values, (*rule.operands, *rule.results), strict=True):
            for dim, names in zip(tensor(value), dims, strict=True):
                composer.unify(dim, [atoms[name] for name in names])
        keeps_partial = masks or all(reaches_results_linearly(r) for r in op.results)
        for name, atom in atoms.items():
            if name in rule.need_replication:
                composer.mark([atom], "whole")
            elif name in rule.permutation:
                composer.mark([atom], "spatial")
            elif name in rule.reduction:
                composer.mark([atom], "reduction" if keeps_partial else "whole")
    results = [tensor(value) for value in lowered.results]
    assert all(value in final for value in lowered.results)
    return composer.rule(operands, results)
