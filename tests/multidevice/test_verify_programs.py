"""`verify` passes on the reference models and on programs of each framework: what is predicted is what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright import zoo
from meshwright.targets import step_target, zoo_target
from meshwright.verify import Verification, verify
from meshwright.zoo import wide_resnet

pytestmark = pytest.mark.compiled

ADAM = optax.adamw(1e-2)
X, Y = (jnp.asarray(np.random.default_rng(i).normal(size=(16, 8, 16)), jnp.float32) for i in range(2))


def checked(target: Any, **options: Any) -> Verification:
    """On four devices, which have most of what eight have."""
    found = verify(target, **{"devices": 4, "steps": 2, "timed_steps": 0, **options})
    assert found.passed, [check for check in found.checks if not check.passed]
    return found


TINY = [name for name in zoo.names() if name.endswith("-tiny")]


# Of each kind one is in `make test`: Llama has the parts of the decoders of today, `test_dropless` a mixture;
# convolutions are those of one block of a wide ResNet, and the perceptron is verified in stages.
QUICK = {"llama-tiny"}
OF_TODAY = [
    name for name in TINY if name not in {"bert-tiny", "gpt-tiny", "mlp-tiny", "moe-tiny", "unet-tiny", "wresnet-tiny"}
]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TINY])
def test_reference_models(name: str) -> None:
    # Compiling is nearly all that convolutions take, and takes longer for more devices.
    devices = 2 if name in {"unet-tiny", "wresnet-tiny"} else 4
    assert_in_one_stage(zoo.build(name), devices=devices)


def test_one_block_of_a_wide_resnet() -> None:
    config = replace(wide_resnet.CONFIGS["wresnet-tiny"], blocks=(1,))
    assert_in_one_stage(wide_resnet.build(config), devices=2)


def assert_in_one_stage(target: zoo.Target, devices: int) -> None:
    found = checked(zoo_target(target), devices=devices, stages=1, steps=1)
    assert found.not_judged == ()
    (stage,) = found.stages
    assert stage.flops[0] == pytest.approx(stage.flops[1], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp-tiny", {"preset": "megatron(tp=2, pp=2)", "microbatches": 2}),
        pytest.param("mlp-tiny", {"stages": 2, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("gpt-tiny", {"preset": "megatron(tp=2, pp=2)", "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("bert-tiny", {"stages": 2, "schedule": "zero_bubble", "microbatches": 4}, marks=pytest.mark.slow),
        pytest.param("llama-tiny", {"stages": None, "microbatches": 4}, marks=pytest.mark.slow),
        pytest.param("moe-tiny", {"stages": 2, "microbatches": 1}, marks=pytest.mark.slow),
        pytest.param("gpt-tiny", {"preset": "zero(stage=3)"}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_stages_and_presets(name: str, options: dict[str, Any]) -> None:
    found = checked(zoo_target(zoo.build(name)), **options)
    stages = options.get("stages", 2)
    assert stages is None or len(found.stages) == (
        2 if "megatron" in str(options) else stages if "stages" in options else 1
    )
    if len(found.stages) > 1:
        assert {(one.source, one.target) for one in found.sent} >= {(0, 1), (1, 0)}
        assert all(one.moved > 0 for one in found.sent)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", OF_TODAY)
def test_models_of_today_in_one_stage_and_two(name: str, stages: int) -> None:
    found = checked(zoo_target(zoo.build(name)), devices=8, stages=stages)
    assert len(found.stages) == stages
    assert found.not_judged == ()


# Frameworks


def step_of(loss_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """A step by AdamW, of a loss of parameters and what is drawn."""

    def step(state: Any, batch: Any) -> Any:
        loss, gradients = mw.value_and_grad(loss_of(batch))(state["params"])
        updates, moments = ADAM.update(gradients, state["moments"], state["params"])
        # A metric that is no number, and one that is whole.
        metrics = {"loss": loss, "nothing": loss * jnp.nan, "rows": jnp.int32(batch[0].shape[0])}
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, metrics

    return step


class LinenAttention(nn.Module):
    """With biases of keys, whose gradients are zero but for rounding, which Adam brings to full size."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        return nn.MultiHeadDotProductAttention(num_heads=2, use_bias=True)(nn.LayerNorm()(x), mask=mask)


