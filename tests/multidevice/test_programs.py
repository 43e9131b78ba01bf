"""Programs of every structure a train step may have give by a plan what they give on one device."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from one_device import TENSOR, assert_as_on_one_device, assert_equal_trees, copy

import meshwright as mw
from meshwright.errors import PlanError

_RANDOM = np.random.default_rng(0)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(_RANDOM.normal(size=shape) * 0.3, jnp.float32)


X, Y = array(32, 16), array(32, 16)
PARAMETERS = {"w": array(3, 16, 16), "b": array(3, 16), "out": array(16, 16)}
SPLIT_OUT = {**TENSOR, "pins": {"*['out']": (None, "model")}}

Loss = Callable[[Any, Any], jax.Array]


def error(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


def sgd(loss: Loss, value_and_grad: Any = mw.value_and_grad) -> Callable[..., Any]:
    def step(parameters, batch):
        value, gradients = value_and_grad(lambda p: loss(p, batch))(parameters)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value

    return step


def scanned(p, b):
    h, _ = jax.lax.scan(lambda h, wb: (jnp.tanh(h @ wb[0] + wb[1]), None), b[0], (p["w"], p["b"]))
    return error(h @ p["out"], b[1])


def scanned_and_rematerialised(p, b):
    layer = jax.checkpoint(
        lambda h, wb: (jnp.tanh(h @ wb[0] + wb[1]), jnp.sum(h**2)), policy=jax.checkpoint_policies.dots_saveable
    )
    h, _ = jax.lax.scan(layer, b[0], (p["w"], p["b"]))
    return error(h @ p["out"], b[1])


def rematerialised(p, b):
    known = jax.checkpoint_policies
    policies = (None, known.dots_with_no_batch_dims_saveable, known.nothing_saveable)
    h = b[0]
    for i, policy in enumerate(policies):
        h = jax.checkpoint(lambda h, w, c: jnp.tanh(jnp.sin(h @ w) + c), policy=policy)(h, p["w"][i], p["b"][i])
    return error(h @ p["out"], b[1])


def looped(p, b):
    h = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"][i] + p["b"][i]), b[0])
    return error(h @ p["out"], b[1])


def until_small(p, b):
    """A `while` of unknown length, which has no gradient."""

    def halve(carry):
        count, h = carry
        return count + 1, jax.nn.relu(h) * 0.5

    count, h = jax.lax.while_loop(lambda c: jnp.max(c[1]) > 0.1, halve, (0, jax.lax.stop_gradient(jnp.abs(b[0]))))
    return error(b[0] @ p["out"] + h, b[1]) * (1 + 0.1 * count)


def branching(p, b):
    h = jax.lax.cond(b[0][0, 0] > 0, jnp.tanh, jnp.sin, b[0] @ p["w"][0])
    h = jax.lax.switch(2, [lambda h: h, lambda h: 2 * h, lambda h: 3 * h], h)
    return error(h @ p["out"], b[1])


def behind_a_barrier(p, b):
    w, x = jax.lax.optimization_barrier((p["w"][0], b[0]))
    return error(jnp.tanh(x @ w) @ p["out"], b[1])


def branching_on_parameters(p, b):
    h = jax.lax.cond(jnp.sum(b[0]) > 0, lambda: b[0] @ p["w"][0], lambda: b[0] * 1.0)
    return error(jnp.tanh(h) @ p["out"], b[1])


@jax.custom_vjp
def sine_of_product(x, w):
    return jnp.sin(x @ w)


def _sine_backward(residuals, cotangent):
    x, w = residuals
    inner = cotangent * jnp.cos(x @ w)
    return inner @ w.T, x.T @ inner


sine_of_product.defvjp(lambda x, w: (sine_of_product(x, w), (x, w)), _sine_backward)


@jax.custom_jvp
def softplus(x):
    return jnp.log1p(jnp.exp(x))


softplus.defjvp(lambda primals, tangents: (softplus(primals[0]), tangents[0] * jax.nn.sigmoid(primals[0])))


def with_derivatives_of_its_own(p, b):
    return error(softplus(sine_of_product(b[0], p["w"][0])) @ p["out"], b[1])


@jax.jit
def jitted_layer(h, w):
    return jax.jit(jax.nn.gelu)(h @ w)


def of_jitted_layers(p, b):
    h = b[0]
    for i in range(3):
        h = jitted_layer(h, p["w"][i])
    return error(h @ p["out"], b[1])


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (scanned, {"zero": 3, "microbatches": 2, "stages": 2}),
        (scanned_and_rematerialised, SPLIT_OUT),
        (scanned_and_rematerialised, {"zero": 1, "microbatches": 4}),
        (rematerialised, {"zero": 3, "microbatches": 2, "stages": 2}),
        (looped, {"zero": 1, "stages": 1}),
        (until_small, {"zero": 1, "stages": 2}),
        (branching, {"zero": 1, "stages": 2}),
        (behind_a_barrier, SPLIT_OUT),
        (branching_on_parameters, {"zero": 1, "stages": 1}),
        # No dim of the cond passes through both branches and their derivatives: it is whole, and said to be.
        pytest.param(
            branching_on_parameters, {"mesh": (8,)}, marks=pytest.mark.filterwarnings("ignore:cond at .* runs whole")
        ),
        (with_derivatives_of_its_own, {"zero": 3, "microbatches": 2}),
        (of_jitted_layers, {"mesh": (2, 2, 2), "zero": 2}),
    ],
)
def test_control_flow_and_derivatives(loss: Loss, options: dict[str, Any]) -> None:
    assert_as_on_one_device(sgd(loss), PARAMETERS, (X, Y), **options)


@pytest.mark.parametrize(
    "options",
    [
        {**TENSOR, "pins": {"*['embedding']": ("model", None)}},
        {**TENSOR, "pins": {"*['embedding']": (None, "model")}},
        {"zero": 3, "microbatches": 2, "stages": 1},
    ],
)
def test_tied_weights(options: dict[str, Any]) -> None:
    tokens = jnp.asarray(_RANDOM.integers(0, 64, (16, 8)))

    def loss(p, tokens):
        logits = jnp.tanh(p["embedding"][tokens] @ p["w"]) @ p["embedding"].T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(tokens, -1, 1)[..., None], -1)
        return -jnp.mean(picked)

    assert_as_on_one_device(sgd(loss), {"embedding": array(64, 16), "w": array(16, 16)}, tokens, **options)


# Losses and microbatches


@pytest.mark.parametrize(
    ("loss", "reduction", "microbatches"),
    [
        (lambda p, b: error(b[0] @ p["out"], b[1]) + 0.01 * jnp.sum(p["out"] ** 2), None, 4),
        (lambda p, b: 0.01 * jnp.sum((b[0] @ p["out"] - b[1]) ** 2), None, 4),
        (lambda p, b: jax.vmap(lambda x, y: jnp.sum((x @ p["out"] - y) ** 2))(*b).mean(), None, 2),
        (lambda p, b: jnp.sum((b[0] @ p["out"] - b[1]) ** 2 / b[0].shape[0]), None, 2),
        (lambda p, b: jnp.sum(jnp.abs(jnp.sort(b[0] @ p["out"], axis=1))) / 9, "sum", 2),
    ],
    ids=["mean", "sum", "mean of vmap", "sum of shares", "as told"],
)
def test_microbatches_add_up(loss: Loss, reduction: str | None, microbatches: int) -> None:
    assert_as_on_one_device(
        sgd(loss), PARAMETERS, (X, Y), microbatches=microbatches, zero=microbatches // 2, reduction=reduction,
        stages=microbatches // 2,
    )  # fmt: skip


MASK = jnp.asarray(_RANDOM.random(32) < 0.7, jnp.float32)


def per_example(p, b):
    return jnp.mean((b[0] @ p["out"] - b[1]) ** 2, -1)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, b: jnp.sqrt(jnp.mean(per_example(p, b))),
        lambda p, b: jnp.max(per_example(p, b)),
        lambda p, b: per_example(p, b)[0],
        lambda p, b: jnp.sum(per_example(p, b)) + jnp.sum(p["out"] ** 2),
    ],
    ids=["root", "maximum", "first", "sum and penalty"],
)
def test_losses_whose_microbatches_do_not_add_up_are_refused(loss: Loss) -> None:
    batch = (X, Y, MASK)
    with pytest.raises(PlanError, match='try reduction="mean"') as refused:
        mw.parallelize(sgd(loss), microbatches=2).plan(PARAMETERS, batch)
    assert "test_programs.py" in refused.value.where
    mw.plan_for(sgd(loss), (PARAMETERS, batch), microbatches=2, reduction="mean")


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, b: jnp.sum(b[2] * per_example(p, b)) / jnp.sum(b[2]),
        lambda p, b: jnp.mean(per_example(p, b), where=b[2] > 0),
        lambda p, b: jnp.sum(b[2] / jnp.sum(b[2]) * per_example(p, b)),
    ],
    ids=["masked", "where", "weights"],
)
def test_counts_of_a_mask_are_those_of_the_whole_batch(loss: Loss) -> None:
    assert_as_on_one_device(sgd(loss), PARAMETERS, (X, Y, MASK), microbatches=4)


def test_batch_statistics_and_auxiliary_results() -> None:
    def step(state, batch):
        p, running = state

        def loss(p):
            h = batch[0] @ p["w"][0]
            mean, variance = h.mean(0), h.var(0)
            y = ((h - mean) / jnp.sqrt(variance + 1e-5) * p["b"][0]) @ p["out"]
            hits = jnp.mean(jnp.argmax(y, 1) == jnp.argmax(batch[1], 1))
            return error(y, batch[1]), ({"mean": 0.9 * running["mean"] + 0.1 * mean}, {"hits": hits, "y": y})

        (value, (running, metrics)), gradients = mw.value_and_grad(loss, has_aux=True)(p)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), running), {"loss": value, **metrics}

    state = (PARAMETERS, {"mean": jnp.zeros(16)})
    assert_as_on_one_device(step, state, (X, Y), mesh=(8,), zero=1)
    assert_as_on_one_device(step, state, (X, Y), zero=3, stages=1)
    with pytest.raises(PlanError, match="examples meet each other"):
        mw.plan_for(step, (state, (X, Y)), microbatches=2)
    # Each microbatch with statistics of its own.
    planned = mw.plan_for(step, (state, (X, Y)), microbatches=2, reduction="mean")
    assert any("every microbatch computes it of its own examples" in note for note in planned.plan.notes)


# Random numbers


@pytest.mark.parametrize(
    ("make_key", "options"), [(jax.random.key, {"zero": 1, "stages": 1}), (jax.random.PRNGKey, SPLIT_OUT)]
)
def test_dropout_draws_the_numbers_of_one_device(make_key: Any, options: dict[str, Any]) -> None:
    def step(state, batch):
        p, key = state
        key, drop = jax.random.split(key)

        def loss(p):
            h = jnp.tanh(batch[0] @ p["w"][0])
            return error(jnp.where(jax.random.bernoulli(drop, 0.8, h.shape), h / 0.8, 0) @ p["out"], batch[1])

        value, gradients = mw.value_and_grad(loss)(p)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), key), value

    assert_as_on_one_device(step, (PARAMETERS, make_key(0)), (X, Y), **options)


def test_each_microbatch_draws_its_own_numbers_and_a_run_repeats() -> None:
    def step(w, batch, key):
        def loss(w):
            mask = jax.random.bernoulli(key, 0.5, batch.shape)
            return jnp.mean((batch * mask) @ w), mask

        (value, mask), gradient = mw.value_and_grad(loss, has_aux=True)(w)
        return w - gradient, (value, mask)

    runs = [mw.parallelize(step, microbatches=2, stages=1)(array(16, 4) * 0, X, jax.random.key(3)) for _ in range(2)]
    assert_equal_trees(runs[0], runs[1], rtol=0, atol=0)
    mask = np.asarray(runs[0][1][1])
    assert (mask[:16] != mask[16:]).any()


# Shapes a step may have


def test_plain_gradients_are_planned_whole() -> None:
    step = sgd(scanned, jax.value_and_grad)
    parallel = assert_as_on_one_device(step, PARAMETERS, (X, Y), mesh=(8,), pins={"args[0]['out']": ("x", None)})
    planned = parallel.planned(PARAMETERS, (X, Y))
    before, after = planned.in_shardings, planned.out_shardings
    assert [s.spec for s in after[:3]] == [s.spec for s in before[:3]]
    assert any(not s.is_fully_replicated for s in after[:3])
    with pytest.raises(PlanError, match="value_and_grad in place of"):
        mw.plan_for(step, (PARAMETERS, (X, Y)), microbatches=2)


def test_two_losses_in_one_step_are_planned_whole() -> None:
    def step(state, batch):
        generator, critic = state

        def forged(generator):
            return jnp.tanh(batch[0] @ generator["out"]) @ critic["out"]

        lost, g = mw.value_and_grad(lambda p: -jnp.mean(forged(p)))(generator)
        won, c = mw.value_and_grad(lambda p: jnp.mean((batch[1] - X) @ p["out"]))(critic)
        new = [jax.tree.map(lambda p, g: p - 0.1 * g, *pair) for pair in ((generator, g), (critic, c))]
        return tuple(new), (lost, won)

    assert_as_on_one_device(step, (PARAMETERS, copy(PARAMETERS)), (X, Y), **TENSOR)


def test_gradients_inside_loops_are_planned_whole() -> None:
    def step(p, batches):
        return jax.lax.scan(sgd(looped), p, batches)

    assert_as_on_one_device(step, PARAMETERS, (jnp.stack([X, -X]), jnp.stack([Y, Y])), steps=1)


def test_gradients_of_several_arguments_inside_jit() -> None:
    @jax.jit
    def gradients(batch, weights, last):
        def loss(last, batch, weights):
            return error(jnp.tanh(batch[0] @ weights["out"]) @ last, batch[1])

        return mw.value_and_grad(loss, argnums=(2, 0))(last, batch, weights)

    def step(state, batch):
        weights, last = state
        value, (g, h) = gradients(batch, weights, last)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, weights, g), last - 0.1 * h), value

    assert_as_on_one_device(step, (PARAMETERS, array(16, 16)), (X, Y), zero=3, microbatches=2)


def test_inference_with_a_cache() -> None:
    weights = {name: array(16, 16) for name in "qkvo"}

    def decode(cache, weights, x, position):
        keys, values = cache
        q, k, v = (x @ weights[name] for name in "qkv")
        keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, position, 0))
        values = jax.lax.dynamic_update_slice(values, v[:, None], (0, position, 0))
        scores = jnp.where(jnp.arange(12) <= position, jnp.einsum("bd,btd->bt", q, keys), -1e9)
        return (keys, values), jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), values) @ weights["o"]

    cache = (jnp.zeros((8, 12, 16)), jnp.zeros((8, 12, 16)))
    pins = {"args[0]*": (None, None, "x")}
    assert_as_on_one_device(decode, cache, weights, array(8, 16), jnp.int32(3), mesh=(8,), pins=pins)


class Named(NamedTuple):
    p: Any
    count: Any
    history: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    p: Any
    count: Any
    history: Any


@pytest.mark.parametrize(
    ("container", "options"), [(Named, {"zero": 1, "stages": 1}), (Node, {"zero": 3, "microbatches": 2})]
)
def test_containers_integers_and_python_scalars(container: Any, options: dict[str, Any]) -> None:
    def step(state, batch, rate):
        def loss(p):
            return error(jnp.tanh(batch["in"]["x"] @ p["out"]), batch["y"])

        value, gradients = mw.value_and_grad(loss)(state.p)
        p = jax.tree.map(lambda p, g: p - rate * g, state.p, gradients)
        history = jnp.roll(state.history, 1).at[0].set(value)
        # An input as it came, a literal, and one result twice.
        return container(p, state.count + 1, history), (value, value, 1.0, batch["id"])

    batch = {"in": {"x": X}, "y": Y, "id": jnp.arange(32)}
    weights = {"out": PARAMETERS["out"].astype(jnp.bfloat16)}
    for p in (PARAMETERS, weights):  # a Python scalar does not widen bfloat16
        parallel = assert_as_on_one_device(step, container(p, 0, jnp.zeros(5)), batch, 0.1, atol=1e-2, **options)
        (planned,) = parallel._steps.values()  # scalars that became arrays did not plan or compile again
        assert planned.jitted._cache_size() == 1


def test_numpy_arguments_stay_as_they_are() -> None:
    state = {name: np.array(x, np.float64) for name, x in PARAMETERS.items()}
    batch = (np.array(X, np.float64), np.array(Y))
    before = copy(state)
    parallel = assert_as_on_one_device(sgd(looped), state, batch, zero=1, stages=1)
    assert len(parallel._steps) == 1  # 64-bit numbers became 32-bit ones without planning again
    for name, x in state.items():
        np.testing.assert_array_equal(x, before[name])


def test_arguments_by_name() -> None:
    def step(state, batch):
        return state - jnp.sum(batch), jnp.sum(batch)

    parallel = mw.parallelize(step)
    assert float(parallel(batch=jnp.ones(8), state=jnp.float32(0))[1]) == 8.0


def test_the_second_call_traces_nothing_and_donates_the_state(caplog: pytest.LogCaptureFixture) -> None:
    traces = 0

    def step(p, batch):
        nonlocal traces
        traces += 1
        return sgd(scanned)(p, batch)

    parallel = mw.parallelize(step, zero=1)
    state, _ = parallel(copy(PARAMETERS), (X, Y))
    first = traces
    with caplog.at_level(logging.WARNING, "meshwright"):
        given = state
        for _ in range(2):
            state, _ = parallel(state, (X, Y))
        assert traces == first
        assert not caplog.records
        assert all(x.is_deleted() for x in jax.tree.leaves(given))
        state, _ = parallel(state, (X[:16], Y[:16]))
    assert traces > first
    assert ["new shapes" in record.message for record in caplog.records] == [True]


# Regions that the user has made parallel already

MESH = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)


def _ring(x, w):
    def turn(carry, _):
        total, x = carry
        return (total + jax.nn.silu(x @ w[0]), jax.lax.ppermute(x, "rows", [(0, 1), (1, 0)])), None

    (total, _), _ = jax.lax.scan(jax.checkpoint(turn), (x * 0, x), None, length=2)
    return total


def _collectives(x, w):
    x = jax.lax.all_gather(x, "rows", tiled=True) * (0.1 + jax.lax.axis_index("rows"))
    x = jax.lax.psum_scatter(x, "rows", tiled=True)
    return jax.lax.psum(x @ w[0], "columns")


def _told(x, w):
    return jax.lax.with_sharding_constraint(x @ w[0], NamedSharding(MESH, P("rows", "columns")))


@pytest.mark.parametrize(
    ("region", "options"),
    [
        (jax.shard_map(_ring, mesh=MESH, in_specs=(P("rows"), P()), out_specs=P("rows")), {"zero": 1, "stages": 2}),
        (
            jax.shard_map(
                _collectives, mesh=MESH, in_specs=(P("rows", "columns"), P(None, "columns")), out_specs=P("rows")
            ),
            {"zero": 3, "microbatches": 2, "reduction": "mean"},  # blocks may meet in collectives
        ),
        (
            jax.shard_map(
                lambda x, w: jnp.tanh(x @ w[0]),
                mesh=MESH,
                in_specs=(P(("columns", "rows")), P()),
                out_specs=P(("columns", "rows")),
                check_vma=False,
            ),
            SPLIT_OUT,
        ),
        (_told, {"zero": 1, "stages": 1}),
    ],
    ids=["ring", "collectives", "two axes on one dim", "sharding constraint"],
)
def test_manual_regions(region: Any, options: dict[str, Any]) -> None:
    def loss(p, b):
        return error(region(b[0], p["w"]) @ p["out"], b[1])

    assert_as_on_one_device(sgd(loss), PARAMETERS, (X, Y), **options)
