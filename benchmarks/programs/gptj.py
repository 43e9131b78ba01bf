"""GPT-J-6B of huggingface/transformers 4.46.3 (Flax Linen, a Python loop over layers), `modeling_flax_gptj.py`.

Weights and activations are bfloat16 or float32 as the model's own `dtype` has them: float32 weights, bfloat16
activations. Dropout is 0, as in the published configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from public import import_from

import meshwright as mw

import_from("transformers")

from transformers.models.gptj.configuration_gptj import GPTJConfig
from transformers.models.gptj.modeling_flax_gptj import FlaxGPTJForCausalLM

TOKENS = 2048


def gptj_6b(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Its train step: the loss of examples/flax/language-modeling, shifted by one token."""
    model = FlaxGPTJForCausalLM(GPTJConfig(), dtype=jnp.bfloat16, _do_init=False)
    optimizer = optax.adamw(1e-4, weight_decay=0.1)

    def state_of() -> tuple[Any, Any]:
        parameters = model.init_weights(jax.random.key(0), (1, TOKENS))
        return parameters, optimizer.init(parameters)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        parameters, moments = state

        def loss_of(parameters: Any) -> jax.Array:
            logits = model(tokens, params=parameters, train=True).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        loss, gradients = mw.value_and_grad(loss_of)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss

    return step, (jax.eval_shape(state_of), jax.ShapeDtypeStruct((global_batch, TOKENS), jnp.int32))
