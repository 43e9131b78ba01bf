"""JAX's Pallas kernel for products of groups of rows (`jax.experimental.pallas.ops.tpu.megablox.gmm`), known again.

In a program it is a call of a function with a derivative of its own, whose options are found in what the rule of that
closes over. That is no interface of JAX: where it is not there the call is like any other. Found, it becomes the
equation of `jax.lax.ragged_dot_general`, which it computes, and binding that runs the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import lax
from jax.extend import core as jex_core

from .jaxpr import Equation

_MODULE, _BACKWARD = "jax.experimental.pallas.ops.tpu.megablox.ops", "_gmm_bwd"
# What a rule is wrapped into, and what the wrapper calls it: by `plain`, and by JAX where dead code was removed.
_WRAPPERS = {"called": "rule", "dce_bwd": "bwd"}
# The arguments of the backward rule that are not arrays, in order.
_OPTIONS = ("preferred_element_type", "tiling", "transpose_rhs", "interpret")


def _run(left: Any, right: Any, sizes: Any, *, kernel: Mapping[str, Any], **rest: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # imports Pallas' TPU part

    del rest
    return gmm(left, right, sizes, **dict(kernel))


class _Kernel(jex_core.Primitive):
    """Binding it runs the kernel."""

    def bind(self, *operands: Any, **params: Any) -> Any:
        return _run(*operands, **params)

    def get_bind_params(self, params: Mapping[str, Any]) -> Any:
        return dict(params)


_primitive = _Kernel("ragged_dot_general")


def as_ragged_dot(equation: Equation) -> Equation:
    """The equation of a product of groups, if it is a call of the kernel; else as it is."""
    options = _options(equation)
    if options is None or len(equation.invars) != 3:  # groups with an offset, or added to something
        return equation
    columns = 2 if options["transpose_rhs"] else 1
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (columns,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
    )
    params = {"ragged_dot_dimension_numbers": numbers, "kernel": tuple(sorted(options.items()))}
    return equation.replace(primitive=_primitive, params=params)


def tile_rows(equation: Equation) -> int:
    """A product of groups by the kernel has a multiple of so many rows; 1 of others."""
    tiling = dict(equation.params.get("kernel", ())).get("tiling")
    return tiling[0] if isinstance(tiling, tuple) else 1


def _options(equation: Equation) -> dict[str, Any] | None:
    rule = equation.params.get("bwd") if equation.primitive.name == "custom_vjp_call" else None
    function = getattr(rule, "f", None)
    while (name := _WRAPPERS.get(getattr(function, "__name__", ""))) is not None:
        closed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        rule = next((cell.cell_contents for variable, cell in closed if variable == name), None)
        function = getattr(rule, "f", None)
    if getattr(function, "__module__", "") != _MODULE or getattr(function, "__name__", "") != _BACKWARD:
        return None
    for _, given in getattr(rule, "transforms", ()):
        for one in given:
            if isinstance(one, tuple) and len(one) == len(_OPTIONS):
                found = dict(zip(_OPTIONS, (getattr(each, "val", each) for each in one), strict=True))
                if isinstance(found["transpose_rhs"], bool) and isinstance(found["tiling"], tuple):
                    return found
    return None
