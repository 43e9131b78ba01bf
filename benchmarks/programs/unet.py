"""The U-Net of Stable Diffusion 1.5 in Flax (Linen), huggingface/diffusers 0.31.0, `unet_2d_condition_flax.py`.

The step of `examples/text_to_image/train_text_to_image_flax.py` after its frozen encoders: from the latents, the noise,
the times and the states of the text that they make. Weights are float32, activations bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from public import import_from

import meshwright as mw

import_from("diffusers")

from diffusers.models.unets.unet_2d_condition_flax import FlaxUNet2DConditionModel


def unet(global_batch: int = 256) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Its train step."""
    model = FlaxUNet2DConditionModel(sample_size=64, cross_attention_dim=768, dtype=jnp.bfloat16)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=1e-2))

    def state_of() -> tuple[Any, Any]:
        parameters = model.init_weights(jax.random.key(0))
        return parameters, optimizer.init(parameters)

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        parameters, moments = state

        def loss_of(parameters: Any) -> jax.Array:
            told = batch["noisy"], batch["timesteps"], batch["text"]
            predicted = model.apply({"params": parameters}, *told, train=True).sample
            return ((batch["noise"] - predicted) ** 2).mean()

        loss, gradients = mw.value_and_grad(loss_of)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss

    latents = jax.ShapeDtypeStruct((global_batch, 4, 64, 64), jnp.float32)
    text = jax.ShapeDtypeStruct((global_batch, 77, 768), jnp.float32)
    times = jax.ShapeDtypeStruct((global_batch,), jnp.int32)
    return step, (jax.eval_shape(state_of), {"noisy": latents, "noise": latents, "timesteps": times, "text": text})
