"""Gemma 3 of google/flax, `examples/gemma` (Flax NNX, a Python loop over layers), at commit 18f8f311c275.

Batches are packed, as its input pipeline makes them: positions and segments of several documents in a row. Weights are
float32 and activations bfloat16, as its training configuration has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from public import import_from, stand_in

import meshwright as mw

import_from("flax", "examples", "gemma")
stand_in("clu", "clu.metric_writers", "clu.periodic_actions", "grain", "sentencepiece", "input_pipeline", "sampler")

import train
import transformer

TOKENS = 2048


def gemma(name: str, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Its train step.

    Args:
      name: of a version of the public configuration.
      batch: samples a step.
    """
    config = transformer.TransformerConfig.from_version_name(name, dtype=jnp.bfloat16)
    rate = train.create_learning_rate_schedule(learning_rate=0.0016, warmup_steps=1000)

    def state_of() -> tuple[transformer.Transformer, nnx.Optimizer]:
        model = transformer.Transformer(config, rngs=nnx.Rngs(params=0))
        adam = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
        return model, nnx.Optimizer(model, adam, wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(state_of))

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        model_graph, parameters, rest = nnx.split(model, nnx.Param, ...)
        inputs, segments = batch["inputs"], batch["inputs_segmentation"]
        same = segments[:, :, None] == segments[:, None, :]
        mask = jnp.logical_and(same, transformer.make_causal_attn_mask(inputs > 0))

        def loss_of(parameters: Any) -> jax.Array:
            module = nnx.merge(model_graph, parameters, rest)
            logits, _ = module(inputs, positions=batch["inputs_position"], attention_mask=mask, cache=None)
            weights = (inputs > 0).astype(jnp.float32)
            return train.compute_weighted_cross_entropy(logits, batch["targets"], weights).mean()

        loss, gradients = mw.value_and_grad(loss_of)(parameters)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    tokens = jax.ShapeDtypeStruct((batch, TOKENS), jnp.int32)
    keys = ("inputs", "inputs_position", "inputs_segmentation", "targets")
    return step, (state, dict.fromkeys(keys, tokens))


def gemma3_1b(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return gemma("gemma3_1b", global_batch)


def gemma3_4b(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return gemma("gemma3_4b", global_batch)


def gemma3_12b(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return gemma("gemma3_12b", global_batch)


def gemma3_27b(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return gemma("gemma3_27b", global_batch)
