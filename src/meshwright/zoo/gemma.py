"""Gemma 3, its language model: five layers that see a window, then one that sees everything; norms before and behind
each part; queries and keys normalised; embeddings scaled, and the head is the embedding.

Shapes: Gemma Team 2025 (Gemma 3 Technical Report, tables 1 and 2) and the `config.json` of each model. The report
trains on 32,768 tokens a sample first; 8,192 are assumed here, and 4 Mi tokens a step, which it does not name.
Layers behind the last whole pattern are a run of their own.
"""

from __future__ import annotations

from .decoder import DecoderConfig, Layer, Run, build as build
from .decoder_attention import GroupedAttention
from .decoder_feed_forward import Dense

_LOCAL_LAYERS = 5  # for each global one


def _gemma(
    name: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    *,
    head_dim: int = 256,
    window: int = 1024,
    query_scalar: float | None = None,
    vocabulary: int = 262_144,
    local_layers: int = _LOCAL_LAYERS,
    sequence: int = 8192,
    global_batch: int = 512,
    dtype: str = "bfloat16",
) -> DecoderConfig:
    """`query_scalar`: features that scores are divided by the root of, where those are not of a head."""
    scale = (head_dim / query_scalar) ** 0.5 if query_scalar else 1.0

    def layer(theta: float, seen: int | None) -> Layer:
        attention = GroupedAttention(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, theta=theta, window=seen, norms="learned", scale=scale
        )
        dense = Dense(intermediate=intermediate, activation="gelu")
        return Layer(attention=attention, feed_forward=dense, norms_behind=True)

    local, whole = layer(10_000.0, window), layer(1_000_000.0, None)
    repeats, rest = divmod(layers, local_layers + 1)
    runs = (Run(pattern=(*(local,) * local_layers, whole), repeats=repeats),)
    runs += (Run(pattern=(local,), repeats=rest),) if rest else ()
    return DecoderConfig(
        name=name, family="gemma", hidden=hidden, runs=runs, vocabulary=vocabulary, tied=True, scaled_embedding=True,
        sequence=sequence, global_batch=global_batch, dtype=dtype,
    )  # fmt: skip


SOURCE = "Gemma Team 2025 (Gemma 3), tables 1 and 2; config.json"

CONFIGS: dict[str, DecoderConfig] = {
    config.name: config
    for config in (
        _gemma("gemma3-1b", 1152, 26, 4, 1, 6912, window=512),
        _gemma("gemma3-4b", 2560, 34, 8, 4, 10240),
        _gemma("gemma3-12b", 3840, 48, 16, 8, 15360),
        _gemma("gemma3-27b", 5376, 62, 32, 16, 21504, head_dim=128, query_scalar=168),
        _gemma(
            "gemma3-tiny", 64, 5, 8, 4, 128, head_dim=16, window=8, local_layers=1, vocabulary=256, sequence=32,
            global_batch=16, dtype="float32",
        ),
    )
}  # fmt: skip
