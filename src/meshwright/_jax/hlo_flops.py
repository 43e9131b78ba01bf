"""FLOPs of one HLO instruction: matrix products and convolutions, also as the library calls a GPU makes of them.

A matrix product costs 2 x results x contracted elements, a convolution 2 x outputs x kernel elements per feature.
Multiplications with padding count, as in published figures, but not more than each input position meets kernel
positions: XLA writes gradients as convolutions over inputs full of inserted zeros and borders, which are no work.
"""

from __future__ import annotations

import json
import math
import re

from meshwright._jax.hlo_parse import ArrayShape, Computation, Instruction


def instruction_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of one execution of `instruction` itself (not of computations it calls); zero for other operations."""
    if instruction.opcode == "dot":
        left = computation.instructions[instruction.operands[0]].shapes[0]
        return _dot_flops(instruction.shapes[0], left, _numbers(instruction.attributes.get("lhs_contracting_dims", "")))
    if instruction.opcode == "convolution":
        image, kernel = (computation.instructions[name].shapes[0] for name in instruction.operands[:2])
        output = instruction.shapes[0]
        read, _, written = re.split("_|->", instruction.attributes["dim_labels"])
        share = _positions(image, read) / max(_positions(output, written), 1)
        holes = math.prod(_window(instruction, "lhs_dilate"))
        return _convolution_flops(instruction, output, kernel) * min(share, 1 / holes)
    if instruction.opcode == "custom-call":
        return _library_flops(computation, instruction)
    return 0.0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _window(instruction: Instruction, key: str) -> tuple[int, ...]:
    found = re.search(rf"\b{key}=([0-9x]+)", instruction.attributes.get("window", ""))
    return _numbers(found[1]) if found else ()


def _positions(shape: ArrayShape, labels: str) -> int:
    """Over how many places a window slides: the dims labelled by a digit."""
    return math.prod(size for size, label in zip(shape.dims, labels, strict=True) if label.isdigit())


def _dot_flops(result: ArrayShape, left: ArrayShape, contracted: tuple[int, ...]) -> float:
    return 2.0 * result.elements * math.prod(left.dims[dim] for dim in contracted)


def _convolution_flops(instruction: Instruction, output: ArrayShape, kernel: ArrayShape) -> float:
    # "b01f_01io->b01f": the kernel's letters name its dims; its `i` is already per feature group.
    kernel_labels = re.split("_|->", instruction.attributes["dim_labels"])[1]
    return 2.0 * output.elements * kernel.elements / kernel.dims[kernel_labels.index("o")]


def _library_flops(computation: Computation, instruction: Instruction) -> float:
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    shapes = computation.operand_shapes(instruction)
    if target.startswith("__cudnn$conv") and "dim_labels" in instruction.attributes:
        # The gradient calls are the same loop nest with the roles of output and kernel played by other arrays.
        output, kernel = {
            "__cudnn$convBackwardInput": (shapes[0], shapes[1]),
            "__cudnn$convBackwardFilter": (shapes[1], instruction.shapes[0]),
        }.get(target, (instruction.shapes[0], shapes[1]))
        return _convolution_flops(instruction, output, kernel)
    if target.startswith("__cublas$"):
        config = json.loads(instruction.attributes["backend_config"])
        numbers = config.get("gemm_backend_config", config)["dot_dimension_numbers"]
        contracted = tuple(int(dim) for dim in numbers["lhs_contracting_dimensions"])
        return _dot_flops(instruction.shapes[0], shapes[0], contracted)
    if target in ("__onednn$matmul", "__onednn$matmul_reorder"):
        return _dot_flops(instruction.shapes[0], shapes[0], (len(shapes[0].dims) - 1,))
    return 0.0
