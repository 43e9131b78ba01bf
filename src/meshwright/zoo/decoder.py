"""A decoder-only language model as data: runs of patterned layers.

A *run* repeats a pattern of layers: windows and full attention in turn (Gemma 3, gpt-oss), layers without positions
between others (Llama 4), dense layers and then mixtures (DeepSeek-V3). Each run is one `jax.lax.scan` over stacked
parameters, whose body is the pattern: a layer's leaf has a leading dim of the repeats. Every layer normalises by root
mean square, before its parts and, where a model does so, behind them.
Parameters are float32; `dtype` is that of the activations.
Model FLOPs of a sample: three times those of the forward pass, the parts' (their modules have the formulas) and
2 * s * m * v of the head for sequence s, hidden m and vocabulary v.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .decoder_attention import GroupedAttention, LatentAttention, rotary_angles
from .decoder_feed_forward import Dense, Mixture
from .layers import Attention, embed, random_tokens, rms_norm, token_cross_entropy
from .parameters import normal, ones, stacked
from .train import Batch, Model, Optimizer, Target, make_target

NEXT_WEIGHT = (
    0.3  # of the loss of the token after the next: DeepSeek-AI 2024 (V3), section 4.2, for most of the training
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of a decoder: attention, then a feed-forward, each added to the residual stream.

    Attributes:
        attention: its first part.
        feed_forward: its second.
        norms_behind: whether what a part adds is normalised too (Gemma 3).
    """

    attention: GroupedAttention | LatentAttention
    feed_forward: Dense | Mixture
    norms_behind: bool = False

    def declare(self, hidden: int, out_deviation: float) -> dict[str, Any]:
        """Its parameters."""
        behind = ("attention_norm_behind", "feed_forward_norm_behind") if self.norms_behind else ()
        return {
            "attention_norm": ones(hidden),
            "attention": self.attention.declare(hidden, out_deviation),
            "feed_forward_norm": ones(hidden),
            **self.feed_forward.declare(hidden, out_deviation),
            **{name: ones(hidden) for name in behind},
        }

    def apply(
        self, params: dict[str, Any], x: jax.Array, angles: Any, attention: Attention
    ) -> tuple[jax.Array, jax.Array | None]:
        """(b, s, m) -> (b, s, m), and the loss of a mixture."""
        added = self.attention.apply(params["attention"], rms_norm(params["attention_norm"], x), angles, attention)
        x = x + (rms_norm(params["attention_norm_behind"], added) if self.norms_behind else added)
        added, loss = self.feed_forward.apply(params, rms_norm(params["feed_forward_norm"], x))
        return x + (rms_norm(params["feed_forward_norm_behind"], added) if self.norms_behind else added), loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A pattern of layers, so many times in a row."""

    pattern: tuple[Layer, ...]
    repeats: int

    @property
    def layers(self) -> int:
        """How many in all."""
        return len(self.pattern) * self.repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        name: of the model.
        family: what its makers call their models.
        runs: its layers.
        tied: whether the head is the embedding.
        scaled_embedding: whether embeddings are multiplied by the root of `hidden` (Gemma).
        next_layer: one more layer, which predicts the token after the next of the next one's embedding and of what the
            other layers make (DeepSeek-AI 2024, V3, section 2.2), with a loss of weight `NEXT_WEIGHT`.
        attention: how it is computed (`layers.Attention`).
    """

    name: str
    family: str
    hidden: int
    runs: tuple[Run, ...]
    vocabulary: int
    tied: bool = False
    scaled_embedding: bool = False
    next_layer: Layer | None = None
    sequence: int = 4096
    global_batch: int = 1024
    dtype: str = "bfloat16"
    attention: Attention = "plain"

    @property
    def layers(self) -> int:
        """How many in all."""
        return sum(run.layers for run in self.runs)

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """Every layer of every pattern, once."""
        layers = tuple(layer for run in self.runs for layer in run.pattern)
        return layers if self.next_layer is None else (*layers, self.next_layer)

    @property
    def counts(self) -> tuple[tuple[Layer, int], ...]:
        """Layers with the number of each."""
        further = () if self.next_layer is None else ((self.next_layer, 1),)
        return (*((layer, run.repeats) for run in self.runs for layer in run.pattern), *further)


def _alone_or_all(parts: list[Any]) -> Any:
    """Parameters of one run or layer stand by themselves, those of several in a list."""
    return parts[0] if len(parts) == 1 else parts


def _as_list(parts: Any) -> list[Any]:
    return parts if isinstance(parts, list) else [parts]


