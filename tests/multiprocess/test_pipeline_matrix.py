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
def test_stages_that_share_processes(tmp_path: Path) -> None:
    """Of the first two processes each has two stages, and of these one is in both."""
    assert_runs(
        tmp_path,
        f"""{_STEPS}
step, optimizer = clipped(predict)
state = numpy((perceptron(), optimizer.init(perceptron())))
check(step, state, batch, Pipeline(submeshes=(1, 2, 1, 4), microbatches=4))
""",
    )


_UPDATES = """
from meshwright.lowering.pipeline import placement
from test_pipeline_updates import stack, tied
from updates import UPDATES, state_of, step_of
placement.SMALL_BYTES = 1024

def check_updates(names, forward, params, pipeline):
    for name in names:
        update, optimizer = UPDATES[name]
        check(step_of(update, forward), numpy(state_of(params, optimizer)), batch, pipeline)
"""


@pytest.mark.slow
def test_updates_that_mix_stages(tmp_path: Path) -> None:
    """Conditions around updates, decisions that all processes take alike, large values sent to one stage, gradients of
    parameters that stages share, and of a stack cut by trips."""
    assert_runs(
        tmp_path,
        f"""{_STEPS}{_UPDATES}
names = ("multisteps", "scaled", "spikes", "together", "statistics")
check_updates(names, tied, perceptron(), Pipeline(submeshes=(2, 2, 4), microbatches=2))
pipeline = Pipeline(submeshes=(2, 2, 4), layers=(2, 1, 2), microbatches=2, scan_splits={{1: (1, 3, 1)}})
check_updates(("scaled", "statistics"), scanned, stack(), pipeline)
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
@pytest.mark.parametrize(
    ("name", "schedule", "submeshes", "microbatches"),
    [
        ("gpt-tiny", "gpipe", (2, 2, 4), 1),
        ("gpt-tiny", "zero_bubble", (4, 2, 2), 4),
        ("gpt-tiny", "interleaved_one_f_one_b", (4, 4), 8),
        ("llama-tiny", "adaptive", (2, 2, 4), 1),
        ("llama-tiny", "interleaved_one_f_one_b", (4, 4), 4),
        ("llama-tiny", "eager_one_f_one_b", (4, 2, 2), 8),
        ("moe-tiny", "zero_bubble", (2, 2, 4), 1),
        ("moe-tiny", "adaptive", (2, 4, 2), 4),
        ("moe-tiny", "gpipe", (2, 2, 4), 8),
        ("unet-tiny", "zero_bubble", (2, 2, 4), 1),
        ("unet-tiny", "interleaved_one_f_one_b", (4, 4), 2),
        ("unet-tiny", "eager_one_f_one_b", (2, 4, 2), 4),
        ("unet-tiny", "adaptive", (2, 2, 4), 8),
    ],
    ids=lambda value: "+".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_reference_models(
    tmp_path: Path, name: str, schedule: str, submeshes: tuple[int, ...], microbatches: int
) -> None:
    """Clipped; with 1F1B and 2 microbatches, not clipped, they are in `test_pipeline_processes.py`."""
    assert_runs(
        tmp_path,
        f"""
from test_pipeline_models import cut
target, pipeline = cut({name!r}, {schedule!r}, {submeshes}, {microbatches})
state = jax.tree.map(np.asarray, jax.jit(target.init)(jax.random.key(0)))
batch = jax.tree.map(np.asarray, jax.jit(target.make_batch)(jax.random.key(1)))
check(target.step, state, batch, pipeline)
""",
    )


@pytest.mark.slow
def test_dropout_draws_what_the_whole_batch_draws(tmp_path: Path) -> None:
    assert_runs(
        tmp_path,
        f"""{_STEPS}
from test_pipeline_models import CASES, options_of
counts = dict(gpipe=1, one_f_one_b=4, eager_one_f_one_b=2, adaptive=8, zero_bubble=4, interleaved_one_f_one_b=8)
for schedule, (submeshes, _) in CASES.items():
    check(
        lambda state, batch: dropout_step(state, *batch), numpy(perceptron()), (*batch, jax.random.key(7)),
        Pipeline(submeshes=submeshes, microbatches=counts[schedule], schedule=schedule, options=options_of(schedule)),
    )
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
from pipelines import holders
from test_pipeline_asynchronous import OPTIMIZER, delayed, step
params, count = perceptron(layers=6), 8
state, (x, y) = numpy((params, OPTIMIZER.init(params))), batch
parallel = pipelined(step, (state, x, y), Pipeline(submeshes=(2, 2, 4), microbatches=count, schedule="pipedream"))
held = [holders(parallel, i) for i in range(len(jax.tree.leaves(params)))]
stage_of = jax.tree.unflatten(jax.tree.structure(params), [stage for (stage,) in held])
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
