"""Programs without the places of the user: values of plain types, equations without shardings.

Where a program sets a mesh (`jax.set_mesh`), constrains a value to one, holds arrays of Explicit axes or moves one to
the host's memory, JAX writes that into the types of the values, the parameters of equations and their contexts; inside
a manual region, the axes that a value varies over. A plan has meshes of its own, so all of that is taken out, at any
depth. Derivative rules are traced when they are asked for: they run in the context that they were written in, and what
they trace is made plain too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src.core import JaxprEqnContext  # 0.10 to 0.12
from jax._src.lax.parallel import psum_p  # 0.10 to 0.12
from jax._src.linear_util import wrap_init  # 0.10 to 0.12
from jax.extend import core as jex_core

from .placement import is_host_typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The context in which a program was traced.

    Args:
      enter: it again.
      is_manual: whether it is the body of a `shard_map`; else it is all of the user's code.
    """

    enter: Callable[[], AbstractContextManager[None]]
    is_manual: bool = False


# Statements about which devices hold equal values: none of them changes a value.
_STATEMENTS = ("pvary", "pcast")


def plain(closed: Any, region: Region) -> jex_core.ClosedJaxpr:
    """A program, and all programs inside it, without meshes.

    Args:
      closed: the program, closed or not.
      region: that it was traced in.
    """
    return jex_core.ClosedJaxpr(
        _plain(getattr(closed, "jaxpr", closed), region), _consts(getattr(closed, "consts", ()))
    )


def unmeshed(closed: Any, region: Region) -> Any:
    """A program without meshes, or as it is if it names none; arguments as of `plain`."""
    return plain(closed, region) if names_place(closed) else closed


def names_place(program: Any) -> bool:
    """Whether the type of a value of a program says where it is: on a mesh, or in the host's memory."""
    jaxpr = getattr(program, "jaxpr", program)
    if any(_names_place(var.aval) for var in (*jaxpr.invars, *jaxpr.constvars)):
        return True
    return any(
        any(_names_place(var.aval) for var in equation.outvars) or any(map(names_place, programs_in(equation)))
        for equation in jaxpr.eqns
    )


def programs_in(equation: Any) -> Iterable[Any]:
    """The programs that an equation holds."""
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (jex_core.ClosedJaxpr, jex_core.Jaxpr)):
                yield part


def _names_place(aval: Any) -> bool:
    return mesh_of(aval) is not None or is_host_typed(aval)


def mesh_of(aval: Any) -> Any:
    """The mesh in the type of a value, or None."""
    sharding = getattr(aval, "sharding", None)
    return sharding.mesh if sharding is not None and not sharding.mesh.empty else None


def _plain(jaxpr: Any, region: Region) -> Any:
    env: dict[Any, Any] = {}

    def fresh(var: Any) -> Any:
        if type(var).__name__ != "DropVar":
            env[var] = jex_core.Var(_aval(var.aval))
        return env.get(var, var)

    def read(atom: Any) -> Any:
        return _literal(atom) if isinstance(atom, jex_core.Literal) else env[atom]

    constvars, invars = [fresh(v) for v in jaxpr.constvars], [fresh(v) for v in jaxpr.invars]
    equations = []
    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in _STATEMENTS:
            env.update(zip(equation.outvars, operands, strict=True))
            continue
        primitive, params = equation.primitive, equation.params
        if primitive.name != "shard_map" or region.is_manual:  # its body is in a region of its own
            params = {k: _inside(k, v, region) for k, v in params.items()}
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


def _inside(key: str, value: Any, region: Region) -> Any:
    """A parameter of an equation, the programs in it made plain too."""
    if hasattr(value, "jaxpr") and hasattr(value, "consts") and value.jaxpr is not value:
        return jex_core.ClosedJaxpr(_plain(value.jaxpr, region), _consts(value.consts))
    if hasattr(value, "eqns") and hasattr(value, "outvars"):
        return _plain(value, region)
    if isinstance(value, jax.sharding.Sharding):
        return None
    if key in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
        return _later(value, region)
    if key == "bwd" and hasattr(value, "call_wrapped") and not region.is_manual:
        return _backward_later(value, region)
    return type(value)(_inside("", v, region) for v in value) if type(value) in (tuple, list) else value


def _later(derivative: Any, region: Region) -> Any:
    """A derivative rule, traced when it is asked for: by then its region is left, so it is entered again."""

    def traced(*zeros: Any) -> Any:
        with region.enter():
            jaxpr, consts, *rest = (derivative.call_wrapped if hasattr(derivative, "call_wrapped") else derivative)(
                *zeros
            )
        return (_plain(jaxpr, region), _consts(consts), *rest)

    return wrap_init(traced, debug_info=derivative.debug_info) if hasattr(derivative, "call_wrapped") else traced


def _backward_later(rule: Any, region: Region) -> Any:
    """A rule that computes cotangents, as `_later`. It gives a list of them, since JAX 0.11 with something else; what
    is no array (the cotangent of an operand that has none) stays what it is."""

    def called(*given: Any) -> Any:
        said: dict[str, Any] = {}

        def computed(*values: Any) -> list[Any]:
            leaves, said["tree"] = jax.tree.flatten(
                rule.call_wrapped(*values), is_leaf=lambda x: not isinstance(x, (list, tuple, dict))
            )
            said["others"] = [None if isinstance(one, jax.Array) else _unplaced(one) for one in leaves]
            said["arrays"] = [isinstance(one, jax.Array) for one in leaves]
            return [one for one in leaves if isinstance(one, jax.Array)]

        with region.enter():
            closed = jax.make_jaxpr(computed)(*(jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in given))
        made = iter(jex_core.jaxpr_as_fun(plain(closed, region))(*given))
        pairs = zip(said["arrays"], said["others"], strict=True)
        return jax.tree.unflatten(said["tree"], [next(made) if is_one else other for is_one, other in pairs])

    return wrap_init(called, debug_info=rule.debug_info)


def _unplaced(cotangent: Any) -> Any:
    """What stands for zeros, of a plain type."""
    aval = getattr(cotangent, "aval", None)
    return cotangent if aval is None or not _names_place(aval) else type(cotangent)(_aval(aval))


def _consts(consts: Sequence[Any]) -> list[Any]:
    """Constants that carry no type of their own; traced ones stay."""
    return [np.asarray(c) if hasattr(c, "aval") and not isinstance(c, jax.core.Tracer) else c for c in consts]


def _literal(literal: Any) -> Any:
    (value,) = _consts([literal.val])
    return jex_core.Literal(value, _aval(literal.aval))


def _aval(aval: Any) -> Any:
    is_array = isinstance(aval, jax.core.ShapedArray)
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type) if is_array else aval
