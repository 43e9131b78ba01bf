"""Examples of google/flax (Linen), at commit 18f8f311c275: ResNet-50, and WMT's Transformer with dropout.

Of `examples/imagenet` and `examples/wmt` the models; the steps are written out here, with AdamW behind clipping, since
the scripts need TensorFlow. Batch statistics are those of the whole batch: the models sum them over an axis of `pmap`,
which is taken out. Activations are bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from public import source_of

import meshwright as mw

TOKENS, WORDS, SMOOTHED = 256, 32_000, 0.1


def models_of(example: str) -> ModuleType:
    """The module `models` of an example, without the axis of `pmap`."""
    module = ModuleType(f"flax_example_{example}")
    sys.modules[module.__name__] = module  # its dataclasses look it up
    text, path = source_of("flax", "examples", example, "models.py")
    exec(compile(text.replace("axis_name='batch'", "axis_name=None"), path, "exec"), module.__dict__)
    return module


def optimizer_of(**options: Any) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=1e-4, **options))


def resnet50(global_batch: int = 4096) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model, optimizer = models_of("imagenet").ResNet50(num_classes=1000, dtype=jnp.bfloat16), optimizer_of()

    def state_of(key: jax.Array) -> tuple[Any, Any, Any]:
        made = model.init({"params": key}, jnp.ones((1, 224, 224, 3)))
        return made["params"], made["batch_stats"], optimizer.init(made["params"])

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, statistics, moments = state

        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": statistics}
            logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), new["batch_stats"]

        (loss, statistics), gradients = mw.value_and_grad(loss_of, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), statistics, moments), loss

    images = {
        "image": jax.ShapeDtypeStruct((global_batch, 224, 224, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((global_batch,), jnp.int32),
    }
    return step, (jax.eval_shape(state_of, jax.eval_shape(lambda: jax.random.key(0))), images)


def wmt_big(global_batch: int = 256) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Of 1,024 features, 12 layers in each half, pairs of 256 tokens."""
    models = models_of("wmt")
    config = models.TransformerConfig(
        vocab_size=WORDS, output_vocab_size=WORDS, share_embeddings=True, logits_via_embedding=True,
        dtype=jnp.bfloat16, emb_dim=1024, num_heads=16, num_layers=12, qkv_dim=1024, mlp_dim=4096, max_len=512,
        dropout_rate=0.1, attention_dropout_rate=0.1, deterministic=False,
    )  # fmt: skip
    model, optimizer = models.Transformer(config), optimizer_of(b2=0.98)

    def state_of(key: jax.Array) -> tuple[Any, Any]:
        tokens = jnp.zeros((1, TOKENS), jnp.int32)
        params = models.Transformer(config.replace(deterministic=True)).init(key, tokens, tokens)["params"]
        return params, optimizer.init(params)

    def step(state: Any, key: jax.Array, batch: Any) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss_of(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, batch["inputs"], batch["targets"], rngs={"dropout": key})
            targets = optax.smooth_labels(jax.nn.one_hot(batch["targets"], WORDS), SMOOTHED)
            losses = optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)
            weights = (batch["targets"] > 0).astype(jnp.float32)
            return (losses * weights).sum() / weights.sum()

        loss, gradients = mw.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    key = jax.eval_shape(lambda: jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((global_batch, TOKENS), jnp.int32)
    return step, (jax.eval_shape(state_of, key), key, {"inputs": tokens, "targets": tokens})