def build(config: DecoderConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a decoder; batch leaves `tokens` and `labels` are int32 (global_batch, sequence).

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each pattern of layers in the backward pass (`jax.checkpoint` on the scans' bodies).

    Raises:
        ValueError: query heads are no multiple of the key heads, or a step's tokens none of a mixture's group.
    """
    _check(config)
    dtype, hidden, sequence, vocabulary = jnp.dtype(config.dtype), config.hidden, config.sequence, config.vocabulary
    # Each layer adds two terms to the residual stream; the smaller start keeps its variance from growing with depth.
    out_deviation = 0.02 * (2 * config.layers) ** -0.5
    runs = [
        stacked(_alone_or_all([layer.declare(hidden, out_deviation) for layer in run.pattern]), run.repeats)
        for run in config.runs
    ]
    params = {
        "embedding": normal(vocabulary, hidden),
        "layers": _alone_or_all(runs),
        "final_norm": ones(hidden),
        **({} if config.tied else {"head": normal(hidden, vocabulary)}),
    }
    if config.next_layer is not None:
        params["next"] = {
            "norm": ones(hidden),
            "embedding_norm": ones(hidden),
            "joined": normal(2, hidden, hidden),
            "layer": config.next_layer.declare(hidden, out_deviation),
            "final_norm": ones(hidden),
        }

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        needed = dict.fromkeys(layer.attention.angles for layer in config.kinds)
        angles = {key: rotary_angles(sequence, key[1], key[0]) for key in needed if key is not None}

        def body_of(run: Run) -> Any:
            def pattern(x: jax.Array, params: Any) -> tuple[jax.Array, jax.Array | None]:
                losses = []
                for layer, layer_params in zip(run.pattern, _as_list(params), strict=True):
                    x, loss = layer.apply(layer_params, x, angles, config.attention)
                    losses += [] if loss is None else [loss]
                return x, functools.reduce(operator.add, losses) if losses else None

            # The scan already keeps each layer's recomputation apart from the forward pass: no CSE barrier is needed.
            return jax.checkpoint(pattern, prevent_cse=False) if remat else pattern

        x = embed(params["embedding"], batch["tokens"], dtype)  # (b, s, m)
        if config.scaled_embedding:
            x = x * jnp.asarray(hidden**0.5, dtype)
        losses = []
        for run, run_params in zip(config.runs, _runs_of(config, params["layers"]), strict=True):
            x, balances = lax.scan(body_of(run), x, run_params)
            losses += [] if balances is None else [jnp.sum(balances)]

        def logits_of(norm: jax.Array, x: jax.Array) -> jax.Array:
            x = rms_norm(norm, x)
            if config.tied:
                head = params["embedding"].astype(dtype)
                return jnp.einsum("bsm,vm->bsv", x, head, preferred_element_type=jnp.float32)
            return jnp.einsum("bsm,mv->bsv", x, params["head"].astype(dtype), preferred_element_type=jnp.float32)

        total = token_cross_entropy(logits_of(params["final_norm"], x), batch["labels"])
        if config.next_layer is not None:
            following = params["next"]
            made = rms_norm(following["norm"], x)
            given = rms_norm(following["embedding_norm"], embed(params["embedding"], batch["labels"], dtype))
            joined = following["joined"].astype(dtype)
            x = jnp.einsum("bsm,mn->bsn", made, joined[0]) + jnp.einsum("bsm,mn->bsn", given, joined[1])
            apply = functools.partial(config.next_layer.apply, angles=angles, attention=config.attention)
            x, balance = (jax.checkpoint(apply) if remat else apply)(following["layer"], x)
            losses += [] if balance is None else [balance]
            # The last position's token after the next is not in the sample.
            logits = logits_of(following["final_norm"], x)[:, :-1]
            total = total + NEXT_WEIGHT * token_cross_entropy(logits, batch["labels"][:, 1:])
        return total + functools.reduce(operator.add, losses) / _mixtures(config) if losses else total

    def make_batch(key: jax.Array) -> Batch:
        return random_tokens(key, batch=config.global_batch, sequence=sequence, vocabulary=vocabulary)

    layers = sum(
        many * (layer.attention.flops(sequence, hidden) + layer.feed_forward.flops(sequence, hidden))
        for layer, many in config.counts
    )
    head = 2 * sequence * hidden * vocabulary
    following = 0 if config.next_layer is None else head + 4 * sequence * hidden**2
    model = Model(
        name=config.name,
        family=config.family,
        params=params,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * (layers + head + following),
        reduction="mean" if _mixtures(config) else None,
    )
    return make_target(model, optimizer=optimizer)


def _runs_of(config: DecoderConfig, layers: Any) -> list[Any]:
    return [layers] if len(config.runs) == 1 else layers


def _mixtures(config: DecoderConfig) -> int:
    """Layers that are mixtures."""
    return sum(many for layer, many in config.counts if isinstance(layer.feed_forward, Mixture))


def _check(config: DecoderConfig) -> None:
    for layer in config.kinds:
        one, two = layer.attention, layer.feed_forward
        if isinstance(one, GroupedAttention) and one.heads % one.kv_heads:
            raise ValueError(
                f"refused to build {config.name!r}: got heads={one.heads}, kv_heads={one.kv_heads}, needed the first "
                "to be a multiple of the second; try kv_heads=1"
            )
        chunk = (one.chunk if isinstance(one, GroupedAttention) else None) or config.sequence
        if config.sequence > chunk and config.sequence % chunk:
            raise ValueError(
                f"refused to build {config.name!r}: got sequence={config.sequence}, needed a multiple of the {chunk} "
                f"positions that see each other; try sequence={config.sequence // chunk * chunk}"
            )
        if isinstance(two, Mixture) and config.global_batch * config.sequence % two.group:
            raise ValueError(
                f"refused to build {config.name!r}: got global_batch={config.global_batch} of "
                f"sequence={config.sequence} tokens, needed a multiple of the {two.group} tokens that are dealt "
                f"together; try global_batch={max(two.group // config.sequence, 1)}"
            )
