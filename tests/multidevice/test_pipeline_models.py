"""Reference models and dropout as pipelines beside one device: each with each schedule and 1, 2, 4 and 8 microbatches.

All pairs of model, schedule and number of microbatches are here, not all triples. Gradients are clipped by their global
norm, of which every stage has a part: a tied embedding counts once, and so does each row of a stack.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pipelines import Pipeline, assert_as_on_one_device
from test_pipeline import data, dropout_step, perceptron

import meshwright as mw
from meshwright import zoo
from meshwright.errors import PlanError
from meshwright.program.equal_stages import main_scan
from meshwright.program.trace import trace_program
from meshwright.zoo import llama, train

SLOW = pytest.mark.slow
INTERLEAVED = "interleaved_one_f_one_b"
MODELS = ("gpt-tiny", "llama-tiny", "moe-tiny", "unet-tiny")

# Of each schedule the devices of its stages (interleaving: of its ranks), and the microbatches of each model. Two ranks
# interleave an even number of microbatches.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "gpipe": ((2, 2, 4), (1, 2, 4, 8)),
    "one_f_one_b": ((4, 2, 2), (2, 4, 8, 1)),
    "eager_one_f_one_b": ((2, 4, 2), (4, 8, 1, 2)),
    "adaptive": ((2, 2, 4), (8, 1, 2, 4)),
    "zero_bubble": ((2, 2, 4), (2, 1, 8, 4)),
    INTERLEAVED: ((4, 4), (4, 8, 2, 4)),
}


def options_of(schedule: str, edges: int = 2) -> tuple[tuple[str, Any], ...]:
    if schedule == INTERLEAVED:
        return (("chunks", 2),)
    return (("warm_up", (2, 1, 3)[:edges]),) if schedule == "adaptive" else ()


def assert_trains(target: Any, pipeline: Pipeline) -> Any:
    state, batch = jax.jit(target.init)(jax.random.key(0)), jax.jit(target.make_batch)(jax.random.key(1))
    return assert_as_on_one_device(target.step, state, batch, pipeline=pipeline)


def clipped() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3, eps=1e-5))


def cut(name: str, schedule: str, submeshes: tuple[int, ...], microbatches: int) -> tuple[Any, Pipeline]:
    """A model whose gradients are clipped, and its pipeline; also for four processes (`test_pipeline_matrix.py`)."""
    options = options_of(schedule, edges=3 if name == "unet-tiny" else 2)
    pipeline = Pipeline(submeshes=submeshes, microbatches=microbatches, schedule=schedule, options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.OPTIMIZERS, "clipped", clipped)
        if name != "llama-tiny":
            return zoo.build(name, optimizer="clipped"), pipeline
        # Four layers in one scan, on three stages in pieces of unequal length.
        target = llama.build(replace(llama.CONFIGS[name], layers=4), optimizer="clipped")
    position, _ = main_scan(trace_program(target.step, (target.example_state, target.example_batch)))
    layers, trips = ((1, 1, 1, 2), (1, 1, 1, 1)) if schedule == INTERLEAVED else ((1, 1, 2), (1, 2, 1))
    return target, replace(pipeline, layers=layers, scan_splits={position: trips})


@SLOW
@pytest.mark.parametrize(
    ("name", "schedule", "submeshes", "microbatches"),
    [
        (name, schedule, submeshes, count)
        for schedule, (submeshes, counts) in CASES.items()
        for name, count in zip(MODELS, counts, strict=True)
    ],
    ids=lambda value: "+".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_model(name: str, schedule: str, submeshes: tuple[int, ...], microbatches: int) -> None:
    parallel = assert_trains(*cut(name, schedule, submeshes, microbatches))
    edges = [(edge.source, edge.target) for edge in parallel.schedule.edges]
    assert ((0, 2) in edges) == (name == "unet-tiny")  # skips over a stage


@SLOW  # in four processes they always run (tests/multiprocess/test_pipeline_processes.py)
@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("llama-tiny", Pipeline(layers=(1, 2), microbatches=4)),
        ("moe-tiny", Pipeline(microbatches=8, schedule="eager_one_f_one_b")),
    ],
    ids=["llama-tiny", "moe-tiny"],
)
def test_two_stages(name: str, pipeline: Pipeline) -> None:
    assert_trains(zoo.build(name), pipeline)


@SLOW
def test_interleaving_on_unequal_ranks() -> None:
    pipeline = Pipeline(submeshes=(2, 2, 4), microbatches=6, schedule=INTERLEAVED, options=options_of(INTERLEAVED))
    assert_trains(zoo.build("gpt-tiny", global_batch=24), pipeline)


@SLOW
def test_pipedream_of_one_microbatch() -> None:
    """Nothing is delayed: the numbers are those of one device."""
    assert_trains(zoo.build("llama-tiny"), Pipeline(layers=(1, 2), microbatches=1, schedule="pipedream"))


def test_microbatches_without_a_whole_group_of_experts_are_refused() -> None:
    """Experts are dealt two examples together, so microbatches of two and more are what the whole batch is."""
    target = zoo.build("moe-tiny")
    with pytest.raises(PlanError, match=r"microbatches=16: got a step that fails at the size of a microbatch"):
        trace_program(target.step, (target.example_state, target.example_batch), microbatches=16)


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [
        pytest.param(schedule, count, marks=() if (schedule, count) == (INTERLEAVED, 4) else SLOW)
        for schedule in CASES
        for count in (1, 2, 4, 8)
        if count % 2 == 0 or schedule != INTERLEAVED
    ],
)
def test_dropout(schedule: str, microbatches: int) -> None:
    pipeline = Pipeline(
        submeshes=CASES[schedule][0], microbatches=microbatches, schedule=schedule, options=options_of(schedule)
    )
    assert_as_on_one_device(dropout_step, perceptron(), *data(), jax.random.key(7), pipeline=pipeline)


@SLOW
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble"])
def test_dropout_in_a_stack_cut_by_trips(schedule: str) -> None:
    """Each trip makes its key of the step's and its number."""

    def loss(params: Any, x: Any, y: Any, key: Any) -> Any:
        def layer(h: Any, one: Any) -> tuple[Any, None]:
            w, number = one
            return h + jnp.tanh(h @ w) * jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, h.shape), None

        h, _ = jax.lax.scan(layer, x @ params["in"], (params["stack"], jnp.arange(5)))
        return jnp.mean((h @ params["in"].T - y) ** 2)

    def step(state: Any, x: Any, y: Any, key: Any) -> Any:
        value, grads = mw.value_and_grad(loss)(state, x, y, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}

    keys = jax.random.split(jax.random.key(0), 2)
    params = {"in": jax.random.normal(keys[0], (32, 32)) / 6, "stack": jax.random.normal(keys[1], (5, 32, 32)) / 32}
    args = params, *data(), jax.random.key(7)
    position, _ = main_scan(trace_program(step, args))
    pipeline = Pipeline(submeshes=(2, 2, 4), layers=(2, 1, 2), schedule=schedule, scan_splits={position: (1, 3, 1)})
    assert_as_on_one_device(step, *args, pipeline=pipeline)


def test_stages_of_a_rank_keep_arrays_of_their_own() -> None:
    """State that lies on the devices of a rank already, as that rank keeps it."""
    target = zoo.mlp(width=32, layers=4, batch=32)
    state = jax.device_put(
        jax.jit(target.init)(jax.random.key(0)), NamedSharding(Mesh(np.array(jax.devices()[:4]), "x"), PartitionSpec())
    )
    pipeline = Pipeline(microbatches=2, schedule=INTERLEAVED, options=options_of(INTERLEAVED))
    batch = jax.jit(target.make_batch)(jax.random.key(1))
    assert_as_on_one_device(target.step, state, batch, pipeline=pipeline)
