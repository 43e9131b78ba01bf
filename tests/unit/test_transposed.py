"""A reshape that transposes first is inlined as two operators, with its numbers and its line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright._jax.jaxpr import evaluate, inline, open_jaxpr, source_line
from meshwright.program.rules import Rules


def merged(x: Any) -> Any:
    return lax.reshape(x, (6, 4), (1, 0, 2))


def test_it_is_a_transpose_and_a_reshape() -> None:
    x = jnp.arange(24.0).reshape(2, 3, 4)
    closed = inline(
        jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (c + merged(x), None), jnp.zeros((6, 4)), None, 2))(x)
    )
    (scan,) = (one for one in open_jaxpr(closed).eqns if one.primitive.name == "scan")
    inside = open_jaxpr(scan.params["jaxpr"]).eqns
    assert [one.primitive.name for one in inside if one.primitive.name != "add"] == ["transpose", "reshape"]
    assert all(one.params["dimensions"] is None for one in inside if one.primitive.name == "reshape")
    np.testing.assert_array_equal(evaluate(closed, x)[0], 2 * merged(x))


def test_both_have_the_line_of_the_user() -> None:
    equations = open_jaxpr(inline(jax.make_jaxpr(merged)(jnp.zeros((2, 3, 4))))).eqns
    assert len(equations) == 2
    assert all("test_transposed.py" in source_line(one) and "merged" in source_line(one) for one in equations)


def test_dims_that_stay_apart_and_the_major_of_merged_ones_can_be_split() -> None:
    equations = open_jaxpr(inline(jax.make_jaxpr(merged)(jnp.zeros((2, 3, 4))))).eqns
    rules = Rules()
    rules.prepare([(one, True) for one in equations])
    split = [
        sorted(rule.factors[f].size for f in rule.splittable)
        for rule in (rules.rule(one, differentiated=True) for one in equations)
    ]
    assert split == [[2, 3, 4], [3, 4]]
