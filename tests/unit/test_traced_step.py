"""A step is traced at its full batch once, and its numbers of microbatches share what is known of its equations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import PlanError, value_and_grad, zoo
from meshwright._jax.jaxpr import open_jaxpr
from meshwright.program.rules import Rules
from meshwright.program.trace import trace_program
from meshwright.program.traces import Traces


def test_numbers_of_microbatches_share_one_trace_of_the_whole() -> None:
    sizes: list[int] = []

    def step(weights: Any, x: Any) -> Any:
        sizes.append(x.shape[0])
        value, grads = value_and_grad(lambda w: jnp.mean(jax.nn.relu(x @ w)))(weights)
        return weights - grads, value

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    traces = Traces(step)
    programs = [traces.program(args, microbatches=count) for count in (1, 2, 4)]
    assert sizes == [16, 8, 4]
    assert len({id(program.rules) for program in programs}) == 1
    assert all(program.outer is programs[0].outer for program in programs)


@pytest.mark.parametrize("name", ["gpt-tiny", "wresnet-tiny", "moe-tiny"])
def test_what_is_shared_changes_no_program(name: str) -> None:
    target = zoo.build(name, global_batch=16)
    args, traces = (target.example_state, target.example_batch), Traces(target.step)
    for count in (1, 2, 4):
        shared, alone = traces.program(args, microbatches=count), trace_program(target.step, args, microbatches=count)
        assert shared.fingerprint == alone.fingerprint
        assert shared.state == alone.state
        assert [one.rule for one in shared.graph.operators] == [one.rule for one in alone.graph.operators]


def test_of_a_microbatch_nothing_is_traced_behind_the_loss() -> None:
    updated: list[int] = []

    def step(weights: Any, x: Any) -> Any:
        value, grads = value_and_grad(lambda w: jnp.mean((2.0 * x) @ w))(weights)
        updated.append(x.shape[0])
        return weights - grads, value

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    program = trace_program(step, args, microbatches=4)
    assert updated == [16]
    assert program.graph.values[program.graph.inputs[0]].shape == (4, 8)


def test_a_loss_with_a_marked_call_of_its_own_is_traced_to_the_end() -> None:
    """The inner call comes first: where there are two, the whole step says which is which."""
    traced: list[int] = []

    def loss(weights: Any, x: Any) -> Any:
        inner, _ = value_and_grad(lambda v: jnp.sum(v**2))(jnp.ones(3))
        return jnp.mean(x @ weights) + jax.lax.stop_gradient(inner)

    def step(weights: Any, x: Any) -> Any:
        value, grads = value_and_grad(loss)(weights, x)
        traced.append(x.shape[0])
        return weights - grads, value

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    program = trace_program(step, args, microbatches=4)
    assert traced == [16, 4]
    assert (4, 8) in {value.shape for value in program.graph.values}


def test_a_marked_call_that_was_traced_before_does_not_take_the_place_of_the_loss() -> None:
    """JAX remembers the inner function at the full batch: nothing of its call is seen while that is traced."""
    inner = jax.jit(lambda w, x: jax.lax.stop_gradient(value_and_grad(lambda v: jnp.mean((x @ v) ** 4))(w)[0]))

    def step(weights: Any, x: Any) -> Any:
        value, grads = value_and_grad(lambda w: jnp.mean(jnp.sin(x @ w)) + inner(w, x))(weights)
        return weights - grads, value

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    jax.eval_shape(inner, *args)
    program = trace_program(step, args, microbatches=4, reduction="mean")
    names = [operator.name for operator in program.graph.operators]
    assert "sin" in names
    assert (4, 8) in {value.shape for value in program.graph.values}


def test_calls_with_derivatives_of_their_own_have_rules_of_their_own() -> None:
    """The same program forwards, and once a derivative that mixes the rows."""

    def doubled(derivative: Any) -> Any:
        function = jax.custom_jvp(lambda x: 2.0 * x)
        function.defjvp(lambda given, moved: (2.0 * given[0], derivative(moved[0])))
        return function

    plain, mixing = doubled(lambda d: 2.0 * d), doubled(lambda d: 2.0 * jnp.cumsum(d, axis=0))
    closed = jax.make_jaxpr(lambda x: (plain(x), mixing(x), plain(x)))(jnp.ones((8, 4)))
    calls = [e for e in open_jaxpr(closed).eqns if e.primitive.name == "custom_jvp_call"]
    rules = Rules()
    rules.prepare([(call, True) for call in calls])
    first, second, third = (rules.rule(call, differentiated=True) for call in calls)
    assert first == third
    assert len(first.splittable) == 2
    assert len(second.splittable) == 1


class Keys:
    """A holder of random keys that changes itself, as programs have them."""

    def __init__(self, key: jax.Array) -> None:
        self.key = key

    def __call__(self) -> jax.Array:
        self.key, drawn = jax.random.split(self.key)
        return drawn


@pytest.mark.parametrize("inside", [True, False])
def test_a_loss_function_that_stores_what_the_step_reads_later_is_refused(inside: bool) -> None:
    def step(weights: Any, key: Any, x: Any) -> Any:
        keys = Keys(key)
        before = keys()

        def loss(w: Any) -> Any:
            return jnp.mean((x @ w + jax.random.normal(keys() if inside else before, (8,))) ** 2)

        value, grads = value_and_grad(loss)(weights)
        return weights - grads, keys(), value

    arrays = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.eval_shape(lambda: jax.random.PRNGKey(0))
    args = (*arrays, jax.ShapeDtypeStruct((16, 8), jnp.float32))
    if not inside:  # as the error advises
        assert trace_program(step, args).marked
        return
    with pytest.raises(PlanError, match=r"stored outside itself.* u32\[2\].*keys = rng\(\) outside"):
        trace_program(step, args)
