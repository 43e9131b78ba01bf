"""Models of published measurements that the zoo has by name (`benchmarks/published.py`).

A row's name finds one; what the row states of its sizes must be those of the model, else the row means another. A
mixture's experts get no more slots than tokens choose: software that publishes steps of these drops none, and computes
nothing for slots that stay empty.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

from published_cells import Row, number

from meshwright.zoo import decoder, dit, llama, mamba, t5, vit
from meshwright.zoo.decoder import DecoderConfig, Run
from meshwright.zoo.decoder_feed_forward import Mixture
from meshwright.zoo.registry import FAMILIES

# Groups of tokens that are dealt together: as few as give each expert a slot, so that dealing costs little.
_SMALLEST_GROUP = 64

# The zoo's names by what rows call the models; "{}" is the size that is found.
_NAMES = (
    (r"mixtral\D*(8x7b|8x22b)", "mixtral-{}"), (r"deepseek[-_ ]?v3|deepseek\D*671b", "deepseek-v3"),
    (r"kimi[-_ ]?k2", "kimi-k2"), (r"gpt[-_ ]?oss\D*(20b|120b)", "gpt-oss-{}"),
    (r"qwen[-_ ]?3\D*(30b-a3b|235b-a22b)", "qwen3-{}"), (r"qwen[-_ ]?3\D*30b", "qwen3-30b-a3b"),
    (r"qwen[-_ ]?3\D*235b", "qwen3-235b-a22b"), (r"qwen[-_ ]?3[-_ ](0\.6b|1\.7b|4b|8b|14b|32b)\b", "qwen3-{}"),
    (r"llama[-_ ]?4\W*(scout|maverick)", "llama4-{}"), (r"gemma[-_ ]?3[-_ ](1b|4b|12b|27b)\b", "gemma3-{}"),
    (r"llama[-_ ]?3\.2[-_ ](1b|3b)\b", "llama3.2-{}"), (r"llama[-_ ]?3(?:\.[13])?[-_ ](8b|70b|405b)\b", "llama3-{}"),
    (r"\bt5\W*(small|base|large|3b|11b)\b", "t5-{}"), (r"\bvit\W*(l|h|g)(?=\W|$|\d)", "vit-{}"),
    (r"\bdit\W*(b|l|xl)(?=\W|$|\d)", "dit-{}"), (r"mamba[-_ ]?2\W*(1\.3b|2\.7b)", "mamba2-{}"),
)  # fmt: skip

# Columns of a row that a model's sizes must agree with, by the names that configurations have for them.
_SIZES = {"d_model": "hidden", "n_layers": "layers"}


def named(row: Row) -> tuple[ModuleType, Any] | None:
    """The module and the shape of the zoo's model that a row names, as published; None if the zoo has none, or the row
    states other sizes."""
    for pattern, name in _NAMES:
        found = re.search(pattern, row["model"], re.IGNORECASE)
        if found is None:
            continue
        known = name.format(*(part.lower() for part in found.groups()))
        family, config = next((f, f.CONFIGS[known]) for f in FAMILIES if known in f.CONFIGS)
        stated = {field: number(row, column) for column, field in _SIZES.items()}
        if any(size not in (None, getattr(config, field)) for field, size in stated.items()):
            return None
        module = decoder if isinstance(config, DecoderConfig) else family
        return module, config
    return None


def experts_named(row: Row) -> int | None:
    """Experts of a layer of the model that a row names; None of a dense one."""
    found = named(row)
    mixtures = _mixtures(found[1]) if found else []
    return max((mixture.experts for mixture in mixtures), default=None)


def _mixtures(config: Any) -> list[Mixture]:
    kinds = config.kinds if isinstance(config, DecoderConfig) else ()
    return [layer.feed_forward for layer in kinds if isinstance(layer.feed_forward, Mixture)]


def dealt(mixture: Mixture) -> Mixture:
    """With as many slots as choices, in groups as small as give each expert one."""
    slots = -(-_SMALLEST_GROUP * mixture.top_k // mixture.experts)
    group = _SMALLEST_GROUP
    while group * mixture.top_k < slots * mixture.experts:
        group *= 2
    return replace(mixture, group=group, capacity_factor=1.0)


def as_run(
    config: Any, row: Row, *, batch: int, dtype: str, fused: bool, one_scan: bool
) -> Any:  # fmt: skip
    """A published shape as a row ran it.

    Args:
      config: of the zoo.
      row: whose sequence it has.
      batch: samples.
      dtype: of activations.
      fused: whether attention is one kernel.
      one_scan: whether its layers have to be one scan, as those of a pipeline: then all are like most of them.
    """
    asked: dict[str, Any] = {"name": row["model"], "global_batch": batch, "dtype": dtype}
    if number(row, "seq_len"):
        asked["sequence"] = number(row, "seq_len")
    if fused:
        asked["attention"] = "operator"
    known = {field.name for field in fields(config)}
    config = replace(config, **{name: value for name, value in asked.items() if name in known})
    if not isinstance(config, DecoderConfig):
        return config
    runs = config.runs
    if one_scan and len(runs) > 1:
        most = max(runs, key=lambda run: run.layers)
        runs = (Run(pattern=most.pattern, repeats=config.layers // len(most.pattern)),)

    def layer_as_run(layer: decoder.Layer) -> decoder.Layer:
        inner = layer.feed_forward
        return replace(layer, feed_forward=dealt(inner)) if isinstance(inner, Mixture) else layer

    runs = tuple(replace(run, pattern=tuple(layer_as_run(layer) for layer in run.pattern)) for run in runs)
    return replace(config, runs=runs)


def widest(config: Any) -> int:
    """Elements of the widest tensor for each position of a sample, or each feature of a layer."""
    if isinstance(config, DecoderConfig):
        widths = [layer.attention.heads * config.sequence for layer in config.kinds]
        for layer in config.kinds:
            inner = layer.feed_forward
            each = inner.experts * inner.intermediate if isinstance(inner, Mixture) else inner.intermediate
            widths.append(each)
        return max(config.vocabulary, config.hidden, *widths)
    if isinstance(config, (llama.LlamaConfig, t5.T5Config)):
        return max(config.heads * config.sequence, config.vocabulary, config.hidden, config.intermediate)
    if isinstance(config, mamba.MambaConfig):
        return max(config.expand * config.hidden * config.states, config.vocabulary)
    if isinstance(config, (vit.ViTConfig, dit.DiTConfig)):
        return config.heads * (config.image_size // config.patch) ** 2 + 4 * config.hidden
    return max(config.heads * config.sequence, config.vocabulary, config.hidden, config.intermediate or 0)
