"""BERT of Equinox, `docs/examples/bert.ipynb` at commit 9336d820b2ef: a model of one example under `vmap`, dropout.

The cells that define its classes and its loss run as they are; the sizes are those of BERT-large, with 512 tokens, in
the place of the notebook's tiny ones. Its optimizer is Adam after clipping by the global norm; all is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from public import notebook, stand_in

import meshwright as mw

stand_in("datasets", "tqdm", "transformers")

CELLS = ("import ", "class ", "@eqx.filter_value_and_grad")
PUBLIC = notebook("equinox", "docs", "examples", "bert.ipynb", cells=CELLS)
TOKENS = 512
CONFIG = {
    "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": TOKENS, "type_vocab_size": 2,
}  # fmt: skip


def bert_large(global_batch: int = 256) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Its train step: the notebook's, without the mean over devices."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-5))
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    model = eqx.filter_eval_shape(PUBLIC["BertClassifier"], CONFIG, 2, key)
    parameters, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    compute_loss = PUBLIC["compute_loss"].__wrapped__

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        parameters, moments, key = state
        key, new_key = jax.random.split(key)

        def loss_of(parameters: Any) -> jax.Array:
            return compute_loss(eqx.combine(parameters, static), batch, key)

        loss, gradients = mw.value_and_grad(loss_of)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (eqx.apply_updates(parameters, updates), moments, new_key), loss

    tokens = jax.ShapeDtypeStruct((global_batch, TOKENS), jnp.int32)
    batch = {"token_ids": tokens, "segment_ids": tokens, "label": jax.ShapeDtypeStruct((global_batch,), jnp.int32)}
    return step, ((parameters, jax.eval_shape(optimizer.init, parameters), key), batch)
