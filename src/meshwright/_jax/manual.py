"""A user's `jax.shard_map`, rewritten as a program on whole arrays.

A manual region runs one function on every block of its operands, the blocks talking over named mesh axes: what `vmap`
with named axes does on one device. So each operand is cut into blocks along new leading dims, one for each mesh axis,
the body is mapped over them, and the results are put together. The values are the same on any mesh; the planner sees
plain equations and may split the new dims like any others. The mesh the user named is not kept: the plan chooses the
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config  # whether a region types its values; no public form up to 0.12
from jax._src.core import JaxprEqnContext, extend_axis_env_nd  # 0.10 to 0.12
from jax._src.lax.parallel import psum_p  # 0.10 to 0.12
from jax._src.linear_util import wrap_init  # 0.10 to 0.12
from jax._src.mesh import use_abstract_mesh  # 0.10 to 0.12
from jax.extend import core as jex_core
from jax.sharding import AxisType

# Statements about which devices hold equal values: none of them changes a value.
_STATEMENTS = ("pvary", "pcast")


def is_shard_map(equation: Any) -> bool:
    """Whether an equation is a manual region."""
    return equation.primitive.name == "shard_map"


def on_whole_arrays(equation: Any, body: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """The function of a `shard_map` equation on whole arrays.

    Args:
      equation: a `shard_map`.
      body: its body, as a function of one device's blocks.
    """
    params = equation.params
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    axes = tuple(name for name in params["mesh"].axis_names if manual is None or name in manual)
    sizes = {name: params["mesh"].shape[name] for name in axes}
    in_splits = [
        _split(spec, atom.aval.ndim, axes) for spec, atom in zip(params["in_specs"], equation.invars, strict=True)
    ]
    out_splits = [
        _split(spec, var.aval.ndim, axes) for spec, var in zip(params["out_specs"], equation.outvars, strict=True)
    ]

    def run(*operands: Any) -> list[Any]:
        mapped = body
        for axis in reversed(axes):
            # An operand that an axis does not split is the same in all its blocks.
            in_axes = tuple(0 if axis in _named(split) else None for split in in_splits)
            mapped = jax.vmap(mapped, in_axes=in_axes, out_axes=0, axis_name=axis, axis_size=sizes[axis])
        blocks = [_cut(x, split, axes, sizes) for x, split in zip(operands, in_splits, strict=True)]
        return [_join(y, split, axes) for y, split in zip(mapped(*blocks), out_splits, strict=True)]

    return run


def plain_body(equation: Any) -> Any:
    """The body of a `shard_map`, a closed jaxpr, without the types a manual region gives its values: those name axes
    that are gone once its blocks are dims of one array."""
    params = equation.params
    body = params["jaxpr"]
    mesh = params["mesh"].abstract_mesh if isinstance(params["mesh"], jax.sharding.Mesh) else params["mesh"]

    @contextmanager
    def region() -> Iterator[None]:
        manual = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual))
        with extend_axis_env_nd(mesh.shape.items()), use_abstract_mesh(manual), config._check_vma(params["check_vma"]):
            yield

    return jex_core.ClosedJaxpr(
        _plain(getattr(body, "jaxpr", body), region), _plain_consts(getattr(body, "consts", ()))
    )


def _plain(jaxpr: Any, region: Callable[[], Any]) -> Any:
    env: dict[Any, Any] = {}

    def fresh(var: Any) -> Any:
        if type(var).__name__ != "DropVar":
            env[var] = jex_core.Var(_plain_aval(var.aval))
        return env.get(var, var)

    def read(atom: Any) -> Any:
        return _plain_literal(atom) if isinstance(atom, jex_core.Literal) else env[atom]

    constvars, invars = [fresh(v) for v in jaxpr.constvars], [fresh(v) for v in jaxpr.invars]
    equations = []
    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in _STATEMENTS:
            env.update(zip(equation.outvars, operands, strict=True))
            continue
        primitive, params = equation.primitive, {k: _inside(k, v, region) for k, v in equation.params.items()}
        if primitive.name == "psum_invariant":  # a sum that also states that its result is equal everywhere
            primitive, params = psum_p, {"axis_index_groups": None, **params}
        outvars = [fresh(v) for v in equation.outvars]
        equations.append(
            equation.replace(
                primitive=primitive, invars=operands, outvars=outvars, params=params, ctx=JaxprEqnContext()
            )
        )
    return jaxpr.replace(
        constvars=constvars, invars=invars, eqns=equations, outvars=[read(atom) for atom in jaxpr.outvars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip


def _inside(key: str, value: Any, region: Callable[[], Any]) -> Any:
    """A parameter of an equation, the programs in it made plain too."""
    if hasattr(value, "jaxpr") and hasattr(value, "consts") and value.jaxpr is not value:
        return jex_core.ClosedJaxpr(_plain(value.jaxpr, region), _plain_consts(value.consts))
    if hasattr(value, "eqns") and hasattr(value, "outvars"):
        return _plain(value, region)
    if isinstance(value, jax.sharding.Sharding):
        return None
    if key in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
        return _later(value, region)
    return type(value)(_inside("", v, region) for v in value) if type(value) in (tuple, list) else value


def _later(derivative: Any, region: Callable[[], Any]) -> Any:
    """A derivative rule, traced when it is asked for: by then its region is left, so it is entered again."""

    def traced(*zeros: Any) -> Any:
        with region():
            jaxpr, consts, *rest = (derivative.call_wrapped if hasattr(derivative, "call_wrapped") else derivative)(
                *zeros
            )
        return (_plain(jaxpr, region), _plain_consts(consts), *rest)

    return wrap_init(traced, debug_info=derivative.debug_info) if hasattr(derivative, "call_wrapped") else traced


def _plain_consts(consts: Sequence[Any]) -> list[Any]:
    """Constants that carry no type of their own; traced ones stay."""
    return [np.asarray(c) if hasattr(c, "aval") and not isinstance(c, jax.core.Tracer) else c for c in consts]


def _plain_literal(literal: Any) -> Any:
    (value,) = _plain_consts([literal.val])
    return jex_core.Literal(value, _plain_aval(literal.aval))


def _plain_aval(aval: Any) -> Any:
    is_array = isinstance(aval, jax.core.ShapedArray)
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type) if is_array else aval


def _split(spec: Any, rank: int, axes: Sequence[str]) -> list[tuple[str, ...]]:
    """For each dim the axes that split it, major first."""
    dims: list[tuple[str, ...]] = []
    for entry in (*spec, *(None,) * (rank - len(spec))):
        names = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        dims.append(tuple(name for name in names if name in axes))
    return dims


def _named(split: Sequence[tuple[str, ...]]) -> list[str]:
    return [axis for dim in split for axis in dim]


def _cut(x: Any, split: Sequence[tuple[str, ...]], axes: Sequence[str], sizes: dict[str, int]) -> Any:
    """Blocks of `x` along leading dims, one for each of the axes that split it, in the order of `axes`."""
    names = _named(split)
    if not names:
        return x
    shape: list[int] = []
    place: dict[str, int] = {}
    for extent, dim in zip(x.shape, split, strict=True):
        for axis in dim:
            place[axis] = len(shape)
            shape.append(sizes[axis])
        shape.append(extent // prod(sizes[axis] for axis in dim))
    leading = [place[axis] for axis in axes if axis in place]
    return jnp.moveaxis(x.reshape(shape), leading, range(len(leading)))


def _join(y: Any, split: Sequence[tuple[str, ...]], axes: Sequence[str]) -> Any:
    """The array whose blocks lie along the leading dims of `y`, one for each of `axes`."""
    names = _named(split)
    # All blocks along an axis that the result does not name are equal: the first is taken.
    y = y[tuple(slice(None) if axis in names else 0 for axis in axes)]
    kept = [axis for axis in axes if axis in names]
    order: list[int] = []
    shape: list[int] = []
    for d, dim in enumerate(split):
        order += [kept.index(axis) for axis in dim]
        order.append(len(kept) + d)
        shape.append(prod(y.shape[i] for i in order[len(order) - len(dim) - 1 :]))
    return y.transpose(order).reshape(shape)
