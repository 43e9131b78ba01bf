"""Rows that are sorted into groups, worked on and brought back: mixtures without dropped tokens, found in a program.

A mixture sorts its tokens by expert, gathers their rows in that order, multiplies each group of rows by the matrices of
its expert, and adds the results to the tokens again. A sort needs all of the batch; but nothing of what the mixture
makes depends on the order of rows. So a device may sort the tokens that it has, and meets no others. That is checked
here, by a walk from the sort over all that reads its results. Of each value it is known whether it has

* *rows*: along one dim it has something of the element that was sorted to this place, whatever its order;
* *places*: along one dim it has, for each element as it was before sorting, the row where it is now (an argsort of the
  order, which brings rows back);
* or neither: it does not depend on the order.

Rows come of an operator on rows alone, or on what is the same for all rows; of a gather at indices that are rows; of a
product of groups (`ragged_dot`) whose sizes count what was sorted by. The order is left by a gather of rows at places,
a scatter-add at rows, and a sum over rows. Where indices reach is computed with numbers, of the order 0, 1, 2...: a
block of rows has to read and write the same block of tokens (`order // k`). Any other use is refused, and the mixture
stays as it is: its tokens are sorted on every device, and a warning says which line it was.

Sizes may count rows behind the sort (`sorted_counts`), and keys may be ids of which those that are no group's, if there
were any, would become the largest: programs of devices that have some of the experts, run as if one had all.

What was found becomes one equation (`_jax.sorted_rows`), whose rule is composed of those inside (`sorted_rule`).

Known limits: one key and its argsort, in one dim; nothing with a derivative of its own inside; that sizes count the
keys is seen on examples of keys. Keys are less than the number of groups; negative ones have to count as of the first
group, unless they are seen to be indices of `top_k` or `argmax`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax.boundary import Boundaries
from .._jax.jaxpr import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    consts_of,
    evaluate,
    is_dropped,
    is_literal,
    is_remat,
    open_jaxpr,
    source_line,
)
from .._jax.megablox import as_ragged_dot
from .._jax.sorted_rows import SortedRows, one_equation, program_of
from .local import ON_ELEMENTS
from .order import Refused, followed
from .ragged import is_ragged
from .rules import ReplicationWarning
from .sorted_counts import counting_before
from .sorted_sums import linear_equations

# Other views of keys, and what takes some of them.
_VIEWS = ("reshape", "convert_element_type", "copy", "squeeze", "expand_dims")
_PARTS = ("slice", "stop_gradient")
# Operators that find indices, and which of their results these are.
_FINDERS = {"top_k": 1, "argmax": 0}
# Which operand of a product of groups is their sizes.
_SIZES = 2
# What may be behind rows that were brought back.
_TAIL = (
    "reshape",
    "transpose",
    "convert_element_type",
    "mul",
    "dot_general",
    "reduce_sum",
    "broadcast_in_dim",
    "squeeze",
)


def with_sorted_rows(core: ClosedJaxpr, boundaries: Boundaries) -> tuple[ClosedJaxpr, Boundaries]:
    """A program with each of its mixtures as one equation, and where its layer boundaries are then."""
    jaxpr = open_jaxpr(core)
    found, places = _replaced(jaxpr, boundaries.before)
    if found is jaxpr:
        return core, boundaries
    before = sorted({sum(place < cut for place in places) for cut in boundaries.before})
    scans = [number for number, place in enumerate(places) if place in boundaries.scans]
    return ClosedJaxpr(found, consts_of(core)), Boundaries(before=before, scans=scans)


def _replaced(jaxpr: Jaxpr, cuts: Sequence[int] = ()) -> tuple[Jaxpr, list[int]]:
    """A program with its mixtures as equations, at any depth, and for each equation the place it had."""
    equations = [_inside(equation) for equation in jaxpr.eqns]
    changed = any(a is not b for a, b in zip(equations, jaxpr.eqns, strict=True))
    places = list(range(len(equations)))
    for keys in [equation.outvars[0] for equation in equations if _sorts(equation)]:
        sort = next((n for n, e in enumerate(equations) if _sorts(e) and e.outvars[0] is keys), None)
        if sort is None:  # it is inside of another mixture
            continue
        here = _with(jaxpr, equations)
        if (counted := counting_before(here, sort, _maker(here))) is not None:
            equations = [equation for _, equation in counted]
            places, changed = [places[n] for n, _ in counted], True
            sort = next(n for n, e in enumerate(equations) if _sorts(e) and e.outvars[0] is keys)
        try:
            run = _run_of(_with(jaxpr, equations), sort)
        except Refused as refusal:
            warnings.warn(
                f"the mixture at {source_line(equations[sort])} sorts all tokens on every device: {refusal}",
                ReplicationWarning, stacklevel=2,
            )  # fmt: skip
            continue
        if run is None or any(places[run.inside[0]] < cut <= places[run.inside[-1]] for cut in cuts):
            continue
        equations, kept = run.replaced()
        places = [places[n] for n in kept]
        changed = True
    return (_with(jaxpr, equations) if changed else jaxpr), places


def _with(jaxpr: Jaxpr, equations: Sequence[Equation]) -> Jaxpr:
    return jaxpr.replace(eqns=list(equations), debug_info=jaxpr.debug_info.with_unknown_names())


def _inside(equation: Equation) -> Equation:
    """An equation of a loop or a rematerialised region, with the mixtures in its body replaced; of kernels that are
    products of groups, the product."""
    if equation.primitive.name == "custom_vjp_call":
        return as_ragged_dot(equation)
    if equation.primitive.name != "scan" and not is_remat(equation):
        return equation
    body = equation.params["jaxpr"]
    found, _ = _replaced(open_jaxpr(body))
    if found is open_jaxpr(body):
        return equation
    closed = ClosedJaxpr(found, consts_of(body)) if hasattr(body, "consts") else found
    return equation.replace(params={**equation.params, "jaxpr": closed})


def _sorts(equation: Equation) -> bool:
    """Whether an equation is an argsort of one key in one dim."""
    return (
        equation.primitive.name == "sort" and equation.params["num_keys"] == 1 and len(equation.invars) == 2
        and equation.invars[0].aval.ndim == 1 and not any(map(is_literal, equation.invars))
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The equations of one mixture.

    Args:
      jaxpr: that they are in.
      inside: their positions in it, in order.
      copied: positions of equations that others may read too, which then stay there as well.
      rows: what is known of them.
    """

    jaxpr: Jaxpr
    inside: Sequence[int]
    copied: Set[int]
    rows: SortedRows

    def replaced(self) -> tuple[list[Equation], list[int]]:
        """The program's equations with these as one, without those that only they read, and their former places."""
        equations, last = self.jaxpr.eqns, self.inside[-1]
        made = {last: one_equation(self.rows, equations[last])}
        needed = {a for a in self.jaxpr.outvars if not is_literal(a)}
        kept: list[int] = []
        for n in reversed(range(len(equations))):
            equation = made.get(n, equations[n])
            if n != last and (n in self.inside or (n in self.copied and not needed.intersection(equation.outvars))):
                continue
            needed.update(a for a in equation.invars if not is_literal(a))
            kept.append(n)
        kept.reverse()
        return [made.get(n, equations[n]) for n in kept], kept


