"""Gradients of stacked parameters added up inside the scan that makes them.

The backward pass of a scan stacks a gradient for each trip, and whoever accumulates over microbatches adds the whole
stack to a sum of the same size: for a model that is one scan, its gradients twice. Here the sum is carried through the
scan, and each trip adds its rows where they belong. A compiler updates a loop's carry in place, so the stack is gone.

What is scattered of a stack is scattered row by row, in the scan, and stays stacked: XLA's GPU compiler sends it beside
the next trip, as long as the loop does nothing with it but stack it (`liveness_pipelined`; llama3-8b with ZeRO-3 on 16
H100s in 4 microbatches: 96 % of these sums run beside compute, 29 % where they are added in the loop), and split over
devices it is a small part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .jaxpr import ClosedJaxpr, Equation, bind, evaluate, is_literal, open_jaxpr, scan_parts, user_context
from .liveness_pipelined import scatters_of_stacks

# A function of some arrays, traced for arrays of these shapes.
Traced = Callable[[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]], ClosedJaxpr]

_SUMS = frozenset(["add", "add_any"])
_FORMATTING = frozenset(["convert_element_type", "transpose", "optimization_barrier"])
# On all rows as on each, where it is another dim that is scattered.
_SUMMED_OVER_DEVICES = frozenset(["reduce_scatter", "psum", "psum_invariant"])


class _Sum(NamedTuple):
    """What a scan stacks and an equation adds to an input.

    Args:
      position: of the stacked result.
      formatted: the equations that turn the stack into what is added, in order.
      stays: whether they scatter it, so that it stays stacked.
      dim: of that, along which rows lie.
      into: the input.
      total: their sum.
    """

    position: int
    formatted: tuple[Equation, ...]
    stays: bool
    dim: int
    into: Any
    total: Any


def accumulate_in_scans(closed: ClosedJaxpr, traced: Traced) -> ClosedJaxpr | None:
    """The same program, with sums of an input and a scan's stacked result that nothing else reads made in the scan;
    None if it has none.

    Args:
      closed: the program of one device.
      traced: how it was traced, with the axes that its collectives name.
    """
    sums, gone = _sums(closed)
    if not sums:
        return None
    jaxpr = open_jaxpr(closed)
    numbers = {id(equation): number for number, equation in enumerate(jaxpr.eqns)}

    def program(*inputs: Any) -> list[Any]:
        given = dict(zip(jaxpr.invars, inputs, strict=True))
        totals: dict[Any, Any] = {}

        def instead(equation: Equation, operands: Sequence[Any]) -> Sequence[Any] | None:
            number = numbers[id(equation)]
            if number in gone:
                return [totals.get(var) for var in equation.outvars]
            if number not in sums:
                return None
            results, made = _accumulating(equation, operands, sums[number], given)
            totals.update(made)
            return results

        return list(evaluate(closed, *inputs, on_equation=instead))

    return traced(program, [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.invars])


def _sums(closed: ClosedJaxpr) -> tuple[dict[int, list[_Sum]], set[int]]:
    """The sums to be made in each scan, by its number among the equations; and the equations that go with them."""
    jaxpr = open_jaxpr(closed)
    reads = Counter(atom for equation in jaxpr.eqns for atom in equation.invars if not is_literal(atom))
    reads.update(atom for atom in jaxpr.outvars if not is_literal(atom))
    inputs = set(jaxpr.invars)
    # What is a stack but for its type and the order of its dims: scan, position, the equations on its way, dim of rows.
    stacks: dict[Any, tuple[int, int, tuple[int, ...], int]] = {}
    sums: dict[int, list[_Sum]] = {}
    gone: set[int] = set()
    for number, equation in enumerate(jaxpr.eqns):
        name = equation.primitive.name
        if name == "scan":
            first = scan_parts(equation).num_carry
            scattered = scatters_of_stacks(open_jaxpr(equation.params["jaxpr"]), first)
            stacks.update(
                (var, (number, position, (), 0))
                for position, var in enumerate(equation.outvars)
                if position >= first and position not in scattered and reads[var] == 1
            )
        elif name in _FORMATTING | _SUMMED_OVER_DEVICES and len(equation.invars) == 1:
            (read,), (made,) = equation.invars, equation.outvars
            if is_literal(read) or read not in stacks or reads[made] != 1:
                continue
            scan, position, way, dim = stacks[read]
            if name == "reduce_scatter" and (
                not equation.params["tiled"] or equation.params["scatter_dimension"] == dim
            ):
                continue
            dim = equation.params["permutation"].index(dim) if name == "transpose" else dim
            stacks[made] = scan, position, (*way, number), dim
        elif name in _SUMS and not any(map(is_literal, equation.invars)):
            for into, made in (equation.invars, equation.invars[::-1]):
                if made in stacks and into in inputs and reads[into] == 1 and into.aval.dtype == made.aval.dtype:
                    scan, position, way, dim = stacks[made]
                    # In a loop nothing needs a barrier: a scatter would only not run beside the next trip.
                    passed = (jaxpr.eqns[at] for at in way)
                    formatted = tuple(one for one in passed if one.primitive.name != "optimization_barrier")
                    stays = any(one.primitive.name == "reduce_scatter" for one in formatted)
                    one = _Sum(
                        position=position, formatted=formatted, stays=stays, dim=dim, into=into,
                        total=equation.outvars[0],
                    )  # fmt: skip
                    sums.setdefault(scan, []).append(one)
                    gone.update((*way, number))
                    break
    return sums, gone


def _accumulating(
    equation: Equation, operands: Sequence[Any], sums: Sequence[_Sum], given: Mapping[Any, Any]
) -> tuple[list[Any], dict[Any, Any]]:
    """The results of a scan, None for those that are added up in it, and the sums."""
    parts = scan_parts(equation)
    first_xs = parts.num_consts + parts.num_carry
    consts, carry, xs = operands[: parts.num_consts], operands[parts.num_consts : first_xs], operands[first_xs:]
    summed = {one.position for one in sums}
    in_place, at_end = [one for one in sums if not one.stays], [one for one in sums if one.stays]

    def trip(state: Any, rows: Any) -> Any:
        carried, totals, number = state
        outs = evaluate(parts.body, *consts, *carried, *rows)
        added = [_with_row(total, outs, number, one) for one, total in zip(in_place, totals, strict=True)]
        others = [out for i, out in enumerate(outs) if i >= parts.num_carry and i not in summed]
        late = [lax.squeeze(_row(outs, one), [one.dim]) for one in at_end]
        onwards = number - 1 if parts.reverse else number + 1
        return (tuple(outs[: parts.num_carry]), added, onwards), (others, late)

    start = jnp.int32(parts.length - 1 if parts.reverse else 0)
    with user_context(equation):
        (carried, totals, _), (others, late) = lax.scan(
            trip, (tuple(carry), [given[one.into] for one in in_place], start), tuple(xs), length=parts.length,
            reverse=parts.reverse, unroll=parts.unroll,
        )  # fmt: skip
    made = {one.total: total for one, total in zip(in_place, totals, strict=True)}
    for one, rows in zip(at_end, late, strict=True):
        made[one.total] = given[one.into] + jnp.moveaxis(rows, 0, one.dim)
    left = iter(others)
    stacked = (None if i in summed else next(left) for i in range(parts.num_carry, len(equation.outvars)))
    return [*carried, *stacked], made


def _row(outs: Sequence[Any], one: _Sum) -> Any:
    """What one trip makes of a sum."""
    row = outs[one.position][None]
    for equation in one.formatted:
        (row,) = bind(equation, row)
    return row


def _with_row(total: jax.Array, outs: Sequence[Any], number: jax.Array, one: _Sum) -> jax.Array:
    """A sum with the row of one trip added where it belongs."""
    before = lax.dynamic_slice_in_dim(total, number, 1, one.dim)
    return lax.dynamic_update_slice_in_dim(total, before + _row(outs, one), number, one.dim)
