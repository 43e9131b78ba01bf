"""Sorted rows (`program.sorted_rows`) as one operator: its rule, and its evaluation on the blocks of one device.

The rule is the composition of those of its equations, as of other calls, with three differences. Rows are split by what
leads them before they are sorted (tokens): a device sorts its own, counts them, and meets no others. Groups, and what
later products sum over, may be split where the result is linear in them: it is then a sum over devices. And the
derivative keeps the results behind the first, which no one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._jax.jaxpr import Equation, bind, is_literal, open_jaxpr
from .._jax.megablox import tile_rows
from .._jax.sorted_rows import SortedRows
from .factors import Composer, Rule
from .ragged import evaluate_ragged, in_tiles, is_ragged
from .split import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composed:
    """The rule, and for each equation its own with the factors of the whole that each of its factors is made of."""

    rule: Rule
    inner: tuple[tuple[Rule, tuple[tuple[int, ...], ...]], ...]


# Those of them that leave a sum to whoever reads it.
_SUMS = ("dot_general", "gather", "ragged_dot_general", "reduce_sum", "scatter-add")

# A rule is a fact about the program inside: the same for equal layers, and in every search.
_COMPOSED: dict[str, _Composed] = {}


def sorted_rule(equation: Equation, rule_of: Callable[[Equation], Rule]) -> Rule:
    """The rule of sorted rows.

    Args:
      equation: of sorted rows.
      rule_of: the rules of the equations inside.
    """
    rows: SortedRows = equation.params["rows"]
    if rows.key not in _COMPOSED:
        _COMPOSED[rows.key] = _composed(rows, rule_of)
    return _COMPOSED[rows.key].rule


def _composed(rows: SortedRows, rule_of: Callable[[Equation], Rule]) -> _Composed:
    body, composer = open_jaxpr(rows.program), Composer()
    env: dict[Any, list[list[int]]] = {var: composer.tensor(var.aval.shape) for var in body.invars}
    groups: list[int] = []
    inner: list[tuple[Rule, list[int]]] = []
    for position, equation in enumerate(body.eqns):
        rule = rule_of(equation)
        atoms = [composer.atom(factor.size) for factor in rule.factors]
        outs = [composer.tensor(var.aval.shape) for var in equation.outvars]
        env.update(zip(equation.outvars, outs, strict=True))
        given = [composer.tensor(a.aval.shape) if is_literal(a) else env[a] for a in equation.invars]
        inner.append((rule, atoms))
        if position in rows.sorts:
            for tensor in (*given[1:], *outs):
                composer.unify(tensor[0], given[0][0])
            composer.unify([atoms[f] for f in rule.operands[0][0]], given[0][0])
            continue
        for tensor, dims in zip((*given, *outs), (*rule.operands, *rule.results), strict=True):
            for dim, factors in zip(tensor, dims, strict=True):
                composer.unify(dim, [atoms[f] for f in factors])
        free = _free(rows, position, equation, rule)
        if position in rows.own:
            dim, along = rows.own[position]
            extent, count = equation.invars[0].aval.shape[dim], equation.invars[1].aval.shape[along]
            rest = [composer.atom(count // extent, "whole")] if count > extent else []
            composer.unify(given[1][along], [*given[0][dim], *rest])
        if is_ragged(equation):
            (group,) = equation.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
            groups = groups or given[1][group]
            composer.unify(given[1][group], groups)
            composer.mark(groups, "reduction" if rows.groups else "whole")
            free |= set(rule.operands[1][group])
        for f, factor in enumerate(rule.factors):
            if f in free or factor.kind == "parallel":
                continue
            sums = factor.kind == "reduction" and position in rows.sums and equation.primitive.name in _SUMS
            composer.mark([atoms[f]], "reduction" if sums else "whole")
    operands, results = [env[v] for v in body.invars], [env[v] for v in body.outvars]
    made = [env[v] for equation in body.eqns for v in equation.outvars]
    # The first factors are what leads the rows, and the groups. Blocks must be blocks inside too.
    first = min(rows.sorts)
    named_first = [[composer.atoms(env[body.eqns[first].outvars[1]][0])[:1], groups]]
    factors = [[[atom]] for _, atoms in inner for atom in atoms]
    everywhere = composer.rule([*named_first, *operands, *made, *factors], results)
    given = everywhere.operands[1 : len(operands) + 1]
    named = (*given, *everywhere.results)
    outside = {f for tensor in named for dim in tensor for f in dim}
    free = outside.intersection(everywhere.splittable)
    rule = everywhere.with_whole([f for f in range(len(everywhere.factors)) if f not in free])
    made_of = iter(dim for (dim,) in everywhere.operands[1 + len(operands) + len(made) :])
    # Rows are tokens times what each of them has.
    extent = body.eqns[first].invars[0].aval.shape[0]
    count = extent // max(rule.factors[0].size, 1)
    tile = lcm(*(tile_rows(one) // gcd(tile_rows(one), count) for one in body.eqns if is_ragged(one)))
    return _Composed(
        rule=in_tiles(Rule(given, rule.results, rule.factors), tile),
        inner=tuple((one, tuple(next(made_of) for _ in atoms)) for one, atoms in inner),
    )


def _free(rows: SortedRows, position: int, equation: Equation, rule: Rule) -> set[int]:
    """Factors of an equation inside that are split more freely than alone."""
    if position in rows.counts:  # of a block of rows those of the block are wanted
        sums = equation.primitive.name in _SUMS
        return {f for f, factor in enumerate(rule.factors) if sums and factor.kind == "reduction"}
    if position not in rows.own:
        return set()
    dim, along = rows.own[position]
    free = {*rule.operands[0][dim], *rule.operands[1][along]}
    if len(rule.operands) > 2:
        free |= set(rule.operands[2][_update_dim(equation, along)])
    return free


def _update_dim(equation: Equation, along: int) -> int:
    """The dim of a scatter's updates that is a dim of its indices."""
    window = equation.params["dimension_numbers"].update_window_dims
    return [d for d in range(equation.invars[2].aval.ndim) if d not in window][along]


