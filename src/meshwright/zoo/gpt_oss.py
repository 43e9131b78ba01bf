"""gpt-oss: layers that see a window of 128 positions and layers that see everything in turn, with sinks; mixtures of
experts with biases, four a token, weighted by a softmax over those four.

Shapes: OpenAI 2025 (gpt-oss model card, table 1) and the `config.json` of each model. What they were trained with is
not published: 4,096 tokens a sample (the context before it was extended), 4 Mi tokens a step and the balance loss of
`decoder_feed_forward` are assumed.
"""

from __future__ import annotations

from typing import Any

from .decoder import DecoderConfig, Layer, Run, build as build
from .decoder_attention import GroupedAttention
from .decoder_feed_forward import Mixture


def _gpt_oss(
    name: str,
    hidden: int,
    layers: int,
    heads: int,
    mixture: Mixture,
    *,
    kv_heads: int = 8,
    head_dim: int = 64,
    window: int = 128,
    vocabulary: int = 201_088,
    **sizes: Any,
) -> DecoderConfig:
    def layer(seen: int | None) -> Layer:
        attention = GroupedAttention(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, theta=150_000.0, window=seen, sinks=True, bias=True
        )
        return Layer(attention=attention, feed_forward=mixture)

    run = Run(pattern=(layer(window), layer(None)), repeats=layers // 2)
    return DecoderConfig(name=name, family="gpt-oss", hidden=hidden, runs=(run,), vocabulary=vocabulary, **sizes)


def _mixture(experts: int) -> Mixture:
    return Mixture(experts=experts, top_k=4, intermediate=2880, activation="clamped", bias=True)


SOURCE = "OpenAI 2025 (model card), table 1; config.json"

CONFIGS: dict[str, DecoderConfig] = {
    config.name: config
    for config in (
        _gpt_oss("gpt-oss-20b", 2880, 24, 64, _mixture(32)),
        _gpt_oss("gpt-oss-120b", 2880, 36, 64, _mixture(128)),
        _gpt_oss(
            "gpt-oss-tiny", 64, 4, 8,
            Mixture(experts=8, top_k=2, intermediate=64, activation="clamped", bias=True, group=32), kv_heads=4,
            head_dim=16, window=8, vocabulary=256, sequence=32, global_batch=16, dtype="float32",
        ),
    )
}  # fmt: skip
