"""`meshwright.attention` as an operator: its rule, and its evaluation on the blocks of one device.

Batch, key heads and the heads of each are split freely. Query positions are split with all keys and values at hand
(*gathered keys*), or together with the key positions, whose blocks then circulate (*ring attention*). Under a causal
mask each block is two chunks (`_jax.attention_ring`), so that positions are split into blocks of an even extent. The
backward pass as an operator of its own (of a program that is differentiated by itself) is split over batch and key
heads: gradients of keys sum over all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .._jax.attention import BACKWARD, FORWARD, Options, tensors_of
from .._jax.attention_ring import Ring
from .._jax.jaxpr import Equation, bind
from .factors import Composer, Rule
from .split import Split, mesh_order

# What is split where it may be: batch, key heads, heads of each, query positions, key positions.
_SPLIT = "bkgqt"


def attention_rule(equation: Equation) -> Rule:
    """The rule of attention, or of a part of its derivative."""
    composer = Composer()
    given, made = tensors_of(equation)
    options: Options = equation.params["options"]
    mask, name = options.mask, equation.primitive.name
    sizes = {
        letter: size
        for letters, atom in zip((*given, *made), (*equation.invars, *equation.outvars), strict=True)
        for letter, size in zip(letters, atom.aval.shape, strict=True)
    }
    split = set(_SPLIT if name == FORWARD else "bkg")
    if name == BACKWARD:
        split -= set("bg" if options.sinks else "g")
    if mask.causal and sizes["q"] != sizes["t"]:
        split -= set("qt")
    atoms = {letter: composer.atom(size, "parallel" if letter in split else "whole") for letter, size in sizes.items()}
    rule = composer.rule(*([[[atoms[letter]] for letter in letters] for letters in side] for side in (given, made)))
    if name != FORWARD or "t" not in split:
        return rule
    factors = list(rule.factors)
    # The first operand is the queries, the second the keys.
    queries, keys = rule.operands[0][1][0], rule.operands[1][1][0]
    granule = 2 if mask.causal and mask.window is None else 1
    factors[queries] = replace(factors[queries], granule=granule)
    before = 0 if mask.window is None else mask.window - 1
    factors[keys] = replace(
        factors[keys], kind="circulating", granule=granule, with_factor=queries, halo=(before, 0)
    )  # fmt: skip
    return Rule(rule.operands, rule.results, tuple(factors))


def evaluate_attention(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """Attention on one device's blocks."""
    (queries,), (keys,) = split.rule.operands[0][1], split.rule.operands[1][1]
    axes = split.axes[queries]
    if not axes:
        return bind(equation, *operands)
    ring = Ring(axes, mesh_order(axes), tuple(split.sizes[axis] for axis in axes), bool(split.axes[keys]))
    options = equation.params["options"]._replace(ring=ring)
    return bind(equation.replace(params={**equation.params, "options": options}), *operands)
