"""A state saved by Orbax under one plan goes on under another, with the loss of one device."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import meshwright as mw

OPTIMIZER = optax.adamw(optax.linear_schedule(1e-1, 1e-2, 10))
BATCH = np.random.default_rng(0).integers(0, 64, (16, 8)).astype(np.int32)
PLANS: dict[str, dict[str, Any]] = {
    "one stage": {},
    "two stages": {"stages": 2, "microbatches": 2},
    "four stages": {"stages": 4, "microbatches": 4},
    "zero 3": {"preset": "zero(stage=3)"},
    "megatron": {"preset": "megatron(tp=2, pp=2)", "microbatches": 2},
}


def make_state(key: Any) -> Any:
    keys = jax.random.split(key, 5)
    params = {
        "embedding": 0.1 * jax.random.normal(keys[0], (64, 32)),
        "layers": [{"w": 0.2 * jax.random.normal(k, (32, 32)), "b": jnp.zeros(32)} for k in keys[1:]],
    }
    return {"params": params, "opt": OPTIMIZER.init(params), "key": jax.random.key(7), "count": jnp.int32(0)}


def step(state: Any, batch: Any) -> Any:
    """A tied embedding, keys, and counts."""

    def loss(params: Any) -> Any:
        h = params["embedding"][batch]
        for layer in params["layers"]:
            h = h + jnp.tanh(h @ layer["w"] + layer["b"])
        logits = h @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, (batch + 1) % 64).mean()

    value, grads = mw.value_and_grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    key, _ = jax.random.split(state["key"])
    return {"params": params, "opt": opt, "key": key, "count": state["count"] + 1}, {"loss": value}


def losses(steps: int) -> list[float]:
    """Of one device."""
    alone, state, found = jax.jit(step), make_state(jax.random.key(0)), []
    for _ in range(steps):
        state, metrics = alone(state, BATCH)
        found.append(float(metrics["loss"]))
    assert min(abs(a - b) for a, b in pairwise(found)) > 1e-3
    return found


def trained(name: str, steps: int = 2) -> Any:
    parallel = mw.parallelize(step, **PLANS[name])
    state = parallel.init(make_state, jax.random.key(0), batch=BATCH)
    for _ in range(steps):
        state, _ = parallel(state, BATCH)
    return state


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero 3", "two stages"),
        *(
            pytest.param(before, after, marks=pytest.mark.slow)
            for before in PLANS for after in PLANS
            if (before, after) != ("zero 3", "two stages")
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_plan(tmp_path: Path, before: str, after: str) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", trained(before))
    parallel = mw.parallelize(step, **PLANS[after])
    target = parallel.abstract_state(make_state, jax.random.key(0), batch=BATCH)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "state", target)
    assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(target)]
    expected = losses(4)
    for number in (2, 3):
        state, metrics = parallel(state, BATCH)
        assert abs(float(metrics["loss"]) - expected[number]) < 1e-6
    assert int(state["count"]) == 4


@pytest.mark.slow
def test_by_a_pytree_checkpointer_as_arrays_of_jax_or_of_numpy(tmp_path: Path) -> None:
    state = trained("two stages")
    rest = {name: part for name, part in state.items() if name != "key"}
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "state", rest)
    parallel = mw.parallelize(step, **PLANS["four stages"])
    target = parallel.abstract_state(make_state, jax.random.key(0), batch=BATCH)
    target = {name: target[name] for name in rest}
    here = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
    for arguments in (ocp.checkpoint_utils.construct_restore_args(target), here):
        found = checkpointer.restore(tmp_path / "state", item=target, restore_args=arguments)
        _, metrics = parallel({**found, "key": jnp.copy(state["key"])}, BATCH)
        assert abs(float(metrics["loss"]) - losses(3)[2]) < 1e-6


def test_a_target_before_a_plan_is_refused() -> None:
    with pytest.raises(mw.PlanError, match=r"no batch, and no plan.*abstract_state"):
        mw.parallelize(step).abstract_state(make_state, jax.random.key(0))
