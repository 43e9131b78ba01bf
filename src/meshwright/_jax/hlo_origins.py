"""What arrays of a compiled program were before the compiler made them larger: fewer positions, or a narrower type.

Compilers and `_jax.convolutions` append zeros to the operands of products and convolutions where fast code wants other
extents: an even number of channels on CPUs, multiples of eight on GPUs, images no smaller than the window. Multiplying
them is no work that the program asks for. XLA's CPU backend has no collectives of 16-bit floating-point numbers, and
sends them as 32-bit ones. What an array is made of is followed backwards through copies, transposes, fusions and calls,
up to the first instruction that computes something.

Known limits: what enters a loop from outside counts as it is; what a program itself converts to a wider type right
before it gathers it counts in the narrower.
"""

from __future__ import annotations

import re
from collections import Counter

from meshwright._jax.hlo_parse import ArrayShape, Computation, Instruction, Module

_CALLS = {"fusion": "calls", "call": "to_apply"}
_SAME_DIMS = ("copy", "convert", "reverse")
_SAME_NUMBERS = ("copy", "bitcast", "transpose", "reshape", "concatenate", "pad", "reverse")
_NARROW = ("bf16", "f16")
# Other names, orders and places of the same numbers.
_SAME_ARRAY = ("bitcast", "copy", "copy-done", "copy-start", "reshape", "transpose")


class Origins:
    """Which arrays the arrays of one compiled program were made from.

    Args:
      module: the program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        calls = [
            (inner, computation, instruction)
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
            for inner in _called(instruction)
        ]
        # What two instructions call has no operands of its own.
        times = Counter(inner for inner, _, _ in calls)
        self._callers = {inner: (outer, caller) for inner, outer, caller in calls if times[inner] == 1}

    def extents(self, computation: Computation, name: str) -> tuple[int, ...]:
        """For each dim of an array how many of its positions hold data, zeros that were appended left out."""
        computation, instruction = self._seen_through(computation, name)
        whole = instruction.shapes[0].dims
        if instruction.opcode in _SAME_DIMS:
            return self.extents(computation, instruction.operands[0])
        if instruction.opcode == "transpose":
            read = self.extents(computation, instruction.operands[0])
            dims = re.findall(r"\d+", instruction.attributes.get("dimensions", ""))
            return tuple(read[int(dim)] for dim in dims)
        if instruction.opcode == "bitcast":
            source = computation.instructions[instruction.operands[0]].shapes[0].dims
            return self.extents(computation, instruction.operands[0]) if source == whole else whole
        if instruction.opcode == "pad" and self.is_zero(computation, instruction.operands[1]):
            read = self.extents(computation, instruction.operands[0])
            return tuple(min(have, most) for have, most in zip(read, whole, strict=True))
        return whole

    def sent(self, computation: Computation, collective: Instruction, name: str) -> ArrayShape:
        """An operand of a collective in the type that the program sends it in."""
        shape = computation.instructions[name].shapes[0]
        if shape.dtype != "f32":
            return shape
        if "to_apply" in collective.attributes:
            # The compiler says so of a sum that it widens; what is summed it may never have rounded.
            widened = collective.attributes["to_apply"].endswith("promoted")
            return ArrayShape(dtype=_NARROW[0], dims=shape.dims) if widened else shape
        return ArrayShape(dtype=self._narrowest(computation, name) or shape.dtype, dims=shape.dims)

    def made_by(self, computation: Computation, name: str) -> tuple[Computation, Instruction]:
        """The instruction that computes an array, or writes a part of it, seen through tuples and other names of it."""
        place: int | None = None
        while True:
            computation, instruction = self._seen_through(computation, name)
            if instruction.opcode == "get-tuple-element" and place is None:
                place, name = int(instruction.attributes["index"]), instruction.operands[0]
            elif instruction.opcode == "tuple" and place is not None:
                place, name = None, instruction.operands[place]
            elif instruction.opcode in _SAME_ARRAY and place is None:
                name = instruction.operands[0]
            else:
                return computation, instruction

    def _narrowest(self, computation: Computation, name: str) -> str | None:
        """The 16-bit type that an array was converted from, all of it; None if it was not."""
        computation, instruction = self._seen_through(computation, name)
        if instruction.opcode == "convert":
            dtype = computation.instructions[instruction.operands[0]].shapes[0].dtype
            return dtype if dtype in _NARROW else None
        if instruction.opcode not in _SAME_NUMBERS:
            return None
        read = instruction.operands[:1] if instruction.opcode == "pad" else instruction.operands
        found = {self._narrowest(computation, one) for one in read}
        return found.pop() if len(found) == 1 else None

    def _seen_through(self, computation: Computation, name: str) -> tuple[Computation, Instruction]:
        """The instruction behind a fusion, a call, or an operand of one."""
        instruction = computation.instructions[name]
        while True:
            if inner := _called(instruction):
                computation = self._module.computations[inner[0]]
                instruction = computation.instructions[computation.root]
            elif instruction.opcode == "parameter" and computation.name in self._callers:
                place = int(instruction.attributes["literal"])
                computation, caller = self._callers[computation.name]
                instruction = computation.instructions[caller.operands[place]]
            else:
                return computation, instruction

    def is_zero(self, computation: Computation, name: str) -> bool:
        """Whether an instruction is the constant zero."""
        _, instruction = self._seen_through(computation, name)
        literal = instruction.attributes.get("literal", "")
        return instruction.opcode == "constant" and bool(re.fullmatch(r"-?0(\.0*)?", literal.strip()))


def _called(instruction: Instruction) -> tuple[str, ...]:
    return instruction.computations(_CALLS[instruction.opcode]) if instruction.opcode in _CALLS else ()
