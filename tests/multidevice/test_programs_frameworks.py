"""Models and optimizers of Flax, Equinox and Optax give by a plan what they give on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from one_device import TENSOR, assert_as_on_one_device

import meshwright as mw
from meshwright.errors import PlanError

_RANDOM = np.random.default_rng(1)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(_RANDOM.normal(size=shape) * 0.3, jnp.float32)


X, Y = array(32, 16), array(32, 8)
PARAMETERS = {"w": array(16, 32), "b": array(32), "out": array(32, 8)}
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def error(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


def perceptron(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["out"]


def training(optimizer: optax.GradientTransformation, value_and_grad: Any = mw.value_and_grad) -> Callable[..., Any]:
    def step(state, batch):
        p, moments = state
        loss, gradients = value_and_grad(lambda p: error(perceptron(p, batch[0]), batch[1]))(p)
        updates, moments = optimizer.update(gradients, moments, p)
        return (optax.apply_updates(p, updates), moments), {"loss": loss, "norm": optax.tree.norm(gradients)}

    return step


def matrices(p: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, p)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (optax.adam(1e-2), {"zero": 3, "microbatches": 2}),
        (
            optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, 2, 9), weight_decay=0.1, mask=matrices),
            {"zero": 1, "stages": 1},
        ),
        pytest.param(optax.adafactor(1e-2, min_dim_size_to_factor=8), {"zero": 1, "stages": 2}, marks=pytest.mark.slow),
        (optax.adafactor(1e-2, min_dim_size_to_factor=8), {"zero": 3, "stages": 1}),
        (optax.sgd(0.1, momentum=0.9, nesterov=True), {**TENSOR, "pins": {"*['w']": (None, "model")}}),
        (optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)), {"zero": 2, "microbatches": 4}),
        (optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1)), {**TENSOR, "pins": {"*['w']": (None, "model")}}),
        (optax.MultiSteps(optax.adam(1e-2), 2), {"zero": 1, "stages": 2}),
        (optax.inject_hyperparams(optax.adam)(learning_rate=1e-2), {}),
    ],
    ids=["adam", "adamw", "adafactor-1", "adafactor-3", "sgd", "clip-2", "clip-tensor", "MultiSteps", "inject"],
)
def test_optimizers(optimizer: Any, options: dict[str, Any]) -> None:
    assert_as_on_one_device(training(optimizer), (PARAMETERS, optimizer.init(PARAMETERS)), (X, Y), **options)


def test_an_optimizer_planned_whole() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))
    state = (PARAMETERS, optimizer.init(PARAMETERS))
    assert_as_on_one_device(training(optimizer, jax.value_and_grad), state, (X, Y), mesh=(8,))


def test_averages_of_parameters_follow_them() -> None:
    def step(state, batch):
        loss, g = mw.value_and_grad(lambda p: error(perceptron(p, batch["x"]), batch["y"]))(state["p"])
        p = jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], g)
        return {
            "p": p,
            "average": optax.incremental_update(p, state["average"], 0.1),
            "steps": state["steps"] + 1,
        }, loss

    state = {"p": PARAMETERS, "average": PARAMETERS, "steps": jnp.int32(0)}
    parallel = assert_as_on_one_device(step, state, {"x": X, "y": Y}, zero=3)
    shardings, _ = parallel.planned(state, {"x": X, "y": Y}).program.in_tree.unflatten(
        parallel.planned(state, {"x": X, "y": Y}).in_shardings
    )
    assert not shardings["average"]["w"].is_fully_replicated
    assert [s.spec for s in jax.tree.leaves(shardings["average"])] == [s.spec for s in jax.tree.leaves(shardings["p"])]


def test_half_precision_with_loss_scaling() -> None:
    def step(state, batch):
        x, y = batch

        def loss(p):
            half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
            return 1024 * error(perceptron(half, x.astype(jnp.bfloat16)).astype(jnp.float32), y)

        value, gradients = mw.value_and_grad(loss)(state)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
        new = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 / 1024 * g, p), state, gradients)
        return new, value / 1024

    # bfloat16 sums in another order differ in their last bits: 2**-8 of a gradient, times 0.1, in each of three steps.
    assert_as_on_one_device(step, PARAMETERS, (X, Y), zero=1, stages=1, atol=1e-3)


# Flax


class LinenBlock(nn.Module):
    """Everything of Linen's that carries state or draws numbers."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(32, use_bias=False)(x))
        x = nn.Dropout(0.1, deterministic=False)(nn.gelu(x))
        return nn.Dense(8)(nn.LayerNorm()(x))