def _run_of(jaxpr: Jaxpr, sort: int) -> _Run | None:
    """The mixture that begins with a sort; None if it is none.

    Raises:
      Refused: if it depends on the order of its rows.
    """
    equations, maker = jaxpr.eqns, _maker(jaxpr)
    made_by = {var: n for n, equation in enumerate(equations) for var in equation.outvars if not is_dropped(var)}
    walk = followed(jaxpr, sort, maker)
    if not walk.products:
        return None
    if walk.refusal is not None:
        raise walk.refusal
    of_groups = list(dict.fromkeys(equations[n].invars[_SIZES] for n in walk.products))
    if len({sizes.aval.shape for sizes in of_groups}) > 1:
        raise Refused("its products have different numbers of groups")
    # The keys, as whoever counts them has them.
    chain = _views(maker, equations[sort].invars[0])
    ids, mapping = _ids_of(jaxpr, made_by, chain[-1], of_groups[0].aval.shape[0])
    if ids and _is_index(maker, ids[-1]):  # else negative ones might be sorted behind all others
        chain += ids
    else:
        mapping = set()
    counts: set[int] = set()
    for sizes in of_groups:
        counts |= _counting(jaxpr, made_by, sizes, chain[-1], negative=not _is_index(maker, chain[-1]))
    inside = _with_tail(jaxpr, {sort, *walk.inside})
    counted = {var for n in counts for var in equations[n].outvars}.difference(chain)
    for n in sorted(inside):
        values = [a for i, a in enumerate(equations[n].invars) if not (is_ragged(equations[n]) and i == _SIZES)]
        if any(not is_literal(a) and a in counted for a in values):
            # A device counts its own rows.
            where = f"{equations[n].primitive.name} at {source_line(equations[n])}"
            raise Refused(f"{where} takes the sizes of groups, or what counts them, for values")
    copied = {*counts, *mapping, *(made_by[var] for var in chain[:-1])} - inside
    copied |= _constants(equations, made_by, inside | copied) - inside
    order = sorted(inside | copied)
    body = [equations[n] for n in order]
    made = {var for equation in body for var in equation.outvars}
    read = list(dict.fromkeys(a for one in body for a in one.invars if not is_literal(a) and a not in made))
    outside = [e for n, e in enumerate(equations) if n not in inside and n not in copied]
    others = {a for one in outside for a in one.invars if not is_literal(a)}
    others |= {a for a in jaxpr.outvars if not is_literal(a)}
    results = [var for n in sorted(inside) for var in equations[n].outvars if var in others]
    early = {
        a for n, e in enumerate(equations[: max(inside)]) if n not in inside for a in e.invars if not is_literal(a)
    }
    if early.intersection(results):
        raise Refused("something is made of its results before all of them are there")
    at = {n: position for position, n in enumerate(order)}
    sums = linear_equations(body, results, walk.rows)
    kept = [var for n in walk.kept for var in equations[n].outvars if var not in results]
    rows = SortedRows(
        program=program_of(jaxpr, body, read, [*results, *kept]), sorts=frozenset(at[n] for n in (sort, *walk.sorts)),
        own={at[n]: dims for n, dims in walk.own.items()}, counts=frozenset(at[n] for n in counts), sums=sums.equations,
        once=sums.once, groups=sums.groups,
    )  # fmt: skip
    return _Run(jaxpr=jaxpr, inside=sorted(inside), copied=copied, rows=rows)


