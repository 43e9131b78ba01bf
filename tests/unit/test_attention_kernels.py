"""`meshwright.attention` on one device: its numbers by each kernel, and which kernel a device gets."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright._jax import attention_blocks, attention_kernels
from meshwright._jax.attention_blocks import Mask
from meshwright._jax.cudnn import as_on
from meshwright.targets import load_target


def plain(query: Any, key: Any, value: Any, sinks: Any = None, *, causal: bool, window: int | None) -> jax.Array:
    """Attention with its scores in memory; queries (b, s, k, g, d)."""
    scores = jnp.einsum("bqkgd,btkd->bkgqt", query, key) * query.shape[-1] ** -0.5
    ahead = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
    seen = (ahead >= 0 if causal else ahead == ahead) & (ahead < (window or query.shape[1]))
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[None, :, :, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], -1)
    weights = jax.nn.softmax(scores, -1)[..., : key.shape[1]]
    return jnp.einsum("bkgqt,btke->bqkge", weights, value)


def operands(*, batch: int = 2, queries: int = 48, keys: int = 48, size: int = 8) -> list[jax.Array]:
    """Queries, keys, values, sinks and a cotangent."""
    made = jax.random.split(jax.random.key(0), 5)
    shapes = (batch, queries, 2, 3, size), (batch, keys, 2, size), (batch, keys, 2, size), (2, 3)
    found = [jax.random.normal(key, shape) for key, shape in zip(made, shapes, strict=False)]
    return [*found, jax.random.normal(made[4], shapes[0])]


def with_gradients(function: Any, operands: Any, cotangent: Any) -> list[jax.Array]:
    """Results, then cotangents of the operands; compiled as one."""

    @jax.jit
    def both(operands: Any, cotangent: Any) -> list[jax.Array]:
        out, pull = jax.vjp(function, *operands)
        return [out, *pull(cotangent)]

    return both(operands, cotangent)


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.max(jnp.abs(b))) + 1e-6)


CASES = [
    (False, None, False), (True, None, False), (True, None, True), (True, 5, False), (True, 20, True), (True, 1, False),
]  # fmt: skip


# In one block everything is at once; in several, windows begin and end where blocks do or inside of them.
@pytest.mark.parametrize(
    ("causal", "window", "sinks", "block"),
    [
        pytest.param(*case, block, marks=[pytest.mark.slow] * (block == 512 and case in CASES[1:4]))
        for block in (512, 16)
        for case in CASES
    ],
)
def test_numbers_and_gradients_are_those_of_plain_attention(
    causal: bool, window: int | None, sinks: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_blocks, "_BLOCK", block)
    *given, cotangent = operands()
    given = given[: 3 + sinks]

    def ours(query: Any, key: Any, value: Any, sinks: Any = None) -> jax.Array:
        return mw.attention(query, key, value, causal=causal, window=window, sinks=sinks)

    expected = with_gradients(lambda *x: plain(*x, causal=causal, window=window), given, cotangent)
    assert_close(with_gradients(ours, given, cotangent), expected)


def test_keys_of_another_sequence() -> None:
    query, key, value, _, cotangent = operands(keys=20)
    given = query, key, value
    expected = with_gradients(lambda *x: plain(*x, causal=False, window=None), given, cotangent)
    assert_close(with_gradients(mw.attention, given, cotangent), expected)


def test_heads_of_one_dim_read_the_key_head_of_their_group() -> None:
    query, key, value, *_ = operands()
    together = query.reshape(*query.shape[:2], 6, -1)
    found = mw.attention(together, key, value, causal=True)
    expected = jax.nn.dot_product_attention(together, key, value, is_causal=True)
    assert_close([found], [expected])


@pytest.mark.parametrize("mapped", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_it_is_mapped_over_batches_and_sinks(mapped: int) -> None:
    """Of four operands the first three or all; of the gradients too."""
    *given, _ = operands()
    stacked = [jnp.stack([x, 0.5 * x, -x]) for x in given[:mapped]]
    fixed = given[mapped:]

    def loss(*operands: Any) -> jax.Array:
        query, key, value, sinks = (*operands, *fixed)
        return jnp.sum(mw.attention(query, key, value, causal=True, sinks=sinks) ** 2)

    both = jax.jit(jax.value_and_grad(loss, tuple(range(mapped))))
    value, grads = jax.jit(jax.vmap(both))(*stacked)
    for i in range(3):
        one, its_grads = both(*(x[i] for x in stacked))
        assert_close([value[i], *(x[i] for x in grads)], [one, *its_grads], 1e-4)


@pytest.mark.parametrize(
    ("dtype", "capability", "has_kernel"),
    [("bfloat16", "9.0", True), ("bfloat16", "8.0", True), ("bfloat16", "7.0", False), ("float32", "9.0", False)],
)
@pytest.mark.parametrize("window", [None, 128])
def test_gpus_since_ampere_have_cudnn_in_half_precision(
    dtype: str, capability: str, has_kernel: bool, window: int | None
) -> None:
    query = jax.ShapeDtypeStruct((2, 256, 8, 128), dtype)
    key = jax.ShapeDtypeStruct((2, 256, 2, 128), dtype)

    @jax.jit
    def both(query: Any, key: Any, value: Any) -> Any:
        loss = lambda *x: jnp.sum(mw.attention(*x, causal=True, window=window).astype(jnp.float32))  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(query, key, value)

    with as_on(capability):
        text = both.trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmha") == 2 * has_kernel


@pytest.mark.parametrize("size", [128, 64])
def test_tpus_have_splash_attention_for_heads_of_128(size: int) -> None:
    query = jax.ShapeDtypeStruct((2, 256, 8, size), jnp.bfloat16)
    traced = jax.jit(lambda *x: mw.attention(*x, causal=True)).trace(query, query, query)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == (size == 128)


@pytest.mark.parametrize(
    "mask",
    [
        Mask(True, 200, 128),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (Mask(), Mask(True), Mask(True, 100))),
    ],
)
def test_splash_attention_is_what_blocks_are(mask: Mask) -> None:
    query, key, value, _, cotangent = operands(batch=1, queries=256, keys=256, size=128)
    options: dict[str, Any] = {"mask": mask, "scale": 128**-0.5}

    def compiled(function: Any, **more: Any) -> Any:
        return jax.jit(partial(function, **options, **more))

    out = compiled(attention_blocks.forward)(query, key, value)
    assert_close(compiled(attention_kernels.splash_forward, interpret=True)(query, key, value), out, 1e-5)
    kept = query, key, value, *out, cotangent
    expected = compiled(attention_blocks.backward)(*kept)
    assert_close(compiled(attention_kernels.splash_backward, interpret=True)(*kept), expected)


def test_shapes_that_do_not_suit_are_refused() -> None:
    query, key, value, sinks, _ = operands()
    with pytest.raises(mw.PlanError, match="heads that are a multiple of the key heads"):
        mw.attention(query[:, :, :, 0].repeat(3, 2)[:, :, :5], key, value)
    with pytest.raises(mw.PlanError, match="as many keys as values"):
        mw.attention(query, key[:, :-1], value)
    with pytest.raises(mw.PlanError, match="one for each head"):
        mw.attention(query, key, value, sinks=sinks.ravel())
    with pytest.raises(mw.PlanError, match=r"window=8 with causal=False"):
        mw.attention(query, key, value, window=8)


@pytest.mark.parametrize(
    ("name", "cluster", "fused"),
    [
        ("llama3.2-1b", "dgx-h100:1", True),
        ("llama3.2-1b", "tpu-v5e:8", True),
        ("llama3.2-1b", "p3.16xlarge:1", False),
        ("llama3.2-1b", "p4d.24xlarge:1+p3.16xlarge:1", False),
        ("llama3.2-1b", "mi300x-8:1", False),
        ("llama-tiny", "dgx-h100:1", False),  # in float32
        ("moe-2.4b", "dgx-h100:1", False),  # has one form only
    ],
)
def test_reference_models_are_fused_where_devices_have_a_kernel(name: str, cluster: str, fused: bool) -> None:
    target = load_target(name, global_batch=8, attention=None, cluster=cluster)
    equations = str(jax.make_jaxpr(target.step)(*target.example_args))
    assert (" attention[" in equations) == fused


X = jnp.ones((1, 4, 2, 8))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mw.attention(X[:0], X[:0], X[:0]), "at least one of everything"),
        (lambda: mw.attention(X.astype(jnp.int32), X, X), "floating type"),
        (lambda: mw.attention(X, X, X, causal=True, window=2.5), "the window of attention"),  # pyrefly: ignore
        (lambda: jax.jit(lambda s: mw.attention(X, X, X, scale=s))(0.5), "scale=1.0"),
        (lambda: jax.jvp(lambda x: mw.attention(x, x, x), (X,), (X,)), "a derivative of attention"),
        (lambda: jax.hessian(lambda x: jnp.sum(mw.attention(x, x, x)))(X), "a derivative of attention"),
    ],
    ids=["empty", "integers", "window", "scale", "forward mode", "twice"],
)
def test_what_attention_refuses(call: Any, said: str) -> None:
    with pytest.raises(mw.PlanError, match=said):
        call()
