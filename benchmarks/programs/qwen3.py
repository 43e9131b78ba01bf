"""Qwen3 of jax-ml/jax-llm-examples (plain JAX, a Python loop over layers), at commit 8b4b24602e06.

It is written for inference; here is a next-token loss around its forward function, with AdamW. Segments are all one,
which makes positions, masks and rotations constants of the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from public import import_from

import meshwright as mw

import_from("jax-llm-examples", "qwen3")

from qwen3_jax import model

TOKENS = 4096


def qwen3_8b(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Its train step, with everything on one device as far as the model knows."""
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3, devices=jax.devices()[:1])
    jax.sharding.set_mesh(mesh)
    config = model.Config(
        embed=4096, q_heads=32, kv_heads=8, num_layers=36, head_dim=128, vocab_size=151936, max_seq_len=TOKENS,
        causal=True, moe_ffw_size=0, moe_experts_per_tok=0, moe_num_experts=0, mlp_ffw_size=12288,
        mlp_layer_idxs=list(range(36)),
    )  # fmt: skip
    config = dataclasses.replace(config, mesh=mesh)
    optimizer = optax.adamw(1e-3, weight_decay=0.1)

    def state_of(key: jax.Array) -> tuple[Any, Any]:
        abstract = model.Weights.abstract(config)
        leaves, tree = jax.tree.flatten(abstract, is_leaf=model.is_param)
        keys = jax.random.split(key, len(leaves))
        made = [leaf.initializer(one, leaf.shape, leaf.dtype) for one, leaf in zip(keys, leaves, strict=True)]
        weights = jax.tree.unflatten(tree, made)
        return weights, optimizer.init(weights)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        weights, moments = state

        def loss_of(weights: Any) -> jax.Array:
            logits = model.forward(tokens, jnp.ones_like(tokens), weights, config)[0]
            logits = logits[:, :-1].astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = mw.value_and_grad(loss_of)(weights)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    state = jax.eval_shape(state_of, jax.random.key(0))
    return step, (state, jax.ShapeDtypeStruct((global_batch, TOKENS), jnp.int32))
