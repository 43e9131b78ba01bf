"""Reference models by name.

Each family's module offers `CONFIGS`, frozen shapes by name, `SOURCE`, where they are from, and
`build(config, optimizer=, remat=)`.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from . import (
    bert,
    deepseek,
    dit,
    gemma,
    gpt,
    gpt_oss,
    llama,
    llama4,
    mamba,
    mixtral,
    moe,
    perceptron,
    qwen,
    t5,
    unet,
    vit,
    wide_resnet,
)
from .layers import Attention
from .train import Optimizer, Target

FAMILIES: tuple[Any, ...] = (
    bert, deepseek, dit, gemma, gpt, gpt_oss, llama, llama4, mamba, mixtral, moe, perceptron, qwen, t5, unet, vit,
    wide_resnet,
)  # fmt: skip
_ENTRIES: dict[str, tuple[Any, Any]] = {
    name: (family, config) for family in FAMILIES for name, config in family.CONFIGS.items()
}

_SETTINGS = ("global_batch", "sequence", "dtype", "attention")


def names() -> tuple[str, ...]:
    """All names that `build` takes, sorted.

    >>> "gpt3-1.3b" in names()
    True
    """
    return tuple(sorted(_ENTRIES))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a reference model is, in a line.

    Attributes:
        name: that `build` takes.
        family: of models like it.
        parameters: number of trained scalars.
        flops: model FLOPs, forward and backward, of a `unit`.
        unit: "token", of a text as long as the model's samples are by default, or "sample".
        source: where its shape is from.
    """

    name: str
    family: str
    parameters: int
    flops: float
    unit: str
    source: str


def entries() -> tuple[Entry, ...]:
    """Every reference model, by family and size.

    >>> next(entry.parameters for entry in entries() if entry.name == "llama3-8b")
    8030261248
    """
    found = []
    for name, (family, config) in _ENTRIES.items():
        target = family.build(config)
        texts = [target.example_batch[key] for key in ("tokens", "previous") if key in target.example_batch]
        tokens = sum(text.shape[1] for text in texts)
        entry = Entry(
            name=name, family=target.family, parameters=target.parameters, source=family.SOURCE,
            flops=target.model_flops_per_sample / (tokens or 1), unit="token" if tokens else "sample",
        )  # fmt: skip
        found.append(entry)
    return tuple(sorted(found, key=lambda entry: (entry.family, entry.parameters, entry.name)))


def settings(name: str) -> dict[str, Any]:
    """What `build` may be told of a model, as it is by default.

    >>> settings("gpt3-125m")["sequence"], "attention" in settings("wresnet-250m")
    (1024, False)

    Args:
        name: one of `names()`.
    """
    _, config = _ENTRIES[name]
    return {field: getattr(config, field) for field in _SETTINGS if hasattr(config, field)}


def build(
    name: str,
    *,
    global_batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    optimizer: Optimizer | None = None,
    remat: bool = False,
    attention: Attention | None = None,
) -> Target:
    """The reference model of this name, abstract: no array is made, so the largest cost no more than the smallest.

    Args:
        name: one of `names()`.
        global_batch: samples a step; the literature's by default.
        sequence: tokens a sample; only for families that have one.
        dtype: of the activations ("float32", "bfloat16", "float16"); parameters stay float32.
        optimizer: "adam", "adamw" or "sgd"; None for what the family is trained with (Wide-ResNet: sgd, others: adam).
        remat: recompute each layer (block) in the backward pass.
        attention: how it is computed; only for families that have several ways.

    Raises:
        KeyError: no model of this name; the message names the nearest.
        ValueError: the model has no such dim, or the sizes do not divide.

    >>> build("gpt3-125m", global_batch=8).example_batch["tokens"].shape
    (8, 1024)
    """
    if name not in _ENTRIES:
        near = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.4)
        raise KeyError(
            f"refused to build a model: got the name {name!r}, needed one of the {len(_ENTRIES)} in zoo.names(); "
            f"try {' or '.join(repr(n) for n in near) if near else repr('gpt-tiny')}"
        )
    family, config = _ENTRIES[name]
    asked = {"global_batch": global_batch, "sequence": sequence, "dtype": dtype, "attention": attention}
    changes = {key: value for key, value in asked.items() if value is not None}
    known = {field.name for field in dataclasses.fields(config)}
    for key, value in changes.items():
        if key not in known:
            raise ValueError(
                f"refused to build {name!r}: got {key}={value!r}, needed a model whose {key} can be set; "
                f"try without {key}="
            )
    # Each family's own default stands where none is named.
    named = {} if optimizer is None else {"optimizer": optimizer}
    return family.build(dataclasses.replace(config, **changes), remat=remat, **named)
