"""What compiled collectives are to the program, where the compiler sends something else than the program says.

XLA's TPU compiler writes a small all-gather as an all-reduce of zeros into which each device has written its own part,
and a small reduce-scatter as an all-reduce of which each device reads its own part, and joins both with the sums of
the program into one operation (seen with libtpu 0.0.42 on v4 to v6e: arrays of up to a few tens of KiB, and on a slice
of v4 or v5p whose axis is no ring all of them). Both are found by what makes the array, and by what reads the sum.

It also multiplies 32-bit numbers as 16-bit ones, and rounds them before it gathers or exchanges them where nothing but
products reads them (`program_types`).

Known limits: a sum that the program itself asks for and of which it reads nothing but each device's part counts as a
reduce-scatter; what passes through a loop before it is sliced counts as a sum.
"""

from __future__ import annotations

import re
from math import prod

from meshwright._jax.hlo_origins import Origins
from meshwright._jax.hlo_parse import Computation, Instruction, Module

_CALLS = {"fusion": "calls", "call": "to_apply"}
# The same numbers under another name or in another type, order or memory.
_SAME = frozenset(
    ("bitcast", "convert", "copy", "copy-done", "copy-start", "optimization-barrier", "reshape", "transpose")
)
_DONE = frozenset(("all-reduce-done", "copy-done"))

_SENDING = re.compile(r'"stablehlo\.(all_gather|all_to_all|collective_permute)"\(.*-> tensor<((?:\d+x)*)(\w+)>')


def program_types(text: str) -> dict[tuple[str, int], set[int]]:
    """By kind of collective (of those that add nothing up) and number of elements, as `hlo.CompiledCollective` counts
    them: the widths in bits in which a program sends so many.

    Args:
      text: of the lowered program, StableHLO.
    """
    found: dict[tuple[str, int], set[int]] = {}
    for opcode, dims, dtype in _SENDING.findall(text):
        elements = prod(int(size) for size in dims.split("x") if size)
        width = re.search(r"\d+", dtype)
        kind = opcode.removeprefix("collective_")
        found.setdefault((kind, elements), set()).add(max(int(width[0]), 8) if width else 8)  # i1 is a byte
    return found


class Roles:
    """The kinds of the arrays of all-reduces of one program.

    Args:
      module: the program.
      origins: of its arrays.
    """

    def __init__(self, module: Module, origins: Origins) -> None:
        self._module = module
        self._origins = origins
        self._users: dict[str, dict[str, list[Instruction]]] = {}

    def of(self, computation: Computation, instruction: Instruction) -> tuple[str, ...]:
        """Of each operand of an all-reduce "all_gather", "reduce_scatter" or "all_reduce"."""
        several = len(instruction.operands) > 1
        return tuple(
            "all_gather"
            if self._is_part_of_zeros(computation, name)
            else "reduce_scatter"
            if self._slices(computation, instruction.name, place if several else None)
            else "all_reduce"
            for place, name in enumerate(instruction.operands)
        )

    def _is_part_of_zeros(self, computation: Computation, name: str) -> bool:
        """Whether an array is zeros with a part written into them at a place that is computed."""
        computation, made = self._origins.made_by(computation, name)
        if made.opcode != "dynamic-update-slice":
            return False
        computation, filled = self._origins.made_by(computation, made.operands[0])
        if filled.opcode == "broadcast":
            computation, filled = self._origins.made_by(computation, filled.operands[0])
        return filled.opcode == "constant" and self._origins.is_zero(computation, filled.name)

    def _slices(self, computation: Computation, name: str, place: int | None) -> int | None:
        """How often a part of an array is read at a place that is computed; None if it is read in another way.

        Args:
          computation: it is in.
          name: of it, or of a tuple.
          place: in the tuple; None for all there is.
        """
        total = 0
        if computation.root == name:
            return None
        for user in self._users_in(computation).get(name, ()):
            found: int | None
            if user.opcode == "get-tuple-element" and place is not None:
                found = self._slices(computation, user.name, None) if int(user.attributes["index"]) == place else 0
            elif user.opcode in _DONE or (user.opcode in _SAME and place is None):
                found = self._slices(computation, user.name, place)
            elif user.opcode == "dynamic-slice" and place is None:
                found = 1 if user.operands[0] == name else None
            elif user.opcode in _CALLS and place is None:
                found = self._slices_inside(user, name)
            else:
                found = None
            if found is None:
                return None
            total += found
        return total

    def _slices_inside(self, caller: Instruction, name: str) -> int | None:
        (called,) = caller.computations(_CALLS[caller.opcode])
        inner = self._module.computations[called]
        places = {str(place) for place, operand in enumerate(caller.operands) if operand == name}
        total = 0
        for one in inner.instructions.values():
            if one.opcode == "parameter" and one.attributes["literal"] in places:
                found = self._slices(inner, one.name, None)
                if found is None:
                    return None
                total += found
        return total

    def _users_in(self, computation: Computation) -> dict[str, list[Instruction]]:
        if computation.name not in self._users:
            users: dict[str, list[Instruction]] = {}
            for one in computation.instructions.values():
                for operand in dict.fromkeys(one.operands):
                    users.setdefault(operand, []).append(one)
            self._users[computation.name] = users
        return self._users[computation.name]
