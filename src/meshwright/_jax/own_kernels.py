"""`meshwright.kernel`: a function of the user's as one operator of a plan, with the rule by which it may be split."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import PlanError
from .jaxpr import Equation


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AsGiven:
    """A partition function of `custom_partitioning` that runs a function on blocks as they are, and sums its results
    over the axes that split only operands.

    Args:
      function: of arrays.
      sums: whether it sums over dims that are in no result.
      flops: of one call, or a function of its operands that says them; None for what its program has.
    """

    function: Callable[..., Any]
    sums: bool
    flops: float | Callable[..., float] | None

    def __call__(self, mesh: Any, operands: Sequence[Any], results: Any) -> Any:
        """As `custom_partitioning` asks for it."""
        made = {axis for one in jax.tree.leaves(results) for axis in _axes(one)}
        alone = tuple(dict.fromkeys(axis for one in operands for axis in _axes(one) if axis not in made))
        summed = alone if self.sums else ()

        def on_blocks(*blocks: Any) -> Any:
            found = self.function(*blocks)
            return jax.tree.map(lambda one: lax.psum(one, summed), found) if summed else found

        # What is in no result and not summed over is whole, however it comes.
        layouts = tuple(_without(one.sharding, () if self.sums else alone) for one in operands)
        return mesh, on_blocks, jax.tree.map(lambda one: one.sharding, results), layouts


def _without(sharding: Any, axes: Sequence[str]) -> Any:
    """A layout that does not split over some axes."""
    if not axes:
        return sharding
    dims = (dim if isinstance(dim, tuple) else (dim,) for dim in sharding.spec)
    kept = (tuple(axis for axis in dim if axis is not None and axis not in axes) for dim in dims)
    return NamedSharding(sharding.mesh, PartitionSpec(*(dim or None for dim in kept)))


def _axes(array: Any) -> list[str]:
    dims = (dim if isinstance(dim, tuple) else (dim,) for dim in array.sharding.spec if dim is not None)
    return [axis for dim in dims for axis in dim]


def kernel(
    function: Callable[..., Any], rule: Any, *, sums: Sequence[str] = (),
    flops: float | Callable[..., float] | None = None, backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """A function as one operator of a plan, which is split by a rule and run on blocks.

    What is inside is not looked at: a Pallas kernel, a call of a library by `jax.ffi`, anything. That it may be split
    so is for the caller to know: run on blocks of its operands it has to give the blocks of its results.

    >>> double = kernel(lambda x: 2 * x, "rows columns -> rows columns")
    >>> double(jax.numpy.ones((2, 2))).tolist()
    [[2.0, 2.0], [2.0, 2.0]]

    Args:
      function: of arrays, by position, to an array or several.
      rule: how dims of operands and results relate, in Shardy's notation: dims of one name are split alike, and those
        that stand in an operand alone are whole unless `sums` has them. "b q h d, b k h d -> b q h d".
      sums: dims of operands over which the function sums: where they are split, its results are summed over devices.
      flops: of a call, for its price: a number, or a function of its operands (arrays without numbers). None for those
        of what the function does.
      backward: `(operands, cotangent of the results) -> cotangent of each operand`. Kernels in it have rules of their
        own. None for a function that is not differentiated: JAX looks into a kernel no more than a plan does.

    Raises:
      PlanError: for a rule that is none.
    """
    split = custom_partitioning(function)
    try:
        split.def_partition(
            partition=AsGiven(function, bool(sums), flops), sharding_rule=rule, reduction_factors=tuple(sums),
            need_replication_factors=_whole(rule, sums),
        )  # fmt: skip
    except ValueError as error:
        raise PlanError(
            refused="the rule of a kernel", got=repr(rule), needed=f"Shardy's notation ({error})", where="rule=",
            try_='"b h d, b k d -> b h k"',
        ) from error  # fmt: skip
    if backward is None:
        return split
    own = backward

    @jax.custom_vjp
    def differentiable(*operands: Any) -> Any:
        return split(*operands)

    differentiable.defvjp(lambda *operands: (split(*operands), operands), lambda kept, cotangent: own(kept, cotangent))
    return differentiable


def _whole(rule: Any, sums: Sequence[str]) -> tuple[str, ...]:
    """Of a rule in words the dims that are in no result and not summed over: these are not split."""
    if not isinstance(rule, str) or "->" not in rule:
        return ()
    operands, results = (set(re.findall(r"[A-Za-z]\w*", side)) for side in rule.split("->", 1))
    return tuple(sorted(operands - results - set(sums)))


def said_flops(equation: Equation) -> float | None:
    """The FLOPs that a `custom_partitioning` call is said to have; None where nobody says so."""
    partition = equation.params["partition"]
    if not isinstance(partition, AsGiven) or partition.flops is None:
        return None
    if not callable(partition.flops):
        return float(partition.flops)
    operands = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
    return float(partition.flops(*equation.params["in_tree"].unflatten(operands)))
