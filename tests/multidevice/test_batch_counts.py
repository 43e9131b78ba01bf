"""Results beside the loss that depend on the size of the batch, checks in the loss, and where a mark belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from one_device import assert_equal_trees, copy

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.program.reduction import ReductionWarning

X = jax.random.normal(jax.random.key(0), (16, 4))
STATE = {"w": 0.5 * jnp.eye(4), "n": jnp.int32(5)}


def counting(aux: Callable[..., Any], reduction: Any = None) -> Callable[..., Any]:
    def step(s: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((x @ w) ** 2), aux(w, s["n"], x)

        (value, a), g = mw.value_and_grad(loss, has_aux=True, reduction=reduction)(s["w"])
        return {"w": s["w"] - 0.1 * g, "n": s["n"] + 1}, (value, a)

    return step


def counts(w: Any, n: Any, x: Any) -> Any:
    size = x.shape[0]
    return {
        "seen": n + size, "average": 0.9 * n + 0.1 * size, "ones": n + jnp.ones(size, jnp.int32).sum(),
        "literals": (1 / size, size, jnp.float32(1) / size), "epoch": (n + size) % 7, "late": n + size > 20,
        "chosen": jax.lax.cond(n > 3, lambda: n + size, lambda: n), "steps": n + 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reduction", "options"),
    [(None, {"microbatches": 4}), ("mean", {"microbatches": 2}), (None, {"microbatches": 4, "stages": 2})],
)
def test_counts_are_of_the_whole_batch(reduction: Any, options: dict[str, Any]) -> None:
    step = counting(counts, reduction)
    expected = jax.jit(step)(STATE, X)
    assert_equal_trees(mw.parallelize(step, **options)(copy(STATE), X), expected)


def test_a_count_beside_a_parameter_is_noted() -> None:
    with pytest.warns(ReductionWarning):
        plan = mw.plan_for(counting(lambda w, n, x: jnp.sum(w) + len(x)), (STATE, X), microbatches=4).plan
    assert [note for note in plan.notes if "test_batch_counts.py" in note and "neither a mean nor a sum" in note]


def _checked(w: Any, x: Any) -> Any:
    h = x @ w
    return jnp.mean(eqx.error_if(h, jnp.any(jnp.isnan(h)), "not a number") ** 2)


def _as_asked(w: Any, x: Any) -> Any:
    h = x @ w
    return jnp.mean(h**2) + (h[0].sum() if len(x) > 8 else 0)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (_checked, r"a check of values of the batch .*pure_callback.*where: .*test_batch_counts.py:\d+"),
        (_as_asked, r"computes in another way at the size of a microbatch: .*test_batch_counts.py:\d+"),
    ],
)
@pytest.mark.filterwarnings("ignore::meshwright.program.rules.ReplicationWarning")
def test_a_loss_that_is_no_sum_of_microbatches_is_refused_for_what_it_is(loss: Callable[..., Any], words: str) -> None:
    def step(w: Any, x: Any) -> Any:
        value, g = mw.value_and_grad(loss)(w, x)
        return w - 0.1 * g, value

    with pytest.raises(PlanError, match=words):
        mw.plan_for(step, (STATE["w"], X), microbatches=4)
    mw.plan_for(step, (STATE["w"], X), microbatches=4, reduction="mean")


def _adversarial(second: Callable[..., Any]) -> Callable[..., Any]:
    def step(s: Any, x: Any) -> Any:
        a, g = mw.value_and_grad(lambda g, d: -jnp.mean(jnp.tanh(x @ g) @ d))(s["g"], s["d"])
        b, d = second(lambda d, g: jnp.mean(jnp.tanh(x @ g) @ d) - jnp.mean(x @ d))(s["d"], s["g"])
        return {"g": s["g"] - 0.1 * g, "d": s["d"] - 0.1 * d}, (a, b)

    return step


def _accumulating(s: Any, x: Any) -> Any:
    def one(total: Any, x: Any) -> Any:
        value, g = mw.value_and_grad(lambda g: jnp.mean(jnp.tanh(x @ g) ** 2))(s["g"])
        return total + g, value

    g, values = jax.lax.scan(one, jnp.zeros_like(s["g"]), x.reshape(4, -1, 4))
    return {"g": s["g"] - 0.1 * g, "d": s["d"]}, values.mean()


@pytest.mark.parametrize("options", [{"microbatches": 4}, {"stages": 2}, {"preset": "data_parallel()"}], ids=str)
@pytest.mark.parametrize(
    ("step", "got", "advice"),
    [
        (_adversarial(mw.value_and_grad), "2 calls", "jax.value_and_grad in place of meshwright's"),
        (_accumulating, "one in a loop or branch at", "outside of loops and branches"),
    ],
)
def test_the_advice_fits_the_marks_that_a_step_has(step: Any, got: str, advice: str, options: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as refused:
        mw.plan_for(step, ({"g": STATE["w"], "d": STATE["w"]}, X), **options)
    assert got in refused.value.got
    assert advice in refused.value.try_
    assert "meshwright.value_and_grad in place of jax" not in str(refused.value)


def test_one_of_several_losses_is_marked_as_the_refusal_advises() -> None:
    step, state = _adversarial(jax.value_and_grad), {"g": STATE["w"], "d": STATE["w"] + 1}
    assert_equal_trees(mw.parallelize(step, microbatches=4)(copy(state), X), jax.jit(step)(state, X))
