"""Models of today: parameters against published counts, FLOPs against traces, parts against plain definitions."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo_traces import drawn, forward_flops

from meshwright import zoo
from meshwright.zoo import layers, mamba, t5, vit
from meshwright.zoo.decoder import DecoderConfig, Layer, Run, build
from meshwright.zoo.decoder_attention import GroupedAttention, LatentAttention, rotary_angles
from meshwright.zoo.decoder_feed_forward import Dense, Mixture, top_k_gating
from meshwright.zoo.registry import FAMILIES

CONFIGS: dict[str, Any] = {
    name: config for family in FAMILIES for name, config in family.CONFIGS.items() if isinstance(config, DecoderConfig)
}

# In billions, as papers and model cards have them.
PUBLISHED = {
    "llama3.2-1b": 1.24, "llama3.2-3b": 3.21, "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9,
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.0,
    "llama4-scout": 109.0, "llama4-maverick": 400.0, "mixtral-8x7b": 46.7, "mixtral-8x22b": 141.0,
    "deepseek-v3": 671.0, "deepseek-v3-mtp": 671.0 + 14.0 - 2 * 0.93,  # that layer's 14 with embedding and head
    "kimi-k2": 1040.0, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
    "t5-small": 0.0605, "t5-base": 0.223, "t5-large": 0.738, "t5-3b": 2.85, "t5-11b": 11.3, "vit-l": 0.304,
    "vit-h": 0.632, "vit-g": 1.843, "dit-b": 0.130, "dit-l": 0.458, "dit-xl": 0.675, "mamba2-1.3b": 1.344,
    "mamba2-2.7b": 2.703,
    # Table 1 of the report, embedding and others.
    "gemma3-1b": 0.302 + 0.698, "gemma3-4b": 0.675 + 3.209, "gemma3-12b": 1.012 + 10.759, "gemma3-27b": 1.416 + 25.6,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    target = zoo.build(name)
    assert target.parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=0.015)
    assert target.parameters == sum(leaf.size for leaf in jax.tree.leaves(target.example_state["params"]))


def not_counted(config: DecoderConfig) -> int:
    """Forward FLOPs of a trace that are no model FLOPs, for the batch: keys out of windows; dispatch and combine."""
    total, tokens = 0, config.global_batch * config.sequence
    for layer, many in config.counts:
        one, two = layer.attention, layer.feed_forward
        if isinstance(one, GroupedAttention) and one.window:
            unseen = max(config.sequence - one.window, 0)
            total += many * 4 * tokens * unseen * one.head_dim * one.heads
        if isinstance(two, Mixture):
            slots = two.experts * two.capacity
            # Two moves, slots that experts compute beside those counted, and what makes weights of choices.
            total += many * tokens * 4 * slots * config.hidden
            spare = slots / two.group - two.top_k
            total += round(many * tokens * 6 * spare * config.hidden * two.intermediate)
            total += many * tokens * 2 * two.top_k * (slots + two.experts)
    return total


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.endswith("-tiny")])
def test_model_flops_are_those_of_the_traced_products(name: str) -> None:
    config, target = CONFIGS[name], zoo.build(name)
    counted = target.model_flops_per_sample * config.global_batch / 3
    assert forward_flops(target) == pytest.approx(counted + not_counted(config), rel=1e-9)


# The last of each family, and all others: they differ in sizes.
FULL = {name.split("-")[0]: name for name in CONFIGS if not name.endswith("-tiny")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in FULL.values()))
        for name in CONFIGS
        if not name.endswith("-tiny")
    ],
)
def test_full_models_trace_in_few_equations(name: str) -> None:
    """Layers are scans over patterns: a model of a hundred is no longer to trace than one of ten."""
    target = zoo.build(name, global_batch=CONFIGS[name].global_batch)
    loss = jax.eval_shape(target.step, target.example_state, target.example_batch)[1]["loss"]
    assert loss.shape == ()
    repeated = [leaf.shape[0] for leaf in jax.tree.leaves(target.example_state["params"]["layers"])]
    assert set(repeated) == {run.repeats for run in CONFIGS[name].runs}


@pytest.mark.slow
def test_a_pattern_is_its_layers_in_turn() -> None:
    """One run of a pattern computes what runs of its layers one by one do."""
    config = dataclasses.replace(CONFIGS["gemma3-tiny"], global_batch=2)
    apart = dataclasses.replace(
        config,
        runs=tuple(Run(pattern=(layer,), repeats=1) for run in config.runs for layer in run.pattern * run.repeats),
    )
    one, other = build(config), build(apart)
    state, batch = jax.jit(lambda key: (one.init(key), one.make_batch(key)))(jax.random.key(0))
    params = jax.tree.map(np.asarray, state["params"])  # NumPy compiles nothing

    def rows(run: Run, stacks: Any) -> list[Any]:
        stacks = stacks if len(run.pattern) > 1 else [stacks]
        parts = [jax.tree.map(lambda leaf: np.split(leaf, run.repeats), each) for each in stacks]
        takers = [operator.itemgetter(n) for n in range(run.repeats)]
        return [
            jax.tree.map(take, each, is_leaf=lambda part: isinstance(part, list)) for take in takers for each in parts
        ]

    spread = [row for run, stacks in zip(config.runs, params["layers"], strict=True) for row in rows(run, stacks)]
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), dict(other.example_state))
    moved = {**zeros, "params": {**params, "layers": spread}}

    def loss(target: zoo.Target, given: Any) -> jax.Array:
        return jax.jit(lambda state, batch: target.step(state, batch)[1]["loss"])(given, batch)

    losses = [loss(one, state), loss(other, moved)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def attended(query: Any, key: Any, value: Any, seen: Any, sinks: Any = None) -> np.ndarray:
    """By a loop over heads: (s, h, d) each."""
    out = np.zeros((*query.shape[:2], value.shape[-1]))
    for head in range(query.shape[1]):
        powers = np.exp(query[:, head] @ key[:, head].T * query.shape[-1] ** -0.5) * seen
        total = powers.sum(-1, keepdims=True) + (0.0 if sinks is None else np.exp(sinks[head]))
        out[:, head] = powers / total @ value[:, head]
    return out


@pytest.mark.parametrize("attention", ["plain", "fused"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_windows_and_sinks_are_those_of_a_loop(attention: Any, sinks: bool, window: int | None) -> None:
    query, key, value = drawn(0, 1, 7, 2, 1, 4), drawn(1, 1, 7, 2, 4), drawn(2, 1, 7, 2, 4)
    logits = drawn(3, 2, 1) if sinks else None
    distance = np.arange(7)[:, None] - np.arange(7)
    seen = (distance >= 0) & (distance < (window or 7))
    expected = attended(query[0, :, :, 0], key[0], value[0], seen, None if logits is None else logits[:, 0])
    attend = jax.jit(functools.partial(layers.causal_attention, attention=attention, window=window))
    np.testing.assert_allclose(attend(query, key, value, sinks=logits)[0, :, :, 0], expected, rtol=1e-4, atol=1e-5)


def test_fused_windows_and_sinks_have_the_gradients_of_plain_ones() -> None:
    given = drawn(0, 1, 6, 2, 2, 4), drawn(1, 1, 6, 2, 4), drawn(2, 1, 6, 2, 4), drawn(3, 2, 2)

    def total(kind: Any, query: Any, key: Any, value: Any, sinks: Any) -> Any:
        return jnp.sum(layers.causal_attention(query, key, value, kind, sinks=sinks, window=4) ** 2)

    plain, fused = (jax.jit(jax.grad(functools.partial(total, kind), range(4)))(*given) for kind in ("plain", "fused"))
    for one, other in zip(plain, fused, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_chunks_do_not_see_each_other() -> None:
    whole = GroupedAttention(heads=4, kv_heads=2, head_dim=8, theta=None)
    chunked = dataclasses.replace(whole, chunk=4)
    params = jax.tree.map(lambda leaf: drawn(0, *leaf.shape), whole.declare(16, 0.02))
    x = drawn(1, 2, 8, 16)
    mixed = jax.jit(lambda x: chunked.apply(params, x, {}, "plain"))(x)
    for start in (0, 4):
        alone = jax.jit(lambda x: whole.apply(params, x, {}, "plain"))(x[:, start : start + 4])
        np.testing.assert_allclose(mixed[:, start : start + 4], alone, rtol=1e-5, atol=1e-5)


def test_latent_attention_is_attention_of_what_its_projections_make() -> None:
    latent = LatentAttention(heads=2, query_rank=6, key_value_rank=5, still_dim=4, turned_dim=2, value_dim=3)
    params = jax.tree.map(lambda leaf: drawn(0, *leaf.shape), latent.declare(8, 0.02))
    params |= {"query_norm": jnp.ones(6), "key_value_norm": jnp.ones(5)}
    x = drawn(1, 1, 5, 8)
    angles = {latent.angles: rotary_angles(5, 2, latent.theta)}
    found = jax.jit(lambda x: latent.apply(params, x, angles, "plain"))(x)

    given = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    rows = np.asarray(x[0], np.float64)

    def narrow(name: str) -> np.ndarray:
        made = rows @ given[name]
        return made / np.sqrt(np.mean(made**2, -1, keepdims=True) + 1e-5)

    def turned(features: np.ndarray) -> np.ndarray:
        position = np.arange(5).reshape(5, *(1,) * (features.ndim - 2))  # the base to the power of 0: an angle a place
        left, right = features[..., 0], features[..., 1]
        return np.stack(
            [left * np.cos(position) - right * np.sin(position), right * np.cos(position) + left * np.sin(position)], -1
        )

    query = np.einsum("sr,rhd->shd", narrow("query_down"), given["query_up"])
    query = np.concatenate([query[..., :4], turned(query[..., 4:])], -1)
    key = np.einsum("sr,rhd->shd", narrow("key_value_down"), given["key_up"])
    shared = turned(rows @ given["key_turned"])
    key = np.concatenate([key, np.repeat(shared[:, None], 2, 1)], -1)
    value = np.einsum("sr,rhd->shd", narrow("key_value_down"), given["value_up"])
    mixed = attended(query, key, value, np.tri(5))
    np.testing.assert_allclose(found[0], np.einsum("shd,hdm->sm", mixed, given["out"]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("router", "scale"), [("softmax", 1.0), ("softmax", None), ("sigmoid", 2.5), ("sigmoid", None)]
)
@pytest.mark.parametrize("top_k", [1, 3])
def test_gating_deals_tokens_to_slots_as_a_loop_would(router: Any, scale: float | None, top_k: int) -> None:
    groups, tokens, experts, capacity = 2, 12, 4, 4
    logits = 2.0 * drawn(3, groups, tokens, experts)
    combine, _ = jax.jit(
        functools.partial(top_k_gating, top_k=top_k, capacity=capacity, router=router, scale=scale)
    )(logits)  # fmt: skip
    scores = np.asarray(jax.nn.softmax(logits) if router == "softmax" else jax.nn.sigmoid(logits))
    expected = np.zeros((groups, tokens, experts, capacity))
    for group in range(groups):
        order = np.argsort(-scores[group], axis=-1)[:, :top_k]
        filled = np.zeros(experts, int)
        for choice in range(top_k):
            for token in range(tokens):
                expert, of_all = order[token, choice], scores[group, token, order[token]].sum()
                if filled[expert] < capacity:
                    weight = scores[group, token, expert] * (1.0 if scale is None else scale / of_all)
                    expected[group, token, expert, filled[expert]] = weight
                filled[expert] += 1
    np.testing.assert_allclose(combine, expected, rtol=1e-5, atol=1e-7)


def test_a_mixture_of_equal_experts_is_a_dense_layer() -> None:
    """With slots for all, weights that sum to one, and the shared feed-forward beside."""
    mixture = Mixture(experts=4, top_k=2, intermediate=8, shared=8, group=6, capacity_factor=2.0)
    params = jax.tree.map(lambda leaf: drawn(0, *leaf.shape), mixture.declare(5, 0.02))
    for name in ("gate_in", "out"):
        params["experts"][name] = jnp.broadcast_to(params["feed_forward"][name], params["experts"][name].shape)
    x = drawn(2, 2, 3, 5)
    mixed, balance = jax.jit(mixture.apply)(params, x)
    dense, _ = Dense(intermediate=8).apply(params, x)
    np.testing.assert_allclose(mixed, 2 * dense, rtol=1e-4, atol=1e-3)
    assert 0.01 < float(balance) < 0.04


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 6}, "heads=6, kv_heads=4"),
        ({"chunk": 24}, "needed a multiple of the 24 positions"),
        ({"group": 100}, "needed a multiple of the 100 tokens"),
    ],
)
def test_shapes_that_do_not_divide_are_refused(changes: dict[str, int], words: str) -> None:
    group = changes.get("group", 32)
    attention = GroupedAttention(
        heads=changes.get("heads", 8), kv_heads=4, head_dim=8, chunk=changes.get("chunk")
    )  # fmt: skip
    layer = Layer(attention=attention, feed_forward=Mixture(experts=4, top_k=2, intermediate=8, group=group))
    config = dataclasses.replace(CONFIGS["qwen3-moe-tiny"], runs=(Run(pattern=(layer,), repeats=2),))
    with pytest.raises(ValueError, match=re.escape(words)):
        build(config)


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_a_state_space_layer_is_its_recurrence(chunk: int) -> None:
    x, inputs, outputs = drawn(0, 2, 12, 3, 4), drawn(1, 2, 12, 5), drawn(2, 2, 12, 5)
    steps = -jnp.abs(drawn(3, 2, 12, 3))
    found = jax.jit(functools.partial(mamba.state_space, chunk=chunk))(x, steps, inputs, outputs)
    state, expected = np.zeros((2, 3, 5, 4)), np.zeros(x.shape)
    for place in range(12):
        left = np.exp(np.asarray(steps[:, place]))[:, :, None, None]
        state = left * state + np.einsum("bn,bhp->bhnp", inputs[:, place], x[:, place])
        expected[:, place] = np.einsum("bn,bhnp->bhp", outputs[:, place], state)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_near_distances_have_a_bucket_each_and_far_ones_share() -> None:
    causal = np.asarray(t5.distance_buckets(300, 300, causal=True))
    assert list(causal[299, 299:283:-1]) == list(range(16))
    assert (causal[0] == 0).all()
    assert (np.diff(causal[299][::-1]) >= 0).all()
    assert (causal[299, :171] == 31).all()
    both = np.asarray(t5.distance_buckets(300, 300, causal=False))
    np.testing.assert_array_equal(both[150, 151:158], 16 + both[150, 149:142:-1])
    assert both.max() == 31


def test_patches_are_squares_of_an_image() -> None:
    images = drawn(0, 2, 6, 4, 3)
    rows = np.asarray(vit.patches_of(images, 2))
    assert rows.shape == (2, 6, 12)
    np.testing.assert_array_equal(rows[1, 3].reshape(2, 2, 3), images[1, 2:4, 2:4])


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        (vit, dataclasses.replace(vit.CONFIGS["vit-tiny"], image_size=30), "try image_size=24"),
        (mamba, dataclasses.replace(mamba.CONFIGS["mamba2-tiny"], sequence=36), "try sequence=32"),
    ],
)
def test_images_and_sequences_that_do_not_divide_are_refused(family: Any, config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        family.build(config)
