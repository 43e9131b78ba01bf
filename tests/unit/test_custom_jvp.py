"""Calls of one function with a custom JVP are told to be the same, and no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright._jax.jaxpr import Equation, custom_jvp_of
from meshwright.program import rules
from meshwright.program.trace import trace_program


def calls(function: Callable[..., Any]) -> list[Equation]:
    traced = jax.make_jaxpr(function)(jnp.ones((2, 4)))
    return [equation for equation in traced.eqns if equation.primitive.name == "custom_jvp_call"]


def times(factor: float) -> Callable[[Any], Any]:
    @jax.custom_jvp
    def scaled(x: Any) -> Any:
        return factor * x

    @scaled.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return factor * primals[0], factor * tangents[0]

    return scaled


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def powered(x: Any, exponent: int) -> Any:
    return x**exponent


@powered.defjvp
def _(exponent: int, primals: Any, tangents: Any) -> Any:
    return primals[0] ** exponent, exponent * tangents[0]


def test_calls_of_one_function_are_the_same() -> None:
    first, second, other = calls(lambda x: jax.nn.relu6(jax.nn.relu(jax.nn.relu(x) + 1)))
    assert custom_jvp_of(first) is not None
    assert custom_jvp_of(first) == custom_jvp_of(second) != custom_jvp_of(other)


def test_functions_made_of_one_definition_are_told_apart() -> None:
    twice, thrice = times(2.0), times(3.0)
    first, second, again = calls(lambda x: twice(thrice(twice(x))))
    assert custom_jvp_of(first) == custom_jvp_of(again) != custom_jvp_of(second)


def test_functions_that_share_a_rule_are_told_apart() -> None:
    def straight_through(primal: Callable[[Any], Any]) -> Callable[[Any], Any]:
        function = jax.custom_jvp(primal)
        function.defjvp(pass_through)
        return function

    def pass_through(primals: Any, tangents: Any) -> Any:
        return jnp.round(primals[0]), tangents[0]

    rounded, turned = straight_through(lambda x: jnp.round(x)), straight_through(lambda x: x[::-1])
    first, second, again = calls(lambda x: rounded(turned(rounded(x))))
    assert custom_jvp_of(first) == custom_jvp_of(again) != custom_jvp_of(second)


def test_of_static_arguments_nothing_is_said() -> None:
    assert [custom_jvp_of(one) for one in calls(lambda x: powered(powered(x, 2), 3))] == [None, None]


def test_other_calls_are_none() -> None:
    (equation,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    assert custom_jvp_of(equation) is None


def test_derivatives_are_traced_once_for_a_function_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    parts = rules.vjp_parts
    monkeypatch.setattr(rules, "vjp_parts", lambda equation: traced.append(equation) or parts(equation))

    def step(w: Any, x: Any) -> Any:
        loss = lambda w: jax.nn.relu(jax.nn.relu(jax.nn.relu(x @ w) @ w) + 1).mean()  # noqa: E731
        value, gradient = mw.value_and_grad(loss)(w)
        return w - gradient, value

    trace_program(step, (jnp.ones((4, 4)), jnp.ones((2, 4))))
    assert len(traced) == 1
