"""Weights that are gathered for the forward pass and again for the backward pass, instead of kept between them.

The derivative of a product reads its weight, so a traced step keeps every weight that a device has gathered until the
backward pass has read it: of a model that is stored over all devices (ZeRO-3) each of them would hold all. FSDP and
DeepSpeed gather a second time; here the equations of a traced step are evaluated so.

A second gather may begin where the backward pass still has as many bytes of other weights to read before this one as
this one has: there is compute to run beside it, and no more than about three weights are there at a time. A barrier
ties what is gathered to a value of that place; without one the compiler would find the same gather twice, and keep the
first. The weight that the backward pass reads first, the last one of the forward pass, stays.

Known limit: gathers inside loops and rematerialised parts are left as they are: both have them again anyway. What is
made of several weights after they were gathered, or by more than a little work, is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import jax
from jax import lax

from .jaxpr import ClosedJaxpr, Equation, Jaxpr, Var, consts_of, is_literal, open_jaxpr
from .passes import is_cheap

Env = dict[Any, Any]

# Collectives that move weights to where they are read.
AGAIN = frozenset({"all_gather", "all_to_all"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """A weight that the backward pass reads, as it is or gathered.

    Args:
      gather: the equation that gathers it, over some axes; None for one that is read as it is.
      views: what little work makes of what was gathered, in order, for the backward pass to read; gathers over other
        axes too.
      at: the first equation of the backward pass that reads any of it.
      anchor: the first from there on that has to wait for the backward pass.
      value: what that one waits for.
      bytes: as it is read.
    """

    gather: Equation | None
    views: tuple[Equation, ...]
    at: int
    anchor: int
    value: Any
    bytes: int


def gather_again(closed: ClosedJaxpr, first_parameter: int) -> ClosedJaxpr | None:
    """The program with its second gathers; None if it has none.

    Args:
      closed: its calls in line; its first result is the loss.
      first_parameter: the first of its arguments that is a parameter, as are all that follow.
    """
    jaxpr = open_jaxpr(closed)
    of_parameters = _of_parameters(jaxpr, first_parameter)
    weights = _read_backward(jaxpr, of_parameters, first_parameter)
    read_before = [0, *accumulate(one.bytes for one in weights)]
    begun: dict[int, list[tuple[_Weight, Equation, Any]]] = {}
    for number, one in enumerate(weights):
        # The last place from which on as much as this one has is still to be read before it; or the first.
        before = max(bisect_right(read_before, read_before[number] - one.bytes, hi=number + 1) - 1, 0)
        if one.gather is not None and weights[before].anchor < one.at:
            begun.setdefault(weights[before].anchor, []).append((one, one.gather, weights[before].value))
    if not begun:
        return None
    found: list[Equation] = []
    names: Env = {}

    def add(equation: Equation, operands: Sequence[Any], results: Sequence[Any]) -> None:
        found.append(equation.replace(invars=list(operands), outvars=list(results)))

    def again(equation: Equation, operands: Sequence[Any]) -> None:
        results = [Var(v.aval) for v in equation.outvars]
        add(equation, operands, results)
        names.update(zip(equation.outvars, results, strict=True))

    def read(equation: Equation) -> list[Any]:
        return [a if is_literal(a) else names.get(a, a) for a in equation.invars]

    second: dict[int, list[tuple[_Weight, Equation, Any]]] = {}
    for at, equation in enumerate(jaxpr.eqns):
        if at in begun:
            value = begun[at][0][2]
            held = [names.get(value, value), *(a for _, gather, _ in begun[at] for a in read(gather))]
            names[value], *sources = tied = [Var(a.aval) for a in held]
            add(_barrier([a.aval for a in held]), held, tied)
            for (one, gather, _), source in zip(begun[at], sources, strict=True):
                second.setdefault(one.at, []).append((one, gather, source))
        for one, gather, source in second.get(at, ()):
            again(gather, [source])
            for view in one.views:
                again(view, read(view))
        add(equation, read(equation), equation.outvars)
    results = [a if is_literal(a) else names.get(a, a) for a in jaxpr.outvars]
    return ClosedJaxpr(jaxpr.replace(eqns=found, outvars=results), consts_of(closed))


def _barrier(avals: Sequence[Any]) -> Equation:
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    (equation,) = open_jaxpr(jax.make_jaxpr(lambda *xs: lax.optimization_barrier(xs))(*types)).eqns
    return equation


def _of_parameters(jaxpr: Jaxpr, first: int) -> set[Any]:
    """Values that depend on parameters and constants alone."""
    found = {*jaxpr.invars[first:], *jaxpr.constvars}
    for equation in jaxpr.eqns:
        if all(is_literal(a) or a in found for a in equation.invars):
            found.update(equation.outvars)
    return found


def _read_backward(jaxpr: Jaxpr, of_parameters: set[Any], first_parameter: int) -> list[_Weight]:
    """The weights that the backward pass reads, in its order."""
    loss = jaxpr.outvars[0]
    end = next((at for at, equation in enumerate(jaxpr.eqns) if loss in equation.outvars), None)
    if end is None:
        return []
    # Of what little work makes of one weight alone, that weight: as it is, or as it was gathered.
    weight: dict[Any, Any] = {var: var for var in jaxpr.invars[first_parameter:]}
    views: dict[Any, list[Equation]] = {}
    gathers: dict[Any, Equation] = {}
    for equation in jaxpr.eqns[: end + 1]:
        of = {weight[a] for a in equation.invars if not is_literal(a) and a in weight}
        if not of or not of_parameters.issuperset(equation.outvars):
            continue
        moves, source = equation.primitive.name in AGAIN, next(iter(of))
        if len(of) == 1 and (source in gathers if moves else is_cheap(equation)):
            weight.update(dict.fromkeys(equation.outvars, source))
            views.setdefault(source, []).append(equation)
            continue
        weight.update((var, var) for var in equation.outvars)
        if moves:  # over further axes it is gathered by what follows
            gathers[equation.outvars[0]] = equation
    read: dict[Any, tuple[int, set[Any]]] = {}
    for at, equation in enumerate(jaxpr.eqns[end + 1 :], start=end + 1):
        for var in equation.invars:
            if not is_literal(var) and var in weight:
                read.setdefault(weight[var], (at, set()))[1].add(var)
    anchors = _anchors(jaxpr, of_parameters, min((at for at, _ in read.values()), default=len(jaxpr.eqns)))
    found = []
    for var, (at, wanted) in read.items():
        needed, size = [], sum(prod(one.aval.shape) * one.aval.dtype.itemsize for one in wanted)
        for view in reversed(views.get(var, ())):
            if not wanted.isdisjoint(view.outvars):
                needed.append(view)
                wanted.update(a for a in view.invars if not is_literal(a))
        place = bisect_left(anchors, (at,))
        anchor, value = anchors[place] if place < len(anchors) else (len(jaxpr.eqns), None)
        found.append(
            _Weight(
                gather=gathers.get(var), views=tuple(reversed(needed)), at=at, anchor=anchor, value=value, bytes=size
            )
        )  # fmt: skip
    return found


def _anchors(jaxpr: Jaxpr, of_parameters: set[Any], first: int) -> list[tuple[int, Any]]:
    """The equations that can only run once the backward pass has begun, with a value that each of them waits for.

    That is known of what depends on the first equation of the backward pass, number `first`, that reads a weight. An
    equation after the loss need not: it may read nothing but what the forward pass has kept.
    """
    late: set[Any] = set()
    found = []
    for at, equation in enumerate(jaxpr.eqns[first:], start=first):
        operands = [a for a in equation.invars if not is_literal(a)]
        if mine := [a for a in operands if a in late]:
            late.update(equation.outvars)
            if arrays := [a for a in mine if jax.numpy.issubdtype(a.aval.dtype, jax.numpy.inexact)]:
                found.append((at, arrays[0]))
        elif not late and not of_parameters.isdisjoint(operands) and not of_parameters.issuperset(equation.outvars):
            late.update(equation.outvars)
    return found
