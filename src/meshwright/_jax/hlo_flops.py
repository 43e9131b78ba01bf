"""FLOPs of one HLO instruction: matrix products and convolutions, also as the library calls a GPU makes of them.

A matrix product costs 2 x results x contracted elements, a convolution what `_jax.convolution_flops` says. Zeros that
were appended to an operand are no work (`_jax.hlo_origins`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence

from meshwright._jax.convolution_flops import SpaceDim, convolution_flops
from meshwright._jax.hlo_parse import Computation, Instruction

# For each dim of an array of a computation, how many of its positions hold data.
Extents = Callable[[Computation, str], tuple[int, ...]]


def instruction_flops(computation: Computation, instruction: Instruction, extents: Extents) -> float:
    """FLOPs of one execution of `instruction` itself (not of computations it calls); zero for other operations."""
    if instruction.opcode in ("dot", "convolution"):
        left, right = (extents(computation, name) for name in instruction.operands[:2])
        if instruction.opcode == "dot":
            given = {"lhs": "lhs_contracting_dims", "rhs": "rhs_contracting_dims", "batch": "rhs_batch_dims"}
            dims = {name: _numbers(instruction.attributes.get(key, "")) for name, key in given.items()}
            return _dot_flops(left, right, dims)
        return _convolution_flops(instruction, left, right, instruction.shapes[0].dims)
    if instruction.opcode == "custom-call":
        return _library_flops(computation, instruction, extents)
    return 0.0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _dot_flops(left: tuple[int, ...], right: tuple[int, ...], dims: Mapping[str, Sequence[int]]) -> float:
    """FLOPs of a matrix product, from the extents of its operands.

    Args:
      left: extents of the left operand.
      right: extents of the right one.
      dims: which of them are summed over, `lhs` and `rhs`, and which of the right one are of the batch, `batch`.
    """
    summed = math.prod(min(left[a], right[b]) for a, b in zip(dims["lhs"], dims["rhs"], strict=True))
    rows = math.prod(size for dim, size in enumerate(left) if dim not in dims["lhs"])
    columns = math.prod(size for dim, size in enumerate(right) if dim not in (*dims["rhs"], *dims["batch"]))
    return 2.0 * rows * columns * summed


def _convolution_flops(
    instruction: Instruction, image: tuple[int, ...], kernel: tuple[int, ...], made: tuple[int, ...]
) -> float:
    """FLOPs of a convolution, from the extents of its operands and result. Dims are named as in "b01f_01io->b01f"; the
    kernel's `i` is already the number of input features of one group."""
    of_image, of_kernel, of_made = re.split("_|->", instruction.attributes["dim_labels"])
    places = sorted(filter(str.isdigit, of_made))
    rank = len(places)
    strides, lows, holes, taps, turned = (
        _window(instruction, key, rank, default)
        for key, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1), ("rhs_reversal", 0))
    )
    space = []
    for n, d in enumerate(places):
        window = kernel[of_kernel.index(d)]
        # Taps of a window that is turned are counted from the other end.
        low = taps[n] * (window - 1) - lows[n] if turned[n] else lows[n]
        step = -strides[n] if turned[n] else strides[n]
        space.append(SpaceDim(
            image[of_image.index(d)], window, made[of_made.index(d)], stride=step, low=low,
            image_dilation=-holes[n] if turned[n] else holes[n], window_dilation=taps[n],
        ))  # fmt: skip
    groups = int(instruction.attributes.get("batch_group_count", "1"))
    return convolution_flops(
        image[of_image.index("b")] // groups, kernel[of_kernel.index("o")], kernel[of_kernel.index("i")], space
    )


def _window(instruction: Instruction, key: str, rank: int, default: int) -> list[int]:
    """For each dim of space a number of a convolution's window: of its padding, the lower one."""
    found = re.search(rf"\b{key}=(-?\d[-0-9x_]*)", instruction.attributes.get("window", ""))
    return [int(one.split("_")[0]) for one in found[1].split("x")] if found else [default] * rank


def _library_flops(computation: Computation, instruction: Instruction, extents: Extents) -> float:
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    made = instruction.shapes[0].dims if instruction.shapes else ()  # a callback gives nothing
    if target.startswith("__cudnn$conv") and "dim_labels" in instruction.attributes:
        first, second = (extents(computation, name) for name in instruction.operands[:2])
        # All three calls name the dims of image, kernel and result of the forward pass.
        image, kernel, result = {
            "__cudnn$convBackwardInput": (made, second, first),
            "__cudnn$convBackwardFilter": (first, made, second),
        }.get(target, (first, second, made))
        return _convolution_flops(instruction, image, kernel, result)
    if target.startswith("__cublas$"):
        config = json.loads(instruction.attributes["backend_config"])
        numbers = config.get("gemm_backend_config", config)["dot_dimension_numbers"]
        given = {
            "lhs": "lhs_contracting_dimensions", "rhs": "rhs_contracting_dimensions", "batch": "rhs_batch_dimensions"
        }  # fmt: skip
        dims = {name: tuple(int(dim) for dim in numbers.get(key, ())) for name, key in given.items()}
        left, right = (extents(computation, name) for name in instruction.operands[:2])
        return _dot_flops(left, right, dims)
    if target in ("__onednn$matmul", "__onednn$matmul_reorder"):
        left = extents(computation, instruction.operands[0])
        return 2.0 * math.prod(made) * left[-1]
    return 0.0
