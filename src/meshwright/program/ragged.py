"""Products of groups of rows (`jax.lax.ragged_dot_general`) as operators: their rule, and their evaluation on blocks.

The rows of the left operand lie in groups one after the other, `group_sizes` of them in each, and each group has a
matrix of its own on the right: the experts of a mixture without dropped tokens. (`megablox.gmm` is such a product too:
`_jax.megablox`.) The gradient of the matrices is the
other form, a sum over the rows of each group. Three kinds of dims may be split:

* rows: a block of rows has its share of every group;
* groups: a device works on the rows of its own groups, which are moved to the front, and has zeros for all others, so
  that the product is partial over the axis. The gradient of the matrices has a block of them;
* all others, as in any matrix product.

The price of split groups is that of equally many rows for each device: of a router that balances its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._jax.jaxpr import Equation, bind
from .._jax.megablox import tile_rows
from .factors import Composer, Rule
from .split import Split


def is_ragged(equation: Equation) -> bool:
    """Whether an equation is a product of groups of rows."""
    return equation.primitive.name == "ragged_dot_general"


def ragged_rule(equation: Equation) -> tuple[Rule, str]:
    """The rule of a product of groups of rows, and why it is whole where it is.

    Args:
      equation: of which `is_ragged` says that it is one.
    """
    shapes = [tuple(atom.aval.shape) for atom in equation.invars]
    numbers = equation.params["ragged_dot_dimension_numbers"]
    ((left_summed, right_summed), (left_batch, right_batch)) = numbers.dot_dimension_numbers
    (rows,) = numbers.lhs_ragged_dimensions
    composer = Composer()
    left, right = composer.tensor(shapes[0]), composer.tensor(shapes[1])
    # Whoever has some of the groups must know where they begin.
    sizes = [[composer.atom(extent, "whole")] for extent in shapes[2]]
    for a, b in (*zip(left_batch, right_batch, strict=True), *zip(left_summed, right_summed, strict=True)):
        composer.unify(left[a], right[b])
    for d in left_summed:
        composer.mark(left[d], "reduction")
    result = [left[d] for d in left_batch]
    result += [dim for d, dim in enumerate(left) if d not in (*left_batch, *left_summed)]
    given = (*right_batch, *right_summed, *numbers.rhs_group_dimensions)
    result += [dim for d, dim in enumerate(right) if d not in given]
    if numbers.rhs_group_dimensions:
        (groups,) = (right[d] for d in numbers.rhs_group_dimensions)
        composer.mark(groups, "reduction")
    else:  # each group is summed, or has a batch of its own
        groups = [composer.atom(shapes[2][-1])]
        result = [groups, *result]
    why = "it has one row, one group and one column"
    if left_batch:
        # JAX's groups may differ in each of the batch.
        why = "it is a batch of products of groups"
        for dim in (*left, groups):
            composer.mark(dim, "whole")
    rule = composer.rule([[left[rows], groups], left, right, sizes], [result])  # `GROUPS` is the second factor
    return in_tiles(Rule(rule.operands[1:], rule.results, rule.factors), tile_rows(equation)), why


def in_tiles(rule: Rule, rows: int) -> Rule:
    """The same rule with blocks of its first factor that are a multiple of so many elements."""
    if rows == 1:
        return rule
    first, *others = rule.factors
    return Rule(rule.operands, rule.results, (replace(first, granule=rows), *others))


def evaluate_ragged(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """A product of groups of rows on one device's blocks."""
    left, right, sizes = operands
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (rows,) = numbers.lhs_ragged_dimensions
    (summed, right_summed), batch = numbers.dot_dimension_numbers
    if any(batch):
        return bind(equation, left, right, sizes)
    of_rows = split.rule.operands[0][rows]
    if split.dim_axes(of_rows):
        start = split.offset(equation.invars[0].aval.shape[rows], of_rows)
        sizes = _differences(jnp.clip(jnp.cumsum(sizes) - start, 0, left.shape[rows]).astype(sizes.dtype))
    sums_groups = rows in summed
    of_groups = split.rule.results[0][0] if sums_groups else split.rule.operands[1][numbers.rhs_group_dimensions[0]]
    if not split.dim_axes(of_groups):
        return bind(equation, left, right, sizes)
    count = sizes.shape[0] // split.blocks(of_groups)
    first = split.offset(sizes.shape[0], of_groups)
    # Sizes may be of more rows than there are: those of the last groups are then cut off.
    ends = jnp.clip(jnp.cumsum(sizes), 0, left.shape[rows]).astype(sizes.dtype)
    sizes = _differences(ends)
    mine = lax.dynamic_slice_in_dim(sizes, first, count)
    begin = lax.dynamic_index_in_dim(ends - sizes, first, keepdims=False)
    total = jnp.sum(mine)
    left = _own(jnp.roll(left, -begin, rows), total, rows)
    if sums_groups:
        (dim,) = (b for a, b in zip(summed, right_summed, strict=True) if a == rows)
        right = _own(jnp.roll(right, -begin, dim), total, dim)
        return bind(equation, left, right, mine)
    (made,) = bind(equation, left, right, mine)
    at = rows - sum(d < rows for d in summed)
    return (jnp.roll(_own(made, total, at), begin, at),)


def _differences(ends: Any) -> Any:
    """Sizes of groups that end there."""
    return jnp.diff(ends, prepend=jnp.zeros((1,), ends.dtype))


def _own(x: Any, total: Any, dim: int) -> Any:
    """The first rows, and zeros for those after them: what a product makes of rows of no group is not everywhere zero,
    nor is its derivative."""
    at = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(at < total, x, jnp.zeros_like(x))
