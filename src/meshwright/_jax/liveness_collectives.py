"""Collectives as XLA's CPU backend runs them, for the memory model; other backends send bfloat16 as it is.

A collective is a kernel of its own, but rarely alone:

* gathering and scattering work on the major dim, so another dim is moved there before and back afterwards;
* an all-to-all takes its operand cut into one piece for each device and gives as many pieces, put together afterwards;
* bfloat16 and float16 are widened to float32 before and rounded afterwards (elsewhere they are moved as they are).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshwright._jax.dataflow import COLLECTIVES, OF_A_HOST, Kind, Spread
from meshwright._jax.liveness_builder import NARROW, Builder

NAMES = COLLECTIVES - {"ppermute"}


def add_collective(program: Builder, equation: Any, position: int, value: int) -> int:
    """Adds what a collective does with its operand `value`, the one at `position`; returns its result."""
    name, params = equation.primitive.name, equation.params
    aval = equation.outvars[position].aval
    key = str(sorted((k, str(v)) for k, v in params.items()))
    if program.platform == "cpu" and str(aval.dtype) in NARROW:
        value = program.widened(value)
        wide = jax.ShapeDtypeStruct(aval.shape, np.float32)
        return program.rounded(_moved(program, name, params, value, wide, key), aval.dtype)
    return _moved(program, name, params, value, aval, key)


def _moved(program: Builder, name: str, params: Any, value: int, aval: Any, key: str) -> int:
    if name == "all_to_all":
        return _all_to_all(program, params, value, aval, key)
    dim = params.get("all_gather_dimension", params.get("scatter_dimension", 0))
    if not dim or not params.get("tiled", True):
        return program.emit(Kind.OPAQUE, name, [value], [aval], key=key, **_who(program, params, aval))[0]
    rank = len(aval.shape)
    first = [dim, *(d for d in range(rank) if d != dim)]
    turned = jax.ShapeDtypeStruct(tuple(aval.shape[d] for d in first), aval.dtype)
    who = _who(program, params, aval)
    (result,) = program.emit(Kind.OPAQUE, name, [program.arranged(value, first)], [turned], key=key, **who)
    return program.arranged(result, [int(d) for d in np.argsort(first)])


def _group(params: Any, aval: Any) -> str:
    """What collectives have in common that may be sent together: of a gather or a scatter the dim may be any, since XLA
    lays it out first."""
    common = sorted((name, str(value)) for name, value in params.items() if not name.endswith("_dimension"))
    return f"{common} {aval.dtype}"


def _who(program: Builder, params: Any, aval: Any) -> dict[str, Any]:
    """What the operation says of the devices that take part."""
    return {"group": _group(params, aval), "spread": _spread(params, program.mesh)}


def _spread(params: Any, mesh: Mapping[str, int] | None) -> Spread | None:
    """The devices of each group: those that differ along its axes alone, of a mesh in row-major order."""
    axes = params.get("axes", params.get("axis_name", ()))
    axes = {axes} if isinstance(axes, str) else set(axes)
    if mesh is None or not axes <= set(mesh):
        return None
    first, stride, total = [0], 1, math.prod(mesh.values())
    for axis, size in reversed(list(mesh.items())):
        if axis in axes:
            first = [device + stride * place for place in range(size) for device in first]
        stride *= size
    return Spread(len(first), total // len(first), sum(device < OF_A_HOST for device in first))


def _all_to_all(program: Builder, params: Any, value: int, aval: Any, key: str) -> int:
    shape = program.types[value][0]
    dim = params["split_axis"]
    # Two pieces stand for all: what matters is that there are several, and how large they are together.
    if shape[dim] % 2:
        return program.emit(Kind.OPAQUE, "all_to_all", [value], [aval], key=key, spread=_spread(params, program.mesh))[
            0
        ]
    half = jax.ShapeDtypeStruct((*shape[:dim], shape[dim] // 2, *shape[dim + 1 :]), aval.dtype)
    pieces = [program.emit(Kind.PERMUTE, "slice", [value], [half], key=(key, rank))[0] for rank in range(2)]
    spread = _spread(params, program.mesh)
    moved = program.emit(Kind.OPAQUE, "all_to_all", pieces, [half, half], key=key, spread=spread)
    return program.emit(Kind.PERMUTE, "concatenate", moved, [aval], key=key)[0]
