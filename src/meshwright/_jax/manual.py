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
from jax._src import config  # whether a region types its values; no public form up to 0.12
from jax._src.core import extend_axis_env_nd  # 0.10 to 0.12
from jax._src.mesh import use_abstract_mesh  # 0.10 to 0.12
from jax.sharding import AxisType

from .plain import Region, plain, programs_in


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
    sizes = params["mesh"].shape
    axes = tuple(name for name in _manual_axes(params) if sizes[name] > 1)
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


def _manual_axes(params: Any) -> list[str]:
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    return [name for name in params["mesh"].axis_names if manual is None or name in manual]


def axes_of_one(equation: Any) -> list[str]:
    """The mesh axes of one device of a `shard_map`. Along these there is one block: the body is evaluated as it is, and
    only equations that talk over them are mapped (`over_one`), so that other operators need not know how to be."""
    return [name for name in _manual_axes(equation.params) if equation.params["mesh"].shape[name] == 1]


def over_one(function: Callable[..., Sequence[Any]], axes: Sequence[str], operands: Sequence[Any]) -> list[Any]:
    """The results of a function that talks over mesh axes of one device."""
    for name in axes:
        function = jax.vmap(function, axis_name=name, axis_size=1)
    made = function(*(jnp.reshape(x, (*(1,) * len(axes), *jnp.shape(x))) for x in operands))
    return [y.reshape(y.shape[len(axes) :]) for y in made]


def mentions(equation: Any, axis: str) -> bool:
    """Whether an equation, or one in a program inside it, names a mesh axis."""
    return any(_holds(value, axis) for value in equation.params.values()) or any(
        mentions(inner, axis) for program in programs_in(equation) for inner in getattr(program, "jaxpr", program).eqns
    )


def _holds(value: Any, axis: str) -> bool:
    if isinstance(value, str):
        return value == axis
    return isinstance(value, (tuple, list, frozenset, set)) and any(_holds(one, axis) for one in value)


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

    return plain(body, Region(enter=region, is_manual=True))


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
