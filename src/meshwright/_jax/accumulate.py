"""Gradients of stacked parameters added up inside the scan that makes them.

The backward pass of a scan stacks a gradient for each trip, and whoever accumulates over microbatches adds the whole
stack to a sum of the same size: for a model that is one scan, its gradients twice. Here the sum is carried through the
scan, and each trip adds its rows where they belong. A compiler updates a loop's carry in place, so the stack is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from .jaxpr import ClosedJaxpr, Equation, bind, consts_of, evaluate, is_literal, open_jaxpr, scan_parts, user_context
from .passes import trace_local

_SUMS = frozenset(["add", "add_any"])


def accumulate_in_scans(closed: ClosedJaxpr, mesh: Mesh | AbstractMesh) -> ClosedJaxpr:
    """The same program, with sums of an input and a scan's stacked result that nothing else reads made in the scan.

    Args:
      closed: the program of one device.
      mesh: whose axes its collectives name.
    """
    sums, gone = _sums(closed)
    if not sums:
        return closed
    jaxpr = open_jaxpr(closed)

    def program(*inputs: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts_of(closed), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else env[atom]

        for number, equation in enumerate(jaxpr.eqns):
            if number in gone:
                continue
            operands = [read(atom) for atom in equation.invars]
            if number not in sums:
                env.update(zip(equation.outvars, bind(equation, *operands), strict=True))
                continue
            into = {position: read(var) for position, var, _ in sums[number]}
            results = _accumulating(equation, operands, into)
            env.update(zip(equation.outvars, results, strict=True))
            env.update((total, results[position]) for position, _, total in sums[number])
        return [read(atom) for atom in jaxpr.outvars]

    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.invars]
    return trace_local(program, shapes, mesh)


def _sums(closed: ClosedJaxpr) -> tuple[dict[int, list[tuple[int, Any, Any]]], set[int]]:
    """For each scan the positions of the stacked results that are added to an input, that input, and the sum; and the
    equations that add them."""
    jaxpr = open_jaxpr(closed)
    reads = Counter(atom for equation in jaxpr.eqns for atom in equation.invars if not is_literal(atom))
    reads.update(atom for atom in jaxpr.outvars if not is_literal(atom))
    inputs = set(jaxpr.invars)
    stacked = {
        var: (number, position)
        for number, equation in enumerate(jaxpr.eqns)
        if equation.primitive.name == "scan"
        for position, var in enumerate(equation.outvars)
        if position >= scan_parts(equation).num_carry
    }
    sums: dict[int, list[tuple[int, Any, Any]]] = {}
    gone: set[int] = set()
    for number, equation in enumerate(jaxpr.eqns):
        if equation.primitive.name not in _SUMS or any(map(is_literal, equation.invars)):
            continue
        for into, made in (equation.invars, equation.invars[::-1]):
            once = reads[into] == 1 and reads[made] == 1
            if once and made in stacked and into in inputs and into.aval.dtype == made.aval.dtype:
                scan, position = stacked[made]
                sums.setdefault(scan, []).append((position, into, equation.outvars[0]))
                gone.add(number)
                break
    return sums, gone


def _accumulating(equation: Equation, operands: Sequence[Any], into: dict[int, Any]) -> list[Any]:
    """A scan whose stacked results at some positions are added to arrays of the same shape."""
    parts = scan_parts(equation)
    first_xs = parts.num_consts + parts.num_carry
    consts, carry, xs = operands[: parts.num_consts], operands[parts.num_consts : first_xs], operands[first_xs:]

    def trip(state: Any, rows: Any) -> Any:
        carried, totals, number = state
        outs = evaluate(parts.body, *consts, *carried, *rows)
        added = {
            position: lax.dynamic_update_index_in_dim(
                total, lax.dynamic_index_in_dim(total, number, 0, keepdims=False) + outs[position], number, 0
            )
            for position, total in totals.items()
        }
        stacked = [out for i, out in enumerate(outs) if i >= parts.num_carry and i not in totals]
        onwards = number - 1 if parts.reverse else number + 1
        return (tuple(outs[: parts.num_carry]), added, onwards), tuple(stacked)

    start = jnp.int32(parts.length - 1 if parts.reverse else 0)
    with user_context(equation):
        (carried, totals, _), stacked = lax.scan(
            trip, (tuple(carry), into, start), tuple(xs), length=parts.length, reverse=parts.reverse,
            unroll=parts.unroll,
        )  # fmt: skip
    others = iter(stacked)
    return [
        *carried,
        *(totals[i] if i in totals else next(others) for i in range(parts.num_carry, len(equation.outvars))),
    ]
