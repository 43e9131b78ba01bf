"""FLOPs of one equation, from its shapes. A multiply-add counts as two; structured equations count their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp

from .._jax import attention, cudnn
from .._jax.convolution_flops import SpaceDim, convolution_flops
from .._jax.jaxpr import Equation, is_literal, is_remat, open_jaxpr, scan_parts
from .._jax.own_kernels import said_flops
from .._jax.pallas import kernel_flops, slices_read

# Data moves, no arithmetic.
_MOVES = frozenset(
    [
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "device_put",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "iota",
        "pad",
        "reshape",
        "rev",
        "scatter",
        "slice",
        "split",
        "squeeze",
        "stop_gradient",
        "transpose",
        "bitcast_convert_type",
        "optimization_barrier",
    ]
)


def equation_flops(equation: Equation) -> tuple[float, bool]:
    """FLOPs of one run, and whether they are those of matrix products or convolutions."""
    name = equation.primitive.name
    match name:
        case "dot_general":
            ((contract, _), _) = equation.params["dimension_numbers"]
            lhs = equation.invars[0].aval
            return 2.0 * _size(equation.outvars[0]) * prod(lhs.shape[d] for d in contract), True
        case "conv_general_dilated":
            (batch, _, *space), (made, read, *window), (_, _, *where) = equation.params["dimension_numbers"]
            image, kernel, result = (atom.aval.shape for atom in (*equation.invars, *equation.outvars))
            params = equation.params
            numbers = zip(
                params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True
            )
            dims = [
                SpaceDim(image[i], kernel[k], result[r], stride, low, holes, taps)
                for i, k, r, (stride, (low, _), holes, taps) in zip(space, window, where, numbers, strict=True)
            ]
            samples = image[batch] // params["batch_group_count"]
            return convolution_flops(samples, kernel[made], kernel[read], dims), True
        case "ragged_dot_general":
            numbers = equation.params["ragged_dot_dimension_numbers"]
            ((contract, _), _) = numbers.dot_dimension_numbers
            (ragged,) = numbers.lhs_ragged_dimensions
            lhs = equation.invars[0].aval
            flops = 2.0 * _size(equation.outvars[0]) * prod(lhs.shape[d] for d in contract)
            # Where the ragged dim is summed over, each group of the result sums its own part of it.
            return (flops / max(equation.outvars[0].aval.shape[0], 1) if ragged in contract else flops), True
        case "cholesky" | "lu":
            # n^3 / 3 and 2 n^3 / 3, Golub and Van Loan, Matrix Computations.
            a = equation.invars[0].aval.shape
            return _size(equation.invars[0]) * min(a[-2:]) * (1 if name == "cholesky" else 2) / 3, True
        case "triangular_solve":
            n = equation.invars[0].aval.shape[-1]
            return float(_size(equation.invars[1]) * n), True
        case "scan":
            parts = scan_parts(equation)
            flops, matmul = _body(parts.body)
            return flops * parts.length, matmul
        case "while":
            # The trip count is not known before the run: one trip is counted, or in a kernel as many as it takes to
            # read all of a block.
            flops, matmul = _body(equation.params["body_jaxpr"])
            return flops * slices_read(open_jaxpr(equation.params["body_jaxpr"])), matmul
        case "cond":
            return max(_body(branch) for branch in equation.params["branches"])
        case "custom_jvp_call" | "custom_vjp_call":
            return _body(equation.params["call_jaxpr"])
        case "custom_linear_solve":
            return _body(equation.params["jaxprs"].solve)
        case "custom_partitioning":
            flops, matmul = _body(equation.params["call"])
            said = said_flops(equation)
            return (flops, matmul) if said is None else (said, True)
        case "pallas_call":
            return kernel_flops(equation, _body)
        case attention.FORWARD | attention.TANGENT | attention.BACKWARD:
            return attention.attention_flops(equation), True
        case cudnn.FORWARD | cudnn.BACKWARD:
            return cudnn.attention_flops(equation), True
    if is_remat(equation) or "jaxpr" in equation.params:
        return _body(equation.params["jaxpr"])
    if name in _MOVES:
        return 0.0, False
    operands = max((_size(v) for v in equation.invars), default=0)
    return float(max(operands, max((_size(v) for v in equation.outvars), default=0))), False


def multiplied(equation: Equation) -> str:
    """The dtype that most of an equation's FLOPs in matrix products or convolutions multiply in, the wider one of the
    two operands'; of a call that of the products inside. Empty where there are none."""
    totals: dict[str, float] = {}
    for flops, dtype in _multiplied(equation):
        totals[dtype] = totals.get(dtype, 0.0) + flops
    return max(totals, key=lambda dtype: totals[dtype], default="")


def _multiplied(equation: Equation) -> list[tuple[float, str]]:
    flops, matmul = equation_flops(equation)
    if not matmul:
        return []
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        inside = open_jaxpr(equation.params["call_jaxpr"]).eqns
        found = [one for inner in inside for one in _multiplied(inner)]
        return found if any(dtype for _, dtype in found) else [(flops, _wider(equation.invars))]
    if is_remat(equation) or "jaxpr" in equation.params:
        return [one for inner in open_jaxpr(equation.params["jaxpr"]).eqns for one in _multiplied(inner)]
    return [(flops, _wider(equation.invars))]


def _wider(atoms: Sequence[Any]) -> str:
    """Units multiply what they are given and sum in what is asked for: the wider operand says how fast. Numbers of rows
    and other whole numbers beside arrays of real ones are not multiplied."""
    dtypes = [atom.aval.dtype for atom in atoms if not is_literal(atom) and hasattr(atom.aval, "dtype")]
    real = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return str(max(real or dtypes, key=lambda dtype: dtype.itemsize)) if dtypes else ""


def _size(atom: Any) -> int:
    return prod(getattr(atom.aval, "shape", ()))


def _body(jaxpr: Any) -> tuple[float, bool]:
    counted = [equation_flops(equation) for equation in open_jaxpr(jaxpr).eqns]
    matmul = any(is_matmul for _, is_matmul in counted)
    return sum(flops for flops, is_matmul in counted if is_matmul == matmul), matmul
