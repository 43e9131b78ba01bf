"""Steps that are `jax.jit` functions: static arguments, donation, and the options that a plan cannot follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from one_device import assert_equal_trees, copy

import meshwright as mw
from meshwright.errors import PlanError

X = jax.random.normal(jax.random.key(0), (16, 4))
W = X[:4]


def step(w: Any, x: Any, train: bool = True, act: Callable[[Any], Any] = jnp.tanh) -> Any:
    loss, grad = mw.value_and_grad(lambda w: jnp.mean(act(x @ w) ** 2))(w)
    return (w - 0.1 * grad if train else w + 0), loss


def configured(config: Any, w: Any, x: Any, scale: Any = 1.0, *, mode: str = "a") -> Any:
    return step(w, x * scale, config[0]) if mode == "a" else step(w, x, train=False)


class Trainer:
    @partial(jax.jit, static_argnums=(0, 3))
    def step(self, w: Any, x: Any, train: bool) -> Any:
        return step(w, x, train)


CONFIGURED = jax.jit(configured, static_argnums=0, static_argnames="mode")


@pytest.mark.parametrize(
    ("of", "args", "named", "options"),
    [
        (jax.jit(step, static_argnames=("train", "act")), (W, X, True), {}, {}),
        (jax.jit(step, static_argnums=(-1, -2)), (W, X, False, jnp.sin), {}, {"microbatches": 2}),
        (jax.jit(step, static_argnums=(2, 3), inline=True), (), {"act": jnp.sin, "w": W, "x": X, "train": True}, {}),
        (CONFIGURED, ((True, 1), W, X), {"mode": "a", "scale": jnp.float32(2)}, {"preset": "data_parallel()"}),
        (partial(CONFIGURED, (True, 2)), (W, X), {"mode": "b"}, {}),
        (Trainer().step, (W, X, True), {}, {}),
        (jax.jit(lambda w, *rest: (w * rest[1], rest[0]), static_argnums=2), (W, X, 3), {}, {}),
        (jax.jit(lambda w, up=True, x=None: w + x if up else w, static_argnames="up"), (W,), {"x": W}, {}),
    ],
    ids=["name", "number", "inline", "first", "partial", "method", "varying", "left out"],
)
def test_static_arguments_are_as_under_jit(of: Any, args: Any, named: Any, options: Any) -> None:
    expected = of(*copy(args), **copy(named))
    assert_equal_trees(mw.parallelize(of, **options)(*copy(args), **copy(named)), expected)


def test_each_static_value_is_planned_once() -> None:
    traced = []

    def counted(w: Any, x: Any, by: Any) -> Any:
        traced.append(by)
        return w * by, jnp.mean(x)

    planned = mw.parallelize(jax.jit(counted, static_argnames="by"), donate=())
    for by in (1, True, 1.0, 1, 2):
        assert_equal_trees(planned(W, X, by=by), (W * by, jnp.mean(X)))
    assert [repr(by) for by in traced] == ["1", "True", "1.0", "2"]
    assert planned.init(lambda: jnp.ones((4, 4))).shape == (4, 4)
    assert mw.plan_for(CONFIGURED, ((True, 1), W, X)).program.input_names == ("args[0]", "args[1]")


@pytest.mark.parametrize(
    ("of", "donate", "gone"),
    [
        (jax.jit(step, donate_argnames="x", inline=True), None, (False, True)),
        (jax.jit(step, donate_argnames=("w",)), None, (True, False)),
        (jax.jit(lambda config, w, x: step(w, x), static_argnums=0), 1, (True, False)),
        (jax.jit(lambda config, w, x: step(w, x), static_argnums=0), (), (False, False)),
    ],
)
def test_donation_counts_static_arguments(of: Any, donate: Any, gone: tuple[bool, bool]) -> None:
    w, x = jnp.copy(W), jnp.ones((4, 4))
    options = {} if donate is None else {"donate": donate}
    mw.parallelize(of, **options)(*([w, x] if donate is None else ["config", w, x]))
    assert (w.is_deleted(), x.is_deleted()) == gone


@pytest.mark.parametrize(
    ("run", "got", "advice"),
    [
        (lambda: mw.parallelize(CONFIGURED)([1], W, X), "the static argument config: got list [1]", "a tuple"),
        (lambda: mw.parallelize(CONFIGURED)(W, W, X), "the static argument config: got ArrayImpl", "leaving config"),
        (lambda: mw.parallelize(CONFIGURED, donate=0)((1,), W, X), "got 0, a static argument", "donate=1"),
        (lambda: mw.parallelize(jax.jit(step, compiler_options={"a": True})), "compiler_options=", "XLA_FLAGS"),
    ],
)
def test_what_cannot_be_followed_is_refused(run: Callable[[], Any], got: str, advice: str) -> None:
    with pytest.raises(PlanError) as refused:
        run()
    assert got in str(refused.value)
    assert advice in refused.value.try_


def test_shardings_of_jit_are_noted() -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    laid_out = jax.jit(step, in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))), inline=True)
    (note,) = [one for one in mw.plan_for(laid_out, (W, X)).plan.notes if "in_shardings of jax.jit(step)" in one]
    assert "not followed" in note


def test_a_loss_in_a_shard_map_that_is_a_mean_over_its_blocks() -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def over_blocks(w: Any, x: Any) -> Any:
        return lax.pmean(jnp.mean((x @ w) ** 2), "d")

    loss = jax.shard_map(over_blocks, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())

    def train(w: Any, x: Any) -> Any:
        value, grad = mw.value_and_grad(loss)(w, x)
        return w - 0.1 * grad, value

    assert_equal_trees(mw.parallelize(train)(jnp.copy(W), X), jax.jit(train)(W, X))
