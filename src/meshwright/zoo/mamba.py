"""Mamba-2: state-space layers in their dual form, products inside chunks of a sequence and a state between them.

Shapes: Dao and Gu 2024 (Transformers are SSMs; section 9.2 and appendix D: 2,048 tokens a sample, states of 128, heads
of 64 features) and the models' `config.json`; the head is the embedding. 1 Mi tokens a step are those of GPT-3 at 1.3B
(Brown et al. 2020, table 2.1), whose recipe they follow. Layers are one `jax.lax.scan`.
Model FLOPs of a sample: 3 * (layers * (2 * s * m * (2 * i + 2 * n + h) + 2 * s * i * m + 2 * s * q * n + 2 * s * q * i
+ 4 * s * i * n + 2 * (s / q)**2 * i * n) + 2 * s * m * v) for sequence s, hidden m, inner width i of h heads, states n,
chunk q and vocabulary v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .layers import causal_mask, embed, random_tokens, rms_norm, token_cross_entropy
from .parameters import normal, ones, stacked, zeros
from .train import Batch, Model, Optimizer, Target, make_target


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Shape of a Mamba-2; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        states: of each feature.
        head_dim: features of a head, which share how fast they forget.
        chunk: positions of a chunk; it divides the sequence.
        expand: inner features for each of `hidden`.
        kernel: positions that the convolution over the sequence sees.
    """

    name: str
    hidden: int
    layers: int
    states: int = 128
    head_dim: int = 64
    chunk: int = 256
    expand: int = 2
    kernel: int = 4
    vocabulary: int = 50_288
    sequence: int = 2048
    global_batch: int = 512
    dtype: str = "bfloat16"


SOURCE = "Dao and Gu 2024; config.json"

CONFIGS: dict[str, MambaConfig] = {
    config.name: config
    for config in (
        MambaConfig(name="mamba2-1.3b", hidden=2048, layers=48),
        MambaConfig(name="mamba2-2.7b", hidden=2560, layers=64),
        MambaConfig(
            name="mamba2-tiny", hidden=64, layers=2, states=16, head_dim=16, chunk=8, vocabulary=256, sequence=32,
            global_batch=16, dtype="float32",
        ),
    )
}  # fmt: skip


def decays(steps: jax.Array) -> jax.Array:
    """The logarithm of what is left of each position at each not earlier one, float32 (..., q) -> (..., q, q).

    Args:
        steps: logarithms of what is left after each position; position j is left at i by those of j + 1 to i.

    Returns:
        Sums of `steps`, the lowest number where j is later than i.
    """
    total = jnp.cumsum(steps, axis=-1)
    differences = total[..., :, None] - total[..., None, :]
    return jnp.where(causal_mask(steps.shape[-1], steps.shape[-1]), differences, jnp.finfo(jnp.float32).min)


def state_space(
    x: jax.Array, steps: jax.Array, inputs: jax.Array, outputs: jax.Array, *, chunk: int
) -> jax.Array:  # fmt: skip
    """The state-space layer's map of a sequence: the state of every feature is multiplied by exp(steps), added to by x
    along `inputs` and read along `outputs` (Dao and Gu 2024, section 6 and listing 1).

    Args:
        x: (b, s, h, p), of heads h of p features.
        steps: float32 (b, s, h), at most 0.
        inputs: (b, s, n), shared by all heads.
        outputs: (b, s, n), likewise.
        chunk: positions that are computed together; it divides s.

    Returns:
        (b, s, h, p).
    """
    shape, dtype = x.shape, x.dtype
    x, inputs, outputs = (each.reshape(shape[0], -1, chunk, *each.shape[2:]) for each in (x, inputs, outputs))
    steps = steps.reshape(shape[0], -1, chunk, shape[2]).transpose(0, 3, 1, 2)  # (b, h, c, q)
    total = jnp.cumsum(steps, axis=-1)

    # What positions of a chunk give each other.
    scores = jnp.einsum("bcqn,bckn->bcqk", outputs, inputs, preferred_element_type=jnp.float32)
    weights = (scores[:, None] * jnp.exp(decays(steps))).astype(dtype)
    inside = jnp.einsum("bhcqk,bckhp->bcqhp", weights, x)

    # What each chunk leaves behind, and what every later chunk finds of it.
    left = jnp.exp(total[..., -1:] - total).astype(dtype)  # (b, h, c, q)
    states = jnp.einsum("bckn,bckhp->bchnp", inputs, x * left.transpose(0, 2, 3, 1)[..., None])
    ends = jnp.pad(total[..., -1], ((0, 0), (0, 0), (1, 0)))
    between = jnp.exp(decays(ends))[:, :, :-1, 1:].astype(dtype)  # (b, h, chunk that finds, chunk that left)
    found = jnp.einsum("bhzc,bchnp->bzhnp", between, states)
    read = jnp.einsum("bcqn,bchnp->bcqhp", outputs, found)
    out = inside + read * jnp.exp(total).astype(dtype).transpose(0, 2, 3, 1)[..., None]
    return out.reshape(shape)


