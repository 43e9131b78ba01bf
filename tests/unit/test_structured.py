"""Equations that hold programs, taken apart, compute what they computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright._jax.jaxpr import ClosedJaxpr, evaluate, inline, is_literal, open_jaxpr
from meshwright._jax.structured import copy_of, may_run_on, move_out, pruned


def branching(x: Any, y: Any, z: Any) -> Any:
    return lax.cond(x > 0, lambda: (x + 1, y * jnp.sum(z), z), lambda: (x, y, jnp.cos(z)))


def looping(x: Any, y: Any, z: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + jnp.sum(c[2]), c[2] * 2), (x, y, z))


def scanning(x: Any, y: Any, z: Any) -> Any:
    (a, b), rows = lax.scan(lambda c, w: ((c[0] + w, c[1] * 2), c[1] + w), (x, y), z)
    return a, b, rows


ARGUMENTS = (jnp.float32(1), jnp.float32(2), jnp.arange(4.0))


def equation_of(function: Callable[..., Any], name: str) -> tuple[ClosedJaxpr, Any]:
    closed = inline(jax.make_jaxpr(function)(*ARGUMENTS))
    return closed, next(e for e in open_jaxpr(closed).eqns if e.primitive.name == name)


def with_equations(closed: ClosedJaxpr, old: Any, new: list[Any], outputs: list[Any]) -> ClosedJaxpr:
    jaxpr = open_jaxpr(closed)
    equations = [made for e in jaxpr.eqns for made in (new if e is old else [e])]
    debug = jaxpr.debug_info.with_unknown_names()
    return ClosedJaxpr(jaxpr.replace(eqns=equations, outvars=outputs, debug_info=debug), [])


@pytest.mark.parametrize(
    ("function", "name", "reads"),
    [(branching, "cond", [{"x"}, {"y", "z"}, {"z"}]), (looping, "while", [{"x"}, {"x", "y", "z"}, {"x", "z"}]),
     (scanning, "scan", [{"x", "z"}, {"y"}, {"y", "z"}])],
)  # fmt: skip
def test_pruned_to_one_result_it_reads_no_more_than_that_needs(
    function: Callable[..., Any], name: str, reads: list[set[str]]
) -> None:
    closed, equation = equation_of(function, name)
    expected = function(*ARGUMENTS)
    named = dict(zip(open_jaxpr(closed).invars, "xyz", strict=True))
    for position, var in enumerate(equation.outvars):
        part = pruned(equation, [v is var for v in equation.outvars])
        assert {named[a] for a in part.invars if not is_literal(a) and a in named} == reads[position]
        (found,) = evaluate(with_equations(closed, equation, [part], [var]), *ARGUMENTS)
        np.testing.assert_allclose(found, expected[position], rtol=1e-6)


@pytest.mark.parametrize("x", [1.0, -1.0])
def test_equations_of_a_branch_in_front_of_it(x: float) -> None:
    closed, equation = equation_of(branching, "cond")
    branches = [open_jaxpr(branch) for branch in equation.params["branches"]]
    positions = [{i for i, e in enumerate(b.eqns) if e.primitive.name == "reduce_sum"} for b in branches]
    assert sorted(map(len, positions)) == [0, 1]
    front, rest = move_out(equation, positions)
    assert [e.primitive.name for e in front.equations] == ["reduce_sum"]
    assert len(rest.invars) == len(equation.invars) + 1
    apart = with_equations(closed, equation, [*front.equations, rest], list(equation.outvars))
    arguments = (jnp.float32(x), *ARGUMENTS[1:])
    for found, expected in zip(evaluate(apart, *arguments), branching(*arguments), strict=True):
        np.testing.assert_allclose(found, expected)


def test_what_might_not_end_is_known_at_any_depth() -> None:
    def nested(x: Any, y: Any, z: Any) -> Any:
        return lax.cond(x > 0, lambda: looping(x, y, jnp.sum(z)), lambda: (x, y, x))

    assert may_run_on(equation_of(nested, "cond")[1])
    assert not may_run_on(equation_of(branching, "cond")[1])
    assert not may_run_on(equation_of(scanning, "scan")[1])


def test_a_copy_has_a_variable_of_its_own() -> None:
    _, equation = equation_of(branching, "cond")
    copy = copy_of(equation.outvars[0], equation)
    assert copy.invars == [equation.outvars[0]]
    assert copy.outvars[0] is not equation.outvars[0]
    assert copy.primitive.name == "copy"
