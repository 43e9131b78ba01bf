"""Llama 4, its language model: three layers that see chunks of 8,192 positions, then one that sees everything and has
no positions; mixtures with one expert a token, weighted by a sigmoid, and a shared one, in every layer (Scout) or every
second (Maverick).

Shapes: the models' cards and `config.json` (Meta 2025). A chunk is as long as the samples assumed here (8,192 tokens, 4
Mi tokens a step; neither is published). The weight of an expert is on what it makes, where Meta's code has it on what
it is given; the balance loss is not published: that of `decoder_feed_forward` is assumed.
"""

from __future__ import annotations

from .decoder import DecoderConfig, Layer, Run, build as build
from .decoder_attention import GroupedAttention
from .decoder_feed_forward import Dense, Mixture

_LOCAL_LAYERS = 3  # for each that sees everything


def _llama4(
    name: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    feed_forwards: tuple[Dense | Mixture, ...],
    chunk: int = 8192,
    head_dim: int = 128,
    vocabulary: int = 202_048,
    sequence: int = 8192,
    global_batch: int = 512,
    dtype: str = "bfloat16",
) -> DecoderConfig:
    """`feed_forwards`: of layers in turn."""

    def attention(place: int) -> GroupedAttention:
        if place == _LOCAL_LAYERS:
            return GroupedAttention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, theta=None)
        return GroupedAttention(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, theta=500_000.0, chunk=chunk, norms="plain"
        )

    pattern = tuple(
        Layer(attention=attention(place), feed_forward=feed_forwards[place % len(feed_forwards)])
        for place in range(_LOCAL_LAYERS + 1)
    )
    return DecoderConfig(
        name=name, family="llama", hidden=hidden, runs=(Run(pattern=pattern, repeats=layers // len(pattern)),),
        vocabulary=vocabulary, sequence=sequence, global_batch=global_batch, dtype=dtype,
    )  # fmt: skip


def _mixture(experts: int, intermediate: int = 8192, group: int = 256) -> Mixture:
    return Mixture(
        experts=experts, top_k=1, intermediate=intermediate, shared=intermediate, router="sigmoid", scale=None,
        group=group,
    )  # fmt: skip


SOURCE = "Meta 2025 (model cards); config.json"

CONFIGS: dict[str, DecoderConfig] = {
    config.name: config
    for config in (
        _llama4("llama4-scout", hidden=5120, layers=48, heads=40, kv_heads=8, feed_forwards=(_mixture(16),)),
        _llama4(
            "llama4-maverick", hidden=5120, layers=48, heads=40, kv_heads=8,
            feed_forwards=(Dense(intermediate=16384), _mixture(128)),
        ),
        _llama4(
            "llama4-tiny", hidden=64, layers=8, heads=8, kv_heads=4, feed_forwards=(Dense(intermediate=128),
            _mixture(8, 64, group=32)), chunk=16, head_dim=16, vocabulary=256, sequence=32, global_batch=16,
            dtype="float32",
        ),
    )
}  # fmt: skip
