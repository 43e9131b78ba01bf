"""GShard mixture of experts: a GPT whose every other feed-forward is a set of experts (Lepikhin et al. 2020).

Tokens are dealt in groups; inside a group each token goes to its two best experts, up to `capacity` tokens an expert.
Dispatch and combine are products with one-hot tensors, so moving from tokens split by group to slots split by expert
is one all-to-all. Unlike the paper, the second expert is never dropped at random: a step is a pure function.
Shapes: the suite of Zheng et al. (Alpa, OSDI 2022); the feed-forward is eight times the hidden size, the width at which
the suite's names agree with its parameter counts.
Model FLOPs of a sample: 3 * (layers * (8 * s * m**2 + 4 * s**2 * m) + layers / 2 * (4 * s * m * f) + layers / 2 *
(2 * 4 * s * m * f + 2 * s * m * e) + 2 * s * m * v) for sequence s, hidden m, feed-forward f, experts e and vocabulary
v. Two experts a token are counted, whatever the capacity; dispatch and combine move data and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .layers import (
    attention_parameters,
    embed,
    feed_forward,
    feed_forward_parameters,
    layer_norm,
    layer_norm_parameters,
    random_tokens,
    self_attention,
    token_cross_entropy,
)
from .parameters import normal
from .train import Batch, Model, Optimizer, Target, make_target

AUXILIARY_WEIGHT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Shape of a mixture of experts; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        expert_group: tokens dealt together; must divide global_batch * sequence.
        capacity_factor: slots of all experts together, per token.
        intermediate: of each feed-forward; None for eight times `hidden`.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    experts: int
    vocabulary: int = 32000
    sequence: int = 1024
    global_batch: int = 1024
    expert_group: int = 2048
    capacity_factor: int = 2
    dtype: str = "bfloat16"
    intermediate: int | None = None


SOURCE = "Lepikhin et al. 2020; Zheng et al. 2022 (Alpa)"

CONFIGS: dict[str, MoEConfig] = {
    config.name: config
    for config in (
        MoEConfig(name="moe-380m", hidden=768, layers=8, heads=16, experts=8),
        MoEConfig(name="moe-690m", hidden=768, layers=8, heads=16, experts=16),
        MoEConfig(name="moe-1.3b", hidden=768, layers=16, heads=16, experts=16),
        MoEConfig(name="moe-2.4b", hidden=1024, layers=16, heads=16, experts=16),
        MoEConfig(name="moe-7.1b", hidden=1280, layers=16, heads=16, experts=32),
        MoEConfig(name="moe-10b", hidden=1536, layers=16, heads=16, experts=32),
        MoEConfig(name="moe-27b", hidden=2048, layers=16, heads=16, experts=48),
        MoEConfig(name="moe-70b", hidden=2048, layers=32, heads=16, experts=64),
        MoEConfig(name="moe-140b", hidden=2048, layers=32, heads=16, experts=128),
        MoEConfig(
            name="moe-tiny",
            hidden=64,
            layers=2,
            heads=8,
            experts=8,
            vocabulary=256,
            sequence=32,
            global_batch=16,
            expert_group=64,
            dtype="float32",
        ),
    )
}


def top2_gating(logits: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Assigns tokens to slots of experts.

    Args:
        logits: float32 (g, s, e), the router's opinion of every token of every group.
        capacity: slots c of an expert for one group; later tokens find it full and keep only their residual.

    Returns:
        The combine weights, float32 (g, s, e, c), zero where a token has no slot, and the load-balancing loss, a
        scalar that is 1 when the experts of every group are used evenly.
    """
    experts = logits.shape[-1]
    gates = jax.nn.softmax(logits, axis=-1)  # (g, s, e)
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts, dtype=jnp.float32)
    second = jax.nn.one_hot(jnp.argmax(gates * (1.0 - first), axis=-1), experts, dtype=jnp.float32)

    # A slot number is the count of earlier tokens of the group with the same expert; all first choices come first.
    first_slot = jnp.cumsum(first, axis=1) - first
    second_slot = jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)
    first_gate = jnp.sum(gates * first, axis=-1, keepdims=True)  # (g, s, 1)
    second_gate = jnp.sum(gates * second, axis=-1, keepdims=True)
    scale = 1.0 / (first_gate + second_gate)

    def slots(chosen: jax.Array, slot: jax.Array) -> jax.Array:
        number = jnp.sum(slot * chosen, axis=-1).astype(jnp.int32)  # (g, s); one-hot of a full expert is all zero
        return jax.nn.one_hot(number, capacity, dtype=jnp.float32)

    first_weight = first_gate * scale * first  # (g, s, e)
    second_weight = second_gate * scale * second
    combine = jnp.einsum("gse,gsc->gsec", first_weight, slots(first, first_slot)) + jnp.einsum(
        "gse,gsc->gsec", second_weight, slots(second, second_slot)
    )
    fraction = jnp.mean(first, axis=1)  # (g, e): share of tokens whose first choice this expert is
    opinion = jnp.mean(gates, axis=1)
    balance = jnp.mean(fraction * opinion) * experts**2
    return combine, balance