def linen() -> tuple[Any, Any]:
    model = LinenAttention()
    params = jax.tree.map(jnp.asarray, jax.jit(model.init)(jax.random.key(0), X)["params"])
    return step_of(lambda batch: lambda p: jnp.mean((model.apply({"params": p}, batch[0]) - batch[1]) ** 2)), params


def nnx_program() -> tuple[Any, Any]:
    graph, params, rest = nnx.split(nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(batch: Any) -> Any:
        return lambda p: jnp.mean((nnx.merge(graph, p, rest)(batch[0]) - batch[1]) ** 2)

    return step_of(loss), params


def equinox() -> tuple[Any, Any]:
    model = eqx.nn.MultiheadAttention(
        2, 16, use_query_bias=True, use_key_bias=True, use_value_bias=True, key=jax.random.key(0)
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(batch: Any) -> Any:
        return lambda p: jnp.mean((jax.vmap(lambda x: eqx.combine(p, static)(x, x, x))(batch[0]) - batch[1]) ** 2)

    return step_of(loss), params


def plain() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(key, (16, 16)) / 4 for name, key in zip("qkvo", keys, strict=True)}
    params |= {f"{name} bias": jnp.zeros(16) for name in "qkv"}

    def loss(batch: Any) -> Any:
        def of_parameters(p: Any) -> jax.Array:
            q, k, v = (batch[0] @ p[name] + p[f"{name} bias"] for name in "qkv")
            scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), q @ k.mT, jnp.finfo(q.dtype).min)
            return jnp.mean((jax.nn.softmax(scores) @ v @ p["o"] - batch[1]) ** 2)

        return of_parameters

    return step_of(loss), params


@pytest.mark.parametrize(
    "made", [plain, *(pytest.param(made, marks=pytest.mark.slow) for made in (linen, nnx_program, equinox))]
)
def test_frameworks_with_parameters_that_are_rounding_noise(made: Callable[[], tuple[Any, Any]]) -> None:
    step, params = made()
    state = {"params": params, "moments": ADAM.init(params)}
    found = checked(step_target(step, (state, (X, Y)), name=made.__name__))
    unseen = {one.name for one in found.not_judged}
    assert "result[1]['nothing']" in unseen
    # The key biases, with their moments; nothing else.
    assert len(unseen) == 4
    assert all("key" in name or "k bias" in name for name in unseen - {"result[1]['nothing']"})


def test_state_of_every_kind() -> None:
    """Keys, counters, half precision, NaNs and what is never changed, in a step that prints."""

    def step(state: Any, x: jax.Array) -> Any:
        key, draw = jax.random.split(state["key"])
        noise = jax.random.normal(draw, x.shape, jnp.bfloat16)

        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(((x.astype(jnp.bfloat16) + noise) @ w).astype(jnp.float32) ** 2)

        value, gradient = mw.value_and_grad(loss)(state["w"])
        jax.debug.print("loss {value}", value=value)
        state = {
            "w": state["w"] - gradient, "key": key, "count": state["count"] + 1, "kept": state["kept"],
            "best": jnp.minimum(state["best"], value), "bad": state["bad"] + 1.0,
        }  # fmt: skip
        return state, {"loss": value, "sign": gradient > 0, "largest": jnp.argmax(jnp.abs(x).sum(0))}

    state = {
        "w": jax.random.normal(jax.random.key(0), (16, 16), jnp.bfloat16), "key": jax.random.key(1),
        "count": jnp.int32(0), "kept": jnp.arange(4.0), "best": jnp.float32(jnp.inf), "bad": jnp.float32(jnp.nan),
    }  # fmt: skip
    found = verify(step_target(step, (state, X[:, 0]), name="kinds"), devices=4, steps=2, timed_steps=0)
    # The model of memory is a few kilobytes off, which is much of so little.
    assert [check for check in found.checks if not check.passed and check.name != "peak memory"] == []
    assert {one.name for one in found.errors} >= {"result[0]['key']", "result[0]['count']", "result[1]['sign']"}
    assert "result[0]['bad']" in {one.name for one in found.not_judged}
