"""How much of an array in a compiled program is data, and how much zeros that were appended to it.

Compilers and `_jax.convolutions` append zeros to the operands of products and convolutions where fast code wants other
extents: an even number of channels on CPUs, multiples of eight on GPUs, images no smaller than the window. Multiplying
them is no work that the program asks for. What an operand is made of is followed backwards through copies, transposes,
fusions and calls, up to the first instruction that computes something.

Known limit: what enters a loop from outside counts as data.
"""

from __future__ import annotations

import re
from collections import Counter

from meshwright._jax.hlo_parse import Computation, Instruction, Module

_CALLS = {"fusion": "calls", "call": "to_apply"}
_PASSED_ON = ("copy", "convert", "reverse", "optimization-barrier")


class DataExtents:
    """Of the arrays of one program.

    Args:
      module: the program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        called = Counter(
            inner
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
            for inner in _called(instruction)
        )
        # What two instructions call has no operands of its own.
        self._callers = {
            inner: (computation, instruction)
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
            for inner in _called(instruction)
            if called[inner] == 1
        }

    def __call__(self, computation: Computation, name: str) -> tuple[int, ...]:
        """For each dim of an array how many of its positions hold data, zeros that were appended left out."""
        instruction = computation.instructions[name]
        whole = instruction.shapes[0].dims
        if instruction.opcode in _PASSED_ON:
            return self(computation, instruction.operands[0])
        if instruction.opcode == "transpose":
            read = self(computation, instruction.operands[0])
            return tuple(read[dim] for dim in _numbers(instruction.attributes.get("dimensions", "")))
        if instruction.opcode == "bitcast":
            source = computation.instructions[instruction.operands[0]].shapes[0].dims
            return self(computation, instruction.operands[0]) if source == whole else whole
        if instruction.opcode == "pad" and self._is_zero(computation, instruction.operands[1]):
            read = self(computation, instruction.operands[0])
            return tuple(min(have, most) for have, most in zip(read, whole, strict=True))
        if instruction.opcode in _CALLS:
            for inner in _called(instruction):
                called = self._module.computations[inner]
                return self(called, called.root)
        if instruction.opcode == "parameter" and computation.name in self._callers:
            outer, caller = self._callers[computation.name]
            return self(outer, caller.operands[int(instruction.attributes["literal"])])
        return whole

    def _is_zero(self, computation: Computation, name: str) -> bool:
        instruction = computation.instructions[name]
        if instruction.opcode == "parameter" and computation.name in self._callers:
            outer, caller = self._callers[computation.name]
            return self._is_zero(outer, caller.operands[int(instruction.attributes["literal"])])
        literal = instruction.attributes.get("literal", "")
        return instruction.opcode == "constant" and bool(re.fullmatch(r"-?0(\.0*)?", literal.strip()))


def _called(instruction: Instruction) -> tuple[str, ...]:
    return instruction.computations(_CALLS[instruction.opcode]) if instruction.opcode in _CALLS else ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