def _views(maker: Callable[[Any], Equation | None], keys: Any) -> list[Any]:
    """Keys, and what they are views of."""
    chain: list[Any] = [keys]
    while (view := maker(chain[-1])) is not None and view.primitive.name in _VIEWS and _is_whole(view.invars[0]):
        chain.append(view.invars[0])
    return chain


def _ids_of(jaxpr: Jaxpr, made_by: Mapping[Any, int], keys: Any, groups: int) -> tuple[list[Any], set[int]]:
    """What keys are made of element by element and are equal to, where it is the number of a group: ids, of which those
    that others work on may become larger than all.

    Returns:
      Views of the ids that keys are made of, and last the ids; and the equations that make keys of them. Both are empty
      for other keys.
    """
    passed, ids, views, numbers = set[int](), set[Any](), list[Any](), _of_literals(jaxpr.eqns)
    stack = [keys]
    while stack:
        var = stack.pop()
        if is_literal(var) or made_by.get(var) in passed:
            continue
        equation = jaxpr.eqns[made_by[var]] if var in made_by else None
        name = equation.primitive.name if equation is not None else ""
        if equation is None or not (var in numbers or name in ON_ELEMENTS or name == "reshape"):
            ids.add(var)
            continue
        if var in numbers and var.aval.size > 1 and (not equation.invars or equation.invars[0].aval.size > 1):
            return [], set()  # of which another place has another one
        if name == "reshape" and var not in numbers:
            views.append(var)
        passed.add(made_by[var])
        stack += equation.invars
    (found, *others) = ids or {None}
    if found is None or others or not passed or found.aval.size != keys.aval.size or not _is_whole(found):
        return [], set()
    program = program_of(jaxpr, [jaxpr.eqns[n] for n in sorted(passed)], [found], [keys])
    return ([*views, found], passed) if _are_equal(program, groups) else ([], set())


# What was seen to leave the numbers of groups as they are, or not to.
_EQUAL: dict[str, bool] = {}


def _are_equal(program: ClosedJaxpr, groups: int) -> bool:
    """Whether a program leaves its numbers as they are: seen on numbers of groups drawn at random, and all alike."""
    text = f"{groups} {program}"
    if text not in _EQUAL:
        given = open_jaxpr(program).invars[0].aval
        tried = [np.random.default_rng(0).integers(0, groups, given.shape)]
        tried += [np.full(given.shape, round(group)) for group in np.linspace(0, groups - 1, _TRIED)]
        with jax.ensure_compile_time_eval():
            made = (evaluate(program, jnp.asarray(one, given.dtype))[0] for one in tried)
            _EQUAL[text] = all(np.array_equal(np.ravel(a), np.ravel(b)) for a, b in zip(made, tried, strict=True))
    return _EQUAL[text]


def _maker(jaxpr: Jaxpr) -> Callable[[Any], Equation | None]:
    """By a variable the equation that makes it."""
    made_by = {var: equation for equation in jaxpr.eqns for var in equation.outvars if not is_dropped(var)}
    return lambda atom: None if is_literal(atom) else made_by.get(atom)


def _is_whole(atom: Any) -> bool:
    """Whether a value is of whole numbers."""
    return np.issubdtype(atom.aval.dtype, np.integer)


def _is_index(maker: Callable[[Any], Equation | None], atom: Any) -> bool:
    """Whether a value is seen never to be negative: of a type without sign, or indices that an operator found."""
    if atom.aval.dtype.kind == "u":
        return True
    equation = maker(atom)
    while equation is not None and equation.primitive.name in (*_VIEWS, *_PARTS) and _is_whole(equation.invars[0]):
        atom = equation.invars[0]
        equation = maker(atom)
    if equation is None or equation.primitive.name not in _FINDERS:
        return False
    return atom is equation.outvars[_FINDERS[equation.primitive.name]]


