"""Kernels that say how they may be split: `jax.experimental.custom_partitioning`.

Such a kernel comes with a *sharding rule*, how its dims relate (Shardy's notation), and a *partition function*, which
for operands laid out in a given way names the layouts it takes and makes and the function that one device runs. The
rule is read here as any other operator's; the device's function is traced for the blocks of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.core import extend_axis_env_nd  # 0.10 to 0.12
from jax._src.custom_partitioning_sharding_rule import (  # 0.10 to 0.12
    SdyShardingRule,
    sdy_sharding_rule_to_mlir,
    str_to_sdy_sharding_rule,
)
from jax._src.interpreters.mlir import dtype_to_ir_type, make_ir_context  # 0.10 to 0.12
from jax._src.lib.mlir import ir  # jaxlib's MLIR bindings; no public form up to 0.12
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .jaxpr import ClosedJaxpr, Equation, consts_of, inline, is_literal, open_jaxpr
from .shardy import OpRule, parse_rule

# Collectives: what of a device's function waits for other devices. `axis_index` does not.
_COLLECTIVES = frozenset(
    """psum psum2 psum_invariant pmax pmin ppermute pbroadcast all_gather all_gather_invariant all_gather_reduced
    reduce_scatter psum_scatter all_to_all ragged_all_to_all pgather""".split()  # noqa: SIM905 (a table, not a column)
)
_SUMS = ("psum", "psum2", "psum_invariant")

# For each dim of a tensor the mesh axes that split it, major first.
Layout = Sequence[Sequence[str]]


class NotPartitioned(Exception):
    """A kernel has no function for these blocks that the plan could run; the message says why, for people."""


def is_partitioned_kernel(equation: Equation) -> bool:
    """Whether an equation is a call of a `custom_partitioning` function."""
    return equation.primitive.name == "custom_partitioning"


def declared_rule(equation: Equation) -> OpRule:
    """The sharding rule that a kernel declares.

    Raises:
      NotPartitioned: if it declares none, or one that does not suit its shapes.
    """
    params = equation.params
    rule = params["sharding_rule"]
    if rule is None:
        raise NotPartitioned("it declares no sharding rule (sharding_rule= of def_partition)")
    try:
        with make_ir_context(), ir.Location.unknown():
            operands = [_tensor_type(atom.aval) for atom in equation.invars]
            results = [_tensor_type(var.aval) for var in equation.outvars]
            options: Mapping[str, Any] = {}
            if callable(rule):
                # As JAX calls it where no mesh is set: the plan's mesh is not known yet.
                rule = rule(*params["static_args"], Mesh(np.empty((), dtype=object), ()), operands, results)
                if isinstance(rule, (list, tuple)) and len(rule) == 2:
                    rule, options = rule
            if isinstance(rule, str):
                rule = str_to_sdy_sharding_rule(rule, **options)
            if not isinstance(rule, SdyShardingRule):
                raise NotPartitioned(f"its sharding rule is a {type(rule).__name__}")
            return parse_rule(str(sdy_sharding_rule_to_mlir(rule, operands, results)))
    except NotPartitioned:
        raise
    except Exception as error:  # of the user's callable, or JAX's refusal of the rule
        raise NotPartitioned(f"its sharding rule cannot be used ({type(error).__name__}: {error})") from error


def _tensor_type(aval: Any) -> Any:
    return ir.RankedTensorType.get(aval.shape, dtype_to_ir_type(aval.dtype))


def partitioned(
    equation: Equation, operands: Sequence[Layout], results: Sequence[Layout], sizes: Mapping[str, int],
    summed: frozenset[str] = frozenset(),
) -> ClosedJaxpr:  # fmt: skip
    """What one device runs of a kernel on its blocks. Sums over the axes of `summed` that end it are left out: its
    results are partial over these.

    Args:
      equation: a call of a `custom_partitioning` function.
      operands: the layout of each operand.
      results: the layout of each result.
      sizes: of the mesh axes.
      summed: axes that split dims that are summed over.

    Raises:
      NotPartitioned: if the partition function asks for other layouts, or communicates in another way.
    """
    params = equation.params
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    given = [_sharded(atom.aval, layout, mesh) for atom, layout in zip(equation.invars, operands, strict=True)]
    wanted = [_sharded(var.aval, layout, mesh) for var, layout in zip(equation.outvars, results, strict=True)]
    in_tree, out_tree = params["in_tree"], params["out_tree"]
    try:
        _, function, made, taken = params["partition"](
            *params["static_args"], mesh, in_tree.unflatten(given), out_tree.unflatten(wanted)
        )
        _check_layouts("takes", given, in_tree.flatten_up_to(taken))
        _check_layouts("makes", wanted, out_tree.flatten_up_to(made))
        blocks = [jax.ShapeDtypeStruct(one.sharding.shard_shape(one.shape), one.dtype) for one in given]
        with extend_axis_env_nd(list(sizes.items())):
            closed = inline(jax.make_jaxpr(function)(*in_tree.unflatten(blocks)))
    except NotPartitioned:
        raise
    except Exception as error:  # whatever the user's function raises
        raise NotPartitioned(f"its partition function failed ({type(error).__name__}: {error})") from error
    closed = _without_sums(closed, summed)
    if _communicates(open_jaxpr(closed)):
        raise NotPartitioned("its partition function communicates by itself")
    local = [jax.ShapeDtypeStruct(one.sharding.shard_shape(one.shape), one.dtype) for one in wanted]
    got = [atom.aval for atom in open_jaxpr(closed).outvars]
    if [(one.shape, one.dtype) for one in got] != [(one.shape, one.dtype) for one in local]:
        raise NotPartitioned(f"its partition function makes blocks of {[one.shape for one in got]}")
    return closed


def _sharded(aval: Any, layout: Layout, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    spec = PartitionSpec(*(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in layout))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))


def _check_layouts(does: str, planned: Sequence[Any], asked: Sequence[Any]) -> None:
    for number, (ours, theirs) in enumerate(zip(planned, asked, strict=True)):
        if not theirs.is_equivalent_to(ours.sharding, len(ours.shape)):
            kind = "operand" if does == "takes" else "result"
            raise NotPartitioned(
                f"its partition function {does} {kind} {number} as {theirs.spec}, its sharding rule says "
                f"{ours.sharding.spec}"
            )


def _without_sums(closed: ClosedJaxpr, axes: frozenset[str]) -> ClosedJaxpr:
    """A program whose results are partial over these axes, from one that ends in sums over them."""
    if not axes:
        return closed
    jaxpr = open_jaxpr(closed)
    summands: dict[Any, Any] = {}
    sums = []
    for equation in jaxpr.eqns:
        params = equation.params
        names = params.get("axes", params.get("axis_name", ()))
        names = {names} if isinstance(names, str) else set(names)
        if equation.primitive.name in _SUMS and names == axes and params.get("axis_index_groups") is None:
            summands.update(zip(equation.outvars, equation.invars, strict=True))
            sums.append(equation)
    read = {atom for one in jaxpr.eqns for atom in one.invars if not is_literal(atom)}
    ends = [atom for atom in jaxpr.outvars if not is_literal(atom) and atom in summands and atom not in read]
    if len(ends) != len(jaxpr.outvars):
        raise NotPartitioned("its partition function does not end in a sum over the dims that it reduces")
    kept = [one for one in jaxpr.eqns if not any(one is sum_ for sum_ in sums)]
    outvars = [summands[atom] for atom in jaxpr.outvars]
    bare = jaxpr.replace(eqns=kept, outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())
    return ClosedJaxpr(bare, consts_of(closed))


def _communicates(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name in _COLLECTIVES
        or any(
            _communicates(open_jaxpr(leaf))
            for leaf in jax.tree.leaves(dict(equation.params), is_leaf=_is_program)
            if _is_program(leaf)
        )
        for equation in jaxpr.eqns
    )


def _is_program(leaf: Any) -> bool:
    return hasattr(open_jaxpr(leaf), "eqns")
