"""Kernels as operators of a plan: those that declare a sharding rule (`jax.experimental.custom_partitioning`), Pallas
kernels, whose rule follows from their grid (`_jax.pallas`), `meshwright.attention` (`program.attention`), cuDNN's
attention (`_jax.cudnn`) and products of groups of rows (`program.ragged`).

Of a declared rule a factor may be split where the kernel's partition function takes and makes the blocks that the rule
says, and sends nothing itself: the plan prices and issues all communication. A *reduction* may be split where what a
device runs ends in a sum over its axes: that sum is left out, and the result is partial, as that of a matrix product.
Factors that need replication, permutations, and those that the partition function handles in another way are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from .._jax.attention import is_attention
from .._jax.cudnn import BACKWARD, is_cudnn_attention
from .._jax.jaxpr import Equation, bind, evaluate, source_line
from .._jax.pallas import GridDim, grid_of, is_pallas_call, on_blocks
from .._jax.partitioned import Layout, NotPartitioned, declared_rule, is_partitioned_kernel, partitioned
from .._jax.shardy import Lowered, LoweredOp
from ..errors import PlanError
from .attention import attention_rule
from .factors import Composer, Dims, Rule, compose, whole_rule
from .ragged import is_ragged, ragged_rule
from .split import Split


def is_kernel(equation: Equation) -> bool:
    """Whether an equation is a kernel that says how it may be split."""
    kinds = is_partitioned_kernel, is_pallas_call, is_cudnn_attention, is_attention, is_ragged
    return any(is_one(equation) for is_one in kinds)


def kernel_rule(equation: Equation) -> tuple[Rule, str]:
    """The rule of a kernel, with every factor whole that cannot be split, and why the last of these cannot.

    Args:
      equation: of which `is_kernel` says that it is one.
    """
    if is_pallas_call(equation):
        return _grid_rule(equation)
    if is_attention(equation):
        return attention_rule(equation), "it has one batch, one head and one position"
    if is_ragged(equation):
        return ragged_rule(equation)
    return _attention_rule(equation) if is_cudnn_attention(equation) else _declared(equation)


def _grid_rule(equation: Equation) -> tuple[Rule, str]:
    """Of a Pallas kernel: an axis of its grid is a factor, blocks are whole."""
    grid, composer = grid_of(equation), Composer()
    axes = {axis: composer.atom(size) for axis, size in grid.sizes.items()}

    def tensor(shape: Sequence[int], dims: Sequence[GridDim | None]) -> list[list[int]]:
        found = composer.tensor(shape)
        for dim, along in zip(found, dims, strict=True):
            if along is None:
                composer.mark(dim, "whole")
                continue
            blocks = composer.atom(grid.sizes[along.axis] // along.share)
            composer.unify(dim, [blocks, composer.atom(along.block, "whole")])
            composer.unify([axes[along.axis]], [blocks, composer.atom(along.share, "whole")])
        return found

    operands = [tensor(atom.aval.shape, dims) for atom, dims in zip(equation.invars, grid.operands, strict=True)]
    results = [tensor(var.aval.shape, dims) for var, dims in zip(equation.outvars, grid.results, strict=True)]
    return composer.rule(operands, results), grid.why


# Dims of the operands of cuDNN's attention: batch, query positions, heads, size, key positions, key heads. Others are
# offsets and pages, of which those that are not used have no elements.
_QUERY, _KEY, _BIAS, _LENGTHS, _SUMS = "bqhs", "bkgs", "bhqk", "b", "bhq"


def _attention_rule(equation: Equation) -> tuple[Rule, str]:
    """Of cuDNN's attention: batch and heads are factors, heads that share a key head as one."""
    params = equation.params
    query, key, bias = (atom.aval.shape for atom in (equation.invars[0], equation.invars[1], equation.invars[3]))
    turned = params["layout"] == 1  # [batch, heads, positions, size]
    order = (lambda dims: dims[0] + dims[2] + dims[1] + dims[3]) if turned else lambda dims: dims
    heads, key_heads = (shape[1 if turned else 2] for shape in (query, key))
    backward = equation.primitive.name == BACKWARD
    tensors = [order(_QUERY), order(_KEY), order(_KEY), _BIAS, _LENGTHS, _LENGTHS, *("." * 4)]
    results = [order(_QUERY), *([order(_KEY)] * 2 if backward else [_SUMS] * params["is_training"])]
    if backward:
        tensors += [_SUMS, order(_QUERY), order(_QUERY)]
        results += [_BIAS] * (len(equation.outvars) - 3)
    shapes = [atom.aval.shape for atom in (*equation.invars, *equation.outvars)]
    why = ""
    if any(prod(shape) for shape in shapes[6:10]):
        why = "its sequences are packed or in pages"
    elif params["dropout_rate"] > 0:
        why = "its dropout draws numbers by place"
    if why:
        return whole_rule(shapes[: len(equation.invars)], shapes[len(equation.invars) :]), why
    composer = Composer()
    named = {"b": composer.atom(query[0]), "g": composer.atom(key_heads), "h": composer.atom(heads)}
    # Keys and values have the same positions: by that a call that holds it is known to be attention.
    named["k"] = composer.atom(key[2 if turned else 1], "whole")
    composer.unify([named["h"]], [named["g"], composer.atom(heads // key_heads, "whole")])
    if backward and len(results) > 3:  # the gradient of what all of them share is a sum over them
        for letter, size in zip("bh", bias, strict=False):
            if size == 1:
                composer.mark([named[letter]], "whole")

    def tensor(shape: Sequence[int], letters: str) -> list[list[int]]:
        found = composer.tensor(shape)
        letters = letters if len(letters) == len(shape) else "." * len(shape)  # it is not given, and has no elements
        for dim, size, letter in zip(found, shape, letters, strict=True):
            if letter in named and size > 1:
                composer.unify(dim, [named[letter]])
            else:
                composer.mark(dim, "whole")
        return found

    made = [tensor(*one) for one in zip(shapes, [*tensors, *results], strict=True)]
    count = len(equation.invars)
    return composer.rule(made[:count], made[count:]), "it has one batch and one head"


def evaluate_on_blocks(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of a kernel that is the same on blocks."""
    del split
    return bind(equation, *operands)


def evaluate_grid(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """A Pallas kernel's results on one device's blocks."""
    pieces = {
        along.axis: split.blocks(dim)
        for tensor, dims in zip(split.rule.results, grid_of(equation).results, strict=True)
        for dim, along in zip(tensor, dims, strict=True)
        if along is not None
    }
    return on_blocks(equation, pieces, operands)


def _declared(equation: Equation) -> tuple[Rule, str]:
    operands = [tuple(atom.aval.shape) for atom in equation.invars]
    results = [tuple(var.aval.shape) for var in equation.outvars]
    try:
        declared = declared_rule(equation)
    except NotPartitioned as error:
        return whole_rule(operands, results), str(error)
    shapes = dict(enumerate([*operands, *results]))
    numbers = tuple(shapes)
    first, last = numbers[: len(operands)], numbers[len(operands) :]
    op = LoweredOp(name="custom_partitioning", operands=first, results=last, rule=declared)
    rule = compose(Lowered(operands=first, results=last, ops=(op,), shapes=shapes), operands)
    made = {factor for tensor in rule.results for dim in tensor for factor in dim}
    why = "its sharding rule lets no dim be split"
    # One axis for each factor that can be split, alone and together with those before it.
    axes: list[tuple[str, ...]] = [()] * len(rule.factors)
    sizes: dict[str, int] = {}
    for index in rule.splittable:
        factor, axis = rule.factors[index], f"axis{index}"
        # A permutation moves data between blocks; what is no reduction and not in the result is one all the same.
        if factor.kind == "spatial" or (factor.kind == "parallel" and index not in made):
            continue
        pieces = next((n for n in (2, 3, 5, 7) if factor.size % n == 0), factor.size)
        alone = [(axis,) if other == index else () for other in range(len(axes))]
        together = [(axis,) if other == index else those for other, those in enumerate(axes)]
        try:
            _function(equation, rule, alone, {axis: pieces})
            _function(equation, rule, together, {**sizes, axis: pieces})
        except NotPartitioned as error:
            why = str(error)
            continue
        axes, sizes = together, {**sizes, axis: pieces}
    return rule.with_whole([index for index in rule.splittable if not axes[index]]), why


def evaluate_kernel(equation: Equation, split: Split, operands: Sequence[Any]) -> Sequence[Any]:
    """A kernel's results on one device's blocks.

    Raises:
      PlanError: if its partition function will not have the blocks of the plan.
    """
    try:
        closed = _function(equation, split.rule, split.axes, split.sizes)
    except NotPartitioned as error:
        shown = ", ".join(f"{axis}={size}" for axis, size in split.sizes.items())
        raise PlanError(
            refused="a kernel on blocks", got=f"over {shown}: {error}",
            needed="a partition function that has the blocks of its sharding rule", where=source_line(equation),
            try_="marking its dims by need_replication_factors= of def_partition, or a mesh of one axis",
        ) from error  # fmt: skip
    return evaluate(closed, *operands)


def _function(equation: Equation, rule: Rule, axes: Sequence[tuple[str, ...]], sizes: Mapping[str, int]) -> Any:
    def layouts(tensors: Sequence[Dims]) -> list[Layout]:
        return [[next((axes[f] for f in dim if axes[f]), ()) for dim in tensor] for tensor in tensors]

    summed = frozenset(a for f, those in zip(rule.factors, axes, strict=True) if f.kind == "reduction" for a in those)
    return partitioned(equation, layouts(rule.operands), layouts(rule.results), sizes, summed)
