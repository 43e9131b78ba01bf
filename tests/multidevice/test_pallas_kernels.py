"""Kernels of others are split: Pallas ones along the axes of their grid that allow it, and cuDNN's attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.state.primitives import ref_swap  # a reference's old value, as kernels of libraries read it
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from one_device import assert_as_on_one_device

import meshwright as mw
from meshwright.program.rules import ReplicationWarning
from meshwright.schemes import analyse
from meshwright.searches import run_searches
from meshwright.targets import load_target

Function = Callable[..., Any]

SAMPLES, POSITIONS, HEADS, SIZE = 8, 128, 8, 16


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`[batch, positions, heads, size]`, causal."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def gpu(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """What JAX has for GPUs."""
    sizes = gpu_attention.BlockSizes(
        block_q=64, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64
    )
    return gpu_attention.mha(q, k, v, None, causal=True, block_sizes=sizes, interpret=True)


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """What JAX has for TPUs, with as many key heads as there are; their heads go round one after the other."""
    mask = splash_attention_mask.CausalMask((q.shape[1], q.shape[1]))
    heads = splash_attention_mask.MultiHeadMask([mask] * q.shape[2])
    kernel = splash_attention_kernel.make_splash_mha(heads, head_shards=1, q_seq_shards=1, interpret=True)
    turned = (one.swapaxes(1, 2) for one in (q, k, v))
    return jax.vmap(kernel)(*turned).swapaxes(1, 2)


def step_of(attention: Function) -> Function:
    def step(state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            q = jnp.einsum("bsw,whd->bshd", x, p["q"])
            k, v = (jnp.einsum("bsw,whd->bshd", x, p[name]) for name in ("k", "v"))
            out = jnp.einsum("bshd,hdw->bsw", attention(q, k, v), p["o"])
            return jnp.mean((x + out) ** 2)

        value, grads = mw.value_and_grad(loss)(state)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, grads), value

    return step


def weights(width: int = 32) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    made = {name: 0.3 * jax.random.normal(next(keys), (width, HEADS, SIZE)) for name in "qkv"}
    return made | {"o": 0.3 * jax.random.normal(next(keys), (HEADS, SIZE, width))}


def batch(width: int = 32) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (SAMPLES, POSITIONS, width))


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """What JAX has for GPUs that are here; of half precision, and traced for those that are not."""
    half = (one.astype(jnp.bfloat16) for one in (q, k, v))
    return jax.nn.dot_product_attention(*half, is_causal=True, implementation="cudnn").astype(q.dtype)


@cache
def plan_of_the_plain_form(preset: str) -> mw.Plan:
    return mw.plan_for(step_of(plain), (weights(), batch()), preset=preset, cluster="dgx-h100:1").plan


@pytest.mark.parametrize("attention", [gpu, splash, cudnn])
@pytest.mark.parametrize(
    "preset", ["data_parallel()", pytest.param("megatron(tp=8)", marks=pytest.mark.slow), "megatron(tp=2)"]
)
def test_attention_is_split_like_the_plain_form(attention: Function, preset: str) -> None:
    args = weights(), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        plan = mw.plan_for(step_of(attention), args, preset=preset, cluster="dgx-h100:1").plan
    like = plan_of_the_plain_form(preset)
    assert [one.use for one in plan.stages[0].parameters] == [one.use for one in like.stages[0].parameters]
    assert plan.stages[0].communication == like.stages[0].communication


@pytest.mark.parametrize("attention", [pytest.param(gpu, marks=pytest.mark.slow), splash], ids=["gpu", "splash"])
@pytest.mark.parametrize("preset", ["megatron(tp=4)"])
def test_its_numbers_are_those_of_one_device(attention: Function, preset: str) -> None:
    assert_as_on_one_device(step_of(attention), weights(), batch(), preset=preset)


def grouped(q: jax.Array, k: jax.Array) -> jax.Array:
    """Each head of q times its key head, which others share: `[batch, heads, size]` each."""
    share = q.shape[1] // k.shape[1]

    def body(q_ref: Any, k_ref: Any, out_ref: Any) -> None:
        out_ref[...] = q_ref[...] * k_ref[...]

    return pl.pallas_call(
        body, grid=q.shape[:2], interpret=True, out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        in_specs=[
            pl.BlockSpec((None, None, q.shape[2]), lambda b, h: (b, h, 0)),
            pl.BlockSpec((None, None, k.shape[2]), lambda b, h: (b, h // share, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, q.shape[2]), lambda b, h: (b, h, 0)),
    )(q, k)  # fmt: skip


def test_heads_that_share_a_key_head_stay_together() -> None:
    """Eight heads of four key heads are split among four devices, and not among eight."""
    args = jax.random.normal(jax.random.key(0), (3, 8, 16)), jax.random.normal(jax.random.key(1), (3, 4, 16))
    for devices, split in ((4, True), (8, False)):
        run = mw.parallelize(grouped, devices=jax.devices()[:devices], mesh=(devices,))
        np.testing.assert_allclose(run(*args), grouped(*args), rtol=1e-6)
        (kernel,) = (one for one in run.plan(*args).stages[0].operators if one.name == "pallas_call")
        assert any(kernel.axes) == split


def running_sum(x: jax.Array) -> jax.Array:
    """Over rows, in scratch memory that is carried from one to the next."""

    def body(x_ref: Any, out_ref: Any, sum_ref: Any) -> None:
        sum_ref[...] = sum_ref[...] + x_ref[...]
        out_ref[...] = sum_ref[...]

    spec = pl.BlockSpec((1, x.shape[1]), lambda row: (row, 0))
    return pl.pallas_call(
        body, grid=(x.shape[0],), in_specs=[spec], out_specs=spec, interpret=True,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_shapes=[pltpu.VMEM((1, x.shape[1]), x.dtype)],
    )(x)  # fmt: skip


def numbered(x: jax.Array) -> jax.Array:
    """Each row times its number."""

    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * pl.program_id(0).astype(x.dtype)

    spec = pl.BlockSpec((1, x.shape[1]), lambda row: (row, 0))
    return pl.pallas_call(
        body, grid=(x.shape[0],), in_specs=[spec], out_specs=spec, interpret=True,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)  # fmt: skip


def reversed_rows(x: jax.Array) -> jax.Array:
    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...]

    there = pl.BlockSpec((1, x.shape[1]), lambda row: (row, 0))
    back = pl.BlockSpec((1, x.shape[1]), lambda row: (x.shape[0] - 1 - row, 0))
    return pl.pallas_call(
        body, grid=(x.shape[0],), in_specs=[there], out_specs=back, interpret=True,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)  # fmt: skip


def flagged(body: Function, *, faster: int = 1, scratch: Any = ((1, 4),), given: int = 0) -> Function:
    """A kernel over rows that starts anew where a flag of a row says so: what it carries depends on numbers."""

    def run(x: jax.Array) -> jax.Array:
        rows, width = x.shape
        flags = jnp.zeros((rows, 1), jnp.int32).at[0, 0].set(1)
        row, whole = pl.BlockSpec((1, width), lambda i, *_: (i, 0)), pl.BlockSpec((1, width), lambda *_: (0, 0))
        return pl.pallas_call(
            body, grid=(rows, faster), interpret=True, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec((1, 1), lambda i, *_: (i, 0)), *[whole] * given, row], out_specs=row,
            scratch_shapes=[pltpu.VMEM(shape, x.dtype) for shape in scratch],
        )(flags, *[jnp.zeros((1, width), x.dtype)] * given, x)  # fmt: skip

    return run


def nothing_at_first(flag: Any, x: Any, out: Any, total: Any) -> None:
    @pl.when(pl.program_id(1) == 1)
    def _() -> None:
        @pl.when(flag[0, 0] == 1)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] = total[...] + x[...]
        out[...] = total[...]


def old_value_of_a_call(flag: Any, x: Any, out: Any, kept: Any) -> None:
    old = jax.jit(lambda: ref_swap(kept, (slice(None), slice(None)), x[...]))()
    out[...] = jnp.where(flag[0, 0] == 1, 0.0, old)


def writes_what_it_is_given(flag: Any, total: Any, x: Any, out: Any) -> None:
    @pl.when(flag[0, 0] == 1)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] = total[...] + x[...]
    out[...] = total[...]


CARRYING = {
    "nothing at the first point": flagged(nothing_at_first, faster=2),
    "an old value of a call": flagged(old_value_of_a_call),
    "an operand that is written": flagged(writes_what_it_is_given, scratch=(), given=1),
}


@pytest.mark.parametrize("kernel", CARRYING.values(), ids=CARRYING)
def test_what_is_carried_only_where_numbers_say_so_is_not_split(kernel: Function) -> None:
    x = jnp.arange(32.0).reshape(8, 4)
    run = mw.parallelize(kernel, devices=jax.devices()[:2], mesh=(2,))
    with pytest.warns(ReplicationWarning, match="runs whole on every device"):
        found = run(x)
    np.testing.assert_array_equal(found, kernel(x))


def rows(x: jax.Array, *, back: bool) -> jax.Array:
    """Twice as much, the rows in order or the other way round."""

    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    count = x.shape[0]
    there = pl.BlockSpec((1, x.shape[1]), lambda row: (row, 0))
    turned = pl.BlockSpec((1, x.shape[1]), lambda row: (count - 1 - row, 0))
    return pl.pallas_call(
        body, grid=(count,), in_specs=[there], out_specs=turned if back else there, interpret=True,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)  # fmt: skip


def test_kernels_that_differ_in_their_blocks_alone_are_told_apart() -> None:
    """As text they are the same."""

    def both(x: jax.Array) -> jax.Array:
        return rows(rows(x, back=False), back=True) - rows(x, back=True)

    x = jnp.arange(32.0).reshape(8, 4)
    with pytest.warns(ReplicationWarning, match="do not follow axis 0"):
        found = mw.parallelize(both, devices=jax.devices()[:2], mesh=(2,))(x)
    np.testing.assert_array_equal(found, both(x))


def test_grids_of_sizes_known_at_run_time_only_are_whole() -> None:
    """JAX's own product of a mixture's experts has one."""

    def experts(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return gmm(x, w, sizes, jnp.float32, interpret=True)

    shapes = ((256, 128), jnp.float32), ((2, 128, 128), jnp.float32), ((2,), jnp.int32)
    with pytest.warns(ReplicationWarning):
        assert mw.plan_for(experts, [jax.ShapeDtypeStruct(*one) for one in shapes], cluster="tpu-v5e:8").plan.stages


@pytest.mark.parametrize("cluster", ["cpu", "dgx-h100:1", "tpu-v5e:8"])
def test_a_kernels_result_is_in_memory(cluster: str) -> None:
    """A product takes in arithmetic on its operands, and no kernel."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return numbered(x) @ w

    shapes = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 8), jnp.float32)
    with pytest.warns(ReplicationWarning):
        plan = mw.plan_for(step, shapes, cluster=cluster, pins={"args[0]": (None, None)})
    assert plan.plan.stages[0].memory.total > 2 * 4 * 1024 * 1024


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (running_sum, "it may carry something along axis 0 of its grid"),
        (numbered, "its body asks where it runs along axis 0 of its grid"),
        (reversed_rows, "its blocks do not follow axis 0 of its grid one after the other"),
    ],
)
def test_what_must_not_be_split_is_run_whole_and_told(kernel: Function, why: str) -> None:
    with pytest.warns(ReplicationWarning, match=why):
        plan = mw.plan_for(kernel, (jax.ShapeDtypeStruct((8, 16), jnp.float32),), cluster="dgx-h100:1").plan
    assert not any(one.axes != ((),) * len(one.axes) for one in plan.stages[0].operators if one.name == "pallas_call")


