"""The reference models: sizes against their names, FLOPs against their own traces, layers against plain definitions."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from zoo_traces import drawn, forward_flops, traced

from meshwright import zoo
from meshwright.zoo import convolution, decoder_attention, gpt, layers, moe, wide_resnet

TINY = tuple(name for name in zoo.names() if name.endswith("-tiny"))
FULL = tuple(name for name in zoo.names() if not name.endswith("-tiny"))
UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
# Names that say a size to a tenth; test_zoo_of_today has the others.
SIZED = tuple(name for name in FULL if re.fullmatch(r"(?!llama3\.2).*-[\d.]+[mbt]", name))
# A small member of each family, and a tiny one; tracing them makes no array. Windows and mixtures: test_zoo_of_today.
TINY_TRACED = (
    "bert-tiny", "dit-tiny", "gpt-tiny", "llama-tiny", "mamba2-tiny", "mlp-tiny", "moe-tiny", "qwen3-tiny", "t5-tiny",
    "unet-tiny", "vit-tiny", "wresnet-tiny",
)  # fmt: skip
TRACED = ("gpt3-125m", "llama3-8b", "mamba2-1.3b", "moe-380m", "wresnet-250m", "unet-470m", "vit-g", *TINY_TRACED)


def test_names_cover_the_families() -> None:
    assert zoo.names() == tuple(sorted(zoo.names()))
    family_of = {name: zoo.build(name).family for name in zoo.names()}
    families = {family_of[name] for name in TINY}
    assert families >= {
        "bert",
        "dit",
        "gemma",
        "gpt",
        "llama",
        "mamba",
        "mlp",
        "moe",
        "qwen",
        "t5",
        "unet",
        "vit",
        "wresnet",
    }
    assert families == {*family_of.values()}
    assert {"gpt3-1t", "llama3-405b", "moe-140b", "wresnet-13b", "unet-2b"} <= set(FULL)


@pytest.mark.parametrize("name", SIZED)
def test_parameters_agree_with_the_name(name: str) -> None:
    number, unit = re.fullmatch(r".*-([\d.]+)([mbt])", name).groups()
    target = zoo.build(name)
    assert target.parameters == pytest.approx(float(number) * UNITS[unit], rel=0.1)
    assert target.parameters == sum(leaf.size for leaf in jax.tree.leaves(target.example_state["params"]))


def test_a_trillion_parameters_are_described_at_once(usual_seconds) -> None:
    built = []
    assert usual_seconds(lambda: built.append(zoo.build("gpt3-1t"))) < 2.0
    (target,) = built
    leaves = jax.tree.leaves((target.example_state, target.example_batch))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


@pytest.mark.parametrize("name", TRACED)
def test_model_flops_are_those_of_the_traced_products(name: str) -> None:
    target = zoo.build(name)
    batch = jax.tree.leaves(target.example_batch)[0].shape[0]
    expected = target.model_flops_per_sample * batch
    if target.family == "moe":
        # Dispatch and combine, documented as not counted: each token meets every slot of its group, forward only.
        config = moe.CONFIGS[name]
        slots = config.capacity_factor * config.expert_group
        moves = 2 * 2 * batch * config.sequence * slots * config.hidden
        expected += 3 * moves * (config.layers // 2)
    assert 3 * forward_flops(target) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "name",
    [name if name == "mlp-tiny" else pytest.param(name, marks=pytest.mark.slow) for name in TINY],
)
def test_tiny_models_learn(name: str) -> None:
    target = zoo.build(name)
    state, batch = jax.jit(lambda key: (target.init(key), target.make_batch(key)))(jax.random.key(0))
    step = jax.jit(target.step)
    losses = []
    first = state
    for _ in range(10):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.all(np.isfinite(losses))
    assert np.all(np.diff(losses) < 0), losses
    assert int(state["step"]) == 10

    def described(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    assert described(state) == described(first) == described(target.example_state)
    assert described(batch) == described(target.example_batch)
    if "statistics" in state:
        moved = jax.tree.map(lambda old, new: bool(jnp.any(old != new)), first["statistics"], state["statistics"])
        assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in TINY_TRACED)) for name in TINY]
)
def test_remat_marks_the_layers_and_changes_nothing_else(name: str) -> None:
    plain, remat = (zoo.build(name, remat=remat) for remat in (False, True))
    assert not [eqn for eqn, _ in traced(plain) if eqn.primitive.name.startswith(("checkpoint", "remat"))]
    assert [eqn for eqn, _ in traced(remat) if eqn.primitive.name.startswith(("checkpoint", "remat"))]
    assert forward_flops(plain) == forward_flops(remat)
    assert plain.example_state == remat.example_state


def test_overrides_reach_the_shapes() -> None:
    target = zoo.build("gpt3-125m", global_batch=4, sequence=256, dtype="float16", optimizer="adamw")
    assert target.example_batch["tokens"].shape == (4, 256)
    assert target.example_state["params"]["embedding"]["positions"].shape == (256, 768)
    products = [eqn for eqn, _ in traced(target) if eqn.primitive.name == "dot_general"]
    assert {eqn.invars[0].aval.dtype for eqn in products} == {jnp.dtype("float16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(target.example_state["params"])} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("optimizer", "copies"), [("adam", 2), ("adamw", 2), ("sgd", 1)])
def test_optimizer_state_holds_its_moments(optimizer: Any, copies: int) -> None:
    target = zoo.mlp(width=8, layers=2, batch=4, optimizer=optimizer)
    sizes = sum(leaf.size for leaf in jax.tree.leaves(target.example_state["opt"]) if leaf.ndim)
    assert sizes == copies * target.parameters


def test_builders_take_any_size() -> None:
    assert zoo.mlp(width=16, layers=3, batch=8, bias=False).parameters == 3 * 16**2
    bert = zoo.bert_layers(layers=3, hidden=32, heads=4, batch=8, sequence=16)
    assert bert.example_batch["x"].shape == (8, 16, 32)
    assert bert.parameters == 3 * (12 * 32**2 + 13 * 32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": "gpt3-1.3B"}, KeyError, "'gpt3-1.3b'"),
        ({"name": "zzzz"}, KeyError, "try 'gpt-tiny'"),
        ({"name": "mlp-tiny", "sequence": 8}, ValueError, "needed a model whose sequence can be set"),
        ({"name": "mlp-tiny", "optimizer": "lion"}, ValueError, "needed one of ['adam', 'adamw', 'sgd']"),
        ({"name": "moe-380m", "global_batch": 3}, ValueError, "try global_batch=2"),
    ],
)
def test_refusals_say_what_to_try(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        zoo.build(**arguments)


def test_heads_must_divide_the_hidden_size() -> None:
    with pytest.raises(ValueError, match="try hidden=72"):
        zoo.bert_layers(hidden=66, heads=8)


def test_causal_attention_never_looks_ahead() -> None:
    declared = layers.attention_parameters("test", 16, 4)
    params = jax.tree.map(lambda leaf: drawn(0, *leaf.shape), declared)
    x = drawn(1, 2, 6, 16)
    changed = x + jnp.arange(6.0)[:, None].clip(3, 4) - 3  # the last two tokens
    attend = jax.jit(functools.partial(layers.self_attention, params, causal=True))
    out, other = attend(x), attend(changed)
    np.testing.assert_allclose(out[:, :4], other[:, :4], atol=1e-4)
    assert np.all(np.max(np.abs(out - other)[:, 4:], axis=-1) > 0.1)
    unmasked = jax.jit(functools.partial(layers.self_attention, params, causal=False))(changed)
    assert np.all(np.max(np.abs(unmasked - other)[:, :4], axis=-1) > 0.1)


def test_grouped_attention_equals_attention_with_repeated_heads() -> None:
    x = drawn(0, 2, 5, 16)
    query = drawn(1, 16, 2, 3, 4)  # 2 key heads, 3 queries each, head dim 4
    key_value = drawn(2, 16, 2, 2, 4)
    out = drawn(3, 2, 3, 4, 16)
    attention = decoder_attention.GroupedAttention(heads=6, kv_heads=2, head_dim=4, theta=None)
    declared = {"query": query, "key_value": key_value, "out": out}
    grouped = jax.jit(lambda params, x: attention.apply(params, x, {}, "plain"))(declared, x)
    repeated = (np.repeat(np.asarray(key_value)[:, i, :, None], 3, axis=2) for i in range(2))
    heads = np.stack([query, *repeated], axis=1)
    params = {
        "qkv": heads.reshape(16, 3, 6, 4),
        "qkv_bias": jnp.zeros((3, 6, 4)),
        "out": out.reshape(6, 4, 16),
        "out_bias": jnp.zeros(16),
    }
    attend = jax.jit(functools.partial(layers.self_attention, causal=True))
    expected = attend(params, x)
    np.testing.assert_allclose(grouped, expected, rtol=1e-4, atol=1e-4)
    biased = {
        "query": query, "query_bias": jnp.zeros((2, 3, 4)), "key_value": key_value,
        "key_value_bias": jnp.zeros((2, 2, 4)), "out": out, "out_bias": jnp.zeros(16),
    }  # fmt: skip
    np.testing.assert_allclose(attend(biased, x), expected, rtol=1e-4, atol=1e-4)


def test_gpts_may_have_another_feed_forward_and_fewer_key_heads() -> None:
    config = dataclasses.replace(gpt.CONFIGS["gpt-tiny"], intermediate=96, kv_heads=2)
    target, usual = gpt.build(config), gpt.build(gpt.CONFIGS["gpt-tiny"])
    assert 3 * forward_flops(target) == pytest.approx(target.model_flops_per_sample * config.global_batch, rel=1e-9)
    hidden, head = config.hidden, config.hidden // config.heads
    # A layer has 6 of 8 heads' keys and values less, and so much less of the feed-forward; each with its biases.
    less = 2 * 6 * head * (hidden + 1) + (4 * hidden - 96) * (2 * hidden + 1)
    assert usual.parameters - target.parameters == config.layers * less
    with pytest.raises(ValueError, match="heads=8 with kv_heads=3"):
        gpt.build(dataclasses.replace(config, kv_heads=3))


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    cosine, sine = decoder_attention.rotary_angles(8, 16)
    repeated = drawn(2, 2, 1, 16).repeat(8, axis=1)
    query, key = np.asarray(jax.jit(decoder_attention.rotary)(repeated, cosine, sine))
    scores = query @ key.T
    for distance in range(-7, 8):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), rtol=1e-4, atol=1e-4)
    assert np.ptp(scores[:, 0]) > 0.1


def test_gating_deals_tokens_to_slots_as_a_loop_would() -> None:
    groups, tokens, experts, capacity = 2, 12, 4, 5
    logits = 2.0 * drawn(3, groups, tokens, experts)
    combine, _ = jax.jit(functools.partial(moe.top2_gating, capacity=capacity))(logits)
    expected = np.zeros((groups, tokens, experts, capacity))
    gates = np.asarray(jax.nn.softmax(logits))
    dropped = 0
    for group in range(groups):
        order = np.argsort(-gates[group], axis=-1)[:, :2]
        filled = np.zeros(experts, int)
        for choice in range(2):
            for token in range(tokens):
                expert = order[token, choice]
                if filled[expert] < capacity:
                    weight = gates[group, token, expert] / gates[group, token, order[token]].sum()
                    expected[group, token, expert, filled[expert]] = weight
                else:
                    dropped += 1
                filled[expert] += 1
    assert dropped > 0
    np.testing.assert_allclose(combine, expected, rtol=1e-5, atol=1e-7)


def test_balance_loss_is_one_when_experts_share_evenly_and_more_when_they_do_not() -> None:
    even = 20.0 * np.eye(4, dtype=np.float32)[None]  # four tokens, each to an expert of its own
    uneven = np.broadcast_to(even[:, :1], even.shape)
    gating = jax.jit(functools.partial(moe.top2_gating, capacity=2))
    assert gating(even)[1] == pytest.approx(1.0, rel=1e-5)
    assert gating(uneven)[1] == pytest.approx(4.0, rel=1e-5)


def test_cross_entropy_equals_that_of_optax() -> None:
    logits = 5.0 * drawn(4, 3, 7, 11)
    labels = np.random.default_rng(5).integers(0, 11, (3, 7))
    expected = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, labels).mean()
    np.testing.assert_allclose(jax.jit(layers.token_cross_entropy)(logits, labels), expected, rtol=1e-6)


def test_normalisations_leave_no_mean_and_unit_variance() -> None:
    x = 3.0 + 2.0 * drawn(6, 4, 5, 5, 8)
    plain = {"scale": jnp.ones(8), "bias": jnp.zeros(8)}
    grouped = jax.jit(functools.partial(convolution.group_norm, groups=2))(plain, x).reshape(4, 5, 5, 2, 4)
    statistics = {"mean": jnp.zeros(8), "variance": jnp.ones(8)}
    batched, moved = jax.jit(wide_resnet.batch_norm)(plain, statistics, x)
    layered = jax.jit(layers.layer_norm)(plain, x)
    for value, axes in ((grouped, (1, 2, 4)), (batched, (0, 1, 2)), (layered, -1)):
        np.testing.assert_allclose(np.mean(value, axes), 0.0, atol=1e-5)
        np.testing.assert_allclose(np.var(value, axes), 1.0, rtol=1e-3)
    x = np.asarray(x)
    np.testing.assert_allclose(moved["mean"], 0.1 * x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(moved["variance"], 0.9 + 0.1 * x.var((0, 1, 2)), rtol=1e-5)


def test_strided_convolution_halves_the_image_from_its_first_pixel() -> None:
    x, weight = drawn(7, 1, 8, 8, 2), drawn(8, 3, 3, 2, 4)
    whole, halved = (convolution.convolution(weight, x, stride=stride) for stride in (1, 2))
    assert whole.shape == (1, 8, 8, 4)
    np.testing.assert_allclose(halved, whole[:, ::2, ::2], rtol=1e-5, atol=1e-5)