def _counting(jaxpr: Jaxpr, made_by: Mapping[Any, int], sizes: Any, keys: Any, *, negative: bool) -> set[int]:
    """The equations that make the sizes of groups of keys."""
    found: set[int] = set()
    stack = [sizes]
    while stack:
        var = stack.pop()
        if is_literal(var) or var is keys:
            continue
        if var not in made_by:
            raise Refused("the sizes of its groups are made of something else than what its rows are sorted by")
        if made_by[var] not in found:
            found.add(made_by[var])
            stack += jaxpr.eqns[made_by[var]].invars
    if not found:
        raise Refused("the sizes of its groups do not count what its rows are sorted by")
    program = program_of(jaxpr, [jaxpr.eqns[n] for n in sorted(found)], [keys], [sizes])
    if not _are_counts(program, negative=False):
        raise Refused("the sizes of its groups do not count what its rows are sorted by")
    if negative and not _are_counts(program, negative=True):
        raise Refused(
            "what its rows are sorted by may be negative, and the sizes of its groups leave that out: take ids of "
            "`jax.lax.top_k`, or count them by `jnp.bincount`"
        )
    return found


# What was seen to count keys, or not to.
_COUNTS: dict[str, bool] = {}


# So many groups, evenly spread, are tried with all keys in them. (One trial of 524,288 keys in 64 groups, counted by
# `one_hot`, takes 0.13 s on a CPU core.)
_TRIED = 8


def _are_counts(program: ClosedJaxpr, *, negative: bool) -> bool:
    """Whether a program counts its keys: seen on keys drawn at random, of all groups or half of them, and all alike.

    Args:
      program: of the keys.
      negative: instead, on keys of which some are negative, which have to count as of the first group: they are
        sorted before all others.
    """
    text = f"{negative} {program}"
    if text not in _COUNTS:
        keys, sizes = open_jaxpr(program).invars[0].aval, open_jaxpr(program).outvars[0].aval
        draws = np.random.default_rng(0)
        (groups,) = sizes.shape
        if negative:
            tried = [draws.integers(-1, groups, keys.shape), np.full(keys.shape, -1)]
        else:
            tried = [draws.integers(0, high, keys.shape) for high in (groups, (groups + 1) // 2)]
            alike = {round(at) for at in np.linspace(0, groups - 1, min(groups, _TRIED))}
            tried += [np.full(keys.shape, group) for group in sorted(alike)]
        with jax.ensure_compile_time_eval():
            _COUNTS[text] = all(
                np.array_equal(
                    evaluate(program, jnp.asarray(one, keys.dtype))[0],
                    np.bincount(np.maximum(one, 0).ravel(), None, groups),
                )
                for one in tried
            )
    return _COUNTS[text]


def _constants(equations: Sequence[Equation], made_by: Mapping[Any, int], among: Iterable[int]) -> set[int]:
    """Equations that make what some others read of literals alone (zeros, positions)."""
    numbers, found = _of_literals(equations), set[int]()
    stack = [a for n in among for a in equations[n].invars]
    while stack:
        atom = stack.pop()
        if not is_literal(atom) and atom in numbers and made_by[atom] not in found:
            found.add(made_by[atom])
            stack += equations[made_by[atom]].invars
    return found


def _of_literals(equations: Sequence[Equation]) -> set[Any]:
    """Values that are made of literals alone."""
    found = set[Any]()
    for equation in equations:
        if all(is_literal(a) or a in found for a in equation.invars):
            found.update(equation.outvars)
    return found


def _with_tail(jaxpr: Jaxpr, inside: set[int]) -> set[int]:
    """The equations with those behind them that make their only result smaller (the sum over a token's experts): where
    it is a sum over devices, less is sent."""
    found, equations = set(inside), jaxpr.eqns

    def leaving() -> list[Any]:
        others = [a for n, e in enumerate(equations) if n not in found for a in e.invars if not is_literal(a)]
        others += [a for a in jaxpr.outvars if not is_literal(a)]
        made = {var for n in found for var in equations[n].outvars}
        return [a for a in others if a in made]

    results = leaving()
    first = smallest = prod(results[0].aval.shape) if len(results) == 1 else 0
    best = inside
    while len(results) == 1 and not any(a is results[0] for a in jaxpr.outvars):
        (reader,) = (n for n, e in enumerate(equations) if n not in found and results[0] in e.invars)
        if equations[reader].primitive.name not in _TAIL:
            break
        found.add(reader)
        results = leaving()
        if len(results) == 1 and prod(results[0].aval.shape) < smallest:
            best, smallest = set(found), prod(results[0].aval.shape)
    return best if smallest < first else inside