def test_what_asks_for_a_gpu_is_answered_for_the_one_that_is_planned_for() -> None:
    """And for no other: nobody here has cuDNN."""
    args = weights(), batch()
    with pytest.raises(RuntimeError, match="cuDNN"):
        mw.plan_for(step_of(cudnn), args, cluster="cpu")

    def wide(q: jax.Array) -> jax.Array:
        """Heads of 256, which cuDNN has from Hopper on."""
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    def samples(count: int) -> Any:
        return (jax.ShapeDtypeStruct((count, POSITIONS, HEADS, 256), jnp.bfloat16),)

    assert mw.plan_for(wide, samples(8), cluster="dgx-h100:1").plan.stages
    with pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        mw.plan_for(wide, samples(16), cluster="dgx-a100-40:1")


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("dgx-h100:1", {"preset": "megatron(tp=8)"}),
        pytest.param("dgx-h100:1", {"stages": 1}, marks=pytest.mark.slow),
        pytest.param("tpu-v5p:8", {"stages": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_reference_model_with_the_attention_of_its_devices(cluster: str, options: dict[str, Any]) -> None:
    """Its scores, 16 GB of a sample, are in no plan's memory, and it takes less than two thirds of the time."""
    plain, fused = (
        mw.plan_for(loaded.step, loaded.example_args, cluster=cluster, **options).plan.predicted
        for attention in ("plain", "fused")
        for loaded in [load_target("llama3-8b", global_batch=16, attention=attention)]
    )
    assert fused is not None
    assert plain is not None
    assert fused.step_seconds < plain.step_seconds / 1.5


def test_an_attention_that_there_is_not_is_refused() -> None:
    with pytest.raises(mw.PlanError, match="plain or fused"):
        load_target("llama-tiny", attention="flash")
    with pytest.raises(mw.PlanError, match="needed a model whose attention can be set"):
        load_target("wresnet-tiny", attention="fused")


def test_schemes_and_searches_answer_for_gpus_that_are_not_here_too() -> None:
    args = weights(), batch()
    assert analyse(step_of(cudnn), args, cluster="dgx-h100:1")
    assert run_searches(step_of(cudnn), args, cluster="dgx-h100:1", methods=["bfs"], time_limit_seconds=0.5)