def _convolved(weight: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """Each feature mixed over the last positions, x (b, s, ...) by weight (kernel, ...)."""
    kernel, positions = weight.shape[0], x.shape[1]
    padded = jnp.pad(x, ((0, 0), (kernel - 1, 0), *((0, 0),) * (x.ndim - 2)))
    rows = [lax.slice_in_dim(padded, k, k + positions, axis=1) * weight[k].astype(x.dtype) for k in range(kernel)]
    return jax.nn.silu(sum(rows[1:], rows[0]) + bias.astype(x.dtype))


def build(config: MambaConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a Mamba-2; batch leaves `tokens` and `labels` are int32 (global_batch, sequence).

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each layer in the backward pass.

    Raises:
        ValueError: the sequence is not a multiple of `chunk`, or the inner width not one of `head_dim`.
    """
    dtype, hidden, sequence, states = jnp.dtype(config.dtype), config.hidden, config.sequence, config.states
    chunk, inner, vocabulary = min(config.chunk, sequence), config.expand * hidden, config.vocabulary
    if sequence % chunk or inner % config.head_dim:
        raise ValueError(
            f"refused to build {config.name!r}: got sequence={sequence} in chunks of {chunk} and {inner} features in "
            f"heads of {config.head_dim}, needed multiples; try sequence={sequence // chunk * chunk}"
        )
    heads = inner // config.head_dim
    layer = {
        "norm": ones(hidden),
        "gate": normal(hidden, heads, config.head_dim),
        "in": normal(hidden, heads, config.head_dim),
        "states": normal(hidden, 2, states),
        "step": normal(hidden, heads),
        "step_bias": zeros(heads),
        "forget": zeros(heads),  # the logarithm of how fast a head forgets
        "skip": ones(heads),
        "in_kernel": normal(config.kernel, heads, config.head_dim, deviation=config.kernel**-0.5),
        "in_kernel_bias": zeros(heads, config.head_dim),
        "states_kernel": normal(config.kernel, 2, states, deviation=config.kernel**-0.5),
        "states_kernel_bias": zeros(2, states),
        "out_norm": ones(heads, config.head_dim),
        "out": normal(heads, config.head_dim, hidden, deviation=0.02 * config.layers**-0.5),
    }
    params = {
        "embedding": normal(vocabulary, hidden),
        "layers": stacked(layer, config.layers),
        "final_norm": ones(hidden),
    }

    def mamba_layer(x: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, None]:
        y = rms_norm(params["norm"], x)
        gate = jnp.einsum("bsm,mhp->bshp", y, params["gate"].astype(dtype))
        features = jnp.einsum("bsm,mhp->bshp", y, params["in"].astype(dtype))
        both = jnp.einsum("bsm,mtn->bstn", y, params["states"].astype(dtype))
        step = jnp.einsum("bsm,mh->bsh", y, params["step"].astype(dtype), preferred_element_type=jnp.float32)
        step = jax.nn.softplus(step + params["step_bias"])
        features = _convolved(params["in_kernel"], params["in_kernel_bias"], features)
        both = _convolved(params["states_kernel"], params["states_kernel_bias"], both)
        inputs, outputs = (lax.index_in_dim(both, i, axis=2, keepdims=False) for i in range(2))  # (b, s, n)
        added = features * step.astype(dtype)[..., None]
        mixed = state_space(added, -step * jnp.exp(params["forget"]), inputs, outputs, chunk=chunk)
        mixed = (mixed + features * params["skip"].astype(dtype)[:, None]) * jax.nn.silu(gate)
        squares = jnp.mean(jnp.square(mixed.astype(jnp.float32)), axis=(-2, -1), keepdims=True)
        mixed = (mixed.astype(jnp.float32) * lax.rsqrt(squares + 1e-5) * params["out_norm"]).astype(dtype)
        return x + jnp.einsum("bshp,hpm->bsm", mixed, params["out"].astype(dtype)), None

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        x = embed(params["embedding"], batch["tokens"], dtype)
        x, _ = lax.scan(jax.checkpoint(mamba_layer, prevent_cse=False) if remat else mamba_layer, x, params["layers"])
        x = rms_norm(params["final_norm"], x)
        head = params["embedding"].astype(dtype)
        logits = jnp.einsum("bsm,vm->bsv", x, head, preferred_element_type=jnp.float32)
        return token_cross_entropy(logits, batch["labels"])

    def make_batch(key: jax.Array) -> Batch:
        return random_tokens(key, batch=config.global_batch, sequence=sequence, vocabulary=vocabulary)

    products = 2 * sequence * hidden * (2 * inner + 2 * states + heads) + 2 * sequence * inner * hidden
    mixing = 2 * sequence * chunk * (states + inner) + 4 * sequence * inner * states
    mixing += 2 * (sequence // chunk) ** 2 * inner * states
    model = Model(
        name=config.name,
        family="mamba",
        params=params,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * (config.layers * (products + mixing) + 2 * sequence * hidden * vocabulary),
    )
    return make_target(model, optimizer=optimizer)
