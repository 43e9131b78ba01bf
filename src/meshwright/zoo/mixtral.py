"""Mixtral: layers whose feed-forward is eight experts, two a token, weighted by a softmax over those two.

Shapes: Jiang et al. 2024 (Mixtral of Experts, table 1) for 8x7B, the model's `config.json` for 8x22B. What they were
trained with is not published: 4,096 tokens a sample and 4 Mi tokens a step are assumed, the balance loss's weight is
that of the `config.json` (0.02 of 8x7B, 0.001 of 8x22B).
"""

from __future__ import annotations

from typing import Any

from .decoder import DecoderConfig, Layer, Run, build as build
from .decoder_attention import GroupedAttention
from .decoder_feed_forward import Mixture


def _mixtral(
    name: str, hidden: int, layers: int, heads: int, mixture: Mixture, *, kv_heads: int = 8, **sizes: Any
) -> DecoderConfig:
    attention = GroupedAttention(heads=heads, kv_heads=kv_heads, head_dim=hidden // heads, theta=1_000_000.0)
    run = Run(pattern=(Layer(attention=attention, feed_forward=mixture),), repeats=layers)
    return DecoderConfig(name=name, family="mixtral", hidden=hidden, runs=(run,), **sizes)


SOURCE = "Jiang et al. 2024, table 1; config.json"

CONFIGS: dict[str, DecoderConfig] = {
    config.name: config
    for config in (
        _mixtral(
            "mixtral-8x7b", 4096, 32, 32, Mixture(experts=8, top_k=2, intermediate=14336, balance=0.02),
            vocabulary=32000,
        ),
        _mixtral(
            "mixtral-8x22b", 6144, 56, 48, Mixture(experts=8, top_k=2, intermediate=16384, balance=0.001),
            vocabulary=32768,
        ),
        _mixtral(
            "mixtral-tiny", 64, 2, 8, Mixture(experts=8, top_k=2, intermediate=64, balance=0.02, group=32), kv_heads=4,
            vocabulary=256, sequence=32, global_batch=16, dtype="float32",
        ),
    )
}  # fmt: skip
