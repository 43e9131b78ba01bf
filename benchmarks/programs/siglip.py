"""SigLIP of google-research/big_vision, at commit 0127fb6b337e: two towers that meet in the loss, over all pairs.

Its `update_fn`, and the optimizer of its configurations (Adam with bfloat16 first moments after clipping), written out
here: the trainer needs TensorFlow. Images of 224 pixels, 64 tokens of text; the text tower computes in float32, as
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from public import import_from, stand_in

import meshwright as mw

import_from("big_vision")
stand_in("big_vision.utils", "tensorflow", "clu", "clu.parameter_overview", "flax.training.checkpoints")

from big_vision.models.proj.image_text import two_towers

PIXELS, TOKENS, VOCABULARY = 224, 64, 32_000


def trained(variant: str, width: int, batch: int, *, scan: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The train step of two towers of a variant.

    Args:
      variant: of the image tower, by its name there; the text tower's is the same without the patch.
      width: of the space where they meet.
      batch: pairs a step.
      scan: layers in a scan, each computed again backward, instead of a Python loop.
    """
    model = two_towers.Model(
        image={"variant": variant, "pool_type": "map", "scan": scan, "dtype_mm": "bfloat16"},
        text={"variant": variant.split("/")[0], "vocab_size": VOCABULARY, "scan": scan},
        out_dim=width,
        temperature_init=10.0,
        bias_init=-10.0,
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10_000, 100_000)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95, mu_dtype=jnp.bfloat16),
        optax.add_decayed_weights(1e-4, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        optax.scale_by_learning_rate(rate),
    )  # fmt: skip

    def state_of(key: jax.Array) -> dict[str, Any]:
        params = model.init(key, jnp.zeros((1, PIXELS, PIXELS, 3)), jnp.zeros((1, TOKENS), jnp.int32))["params"]
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            images, texts, out = model.apply({"params": params}, batch["image"], batch["labels"], train=True)
            logits = jnp.dot(images, texts.T) * out["t"] + out["b"]
            signs = -jnp.ones_like(logits) + 2 * jnp.eye(images.shape[0])
            return -jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=-1).mean()

        loss, gradients = mw.value_and_grad(loss_of)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    pairs = {
        "image": jax.ShapeDtypeStruct((batch, PIXELS, PIXELS, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((batch, TOKENS), jnp.int32),
    }
    return step, (jax.eval_shape(state_of, jax.eval_shape(lambda: jax.random.key(0))), pairs)


def siglip_b16(global_batch: int = 16_384) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return trained("B/16", 768, global_batch, scan=False)


def siglip_so400m(global_batch: int = 16_384) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return trained("So400m/14", 1152, global_batch, scan=True)