def test_linen_with_batch_statistics_and_dropout() -> None:
    model = LinenBlock()
    made = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def step(state, batch):
        p, statistics, key = state
        key, drop = jax.random.split(key)

        def loss(p):
            variables = {"params": p, "batch_stats": statistics}
            y, updated = model.apply(variables, batch[0], mutable=["batch_stats"], rngs={"dropout": drop})
            return error(y, batch[1]), updated["batch_stats"]

        (value, updated), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), updated, key), value

    assert_as_on_one_device(step, (made["params"], made["batch_stats"], jax.random.key(2)), (X, Y), zero=3, stages=1)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return x + nn.Dense(16, kernel_init=kernel)(nn.relu(x)), None


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(LinenLayer, prevent_cse=False), variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
            metadata_params={nn.PARTITION_NAME: None},
        )  # fmt: skip
        return nn.Dense(8)(layers()(x, None)[0])


def test_linen_train_state_with_scanned_layers() -> None:
    model = LinenStack()
    state = TrainState.create(
        apply_fn=model.apply, params=jax.jit(model.init)(jax.random.key(0), X)["params"], tx=MOMENTUM
    )

    def step(state, batch):
        def loss(p):
            return error(state.apply_fn({"params": p}, batch[0]), batch[1])

        value, gradients = mw.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    assert_as_on_one_device(step, state, (X, Y), zero=3, microbatches=2, stages=2)


class NNXBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.gelu(self.norm(self.inner(x)))))


def test_nnx_split_and_merged() -> None:
    graph, p, rest = nnx.split(NNXBlock(nnx.Rngs(0)), nnx.Param, ...)

    def step(state, batch):
        p, rest = state

        def loss(p):
            model = nnx.merge(graph, p, rest, copy=True)
            value = error(model(batch[0]), batch[1])
            return value, nnx.split(model, nnx.Param, ...)[2]

        (value, rest), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), rest), value

    pins = {"*inner*kernel*": (None, "model")}
    assert_as_on_one_device(step, (p, rest), (X, Y), **TENSOR, pins=pins)


def test_nnx_with_its_own_gradients_is_planned_whole() -> None:
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    graph, state = nnx.split((model, nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param)))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(lambda model: error(model(batch[0]), batch[1]))(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    assert_as_on_one_device(step, state, (X, Y), mesh=(8,), pins={"args[0][0]['kernel']*": ("x", None)})


# Equinox


class Block(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    outer: eqx.nn.Linear
    activation: Callable[..., Any]
    scale: float = eqx.field(static=True)

    def __init__(self, key: jax.Array) -> None:
        first, last = jax.random.split(key)
        self.inner, self.outer = eqx.nn.Linear(16, 32, key=first), eqx.nn.Linear(32, 8, key=last)
        self.norm, self.activation, self.scale = eqx.nn.LayerNorm(32), jax.nn.gelu, 2.0

    def __call__(self, x):
        return self.outer(self.norm(self.activation(self.scale * self.inner(x))))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**TENSOR, "pins": {"args[0][0].inner.weight": ("model", None)}}, marks=pytest.mark.slow),
        {"zero": 3, "microbatches": 2, "stages": 2},
    ],
)
def test_equinox_with_an_activation_among_its_leaves(options: dict[str, Any]) -> None:
    model = Block(jax.random.key(0))
    p, static = eqx.partition(model, eqx.is_inexact_array)

    def step(state, batch):
        p, moments = state

        def loss(p):
            return error(jax.vmap(eqx.combine(p, static))(batch[0]), batch[1])

        value, gradients = mw.value_and_grad(loss)(p)
        updates, moments = MOMENTUM.update(gradients, moments, p)
        return (eqx.apply_updates(p, updates), moments), value

    assert_as_on_one_device(step, (p, MOMENTUM.init(p)), (X, Y), **options)
    with pytest.raises(PlanError, match=r"got function .*eqx\.partition"):
        mw.plan_for(step, ((model, ()), (X, Y)))


def test_equinox_with_batch_norm_state_and_its_own_gradients() -> None:
    layers = [
        eqx.nn.Linear(16, 32, use_bias=False, key=jax.random.key(0)),
        eqx.nn.BatchNorm(32, "batch", mode="batch"),
        eqx.nn.Dropout(0.1),
        eqx.nn.Linear(32, 8, key=jax.random.key(1)),
    ]
    model, memory = eqx.nn.make_with_state(eqx.nn.Sequential)(layers)
    p, static = eqx.partition(model, eqx.is_inexact_array)

    def step(state, batch):
        p, memory, key = state
        key, drop = jax.random.split(key)

        def loss(p):
            def one(x, key):
                return eqx.combine(p, static)(x, memory, key=key)

            y, updated = jax.vmap(one, axis_name="batch", out_axes=(0, None))(batch[0], jax.random.split(drop, 32))
            return error(y, batch[1]), updated

        (value, updated), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(p)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), updated, key), value

    assert_as_on_one_device(step, (p, memory, jax.random.key(2)), (X, Y), mesh=(8,))
