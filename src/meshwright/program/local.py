"""One equation evaluated on the shards of one device, inside a manual `shard_map`.

`restrict` says which factors of an equation can be split this way, `evaluate_local` does it. Most primitives are
*shape-free*: bound to shards with unchanged parameters they give the shards of the result. Those whose parameters hold
shapes or positions are rewritten here, one function each. An unknown primitive is tried on small shapes: if it gives
what its factor rule says, it is shape-free too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax import attention
from .._jax.cudnn import BACKWARD, FORWARD
from .._jax.jaxpr import Equation, bind, open_jaxpr, result_avals
from .._jax.random import is_key, random_bits_at, split_at
from .._jax.sorted_rows import NAME as SORTED_ROWS
from .attention import evaluate_attention
from .factors import Dims, Rule, factors_of
from .groups import group_factor
from .halo import POOLS, spatial_rule, windowed
from .indexed import gather, gather_whole, scatter, scatter_whole
from .kernels import evaluate_grid, evaluate_kernel, evaluate_on_blocks
from .microbatch_rows import rows_in_batch
from .ragged import evaluate_ragged
from .sorted_rule import evaluate_sorted
from .split import Split

# Reductions whose partial results combine by one collective.
COMBINE: Mapping[str, str] = {
    "reduce_sum": "sum",
    "dot_general": "sum",
    "conv_general_dilated": "sum",
    "custom_partitioning": "sum",
    "ragged_dot_general": "sum",
    SORTED_ROWS: "sum",
    "gather": "sum",
    "scatter-add": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "max",
    "reduce_and": "min",
}

Evaluator = Callable[[Equation, Split, Sequence[Any]], Sequence[Any]]


def _result_shape(equation: Equation, split: Split) -> tuple[int, ...]:
    return split.local_shape(equation.outvars[0].aval.shape, split.rule.results[0])


def _broadcast_in_dim(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    shape = _result_shape(equation, split)
    return (lax.broadcast_in_dim(operands[0], shape, equation.params["broadcast_dimensions"]),)


def _reshape(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    return (lax.reshape(operands[0], _result_shape(equation, split), equation.params["dimensions"]),)


def _iota(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    del operands
    aval, along = equation.outvars[0].aval, equation.params["dimension"]
    shape = _result_shape(equation, split)
    whole = equation.params.get("whole", aval.shape)[along]
    at = slice(along, along + 1)
    own = equation.params.get("unpadded", aval.shape)[at]
    (indices,) = _positions(split, aval.shape[at], (whole,), split.rule.results[0][at], own)
    return (lax.broadcast_in_dim(indices.astype(aval.dtype), shape, (along,)),)


def _slice(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    params = equation.params
    limits = [
        limit // split.blocks(dim) for limit, dim in zip(params["limit_indices"], split.rule.operands[0], strict=True)
    ]
    return (lax.slice(operands[0], params["start_indices"], limits, params["strides"]),)


def _dynamic_slice(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    return (lax.dynamic_slice(operands[0], operands[1:], _result_shape(equation, split)),)


def _random_bits(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    shape, (keys,) = equation.params["shape"], operands
    whole = equation.params.get("whole", shape)
    own = equation.params.get("unpadded", shape)
    positions = _positions(split, shape, whole, split.rule.results[0][keys.ndim :], own)
    return (random_bits_at(keys, equation.params["bit_width"], whole, positions),)


def _random_split(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    shape, (keys,) = equation.params["shape"], operands
    whole = equation.params.get("whole", shape)
    own = equation.params.get("unpadded", shape)
    return (split_at(keys, whole, _positions(split, shape, whole, split.rule.results[0][keys.ndim :], own)),)


def _positions(
    split: Split, shape: Sequence[int], whole: Sequence[int], dims: Dims, unpadded: Sequence[int]
) -> list[Any]:
    """For each dim of a draw the indices of this device's block, in the whole batch; the dim may be padded."""
    found = []
    for extent, of_all, dim, own in zip(shape, whole, dims, unpadded, strict=True):
        indices = jnp.arange(extent // split.blocks(dim), dtype=jnp.uint32)
        if split.dim_axes(dim):
            indices = indices + split.offset(extent, dim).astype(jnp.uint32)
        found.append(indices if own == of_all else rows_in_batch(indices, own, of_all))
    return found


def _sorted_rows(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    return evaluate_sorted(equation, split, operands, evaluate_local)


def _pad(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """`pad`, whose result may be split along a dim that is padded at its end: a block is cut out of the operand, which
    has all of that dim, and only the block is padded."""
    x, value = operands
    config, shape = list(equation.params["padding_config"]), equation.outvars[0].aval.shape
    for d, dim in enumerate(split.rule.results[0]):
        block, have = shape[d] // split.blocks(dim), x.shape[d]
        if not split.dim_axes(dim) or not any(config[d]):
            continue
        config[d] = (0, 0, 0)
        if block > have:  # most blocks are padding
            x = lax.pad(x, value, [(0, (shape[d] - have) * (e == d), 0) for e in range(x.ndim)])
            x = lax.dynamic_slice_in_dim(x, split.offset(shape[d], dim), block, d)
            continue
        # A block that begins near the end, or behind it, is cut out as far as there is something, and then shifted.
        start = split.offset(shape[d], dim)
        first = jnp.minimum(start, have - block)
        x = lax.dynamic_slice_in_dim(x, first, block, d)
        x = lax.pad(x, value, [(0, block * (e == d), 0) for e in range(x.ndim)])
        x = lax.dynamic_slice_in_dim(x, jnp.minimum(start - first, block), block, d)
    return (lax.pad(x, value, config),)


_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
_WINDOWED = ("conv_general_dilated", *POOLS)
_EVALUATORS: Mapping[str, Evaluator] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "custom_partitioning": evaluate_kernel,
    "pallas_call": evaluate_grid,
    **dict.fromkeys((FORWARD, BACKWARD, attention.TANGENT, attention.BACKWARD), evaluate_on_blocks),
    attention.FORWARD: evaluate_attention,
    "reshape": _reshape,
    "iota": _iota,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "pad": _pad,
    "random_bits": _random_bits,
    "random_split": _random_split,
    "gather": gather,
    "ragged_dot_general": evaluate_ragged,
    SORTED_ROWS: _sorted_rows,
    **dict.fromkeys(_SCATTERS, scatter),
    **dict.fromkeys(_WINDOWED, windowed),
}
_COMBINERS = {"max": lax.pmax, "min": lax.pmin}


def overflows(equation: Equation) -> bool:
    """Whether numbers are converted to a type of smaller ones: parts of a sum may not fit where the sum does."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if not jnp.issubdtype(before, jnp.inexact):
        return False
    return not jnp.issubdtype(after, jnp.inexact) or float(jnp.finfo(after).max) < 0.9 * float(jnp.finfo(before).max)


def evaluate_local(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of `equation` on this device's shards.

    Results of a sum are left partial; a maximum or minimum is combined at once, since no later collective could.
    """
    if not any(split.axes) and "whole" not in equation.params:
        return bind(equation, *operands)
    name = equation.primitive.name
    combine = COMBINE.get(name)
    axes = split.reduced_axes()
    if axes and combine in _COMBINERS:
        # Only undifferentiated maxima are split (`restrict`); JAX has no derivative for their collective.
        operands = [lax.stop_gradient(x) for x in operands]
    evaluator = _EVALUATORS.get(name)
    results = evaluator(equation, split, operands) if evaluator else bind(equation, *operands)
    if axes and combine in _COMBINERS:
        results = [_COMBINERS[combine](r.astype(_counted(r)), axes).astype(r.dtype) for r in results]
    return results


def _counted(x: Any) -> Any:
    """The dtype to combine `x` in: collectives have no truth values."""
    return jnp.uint8 if x.dtype == bool else x.dtype


def _update_whole(equation: Equation, rule: Rule) -> set[int]:
    have, put = (atom.aval.shape for atom in equation.invars[:2])
    return {f for h, p, dim in zip(have, put, rule.operands[0], strict=True) if h != p for f in dim}


def _reshape_whole(equation: Equation, rule: Rule) -> set[int]:
    """Dims that Shardy cannot relate (a reshape of 4 x 3 to 3 x 2 x 2)."""
    del equation
    return factors_of(rule.operands) ^ factors_of(rule.results)


def _convolution_whole(equation: Equation, rule: Rule) -> set[int]:
    params = equation.params
    numbers = params["dimension_numbers"]
    whole: set[int] = set()
    # A kernel as large as its operand makes Shardy see a matrix product; it is one only if nothing slides.
    for d, out, pads in zip(numbers.rhs_spec[2:], numbers.out_spec[2:], params["padding"], strict=True):
        if equation.outvars[0].aval.shape[out] != 1 or any(pads):
            whole.update(rule.operands[1][d])
    return whole


_WHOLE: Mapping[str, Callable[[Equation, Rule], set[int]]] = {
    "conv_general_dilated": _convolution_whole,
    "dynamic_update_slice": _update_whole,
    "gather": gather_whole,
    "reshape": _reshape_whole,
    **dict.fromkeys(_SCATTERS, scatter_whole),
}


# Operators on elements: of blocks of any shape they give a block of that shape, and nobody has to try.
ON_ELEMENTS = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma pow
    random_gamma_grad reduce_precision regularized_incomplete_beta rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta""".split()  # noqa: SIM905 (a table, not a column)
)


def restrict(equation: Equation, rule: Rule, *, differentiated: bool) -> Rule:
    """`rule` with every factor made whole that `evaluate_local` cannot split.

    Args:
      equation: an equation of plain arrays (no nested jaxpr of its own).
      rule: its composed Shardy rule.
      differentiated: whether a cotangent passes through it.
    """
    name = equation.primitive.name
    rule = spatial_rule(equation, rule)
    whole: set[int] = set()
    combine = COMBINE.get(name)
    reductions = {index for index, factor in enumerate(rule.factors) if factor.kind == "reduction"}
    truths = any(var.aval.dtype == bool for var in equation.outvars)
    # Truth values have no sum, and bits of an integer no largest.
    combines = truths if name in ("reduce_or", "reduce_and") else combine in _COMBINERS or not truths
    if combine is None or not combines or (combine != "sum" and differentiated):
        whole |= reductions
    # What is not summed must come out: any other dim of an operand means more than its elements do.
    taken, made = factors_of(rule.operands), factors_of(rule.results)
    whole |= taken - made - reductions
    if _holds_programs_over_arrays(equation):
        whole |= taken | made
    shapes = [atom.aval.shape for atom in (*equation.invars, *equation.outvars)]
    for shape, dims in zip(shapes, (*rule.operands, *rule.results), strict=True):
        for extent, dim in zip(shape, dims, strict=True):
            if extent != prod(rule.factors[f].size for f in dim):
                whole.update(dim)  # a border or a window: the dim is not the factor's index
    if name in _WHOLE:
        whole |= _WHOLE[name](equation, rule)
    rule = rule.with_whole(sorted(whole))
    if name in _WINDOWED:
        known = group_factor(equation, rule)  # `windowed` changes the parameters to fit its blocks
        unsure = [f for f in rule.splittable if rule.factors[f].kind != "spatial" and f != known]
    else:
        unsure = rule.splittable if name not in _EVALUATORS and name not in ON_ELEMENTS else ()
    return rule.with_whole([f for f in unsure if not _is_shape_free(equation, rule, f)])


def _holds_programs_over_arrays(equation: Equation) -> bool:
    """Whether a parameter is a program traced for whole arrays (a reduction's or a sort's is over scalars)."""
    programs = [open_jaxpr(leaf) for leaf in jax.tree.leaves(dict(equation.params))]
    return any(v.aval.shape for p in programs if hasattr(p, "eqns") for v in (*p.constvars, *p.invars))


def _is_shape_free(equation: Equation, rule: Rule, factor: int) -> bool:
    """Whether the primitive, bound to blocks of one factor, gives results of the blocks' shapes."""
    size = rule.factors[factor].size
    pieces = next((p for p in (2, 3, 5, 7) if size % p == 0), size)

    def blocks(atoms: Sequence[Any], tensors: Sequence[Dims]) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(
                tuple(n // pieces if factor in dim else n for n, dim in zip(atom.aval.shape, dims, strict=True)),
                atom.aval.dtype,
            )
            for atom, dims in zip(atoms, tensors, strict=True)
        ]

    got = result_avals(equation, blocks(equation.invars, rule.operands))
    want = blocks(equation.outvars, rule.results)
    return got is not None and [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]


def has_keys(equation: Equation) -> bool:
    """Whether typed PRNG keys go in or out."""
    return any(is_key(atom.aval) for atom in (*equation.invars, *equation.outvars))