def evaluate_sorted(equation: Equation, split: Split, operands: Sequence[Any], on: Callable[..., Any]) -> Sequence[Any]:
    """Sorted rows on one device's blocks.

    Args:
      equation: of sorted rows.
      split: how it is split.
      operands: blocks of its operands.
      on: evaluates an equation inside on blocks: of the equation, its split and its operands.
    """
    rows: SortedRows = equation.params["rows"]
    body = open_jaxpr(rows.program)
    env: dict[Any, Any] = dict(zip(body.invars, operands, strict=True))
    for position, (inner, (rule, made_of)) in enumerate(zip(body.eqns, _COMPOSED[rows.key].inner, strict=True)):
        given = [a.val if is_literal(a) else env[a] for a in inner.invars]
        if shared := split.reduced_axes():
            given = [
                jnp.where(lax.axis_index(shared) == 0, x, jnp.zeros_like(x)) if (position, i) in rows.once else x
                for i, x in enumerate(given)
            ]
        axes = tuple(next((split.axes[f] for f in those if split.axes[f]), ()) for those in made_of)
        own = Split(rule, axes, split.sizes)
        if position in rows.sorts:
            results = bind(inner, *given)
        elif position in rows.own:
            results = _own(inner, own, given, *rows.own[position])
        elif is_ragged(inner):
            # The sizes of groups are counted of this device's rows.
            whole = rule.operands[0][inner.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions[0]]
            axes = tuple(() if f in whole else those for f, those in enumerate(axes))
            results = evaluate_ragged(inner, Split(rule, axes, split.sizes), given)
        else:
            results = on(inner, own, given)
        env.update(zip(inner.outvars, results, strict=True))
    return [env[var] for var in body.outvars]


def _own(equation: Equation, split: Split, operands: Sequence[Any], dim: int, along: int) -> Sequence[Any]:
    """A gather or scatter whose indices are of this device's own block of the operand."""
    del along
    operand, indices, *updates = operands
    dims, shape = split.rule.operands[0], equation.invars[0].aval.shape
    if split.dim_axes(dims[dim]):
        indices = indices - split.offset(shape[dim], dims[dim]).astype(indices.dtype)
    params = dict(equation.params)
    if not updates:
        params["slice_sizes"] = tuple(
            1 if d == dim else size // split.blocks(dims[d]) for d, size in enumerate(params["slice_sizes"])
        )
        params["mode"] = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return bind(equation.replace(params=params), operand, indices, *updates)
