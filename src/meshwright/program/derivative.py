"""Which values carry a cotangent: those between a differentiated input and the loss along a differentiable path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Results of these never depend smoothly on their operands.
_CUTS = frozenset(
    [
        "stop_gradient",
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
        "sign",
        "floor",
        "ceil",
        "round",
        "is_finite",
        "argmax",
        "argmin",
        "iota",
        "random_bits",
        "shift_left",
        "shift_right_logical",
        "shift_right_arithmetic",
        "and",
        "or",
        "not",
        "xor",
        "population_count",
        "clz",
        "reduce_and",
        "reduce_or",
        "nextafter",
    ]
)


def is_cut(primitive: str) -> bool:
    """Whether no cotangent passes through the primitive."""
    return primitive in _CUTS


def cotangents(
    operators: Iterable[tuple[str, Sequence[int], Sequence[int]]],
    smooth: Sequence[bool],
    sources: Iterable[int],
    sinks: Iterable[int],
) -> list[bool]:
    """For each value, whether a cotangent reaches it.

    Args:
      operators: (primitive, operand values, result values), in any order (scans make cycles).
      smooth: for each value, whether its dtype is inexact.
      sources: differentiated inputs.
      sinks: the loss.
    """
    links = [(list(ops), list(results)) for name, ops, results in operators if not is_cut(name)]
    down = _reach(links, smooth, sources)
    up = _reach([(results, ops) for ops, results in links], smooth, sinks)
    return [a and b for a, b in zip(down, up, strict=True)]


def _reach(links: list[tuple[list[int], list[int]]], smooth: Sequence[bool], start: Iterable[int]) -> list[bool]:
    heads: dict[int, list[int]] = {}
    for position, (tails, _) in enumerate(links):
        for value in tails:
            heads.setdefault(value, []).append(position)
    seen = [False] * len(smooth)
    stack = [value for value in start if smooth[value]]
    for value in stack:
        seen[value] = True
    while stack:
        for position in heads.get(stack.pop(), ()):
            for value in links[position][1]:
                if smooth[value] and not seen[value]:
                    seen[value] = True
                    stack.append(value)
    return seen
