"""Every schedule, number of microbatches and kind of step in four processes of two devices, against one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pipeline_processes import assert_runs

_STEPS = """
from test_pipeline import data, dropout_step, perceptron, predict, scanned

def clipped(forward):
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-5))
    def step(state, batch):
        params, moments = state
        x, y = batch
        loss, grads = mw.value_and_grad(lambda p: jnp.mean((forward(p, x) - y) ** 2))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": loss}
    return step, optimizer

def numpy(tree):
    return jax.tree.map(np.asarray, tree)

batch = numpy(data())
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "eager_one_f_one_b", "adaptive", "zero_bubble"])
def test_schedules_and_microbatches(tmp_path: Path, schedule: str) -> None:
    """Stages on equal and unequal submeshes, gradients clipped by their global norm, 1, 2, 4 and 8 microbatches."""
    options = '(("warm_up", (2, 1)),)' if schedule == "adaptive" else "()"
    assert_runs(
        tmp_path,
        f"""{_STEPS}
step, optimizer = clipped(predict)
state = numpy((perceptron(), optimizer.init(perceptron())))
for microbatches in (1, 2, 4, 8):
    submeshes = (2, 2, 4) if microbatches < 8 else (4, 2, 2)
    check(step, state, batch, Pipeline(
        submeshes=submeshes, microbatches=microbatches, schedule={schedule!r}, options={options}))
""",
    )


@pytest.mark.slow
def test_a_stack_cut_by_trips(tmp_path: Path) -> None:
    """Each stage holds its rows of a scanned layer's parameters; clipping adds up over all rows."""
    assert_runs(
        tmp_path,
        f"""{_STEPS}
step, optimizer = clipped(scanned)
keys = jax.random.split(jax.random.key(0), 2)
stack = {{"w": jax.random.normal(keys[0], (5, 32, 32)) / 32, "b": jnp.zeros((5, 32))}}
params = {{"in": jax.random.normal(keys[1], (32, 32)) / 32**0.5, "stack": stack}}
state = numpy((params, optimizer.init(params)))
pipeline = Pipeline(submeshes=(2, 2, 4), layers=(2, 1, 2), microbatches=2, scan_splits={{1: (1, 3, 1)}})
check(step, state, batch, pipeline)
""",
    )


@pytest.mark.slow
def test_dropout_with_a_key_for_each_microbatch(tmp_path: Path) -> None:
    assert_runs(
        tmp_path,
        f"""{_STEPS}
count, (x, y) = 4, batch
def alone(state, batch):
    found = []
    for m, (a, b) in enumerate(zip(np.split(x, count), np.split(y, count))):
        moved, metrics = dropout_step(state, a, b, jax.random.fold_in(jax.random.key(7), m))
        found.append((jax.tree.map(lambda new, old: new - old, moved, state), metrics))
    mean = jax.tree.map(lambda *xs: sum(xs) / count, *found)
    return jax.tree.map(jnp.add, state, mean[0]), mean[1]
state = numpy(perceptron())
parallel = pipelined(dropout_step, (state, x, y, jax.random.key(7)), Pipeline(microbatches=count))
expected, found = state, jax.tree.map(np.asarray, state)
for _ in range(3):
    expected, metrics = jax.jit(alone)(expected, batch)
    found, again = parallel(found, x, y, jax.random.key(7))
print("compared", compare((found, again), (expected, metrics)), "loss", float(again["loss"]))
""",
    )


@pytest.mark.slow
def test_stages_that_share_ranks(tmp_path: Path) -> None:
    """Interleaving: two ranks of two processes each, two stages on each rank."""
    assert_runs(
        tmp_path,
        f"""{_STEPS}
step, optimizer = clipped(predict)
params = perceptron(layers=8)
state = numpy((params, optimizer.init(params)))
parallel = mw.parallelize(step, stages=4, schedule="interleaved_one_f_one_b", microbatches=4)
expected, found = state, state
for _ in range(3):
    expected, metrics = jax.jit(step)(expected, batch)
    found, again = parallel(found, batch)
assert parallel.plan(found, batch).schedule == "interleaved_one_f_one_b"
print("compared", compare((found, again), (expected, metrics)), "loss", float(again["loss"]))
""",
    )


@pytest.mark.slow
def test_asynchronous_updates(tmp_path: Path) -> None:
    """PipeDream: the numbers of delayed updates, simulated on one device."""
    assert_runs(
        tmp_path,
        f"""{_STEPS}
from test_pipeline_asynchronous import OPTIMIZER, delayed, step
params, count = perceptron(layers=6), 8
state, (x, y) = numpy((params, OPTIMIZER.init(params))), batch
parallel = pipelined(step, (state, x, y), Pipeline(submeshes=(2, 2, 4), microbatches=count, schedule="pipedream"))
holders = [list(where) for where in parallel.in_shardings[: len(jax.tree.leaves(params))]]
stage_of = jax.tree.unflatten(jax.tree.structure(params), [stage for (stage,) in holders])
expected, found = state, state
for _ in range(2):
    expected, losses = delayed(expected, list(zip(np.split(x, count), np.split(y, count))), stage_of, 3)
    found, again = parallel(found, x, y)
print("compared", compare((found, again), (expected, {{"loss": np.mean(losses)}})), "loss", float(again["loss"]))
""",
    )


@pytest.mark.slow
def test_inference(tmp_path: Path) -> None:
    assert_runs(
        tmp_path,
        f"""{_STEPS}
params, (x, _) = numpy(perceptron()), batch
parallel = mw.parallelize(predict, stages=2, schedule="inference", microbatches=4)
found, expected = parallel(params, x), jax.jit(predict)(params, x)
print("compared", compare([found], [expected]))
""",
    )
