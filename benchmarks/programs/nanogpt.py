"""nanoGPT in Flax (Linen, a Python loop over layers), jenkspt/gpt-jax, at commit f22a46e81e72.

The optimizer (AdamW behind clipping, no decay of biases) and the loss are those of its `train.py`, written out here: as
it is, it needs an older Flax, whose parameters were frozen dicts. Sizes are those of its table of GPT-2 models;
activations are bfloat16 and dropout is 0, as in its `config/gpt2.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import unfreeze
from flax.training.train_state import TrainState
from public import import_from, stand_in

import meshwright as mw

import_from("gpt-jax")
stand_in("wandb", "tyro", "tensorflow", "tensorflow.io", "dataset")

from model import GPT, GPTConfig
from train import param_decay_mask

TOKENS = 1024


def nanogpt(layers: int, heads: int, width: int, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Its train step.

    Args:
      layers: of the model.
      heads: of attention.
      width: of the residual stream.
      batch: samples a step.
    """
    config = GPTConfig(num_layers=layers, num_heads=heads, num_embeds=width, dropout_rate=0.0, dtype="bfloat16")
    model = GPT(config)
    rate = optax.warmup_cosine_decay_schedule(0.0, 6.4e-4, 1000, 150000, 6.4e-5)

    def state_of() -> TrainState:
        params = model.init(jax.random.key(0))
        mask = unfreeze(param_decay_mask(params))
        adam = optax.adamw(rate, 0.9, 0.95, weight_decay=0.1, mask=mask)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    state = jax.eval_shape(state_of)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]

        def loss_of(params: Any) -> jax.Array:
            logits = state.apply_fn(params, inputs, False)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = mw.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    return step, (state, jax.ShapeDtypeStruct((batch, TOKENS + 1), jnp.int32))


def gpt2_medium(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return nanogpt(24, 16, 1024, global_batch)


def gpt2_xl(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return nanogpt(48, 25, 1600, global_batch)
