"""DeepSeek-V3 and Kimi K2: latent attention, a few dense layers, then mixtures of hundreds of experts, eight a token
and a shared one, chosen by sigmoids; optionally (`-mtp`) the token after the next is predicted too.

Shapes: DeepSeek-AI 2024 (DeepSeek-V3 Technical Report, section 4.2: 4,096 tokens a sample, 15,360 samples a step) and
Kimi Team 2025 (Kimi K2, table 2 and section 2.5: 4,096 tokens a sample, 67 Mi tokens a step), and the `config.json` of
each. The balance loss is that of a sequence, of weight 0.0001 (section 4.2), here of a group of tokens.
Not modelled: the bias that steers the choice of experts and that no gradient reaches (256 numbers a layer), and that a
token's experts are those of four groups of eight.
"""

from __future__ import annotations

from typing import Any

from .decoder import DecoderConfig, Layer, Run, build as build
from .decoder_attention import LatentAttention
from .decoder_feed_forward import Dense, Mixture


def _deepseek(
    name: str,
    hidden: int,
    dense_layers: int,
    mixture_layers: int,
    attention: LatentAttention,
    intermediate: int,
    mixture: Mixture,
    *,
    predicts_two: bool = False,
    **sizes: Any,
) -> DecoderConfig:
    dense = Layer(attention=attention, feed_forward=Dense(intermediate=intermediate))
    sparse = Layer(attention=attention, feed_forward=mixture)
    runs = Run(pattern=(dense,), repeats=dense_layers), Run(pattern=(sparse,), repeats=mixture_layers)
    return DecoderConfig(
        name=name, family="deepseek", hidden=hidden, runs=runs, next_layer=sparse if predicts_two else None, **sizes
    )  # fmt: skip


def _attention(heads: int, theta: float) -> LatentAttention:
    return LatentAttention(
        heads=heads, query_rank=1536, key_value_rank=512, still_dim=128, turned_dim=64, value_dim=128, theta=theta
    )  # fmt: skip


def _mixture(experts: int, scale: float) -> Mixture:
    return Mixture(
        experts=experts, top_k=8, intermediate=2048, shared=2048, router="sigmoid", scale=scale, balance=0.0001
    )  # fmt: skip


_TINY: dict[str, Any] = {"vocabulary": 256, "sequence": 32, "global_batch": 16, "dtype": "float32"}
_TINY_ATTENTION = LatentAttention(
    heads=8, query_rank=32, key_value_rank=16, still_dim=16, turned_dim=8, value_dim=16
)  # fmt: skip
_TINY_MIXTURE = Mixture(
    experts=16, top_k=4, intermediate=32, shared=32, router="sigmoid", scale=2.5, balance=0.0001, group=32
)  # fmt: skip

SOURCE = "DeepSeek-AI 2024 (V3, section 4.2); Kimi Team 2025 (K2, table 2); config.json"

CONFIGS: dict[str, DecoderConfig] = {
    config.name: config
    for config in (
        *(
            _deepseek(
                name, 7168, 3, 58, _attention(128, 10_000.0), 18432, _mixture(256, 2.5), vocabulary=129_280,
                global_batch=15360, predicts_two=predicts_two,
            )
            for name, predicts_two in (("deepseek-v3", False), ("deepseek-v3-mtp", True))
        ),
        _deepseek(
            "kimi-k2", 7168, 1, 60, _attention(64, 50_000.0), 18432, _mixture(384, 2.827), vocabulary=163_840,
            global_batch=16384,
        ),
        _deepseek("deepseek-v3-tiny", 64, 1, 2, _TINY_ATTENTION, 128, _TINY_MIXTURE, **_TINY),
        _deepseek("deepseek-v3-mtp-tiny", 64, 1, 2, _TINY_ATTENTION, 128, _TINY_MIXTURE, predicts_two=True, **_TINY),
    )
}  # fmt: skip
