"""Vision transformers of google-research/big_vision, at commit 0127fb6b337e: a Python loop over layers, and a scan.

Its `update_fn` without mixup, and the optimizer of its configurations (Adam with bfloat16 first moments after clipping,
no decay of vectors), written out here: `train.py` needs TensorFlow. Images of 224 pixels, 1,000 classes.
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

from big_vision.models import vit

PIXELS, CLASSES = 224, 1000


def trained(variant: str, batch: int, **config: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The train step of a variant.

    Args:
      variant: by its name there.
      batch: images a step.
      config: of its model.
    """
    model = vit.Model(num_classes=CLASSES, variant=variant, dtype_mm="bfloat16", **config)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10_000, 100_000)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(mu_dtype=jnp.bfloat16),
        optax.add_decayed_weights(1e-4, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        optax.scale_by_learning_rate(rate),
    )  # fmt: skip

    def state_of(key: jax.Array) -> dict[str, Any]:
        params = model.init(key, jnp.zeros((1, PIXELS, PIXELS, 3)))["params"]
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: Any, key: jax.Array, batch: Any) -> tuple[Any, jax.Array]:
        key = jax.random.fold_in(key, state["opt"][1].count)

        def loss_of(params: Any) -> jax.Array:
            logits, _ = model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": key})
            return optax.sigmoid_binary_cross_entropy(logits, batch["labels"]).sum(axis=-1).mean()

        loss, gradients = mw.value_and_grad(loss_of)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    key = jax.eval_shape(lambda: jax.random.key(0))
    images = {
        "image": jax.ShapeDtypeStruct((batch, PIXELS, PIXELS, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((batch, CLASSES), jnp.float32),
    }
    return step, (jax.eval_shape(state_of, key), key, images)


def vit_l16(global_batch: int = 4096) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return trained("L/16", global_batch)


def vit_g14(global_batch: int = 4096) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """As a scan."""
    return trained("g/14", global_batch, pool_type="map", scan=True)
