"""Surgery on scans: one scan as several shorter ones in a row, and the slices of stacked operands read back.

The equations around a scan stay the very objects they were. What is new (slices, concatenations) is traced, not built
by hand, so that it has the parameters of the JAX at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import jax

from .jaxpr import ClosedJaxpr, Equation, Jaxpr, Var, consts_of, is_dropped, is_literal, open_jaxpr, scan_parts

# What may stand between a stacked array and the scan that reads it: each row is converted by itself.
_PER_ROW = frozenset(["convert_element_type", "copy", "transpose"])


def split_scan(equation: Equation, trips: Sequence[int], makers: Mapping[Any, Equation]) -> Iterator[Equation]:
    """The equations that a scan becomes: for each piece the slices of its stacked operands and the shorter scan, after
    the last one the concatenations of its stacked results.

    Args:
      equation: a scan.
      trips: of each piece, in the order they run; they add up to the scan's.
      makers: by variable, the equation that makes it. A stacked operand that is another array in another dtype or
        order of dims is sliced before it is converted: each piece reads its rows of that array only.
    """
    parts = scan_parts(equation)
    first_xs = parts.num_consts + parts.num_carry
    consts, carries, stacked = (
        list(equation.invars[: parts.num_consts]),
        list(equation.invars[parts.num_consts : first_xs]),
        equation.invars[first_xs:],
    )
    results = equation.outvars[: parts.num_carry], equation.outvars[parts.num_carry :]
    made: list[list[Any]] = []
    bounds = list(pairwise(accumulate(trips, initial=0)))
    for number, (start, stop) in enumerate(bounds):
        rows = (parts.length - stop, parts.length - start) if parts.reverse else (start, stop)
        xs = []
        for atom in stacked:
            dim, conversions = 0, []
            while (maker := makers.get(atom)) is not None and maker.primitive.name in _PER_ROW:
                conversions.append((maker, dim))
                dim = _dim_before(maker, dim)
                (atom,) = maker.invars
            slicing, part = _one_equation(equation, _first_rows(stop - start, dim), [atom])
            yield _moved(slicing, rows[0], dim)
            for maker, at in reversed(conversions):
                made_aval = maker.outvars[0].aval
                shape = [stop - start if d == at else n for d, n in enumerate(made_aval.shape)]
                converted = Var(made_aval.update(shape=tuple(shape)))
                yield maker.replace(invars=[part], outvars=[converted])
                part = converted
            xs.append(part)
        last = number == len(bounds) - 1
        outs = [Var(v.aval) if is_dropped(v) or not last else v for v in results[0]]
        shapes = [v.aval.update(shape=(stop - start, *v.aval.shape[1:])) for v in results[1]]
        ys = [Var(aval) for aval in shapes]
        params = {**equation.params, "length": stop - start, "unroll": min(parts.unroll, stop - start)}
        yield equation.replace(invars=[*consts, *carries, *xs], outvars=[*outs, *ys], params=params)
        carries = list(outs)
        made.append(ys)
    for position, var in enumerate(results[1]):
        if not is_dropped(var):
            pieces = [ys[position] for ys in (reversed(made) if parts.reverse else made)]
            joined, _ = _one_equation(equation, _join, pieces, result=var)
            yield joined


def split_scans_at(
    closed: ClosedJaxpr, trips: Mapping[int, Sequence[int]]
) -> tuple[ClosedJaxpr, dict[tuple[int, int], int]]:
    """The program with the top-level scans at the positions `trips` cut into pieces of so many trips; conversions that
    nothing reads any more are gone.

    Returns:
      The program, and for each (position of a scan before, number of a piece) the piece's first equation.
    """
    top: Jaxpr = open_jaxpr(closed)
    makers = {var: equation for equation in top.eqns for var in equation.outvars}
    equations: list[Equation] = []
    starts: dict[tuple[int, int], Equation] = {}
    for position, equation in enumerate(top.eqns):
        if len(trips.get(position, ())) < 2:
            equations.append(equation)
            continue
        number, fresh = 0, True
        for made in split_scan(equation, trips[position], makers):
            if fresh and number < len(trips[position]):
                starts[position, number] = made
            fresh = made.primitive is equation.primitive
            number += fresh
            equations.append(made)
    read = {id(atom) for atom in top.outvars}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.primitive.name in _PER_ROW and id(equation.outvars[0]) not in read:
            continue
        read.update(id(atom) for atom in equation.invars)
        kept.append(equation)
    kept.reverse()
    places = {id(equation): place for place, equation in enumerate(kept)}
    debug = top.debug_info.with_unknown_names()
    program = ClosedJaxpr(top.replace(eqns=kept, debug_info=debug), list(consts_of(closed)))
    return program, {piece: places[id(first)] for piece, first in starts.items()}


def input_rows(closed: ClosedJaxpr) -> dict[int, tuple[int, int, int, int]]:
    """For each top-level equation that cuts rows of one dim out of an input for scans alone, which loop over that dim:
    that input's position, the dim, the first row and the one past the last."""
    top = open_jaxpr(closed)
    inputs: dict[Any, int] = {var: i for i, var in enumerate(top.invars)}
    readers: dict[Any, list[Equation]] = {}
    for equation in top.eqns:
        for atom in equation.invars:
            if not is_literal(atom):
                readers.setdefault(atom, []).append(equation)
    outputs = {atom for atom in top.outvars if not is_literal(atom)}

    def for_scans(var: Any, dim: int) -> bool:
        found = readers.get(var, [])
        return var not in outputs and all(
            (equation.primitive.name == "scan" and dim == 0)
            or (equation.primitive.name in _PER_ROW and for_scans(equation.outvars[0], _dim_after(equation, dim)))
            for equation in found
        )  # fmt: skip

    found = {}
    for position, equation in enumerate(top.eqns):
        if equation.primitive.name != "slice" or is_literal(equation.invars[0]):
            continue
        source = inputs.get(equation.invars[0])
        starts, stops = equation.params["start_indices"], equation.params["limit_indices"]
        shape = equation.invars[0].aval.shape
        cut = [d for d, (a, b, n) in enumerate(zip(starts, stops, shape, strict=True)) if (a, b) != (0, n)]
        even = set(equation.params["strides"] or ()) <= {1}
        if source is not None and len(cut) == 1 and even and for_scans(equation.outvars[0], cut[0]):
            found[position] = (source, cut[0], int(starts[cut[0]]), int(stops[cut[0]]))
    return found


