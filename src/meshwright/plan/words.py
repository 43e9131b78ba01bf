"""Layouts in words, and many names in one: shared by whatever shows a plan to a person."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..sharding.spec import Spec
from .plan import ParameterPlan

_DIGITS = re.compile(r"\d+")


def name_pattern(name: str) -> str:
    """`name` with every number replaced by `*`: equal for the same parameter of different layers.

    >>> name_pattern("layers/10/mlp/w1")
    'layers/*/mlp/w*'
    """
    return _DIGITS.sub("*", name)


def common_name(names: Sequence[str]) -> str:
    """One name for several of the same `name_pattern`: the numbers that differ among them become `*`.

    >>> common_name(["layers/0/w1", "layers/1/w1"])
    'layers/*/w1'
    """
    numbers = zip(*(_DIGITS.findall(name) for name in names), strict=True)
    shown = iter([found[0] if len(set(found)) == 1 else "*" for found in numbers])
    return _DIGITS.sub(lambda _: next(shown), names[0])


def mesh_words(mesh: Iterable[tuple[str, int]]) -> str:
    """A logical mesh: `x=2 y=4`."""
    return " ".join(f"{name}={size}" for name, size in mesh) or "one device"


def split_words(spec: Spec) -> str:
    """What splits a value: `split x on dim 1`, or `whole`; the axes of one dim major first.

    >>> split_words(Spec(dims=(("x", "y"), (), ("z",))))
    'split x y on dim 0, z on dim 2'
    """
    parts = [f"{' '.join(axes)} on dim {dim}" for dim, axes in enumerate(spec.dims) if axes]
    return f"split {', '.join(parts)}" if parts else "whole"


def spec_words(spec: Spec) -> str:
    """A spec in full: its splits, the axes it is a sum over, and those its gradient is."""
    parts = [split_words(spec)]
    if spec.partial:
        parts.append(f"partial over {' '.join(sorted(spec.partial))}")
    if spec.broadcast:
        parts.append(f"gradient summed over {' '.join(sorted(spec.broadcast))}")
    return ", ".join(parts)


def optimizer_words(parameter: ParameterPlan) -> str:
    """How the optimizer state is split beyond its parameter: `over x on dim 0`, or "" where it is as the parameter."""
    use, storage = parameter.use, parameter.storage
    if storage == Spec(use.dims):
        return ""
    extends = all(after[: len(before)] == before for before, after in zip(use.dims, storage.dims, strict=True))
    if not extends or storage.partial or storage.broadcast:
        return spec_words(storage)
    added = [
        f"{' '.join(after[len(before) :])} on dim {dim}"
        for dim, (before, after) in enumerate(zip(use.dims, storage.dims, strict=True))
        if after != before
    ]
    return f"over {', '.join(added)}"
