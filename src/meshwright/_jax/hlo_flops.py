"""FLOPs of one HLO instruction: matrix products and convolutions, also as the library calls a GPU makes of them.

A matrix product costs 2 x results x contracted elements, a convolution 2 x outputs x kernel elements per feature.
Multiplications with padding count, as in published figures; multiplications with the zeros that XLA inserts when
it writes the gradient of a strided or grouped convolution as a dilated one do not, for nobody need perform them.
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
        kernel = computation.instructions[instruction.operands[1]].shapes[0]
        holes = math.prod(_window(instruction, "lhs_dilate"))
        return _convolution_flops(instruction, instruction.shapes[0], kernel) / holes
    if instruction.opcode == "custom-call":
        return _library_flops(computation, instruction)
    return 0.0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _window(instruction: Instruction, key: str) -> tuple[int, ...]:
    found = re.search(rf"\b{key}=([0-9x]+)", instruction.attributes.get("window", ""))
    return _numbers(found[1]) if found else ()


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
