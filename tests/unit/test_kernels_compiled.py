"""Kernels for machines that are not here, split by a plan and compiled by the compilers of these machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from meshwright._jax.ahead import has_cuda_compiler, has_tpu_compiler
from meshwright.api import value_and_grad
from meshwright.targets import step_target
from meshwright.verify import verify

POSITIONS, HEADS, SIZE = 1024, 8, 128
WIDTH = HEADS * SIZE


def mha(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return gpu_attention.mha(q, k, v, None, causal=True)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    heads = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((POSITIONS, POSITIONS))] * HEADS)
    kernel = splash_attention_kernel.make_splash_mha(heads, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(*(one.swapaxes(1, 2) for one in (q, k, v))).swapaxes(1, 2)


def step_of(attention: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            p = jax.tree.map(lambda one: one.astype(jnp.bfloat16), params)
            q, k, v = (jnp.einsum("bsw,whd->bshd", x, p[name]) for name in "qkv")
            out = x + jnp.einsum("bshd,hdw->bsw", attention(q, k, v), p["o"])
            return jnp.mean(out.astype(jnp.float32) ** 2)

        value, grads = value_and_grad(loss)(state)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value

    return step


def verified(attention: Callable[..., Any], cluster: str, **options: Any) -> Any:
    shapes = {**dict.fromkeys("qkv", (WIDTH, HEADS, SIZE)), "o": (HEADS, SIZE, WIDTH)}
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    args = state, jax.ShapeDtypeStruct((16, POSITIONS, WIDTH), jnp.bfloat16)
    return verify(step_target(step_of(attention), args, name="a layer"), cluster=cluster, **options)


def assert_split_and_fits(found: Any, *, but: str = "bytes") -> None:
    """Every check but those of collectives, of which these compilers join some (docs/compilers.md)."""
    (stage,) = found.plan.stages
    (layer,) = (one for one in stage.operators if one.name == "custom_vjp_call")
    assert any(layer.axes)
    assert all(one.passed for one in found.checks if not one.name.endswith(but)), found.checks
    assert any("not counted" in one.name for one in found.checks)


@pytest.mark.compilers
@pytest.mark.skipif(not has_tpu_compiler(), reason="needs libtpu: make test-compilers")
@pytest.mark.parametrize("preset", ["data_parallel()", "megatron(tp=4)"])
def test_splash_attention_for_tpus(preset: str) -> None:
    """Operands in the order of the kernel's dims are counted as copies, and the compiler's products write them so."""
    found = verified(splash, "tpu-v5e:8", preset=preset)
    assert_split_and_fits(found, but="peak memory")
    predicted, compiled = found.stages[0].peak_bytes
    assert compiled < predicted


@pytest.mark.compilers
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs the CUDA plugin: make test-compilers-gpu")
@pytest.mark.parametrize("attention", [mha, cudnn])
@pytest.mark.parametrize("preset", ["data_parallel()", "megatron(tp=4)"])
def test_attention_for_gpus(attention: Callable[..., Any], preset: str) -> None:
    assert_split_and_fits(verified(attention, "dgx-h100:1", preset=preset))
