"""Functions of the user, traced: under the mesh that is set where they are called, of which nothing is left in the
program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType

from ..errors import PlanError
from .context import as_user
from .jaxpr import LAYOUT_WISHES, ClosedJaxpr, evaluate, inline, is_literal, open_jaxpr, source_line
from .placement import in_host, is_host_typed, placed
from .plain import Region, mesh_of, programs_in, unmeshed


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A function of the user.

    Args:
      program: of it, without meshes.
      results: as shapes, with `placement` where they are left in the host's memory.
      hosted: for each leaf of the results, whether it is left in the host's memory (`jax.memory.Space.Host`).
      wishes: what it says about layouts, in words with the line, each once.
      offloads: where it moves what it computes on with to the host's memory, likewise.
    """

    program: ClosedJaxpr
    results: Any
    hosted: tuple[bool, ...]
    wishes: tuple[str, ...]
    offloads: tuple[str, ...]

    def run(self, *leaves: Any) -> list[Any]:
        """The leaves of the results, from those of the arguments."""
        return list(evaluate(inline(self.program), *leaves))


def trace(function: Callable[..., Any], args: Sequence[Any]) -> Traced:
    """Trace a function under the mesh that the user has set.

    Args:
      function: of the user, of arrays.
      args: its arguments, as arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      PlanError: if it computes on both memories at once.
    """
    region = as_user()
    try:
        with region():
            closed, shapes = jax.make_jaxpr(placed(function, args), return_shape=True)(*args)
    except ValueError as error:
        if "memory_space" not in str(error):
            raise
        raise PlanError(
            refused="to compute on arrays in the host's memory and in the devices'", got=str(error),
            needed="operands in one memory, as under jax.jit", where=getattr(function, "__name__", "the step"),
            try_="jax.device_put(x, jax.memory.Space.Device) before it is computed with, and Space.Host for what is to "
            "stay in the host's memory",
        ) from error  # fmt: skip
    _check_constants(closed, getattr(function, "__name__", "the step"))
    leaves, tree = jax.tree.flatten(shapes)
    hosted = [is_host_typed(aval) for aval in closed.out_avals]
    results = jax.tree.unflatten(
        tree, [in_host(leaf) if is_one else leaf for leaf, is_one in zip(leaves, hosted, strict=True)]
    )
    return Traced(
        program=unmeshed(closed, Region(enter=region)), results=results,
        hosted=tuple(hosted), wishes=tuple(dict.fromkeys(_wishes(closed))),
        offloads=tuple(dict.fromkeys(_offloads(closed))),
    )  # fmt: skip


def _check_constants(closed: Any, where: str) -> None:
    """Refuse what was stored by a function while JAX traced it, and read when that trace had ended.

    The loss function is traced by itself. Under `jax.value_and_grad` what depends on no parameter may leave it so.
    """
    leaked = [x for x in closed.consts if isinstance(x, jax.core.Tracer)]
    if leaked:
        raise PlanError(
            refused="a value that the loss function stored outside itself, and the step read after it",
            got=", ".join(sorted({f"an array of {x.aval.str_short(short_dtypes=True)}" for x in leaked})),
            needed="a loss function whose values leave it as results", where=where,
            try_="computing it before the loss function (of a holder of random keys: keys = rng() outside, and keys "
            "inside), or returning it from the loss function with has_aux=True",
        )  # fmt: skip


def _wishes(program: Any) -> Iterator[str]:
    jaxpr = open_jaxpr(program)
    typed = {mesh for var in jaxpr.invars if (mesh := mesh_of(var.aval)) and AxisType.Explicit in mesh.axis_types}
    for mesh in typed:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        yield f"the types of arrays on a mesh of Explicit axes ({axes})"
    for equation in jaxpr.eqns:
        if (name := LAYOUT_WISHES.get(equation.primitive.name)) is not None:
            sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
            spec = getattr(sharding, "spec", None)
            yield f"{name} at {source_line(equation)}" + (f" to {spec}" if spec is not None else "")
        elif equation.primitive.name == "device_put":
            for target in equation.params["devices"]:
                if target is not None and not isinstance(target, jax.memory.Space):
                    yield f"device_put at {source_line(equation)} to {getattr(target, 'spec', target)}"
        elif equation.primitive.name in ("jit", "pjit"):
            for option in ("in_shardings", "out_shardings"):
                said = [one for one in equation.params[option] if isinstance(one, jax.sharding.Sharding)]
                if said:
                    specs = dict.fromkeys(str(getattr(one, "spec", one)) for one in said)
                    yield f"{option} of jax.jit({equation.params['name']}), {', '.join(specs)}"
        for inside in programs_in(equation) if equation.primitive.name != "shard_map" else ():
            yield from _wishes(inside)


def _offloads(program: Any) -> Iterator[str]:
    """Where a value is moved to the host's memory and then read."""
    jaxpr = open_jaxpr(program)
    read = {atom for equation in jaxpr.eqns for atom in equation.invars if not is_literal(atom)}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            for given, made in zip(equation.invars, equation.outvars, strict=True):
                # What is put there as it comes in is so by `placed`, or is there anyway.
                if is_host_typed(made.aval) and made in read and given not in jaxpr.invars:
                    yield f"device_put at {source_line(equation)}"
        for inside in programs_in(equation) if equation.primitive.name != "shard_map" else ():
            yield from _offloads(inside)
