"""`meshwright.kernel`: a function of the user's is split by the rule that comes with it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from one_device import assert_as_on_one_device

import meshwright as mw
from meshwright.program.rules import ReplicationWarning


def rows_times_numbers(x: jax.Array, w: jax.Array) -> jax.Array:
    """A kernel that reads its whole operands: of its structure nothing is known."""

    def body(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] @ w_ref[...]

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(body, out_shape=shape, interpret=True)(x, w)


RULE = "m k, k n -> m n"


def transposed(kept: Any, g: jax.Array) -> Any:
    (x, w), bare = kept, mw.kernel(rows_times_numbers, RULE, sums=["k"])
    return bare(g, w.T), bare(x.T, g)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return mw.kernel(rows_times_numbers, RULE, sums=["k"], backward=transposed)(x, w)


def step(state: Any, x: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        return jnp.mean((product(jax.nn.relu(product(x, p[0])), p[1]) - x) ** 2)

    value, grads = mw.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value


def arguments() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [0.1 * jax.random.normal(keys[0], (32, 64)), 0.1 * jax.random.normal(keys[1], (64, 32))]
    return weights, jax.random.normal(keys[2], (16, 32))


# The inner width is split: one product has it in its result, and sums over it backwards.
INNER = {"mesh": {"x": 8}, "pins": {"args[0][0]": (None, "x"), "args[0][1]": ("x", None)}}


@pytest.mark.parametrize("options", [{"preset": "data_parallel()"}, INNER, {"stages": 2}])
def test_its_numbers_are_those_of_one_device(options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        assert_as_on_one_device(step, *arguments(), **options)


def test_without_a_rule_it_is_whole() -> None:
    def bare(x: jax.Array) -> jax.Array:
        return rows_times_numbers(x, x)

    with pytest.warns(ReplicationWarning, match="its grid has one point"):
        mw.plan_for(bare, (jax.ShapeDtypeStruct((16, 16), jnp.float32),), cluster="dgx-h100:1")


@pytest.mark.parametrize("flops", [4e12, lambda x, w: 1e9 * x.shape[0] * w.shape[1]])
def test_its_price_is_of_the_flops_that_are_said(flops: Any) -> None:
    """Four thousand million of FLOPs an element, of 64 x 64."""
    kernel = mw.kernel(rows_times_numbers, RULE, flops=flops)
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = mw.plan_for(kernel, (shape, shape), cluster="dgx-h100:1", mesh=(8,)).plan
    assert plan.stages[0].flops == pytest.approx((4e12 if flops == 4e12 else 64 * 64 * 1e9) / 8)


def test_dims_that_are_in_no_result_are_whole_without_meshwright_too() -> None:
    """Under plain `jax.jit`: the largest of each row, of rows that lie on two devices."""
    largest = mw.kernel(lambda x: x.max(1), "m k -> m")
    mesh = jax.make_mesh((2,), ("k",), devices=jax.devices()[:2])
    x = jnp.arange(8.0).reshape(2, 4)
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "k")))
    assert jax.jit(largest)(split).tolist() == x.max(1).tolist()


def test_a_rule_that_is_none_is_refused() -> None:
    with pytest.raises(mw.PlanError, match=r"refused the rule of a kernel: got 'm k'"):
        mw.kernel(rows_times_numbers, "m k")


def test_the_example_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    found: dict[str, Any] = {}
    for block in blocks:
        exec(block, found)
    assert found["plan"].stages
