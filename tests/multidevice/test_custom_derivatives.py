"""Functions with derivatives of their own give by a plan what they give on one device: on parameters, with reductions
inside, and where what takes a gradient's place is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import assert_as_on_one_device, assert_equal_trees

import meshwright as mw
from meshwright.errors import PlanError

_RANDOM = np.random.default_rng(3)
X, Y = (jnp.asarray(_RANDOM.normal(size=(32, 64)), jnp.float32) for _ in range(2))
WEIGHTS = [jnp.asarray(_RANDOM.normal(size=(64, 64)) / 8, jnp.float32) for _ in range(2)]
PLANS = [{"preset": "data_parallel"}, {"preset": "zero(3)"}, {"preset": "megatron(tp=8)"}]


def custom(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    function = jax.custom_vjp(lambda *args: forward(*args)[0])
    function.defvjp(forward, backward)
    return function


@jax.custom_jvp
def squared(w: Any) -> Any:
    return w * w


squared.defjvp(lambda given, moved: (given[0] ** 2, 2 * given[0] * moved[0]))
ON_PARAMETERS = {
    "scaled": custom(lambda w: (w, w), lambda w, g: (2 * g * w,)),
    "clipped": custom(lambda w: (w, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),)),
    "squared": squared,
}


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(weights: Any, x: Any, y: Any) -> Any:
        value, gradients = mw.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    return step


@pytest.mark.parametrize("options", PLANS, ids=str)
@pytest.mark.parametrize("name", ON_PARAMETERS)
def test_a_derivative_of_its_own_on_parameters(name: str, options: dict[str, Any]) -> None:
    """Gradients are summed, once, before a rule that may be any function of them."""

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ ON_PARAMETERS[name](weight))
        return jnp.mean((x - y) ** 2)

    assert_as_on_one_device(step_of(loss), WEIGHTS, X, Y, **options)


def rounded(x: Any) -> Any:
    """In whole steps of a fourth of the largest element."""
    step = jnp.max(jnp.abs(x)) / 4
    return jnp.round(x / step) * step


# Of operands and cotangents rounded by the whole array's largest element, and plain.
PRODUCTS = {
    "rounded": custom(
        lambda x, w: (rounded(x) @ rounded(w), (x, w)), lambda kept, g: (rounded(g) @ kept[1].T, kept[0].T @ rounded(g))
    ),
    "plain": custom(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)),
}


@pytest.mark.parametrize("options", [*PLANS, {"stages": 1}], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_inside_are_split_with_their_reductions(name: str, options: dict[str, Any]) -> None:
    """What devices hold in parts is reduced where it is made, in both passes; a product summed in parts stays a sum."""
    product = PRODUCTS[name]

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((product(jnp.tanh(product(x, weights[0])), weights[1]) - y) ** 2)

    planned = assert_as_on_one_device(step_of(loss), WEIGHTS, X, Y, **options)
    (stage,) = planned.plan(WEIGHTS, X, Y).stages
    calls = [one for one in stage.operators if one.name == "custom_vjp_call"]
    if "preset" in options:
        assert calls
        assert all(any(one.axes) for one in calls)
    if options == {"preset": "megatron(tp=8)"}:  # by columns, then by rows
        assert [[bool(axes) for axes in one.use.dims] for one in stage.parameters] == [[False, True], [True, False]]


def with_rule(function: Callable[..., Any]) -> Any:
    """The same function with a rule of its own: what JAX would do."""
    return custom(lambda *given: jax.vjp(function, *given), lambda pullback, g: pullback(g))


spread = with_rule(lambda h: h / (1 + jnp.max(jnp.abs(h))))
REDUCING = {
    "normalised": with_rule(lambda h: h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)),
    "in another": with_rule(lambda h: spread(2 * h) + jnp.mean(h)),
    "two results": lambda h: (lambda made, sums: made + sums[:, None])(*two_results(h)),
    "with a bias": lambda h: shifted(h, WEIGHTS[0], WEIGHTS[1][0]),
    "positive": lambda h: h * counted(h)[:, None],
    "in a loop": lambda h: jax.lax.scan(lambda h, _: (spread(h), None), h, None, length=2)[0],
}
shifted = with_rule(lambda h, w, b: h @ w + b)
counted = custom(lambda h: (jnp.sum(h, axis=-1) > 0, h), lambda h, _: (jnp.zeros_like(h),))
two_results = with_rule(lambda h: (jnp.sin(h), jnp.sum(jnp.abs(h), axis=-1) / 64))


BOTH_WAYS = [{"preset": "megatron(tp=8)"}, {"preset": "megatron(tp=4, dp=2)"}, {"mesh": {"a": 2, "b": 4}}]


# Each by one of the plans; by every plan what reduces in a loop, which is all of it but the operands.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, one, id=f"{name}-{one}", marks=[pytest.mark.slow] * (name != "in a loop" and one != own))
        for name, own in zip(REDUCING, 2 * BOTH_WAYS, strict=True)
        for one in BOTH_WAYS
    ],
)
def test_what_reduces_inside_is_as_on_one_device(name: str, options: dict[str, Any]) -> None:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((REDUCING[name](jnp.tanh(x @ weights[0])) @ weights[1] - y) ** 2)

    assert_as_on_one_device(step_of(loss), WEIGHTS, X, Y, **options)


def test_parts_of_a_sum_are_added_up_before_they_are_narrowed() -> None:
    """What the devices' parts come to has no float16, what all of it comes to has."""
    signs = jnp.repeat(jnp.asarray([3e4, -3e4]), 32)
    summed = with_rule(lambda h: jnp.sum((1 + 1e-3 * h) * signs, axis=-1).astype(jnp.float16))

    def loss(weights: Any, x: Any, y: Any) -> Any:
        made = summed(jnp.tanh(x @ weights[0])).astype(jnp.float32) / 100
        return jnp.mean((made[:, None] * weights[1][0] - y) ** 2)

    assert_as_on_one_device(step_of(loss), WEIGHTS, X, Y, preset="megatron(tp=8)", steps=1, atol=1e-2)


