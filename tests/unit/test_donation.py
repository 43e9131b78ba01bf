"""Which arguments a step takes over, and which arrays it copies first; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.program.trace import trace_program
from meshwright.runtime.aliases import Unshared

W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def train(w: Any, x: Any) -> Any:
    value, grad = mw.value_and_grad(loss)(w, x)
    return w - grad, value


def cast(w: Any, x: Any) -> Any:
    value, grad = mw.value_and_grad(loss)(w.astype(jnp.bfloat16), x)
    return w - grad.astype(w.dtype), value


def two_losses(state: Any, x: Any) -> Any:
    (a, _), (b, _) = (train(w, x) for w in state)
    return (a, b), x


def in_a_scan(w: Any, x: Any) -> Any:
    return jax.lax.scan(train, w, jnp.stack([x, x]))


def in_a_branch(w: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, train, lambda w, x: (w, loss(w, x)), w, x)


def unmarked(w: Any, x: Any) -> Any:
    value, grad = jax.value_and_grad(loss)(w, x)
    return w - grad, value


def refined(x: Any, w: Any) -> Any:
    """A result of the shape of the first argument, and parameters in the second."""
    value, grad = mw.value_and_grad(loss)(w, x)
    return x - value, grad


def refined_in_a_scan(x: Any, w: Any) -> Any:
    def trip(carry: Any, _: Any) -> Any:
        x, w = carry
        w, value = train(w, x)
        return (x * 2, w), value

    (x, w), values = jax.lax.scan(trip, (x, w), None, length=2)
    return x, w, values


@pytest.mark.parametrize(
    ("step", "args", "donated"),
    [
        (train, (W, X), {0}),
        (cast, (W, X), {0}),
        (two_losses, ((W, W), X), {0, 1}),
        (in_a_scan, (W, X), {0}),
        (in_a_branch, (W, X), {0}),
        (unmarked, (W, X), set()),
        (refined, (X, W), set()),
        (refined_in_a_scan, (X, W), set()),
        (jax.jit(train), (W, X), {0}),
        (jax.jit(unmarked, donate_argnums=0), (W, X), {0}),
        (jax.jit(train, donate_argnums=1), (W, X), {1}),
    ],
)
def test_a_step_says_what_it_takes_over(step: Callable[..., Any], args: Any, donated: set[int]) -> None:
    assert trace_program(step, args).donated == donated


@pytest.mark.parametrize(("donate", "donated"), [((), set()), (1, {2}), (-1, {2}), ((0, 1), {0, 1, 2}), ([0], {0, 1})])
def test_the_user_overrules_it(donate: Any, donated: set[int]) -> None:
    assert trace_program(two_losses, ((W, W), X), donate=donate).donated == donated


@pytest.mark.parametrize("donate", [2, -3, True, "w", 0.0, (0, None)])
def test_what_is_no_argument_is_refused(donate: Any) -> None:
    with pytest.raises(PlanError, match=r"what is to be donated.*where: donate="):
        trace_program(train, (W, X), donate=donate)


def test_a_state_that_is_not_donated_is_noted() -> None:
    (note,) = trace_program(unmarked, (W, X)).notes
    assert "args[0] comes back" in note
    assert "donate=0" in note
    assert trace_program(unmarked, (W, X), donate=()).notes == trace_program(train, (W, X)).notes == ()


def test_arrays_that_share_a_buffer_are_copied_once() -> None:
    w, keys = jnp.ones(4), jax.random.split(jax.random.key(0), 3)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    again = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))  # its first block is the buffer of w
    other = jnp.zeros(4)

    apart = Unshared(donated=[0, 1, 2])([w, w, again, other])
    assert [a is b for a, b in zip(apart, [w, w, again, other], strict=True)] == [True, False, False, True]
    assert apart[2].sharding == again.sharding
    kept = Unshared(donated=[0])([w, other, w])
    assert kept[0] is not w
    assert kept[1:] == [other, w]
    assert Unshared(donated=[0], constants=[w])([w])[0] is not w
    (first, second) = Unshared(donated=[0, 1])([keys, keys])
    assert first is keys
    assert second is not keys
    assert (second == keys).all()
    assert all(a is b for a, b in zip(Unshared(donated=[])([w, w]), [w, w], strict=True))


def test_results_of_the_last_step_are_compared_with_what_was_made_of_them() -> None:
    unshared = Unshared(donated=[0])
    w, b, x = jnp.ones(4), jnp.ones(4), jnp.arange(4)
    unshared.remember([w, b])
    assert unshared([w, b, x])[0] is w
    assert unshared([w, w.addressable_shards[0].data, x])[0] is not w
    assert unshared([w, jax.device_put(w, jax.devices()[0]), x])[0] is not w
    assert unshared([w, w, x])[0] is not w
