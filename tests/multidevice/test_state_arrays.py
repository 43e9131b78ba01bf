"""Every leaf of what a pipelined step returns is a plain array, which everything that takes arrays accepts."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from one_device import assert_equal_trees
from pipelines import Pipeline, pipelined, whole

import meshwright as mw
from meshwright import PlanError
from meshwright.runtime.pipeline.executor import Executor
from meshwright.runtime.pipeline.kept_leaf import Joint, Owned, Relaid
from meshwright.runtime.pipeline.step import PipelinedStep

OPTIMIZER = optax.adam(1e-2, eps=1e-4)
BATCH = jax.random.normal(jax.random.key(1), (16, 64))
ONE_AXIS = [(("x",), (4,)), (("x",), (2,))]
UNLIKE = {"args[0]['params']['tied']": (("x",), ()), "args[0]['params']['stack']": ((), ("x",), ())}


def is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def make_state(depth: int = 6) -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "tied": 0.1 * jax.random.normal(keys[0], (64, 32)),
        "stack": 0.1 * jax.random.normal(keys[1], (depth, 32, 32)),
    }
    return {
        "params": params, "opt": OPTIMIZER.init(params), "key": jax.random.key(7), "raw": jax.random.PRNGKey(5),
        "count": jnp.int32(0), "rate": jnp.float32(1.0), "last": jnp.float32(0.0),
    }  # fmt: skip


def step(state: Any, x: Any) -> Any:
    """A tied parameter, layers in a scan, keys, a count, a rate, and a leaf that is only written."""

    def loss(params: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ params["tied"], params["stack"])
        return jnp.mean((h @ params["tied"].T - x) ** 2)

    value, grads = mw.value_and_grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], jax.tree.map(lambda u: state["rate"] * u, updates))
    return {
        "params": params, "opt": opt, "key": jax.random.split(state["key"])[0],
        "raw": jax.random.fold_in(state["raw"], 1), "count": state["count"] + 1, "rate": state["rate"], "last": value,
    }, {"loss": value, "norm": optax.tree.norm(grads)}  # fmt: skip


def planned(scan: Sequence[int], **options: Any) -> PipelinedStep:
    pipeline = Pipeline(microbatches=2, scan_splits={1: scan}, meshes=ONE_AXIS, **options)
    return pipelined(step, (jax.eval_shape(lambda: make_state(sum(scan))), BATCH), pipeline)


def kinds(parallel: PipelinedStep) -> dict[str, type]:
    """How the parameters are kept."""
    names = zip(parallel.program.input_names, parallel.kept_leaves, strict=True)
    return {name.split("'")[-2]: type(kept) for name, kept in names if "['params']" in name}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scan": (3, 3), "layers": (2, 2)}, {"tied": Joint, "stack": Joint}),
        pytest.param(
            {"scan": (3, 3), "layers": (2, 2), "submeshes": (4, 2), "layouts": UNLIKE},
            {"tied": Owned, "stack": Relaid}, marks=pytest.mark.slow,
        ),
        pytest.param({"scan": (2, 4), "layers": (2, 2)}, {"tied": Joint, "stack": Relaid}, marks=pytest.mark.slow),
        pytest.param({"scan": (2, 3), "layers": (2, 2)}, {"tied": Joint, "stack": Relaid}, marks=pytest.mark.slow),
        pytest.param(
            {"scan": (2, 2, 2), "layers": (2, 1, 2), "submeshes": (4, 2, 2), "layouts": UNLIKE},
            {"tied": Owned, "stack": Relaid}, marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "scan": (2, 2, 2, 2), "layers": (2, 1, 1, 2), "submeshes": (2, 2),
                "schedule": "interleaved_one_f_one_b", "options": (("chunks", 2),),
            },
            {"tied": Joint, "stack": Relaid}, marks=pytest.mark.slow,
        ),
    ],
    ids=["joint", "owned", "unequal rows", "five rows", "three stages", "interleaved"],
)  # fmt: skip
def test_a_state_is_copied_replaced_and_gone_on_with(options: Any, expected: dict[str, type]) -> None:
    parallel = planned(**options)
    assert kinds(parallel) == expected
    depth = sum(options["scan"])
    alone, truth = jax.jit(step), make_state(depth)
    state = parallel.create(lambda: make_state(depth))
    for number in range(5):
        truth, _ = alone(truth, BATCH)
        before = state
        state, metrics = parallel(state, BATCH)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((state, metrics)))
        if number != 2:  # arrays of NumPy are not taken over
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before["params"]))
            with pytest.raises(PlanError, match="already donated"):
                parallel(before, BATCH)
        if number == 0:
            state = jax.tree.map(jnp.copy, state)
        if number == 1:  # as a checkpoint gives it back
            state = {name: part if name == "key" else whole(part) for name, part in state.items()}
        if number == 2:  # by the user, from one step to the next
            truth, state = ({**s, "params": jax.tree.map(lambda p: 0.5 * p, s["params"])} for s in (truth, state))
    truth, expected_metrics = alone(truth, BATCH)
    assert_equal_trees(whole(parallel(state, BATCH)), whole((truth, expected_metrics)))


def test_everything_that_takes_arrays_accepts_every_leaf() -> None:
    """With stages on as many devices, counts, keys and rates lie on the devices of all."""
    parallel, alone = mw.parallelize(step, stages=2, microbatches=2), jax.jit(step)
    state, metrics = parallel(parallel.init(make_state, batch=BATCH), BATCH)
    truth, _ = alone(make_state(), BATCH)
    for leaf in jax.tree.leaves((state, metrics)):
        assert isinstance(leaf, jax.Array)
        jax.jit(lambda x: x)(leaf)
        copy.deepcopy(leaf)
        if not is_key(leaf):
            np.testing.assert_array_equal(np.asarray(leaf * 1), pickle.loads(pickle.dumps(jax.device_get(leaf))))
    first, second = jax.random.split(state["key"])
    assert jax.random.key_data(first).tolist() != jax.random.key_data(second).tolist()
    assert jax.random.normal(state["key"]) == jax.random.normal(truth["key"])
    assert jax.random.normal(state["raw"]) == jax.random.normal(truth["raw"])
    small = {name: state[name] for name in ("key", "raw", "count", "rate")}
    assert jax.jit(lambda s: s["count"] * s["rate"])(small) == 1
    assert all(leaf.sharding.device_set == set(jax.devices()) for leaf in jax.tree.leaves(small))
    # Tree-wide reductions want one set of devices.
    together = mw.reshard(state["params"], mw.spread_shardings(state["params"]))
    np.testing.assert_allclose(jax.jit(optax.tree.norm)(together), optax.tree.norm(truth["params"]), rtol=1e-5)
    average = jax.tree.map(jnp.copy, state["params"])
    average = jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, average, state["params"])
    assert_equal_trees(average, truth["params"])
    rest = {name: part for name, part in state.items() if name != "key"}
    again = serialization.from_bytes(jax.tree.map(jnp.zeros_like, rest), serialization.to_bytes(rest))
    state = {**again, "key": state["key"], "rate": jnp.float32(0.0), "count": state["count"] * 0 + 40}
    later, _ = parallel(state, BATCH)
    assert int(later["count"]) == 41
    assert_equal_trees(later["params"], truth["params"])  # at a rate of zero


def test_copies_are_made_for_arrays_that_did_not_go_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    move = Executor.move

    def noted(self: Executor, values: Any, shardings: Any, about: Any) -> Any:
        moved.append(about())
        return move(self, values, shardings, about)

    parallel = planned((3, 3), layers=(2, 2), submeshes=(4, 2), layouts=UNLIKE)
    monkeypatch.setattr(Executor, "move", noted)

    def copies() -> list[str]:
        found = [text.split("'")[1::2][-1] for text in moved if text.startswith("the copy of")]
        moved.clear()
        return found

    state = parallel.create(make_state)
    state, _ = parallel(state, BATCH)
    assert copies() == []
    state["params"] = {**state["params"], "tied": state["params"]["tied"] * 1}
    state, _ = parallel(state, BATCH)
    assert copies() == ["tied"]
    state, _ = parallel(state, BATCH)
    assert copies() == []
    # Copies go when the array that they are of does.
    kept = next(k for k in parallel.kept_leaves if isinstance(k, Owned))
    assert len(kept.copies) == 1
    del state
    gc.collect()
    assert len(kept.copies) == 0


def test_a_plan_says_which_rows_move() -> None:
    args = (jax.eval_shape(lambda: make_state(5)), BATCH)
    uneven = mw.plan_for(step, args, stages=2, microbatches=2).plan
    assert any(
        "['stack']" in note and "move between devices before and after each step" in note for note in uneven.notes
    )
    args = (jax.eval_shape(make_state), BATCH)
    even = mw.plan_for(step, args, preset="gpipe(2)", microbatches=2).plan
    assert not any("move between devices" in note for note in even.notes)
