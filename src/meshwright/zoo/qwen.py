"""Qwen3: Llama's layers with normalised queries and keys and heads of 128 features; its mixtures have 128 experts, 8 a
token, without a shared one.

Shapes: Yang et al. 2025 (Qwen3 Technical Report, tables 1 and 2) and the `config.json` of each model; the weight of the
balance loss is theirs (0.001). Both name 4,096 tokens a sample for most of the training; the batch is not published:
4 Mi tokens are assumed.
"""

from __future__ import annotations

from typing import Any

from .decoder import DecoderConfig, Layer, Run, build as build
from .decoder_attention import GroupedAttention
from .decoder_feed_forward import Dense, Mixture


def _qwen(
    name: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    feed_forward: Dense | Mixture,
    *,
    tied: bool = False,
    head_dim: int = 128,
    vocabulary: int = 151_936,
    **sizes: Any,
) -> DecoderConfig:
    attention = GroupedAttention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, theta=1_000_000.0, norms="learned"
    )  # fmt: skip
    run = Run(pattern=(Layer(attention=attention, feed_forward=feed_forward),), repeats=layers)
    return DecoderConfig(
        name=name, family="qwen", hidden=hidden, runs=(run,), vocabulary=vocabulary, tied=tied, **sizes
    )  # fmt: skip


def _dense(name: str, hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool = False) -> DecoderConfig:
    return _qwen(name, hidden, layers, heads, 8, Dense(intermediate=intermediate), tied=tied)


def _experts(intermediate: int) -> Mixture:
    return Mixture(experts=128, top_k=8, intermediate=intermediate, balance=0.001)


SOURCE = "Yang et al. 2025 (Qwen3), tables 1 and 2; config.json"

CONFIGS: dict[str, DecoderConfig] = {
    config.name: config
    for config in (
        _dense("qwen3-0.6b", 1024, 28, 16, 3072, tied=True),
        _dense("qwen3-1.7b", 2048, 28, 16, 6144, tied=True),
        _dense("qwen3-4b", 2560, 36, 32, 9728, tied=True),
        _dense("qwen3-8b", 4096, 36, 32, 12288),
        _dense("qwen3-14b", 5120, 40, 40, 17408),
        _dense("qwen3-32b", 5120, 64, 64, 25600),
        _qwen("qwen3-30b-a3b", 2048, 48, 32, 4, _experts(768)),
        _qwen("qwen3-235b-a22b", 4096, 94, 64, 4, _experts(1536)),
        _qwen(
            "qwen3-tiny", 64, 2, 8, 4, Dense(intermediate=128), tied=True, head_dim=16, vocabulary=256, sequence=32,
            global_batch=16, dtype="float32",
        ),
        _qwen(
            "qwen3-moe-tiny", 64, 2, 8, 4, Mixture(experts=8, top_k=2, intermediate=64, balance=0.001, group=32),
            head_dim=16, vocabulary=256, sequence=32, global_batch=16, dtype="float32",
        ),
    )
}  # fmt: skip