# By a plan that splits the batch and by one that does not; the others are found for all kinds of functions above.
@pytest.mark.parametrize(
    "options", [PLANS[0], PLANS[2], *(pytest.param(one, marks=pytest.mark.slow) for one in (PLANS[1], {}))], ids=str
)
def test_training_in_8_bits_scales_by_the_whole_batch(options: dict[str, Any]) -> None:
    """Scaling factors and the largest elements of earlier steps, which Flax's rules give in the place of gradients, are
    those of one device."""

    class Perceptron(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = nn.relu(nn.Dense(64, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x))
            return x

    model = Perceptron()

    def step(state: Any, x: Any, y: Any) -> Any:
        loss, found = mw.value_and_grad(lambda state, x: jnp.mean((model.apply(state, x) - y) ** 2))(state, x)
        parameters = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], found["params"])
        return {**found, "params": parameters}, loss

    state = model.init(jax.random.key(0), X)
    assert_as_on_one_device(step, state, X, Y, **options)


@pytest.mark.parametrize("reduction", [None, "mean"])
def test_what_is_no_gradient_is_not_added_up_over_microbatches(reduction: Any) -> None:
    counted = custom(lambda w, largest: (w, largest), lambda largest, g: (g, 0.9 * largest + jnp.max(jnp.abs(g))))

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ counted(weights[0], weights[1][:1]) - y) ** 2)

    kept = {} if reduction is None else {"reduction": reduction}
    with pytest.raises(PlanError, match=r"next value in place of a gradient.*microbatches=1"):
        mw.parallelize(step_of(loss), microbatches=4, **kept)(WEIGHTS, X, Y)


def test_cotangents_in_a_wider_type_become_that_of_their_operand() -> None:
    """As `jax.nn.scaled_dot_general` gives them; JAX itself takes them for what they are not."""

    def step_with(dtype: Any) -> Any:
        def backward(kept: Any, g: Any) -> Any:
            return (g @ kept[1].T, (kept[0].T.astype(jnp.float32) @ g.astype(jnp.float32)).astype(dtype))

        product = custom(lambda x, w: (x @ w, (x, w)), backward)
        return step_of(lambda w, x, y: jnp.mean((product(product(x, w[0]), w[1]) - y).astype(jnp.float32) ** 2))

    weights, x = [weight.astype(jnp.bfloat16) for weight in WEIGHTS], X.astype(jnp.bfloat16)
    expected, _ = jax.jit(step_with(jnp.bfloat16))(weights, x, Y)
    for options in ({"preset": "data_parallel"}, {"stages": 2, "microbatches": 4}):
        found, _ = mw.parallelize(step_with(jnp.float32), donate=(), **options)(weights, x, Y)
        assert_equal_trees(found, expected, rtol=0.01)


ZEROS = np.zeros(64, np.float32)
HARMLESS = {
    "zeros kept": custom(lambda x, s: (x * s, (s, jnp.zeros_like(s))), lambda kept, g: (g * kept[0], kept[1])),
    "zeros closed over": custom(lambda x, s: (x * s, s), lambda s, g: (g * s, ZEROS)),
    "for nobody": custom(lambda x, s: (x * s, s), lambda s, g: (g * s, s)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_zero_or_reaches_no_parameter_is_no_reason_to_refuse(name: str) -> None:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        scale = weights[1][0] if name != "for nobody" else jax.lax.stop_gradient(weights[1][0])
        return jnp.mean((HARMLESS[name](jnp.tanh(x @ weights[0]), scale) @ weights[1] - y) ** 2)

    for options in ({"microbatches": 4}, {"preset": "data_parallel"}):
        assert_as_on_one_device(step_of(loss), WEIGHTS, X, Y, reduction="mean", **options)
