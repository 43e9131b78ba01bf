"""Llama 3: rotary positions, grouped-query attention, SwiGLU, RMS norm, untied head but for 1B and 3B.

Shapes: Grattafiori et al. 2024 (3 and 3.1: 8B, 70B, 405B; 3.3's 70B has the shape of 3's) and the `params.json` of
Llama 3.2 (1B, 3B). A decoder of one run of equal layers (`decoder`).
Model FLOPs of a sample: 3 * (layers * (4 * s * m * d * (heads + kv_heads) + 4 * s**2 * d * heads + 6 * s * m * f)
+ 2 * s * m * v) for sequence s, hidden m, head dim d, feed-forward f and vocabulary v.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import decoder
from .decoder import DecoderConfig, Layer, Run
from .decoder_attention import GroupedAttention
from .decoder_feed_forward import Dense
from .layers import Attention
from .train import Optimizer, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        attention: how it is computed (`layers.Attention`).
        head_dim: features of a head; None for an equal share of `hidden`.
        tied: whether the head is the embedding.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 128_256
    sequence: int = 8192
    global_batch: int = 2048  # 16 Mi tokens a step, the last stage of Llama 3's pre-training
    dtype: str = "bfloat16"
    attention: Attention = "plain"
    head_dim: int | None = None
    tied: bool = False


SOURCE = "Grattafiori et al. 2024, table 3; params.json of Llama 3.2"

CONFIGS: dict[str, LlamaConfig] = {
    config.name: config
    for config in (
        LlamaConfig(name="llama3.2-1b", hidden=2048, layers=16, heads=32, kv_heads=8, intermediate=8192, tied=True),
        LlamaConfig(name="llama3.2-3b", hidden=3072, layers=28, heads=24, kv_heads=8, intermediate=8192, tied=True),
        LlamaConfig(name="llama3-8b", hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336),
        LlamaConfig(name="llama3-70b", hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672),
        LlamaConfig(name="llama3-405b", hidden=16384, layers=126, heads=128, kv_heads=8, intermediate=53248),
        LlamaConfig(
            name="llama-tiny",
            hidden=128,
            layers=2,
            heads=16,
            kv_heads=8,
            intermediate=256,
            vocabulary=256,
            sequence=32,
            global_batch=16,
            dtype="float32",
        ),
    )
}


def decoder_of(config: LlamaConfig) -> DecoderConfig:
    """The decoder that a Llama is.

    Raises:
        ValueError: `hidden` is not a multiple of `heads`, and no `head_dim` is given.
    """
    hidden, heads = config.hidden, config.heads
    if config.head_dim is None and hidden % heads:
        raise ValueError(
            f"refused to build {config.name!r}: got hidden={hidden}, heads={heads}, kv_heads={config.kv_heads}, needed "
            "each to be a multiple of the next; try kv_heads=1"
        )
    attention = GroupedAttention(
        heads=heads, kv_heads=config.kv_heads, head_dim=config.head_dim or hidden // heads, theta=500_000.0
    )
    layer = Layer(attention=attention, feed_forward=Dense(intermediate=config.intermediate))
    return DecoderConfig(
        name=config.name, family="llama", hidden=hidden, runs=(Run(pattern=(layer,), repeats=config.layers),),
        vocabulary=config.vocabulary, tied=config.tied, sequence=config.sequence, global_batch=config.global_batch,
        dtype=config.dtype, attention=config.attention,
    )  # fmt: skip


def build(config: LlamaConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a Llama; arguments, batch and errors as of `decoder.build`."""
    return decoder.build(decoder_of(config), optimizer=optimizer, remat=remat)