def _dim_before(equation: Equation, dim: int) -> int:
    """Of a dim of the result of an equation that treats each row by itself, the operand's dim that it is."""
    return equation.params["permutation"][dim] if equation.primitive.name == "transpose" else dim


def _dim_after(equation: Equation, dim: int) -> int:
    """Of a dim of its operand, the result's dim that it becomes."""
    return equation.params["permutation"].index(dim) if equation.primitive.name == "transpose" else dim


@lru_cache(maxsize=1 << 12)
def _first_rows(count: int, dim: int) -> Callable[[Any], Any]:
    return lambda x: jax.lax.slice_in_dim(x, 0, count, axis=dim)


def _moved(slicing: Equation, by: int, dim: int) -> Equation:
    """The slice of as many rows so much further on: to trace one for every piece of a long scan takes a second."""
    ends = {name: slicing.params[name] for name in ("start_indices", "limit_indices")}
    moved = {name: tuple(n + by if d == dim else n for d, n in enumerate(end)) for name, end in ends.items()}
    return slicing.replace(params=slicing.params | moved)


def _join(*pieces: Any) -> Any:
    return jax.lax.concatenate(pieces, 0)


def _one_equation(
    origin: Equation, function: Callable[..., Any], atoms: Sequence[Any], *, result: Any = None
) -> tuple[Equation, Any]:
    """`function` of `atoms`, one primitive, as an equation that carries the source line of `origin`; and its result."""
    made = _traced(function, tuple((a.aval.shape, a.aval.dtype) for a in atoms), jax.sharding.get_abstract_mesh())
    out = Var(made.outvars[0].aval) if result is None else result
    return made.replace(invars=list(atoms), outvars=[out], source_info=origin.source_info), out


# Pieces of a scan, and programs that differ in their microbatches alone, slice and join the same shapes.
@lru_cache(maxsize=1 << 14)
def _traced(function: Callable[..., Any], shapes: tuple[tuple[tuple[int, ...], Any], ...], context: Any) -> Equation:
    """`function`, one primitive, of arrays of these shapes and dtypes, traced in the mesh that is the context."""
    del context
    (made,) = open_jaxpr(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(*one) for one in shapes))).eqns
    return made
