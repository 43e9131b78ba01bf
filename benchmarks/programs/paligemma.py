"""PaliGemma of google-research/big_vision, at commit 0127fb6b337e: an image tower before a decoder with a prefix mask.

The loss of its trainer, which needs TensorFlow, is written out here, and the optimizer of its configurations (Adam
with bfloat16 first moments after clipping). Images of 224 pixels, 64 tokens of text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from public import import_from, stand_in

import meshwright as mw

import_from("big_vision")
stand_in("big_vision.utils", "tensorflow", "clu", "clu.parameter_overview", "flax.training.checkpoints")

from big_vision.models.proj.paligemma import paligemma

del sys.modules["tensorflow"]  # whether an array is one of its own is asked where it is there

PIXELS, TOKENS = 224, 64


def trained(batch: int, *, scan: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The train step of So400m/14 before Gemma 2B.

    Args:
      batch: pairs of an image and a text.
      scan: layers in a scan, each computed again backward, as there; else in a Python loop.
    """
    model = paligemma.Model(
        img={"variant": "So400m/14", "pool_type": "none", "scan": scan, "dtype_mm": "bfloat16"},
        llm={"variant": "gemma_2b", "scan": scan, "remat_policy": "nothing_saveable" if scan else "none"},
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(mu_dtype=jnp.bfloat16), optax.scale_by_learning_rate(1e-5)
    )
    shapes = {
        "image": ((batch, PIXELS, PIXELS, 3), jnp.float32), "text": ((batch, TOKENS), jnp.int32),
        "mask_ar": ((batch, TOKENS), jnp.int32), "mask_loss": ((batch, TOKENS), jnp.float32),
    }  # fmt: skip

    def state_of(key: jax.Array) -> dict[str, Any]:
        image, text, mask, _ = (jnp.zeros((1, *shape[1:]), kind) for shape, kind in shapes.values())
        params = model.init(key, image, text[:, :-1], mask[:, :-1])["params"]
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            text, image, masks = batch["text"], batch["image"], batch["mask_ar"]
            logits, _ = model.apply({"params": params}, image, text[:, :-1], masks[:, :-1], train=True)
            log_likely = jax.nn.log_softmax(logits, axis=-1)
            targets = jax.nn.one_hot(text[:, 1:], logits.shape[-1])
            counted = batch["mask_loss"][:, 1:]
            lost = -jnp.sum(log_likely * targets, axis=-1) * counted
            return jnp.mean(jnp.sum(lost, axis=-1) / jnp.clip(jnp.sum(counted, axis=-1), 1))

        loss, gradients = mw.value_and_grad(loss_of)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    given = {name: jax.ShapeDtypeStruct(shape, kind) for name, (shape, kind) in shapes.items()}
    return step, (jax.eval_shape(state_of, jax.eval_shape(lambda: jax.random.key(0))), given)


def paligemma_3b(global_batch: int = 256) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return trained(global_batch, scan=True)


def paligemma_3b_loop(global_batch: int = 256) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return trained(global_batch, scan=False)
