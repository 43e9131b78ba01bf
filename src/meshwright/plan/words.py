"""Layouts in words, and many names in one: shared by whatever shows a plan to a person."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

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


def microbatches_words(count: int) -> str:
    """A number of microbatches.

    >>> microbatches_words(1), microbatches_words(8)
    ('1 microbatch', '8 microbatches')
    """
    return "1 microbatch" if count == 1 else f"{count} microbatches"


def number_words(numbers: Iterable[int]) -> str:
    """Stages, counted from 0, as a reader counts them: from 1, neighbours together.

    >>> number_words([0, 1, 2, 5]), number_words([1, 3, 5, 7])
    ('1 to 3, 6', 'every second of 2 to 8')
    """
    runs = number_runs(sorted(numbers))
    single = all(stop - first == 1 for first, stop in runs)
    if len(runs) > 3 and single and {after[0] - before[0] for before, after in pairwise(runs)} == {2}:
        return f"every second of {runs[0][0] + 1} to {runs[-1][0] + 1}"
    return ", ".join(range_words((first + 1, stop + 1)) for first, stop in runs)


def number_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as (first, stop) of runs in which each is the one before plus 1, in the order given.

    >>> number_runs([4, 5, 6, 0, 1])
    [(4, 7), (0, 2)]
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1]:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def range_words(bounds: tuple[int, int]) -> str:
    """The numbers of a range, its stop excluded.

    >>> range_words((4, 8)), range_words((4, 5))
    ('4 to 7', '4')
    """
    first, stop = bounds
    return str(first) if stop == first + 1 else f"{first} to {stop - 1}"


def stage_words(numbers: Sequence[int], noun: str = "stage") -> str:
    """Stages by their numbers, counted from 0.

    >>> stage_words([0]), stage_words([1, 2, 3])
    ('stage 1', 'stages 2 to 4')
    """
    return f"{noun}{'' if len(numbers) == 1 else 's'} {number_words(numbers)}"


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