def mixture(params: dict[str, jax.Array], x: jax.Array, *, group: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The expert layer, (b, s, m) -> (b, s, m) and its load-balancing loss; b * s must be a multiple of `group`."""
    grouped = x.reshape(-1, group, x.shape[-1])  # (g, s, m)
    # The router works in float32: rounding its logits would change which expert is best.
    logits = jnp.einsum("gsm,me->gse", grouped.astype(jnp.float32), params["router"])
    combine, balance = top2_gating(logits, capacity)
    dispatch = (combine > 0).astype(x.dtype)  # (g, s, e, c)
    slots = jnp.einsum("gsec,gsm->egcm", dispatch, grouped)
    inner = jax.nn.gelu(jnp.einsum("egcm,emf->egcf", slots, params["in"].astype(x.dtype)))
    slots = jnp.einsum("egcf,efm->egcm", inner, params["out"].astype(x.dtype))
    return jnp.einsum("gsec,egcm->gsm", combine.astype(x.dtype), slots).reshape(x.shape), balance


def build(config: MoEConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a mixture of experts; `tokens` and `labels` are int32 (global_batch, sequence).

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each layer in the backward pass.

    Raises:
        ValueError: `hidden` is not a multiple of `heads`, or the step's tokens are not one of `expert_group`, or
            `layers` is odd.
    """
    dtype, hidden, sequence, vocabulary = jnp.dtype(config.dtype), config.hidden, config.sequence, config.vocabulary
    if config.layers % 2:
        raise ValueError(
            f"refused to build {config.name!r}: got layers={config.layers}, needed an even number, as every other "
            f"layer holds experts; try layers={config.layers + 1}"
        )
    if config.global_batch * sequence % config.expert_group:
        raise ValueError(
            f"refused to build {config.name!r}: got global_batch={config.global_batch} of sequence={sequence} tokens, "
            f"needed a multiple of expert_group={config.expert_group} tokens; try "
            f"global_batch={max(config.expert_group // sequence, 1)}"
        )
    capacity = config.capacity_factor * config.expert_group // config.experts
    intermediate = config.intermediate or 8 * hidden
    out_deviation = 0.02 * (2 * config.layers) ** -0.5

    def declare(index: int) -> dict[str, Any]:
        layer = {
            "attention_norm": layer_norm_parameters(hidden),
            "attention": attention_parameters(config.name, hidden, config.heads, out_deviation=out_deviation),
            "feed_forward_norm": layer_norm_parameters(hidden),
        }
        if index % 2 == 0:
            return {**layer, "feed_forward": feed_forward_parameters(hidden, intermediate, out_deviation=out_deviation)}
        experts = {
            "router": normal(hidden, config.experts),
            "in": normal(config.experts, hidden, intermediate),
            "out": normal(config.experts, intermediate, hidden, deviation=out_deviation),
        }
        return {**layer, "experts": experts}

    params = {
        "embedding": {"tokens": normal(vocabulary, hidden), "positions": normal(sequence, hidden)},
        "layers": [declare(index) for index in range(config.layers)],
        "final_norm": layer_norm_parameters(hidden),
    }

    def dense_layer(params: dict[str, Any], x: jax.Array) -> jax.Array:
        x = x + self_attention(params["attention"], layer_norm(params["attention_norm"], x), causal=True)
        return x + feed_forward(params["feed_forward"], layer_norm(params["feed_forward_norm"], x))

    def expert_layer(params: dict[str, Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self_attention(params["attention"], layer_norm(params["attention_norm"], x), causal=True)
        normalised = layer_norm(params["feed_forward_norm"], x)
        mixed, balance = mixture(params["experts"], normalised, group=config.expert_group, capacity=capacity)
        return x + mixed, balance

    # Under `jax.jit` the layers that are alike are traced once.
    dense, expert = (jax.jit(jax.checkpoint(layer) if remat else layer) for layer in (dense_layer, expert_layer))

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        embedding = params["embedding"]
        x = embed(embedding["tokens"], batch["tokens"], dtype) + embedding["positions"].astype(dtype)  # (b, s, m)
        balances = []
        for layer_params in params["layers"]:
            if "experts" in layer_params:
                x, balance = expert(layer_params, x)
                balances.append(balance)
            else:
                x = dense(layer_params, x)
        x = layer_norm(params["final_norm"], x)
        head = embedding["tokens"].astype(dtype)
        logits = jnp.einsum("bsm,vm->bsv", x, head, preferred_element_type=jnp.float32)
        return token_cross_entropy(logits, batch["labels"]) + AUXILIARY_WEIGHT * sum(balances) / len(balances)

    def make_batch(key: jax.Array) -> Batch:
        return random_tokens(key, batch=config.global_batch, sequence=sequence, vocabulary=vocabulary)

    attention = config.layers * (8 * sequence * hidden**2 + 4 * sequence**2 * hidden)
    one_expert = 4 * sequence * hidden * intermediate
    router = 2 * sequence * hidden * config.experts
    pair = one_expert + 2 * one_expert + router  # a dense layer and an expert layer
    model = Model(
        name=config.name,
        family="moe",
        params=params,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * (attention + config.layers // 2 * pair + 2 * sequence * hidden * vocabulary),
        reduction="mean",
    )
    return make_target(model, optimizer=optimizer)
