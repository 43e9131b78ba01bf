"""The schedule of a compiled program: what its kernels take by the compiler's own estimate, and what runs beside
collectives.

XLA prints the instructions of a computation in the order in which they are issued. Its TPU compiler writes beside each
kernel the cycles that it estimates, and moves a collective beside compute in one of two forms: a pair of instructions,
`all-gather-start` and `all-gather-done`; or an *async collective fusion*, in which the kernels between a start and a
done carry the collective's steps and all have its `chain_id`. What stands between start and done runs beside it.

Known limits: what a collective takes is not known here (the compiler prints no cycles for it), so that a collective may
take longer than all that runs beside it; GPU compilers print no cycles, of them the number of kernels alone is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshwright._jax.hlo import KINDS, chain_of, collective_kind, trip_count
from meshwright._jax.hlo_flops import instruction_flops
from meshwright._jax.hlo_origins import Origins
from meshwright._jax.hlo_parse import Computation, Instruction, Module, parse_module

# The class of a kernel is the first of these that is in it.
_CLASSES: tuple[tuple[str, frozenset[str]], ...] = (
    ("products", frozenset({"dot", "convolution"})),
    ("indexing", frozenset({"gather", "scatter", "sort"})),
    ("reductions", frozenset({"reduce", "reduce-window", "select-and-scatter"})),
)
_MOVING = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "copy", "bitcast", "transpose", "reshape", "slice",
     "concatenate", "pad", "reverse", "dynamic-slice", "dynamic-update-slice", "broadcast", "convert"}
)  # fmt: skip

# Instructions that are no kernels: names of existing buffers, and the two ends of copies beside compute.
_NO_KERNELS = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "copy-start", "copy-done",
     "slice-start", "slice-done", "while", "conditional", "call", "partition-id", "replica-id"}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of one class in one run of a program.

    Args:
      count: how many are executed.
      cycles: of all of them, as the compiler estimates; 0 where it does not.
      flops: of their products.
    """

    count: int = 0
    cycles: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Kernels) -> Kernels:
        return Kernels(
            count=self.count + other.count, cycles=self.cycles + other.cycles, flops=self.flops + other.flops
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledCollective:
    """One collective of a schedule.

    Args:
      kind: as of `hlo.CompiledCollective`.
      bytes: that it leaves on a device, summed over its arrays.
      count: executions in one run of the program.
      source: the operation of the traced program that it comes from, as XLA names it.
      is_asynchronous: whether it has a start and a done.
      kernels: how many run between these.
      cycles: of these, as the compiler estimates; 0 where it does not.
      flops: of their products.
      written_bytes: that they leave in memory.
    """

    kind: str
    bytes: int
    count: int
    source: str
    is_asynchronous: bool
    kernels: int = 0
    cycles: float = 0.0
    flops: float = 0.0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run of a compiled program on one device.

    Args:
      kernels: by class: "products", "convolutions", "reductions", "indexing", "elementwise", "copies", "opaque" (custom
        calls, such as Pallas kernels), and "updates": of these what is outside of a function that is differentiated,
        products and custom calls left out (the optimizer, where the program has both).
      collectives: in the order in which they are issued.
    """

    kernels: Mapping[str, Kernels]
    collectives: tuple[ScheduledCollective, ...]

    @property
    def cycles(self) -> float:
        """Of all kernels; 0 where the compiler estimates none."""
        return sum(one.cycles for one in self.kernels.values())


def in_turn(schedules: Iterable[tuple[Schedule, int]]) -> Schedule:
    """One schedule of several that run after each other.

    Args:
      schedules: each with how often it runs.
    """
    kernels: dict[str, Kernels] = {}
    collectives: list[ScheduledCollective] = []
    for schedule, runs in schedules:
        for name, one in schedule.kernels.items():
            times = Kernels(count=runs * one.count, cycles=runs * one.cycles, flops=runs * one.flops)
            kernels[name] = kernels.get(name, Kernels()) + times
        collectives += [replace(one, count=runs * one.count) for one in schedule.collectives]
    return Schedule(kernels=kernels, collectives=tuple(collectives))


def read_schedule(text: str) -> Schedule:
    """The schedule of optimised HLO text.

    Raises:
      ValueError: if the text is not a compiled program.
    """
    module = parse_module(text)
    reader = _Reader(module, Origins(module), "jvp(" in text)
    reader.read(module.entry, 1)
    return Schedule(kernels=reader.kernels, collectives=tuple(reader.collectives))


@dataclass(slots=True)
class _Reader:
    module: Module
    origins: Origins
    differentiates: bool
    kernels: dict[str, Kernels] = field(default_factory=dict)
    collectives: list[ScheduledCollective] = field(default_factory=list)

    def read(self, name: str, times: int) -> None:
        """A computation that is executed so many times."""
        computation = self.module.computations[name]
        open_: dict[str, ScheduledCollective] = {}
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                trips = trip_count(self.module, computation, instruction) or 1
                self.read(instruction.computations("body")[0], times * trips)
            elif opcode == "conditional":
                self._longest(instruction, times)
            elif opcode == "call":
                for called in instruction.computations("to_apply"):
                    self.read(called, times)
            elif not self._collective(computation, instruction, times, open_) and _is_kernel(instruction):
                self._kernel(computation, instruction, times, open_)
        self.collectives.extend(open_.values())  # of which the end is not in this computation

    def _length(self) -> tuple[float, int]:
        return sum(one.cycles for one in self.kernels.values()), sum(one.count for one in self.kernels.values())

    def _longest(self, conditional: Instruction, times: int) -> None:
        """The branch with the most cycles, or kernels where no cycles are known."""
        branches = conditional.computations("branch_computations") or (
            conditional.computations("true_computation") + conditional.computations("false_computation")
        )
        readers = [_Reader(self.module, self.origins, self.differentiates) for _ in branches]
        for reader, branch in zip(readers, branches, strict=True):
            reader.read(branch, times)
        longest = max(readers, key=_Reader._length)
        for name, kernels in longest.kernels.items():
            self.kernels[name] = self.kernels.get(name, Kernels()) + kernels
        self.collectives.extend(longest.collectives)

    def _collective(
        self, computation: Computation, instruction: Instruction, times: int, open_: dict[str, ScheduledCollective]
    ) -> bool:
        """Whether an instruction is a collective, or an end of one, and no kernel beside."""
        if collective_kind(instruction.opcode):
            found = _described(computation, instruction, times)
            if instruction.opcode.endswith("-start"):
                open_[instruction.name] = replace(found, is_asynchronous=True)
            else:
                self.collectives.append(found)
            return True
        if instruction.opcode.endswith("-done") and instruction.operands[0] in open_:
            self.collectives.append(open_.pop(instruction.operands[0]))
            return True
        if instruction.opcode not in ("fusion", "async-start"):
            return False
        ends = {target for _, one in self._inside(instruction) if (target := _end(one)) is not None}
        for inner, one in self._inside(instruction):
            if not collective_kind(one.opcode):
                continue
            chain = chain_of(one) or instruction.name
            if "AsyncCollectiveStart" in ends or instruction.opcode == "async-start":
                open_[chain] = replace(_described(inner, one, times), is_asynchronous=True)
            elif "AsyncCollectiveDone" in ends and chain in open_:
                self.collectives.append(open_.pop(chain))
            elif chain not in open_:  # all of it inside one kernel
                self.collectives.append(_described(inner, one, times))
        return bool(ends)

    def _kernel(
        self, computation: Computation, instruction: Instruction, times: int, open_: dict[str, ScheduledCollective]
    ) -> None:
        found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes.get("backend_config", ""))
        inside = [*self._inside(instruction), (computation, instruction)]
        opaque = instruction.opcode == "custom-call"
        flops = sum(instruction_flops(inner, one, self.origins.extents) for inner, one in inside)
        cycles = float(found[1]) if found else 0.0
        kernel = Kernels(count=times, cycles=times * cycles, flops=times * flops)
        name = "products" if opaque and flops else _class([one for _, one in inside])
        if self.differentiates and name not in ("products", "convolutions", "opaque") and _is_outside(instruction):
            name = "updates"
        self.kernels[name] = self.kernels.get(name, Kernels()) + kernel
        written = sum(shape.size_bytes for shape in instruction.shapes)
        for chain, one in open_.items():
            open_[chain] = replace(
                one, kernels=one.kernels + 1, cycles=one.cycles + cycles, flops=one.flops + flops,
                written_bytes=one.written_bytes + written,
            )  # fmt: skip

    def _inside(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions of a fusion, fusions in it as well."""
        for name in instruction.computations("calls"):
            inner = self.module.computations[name]
            for one in inner.instructions.values():
                yield inner, one
                yield from self._inside(one)


def _is_kernel(instruction: Instruction) -> bool:
    if instruction.opcode != "custom-call":
        return instruction.opcode not in _NO_KERNELS
    # Of a TPU's custom calls the others allocate buffers, or say something of values.
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    return target == "tpu_custom_call" or target.startswith("__") or "estimated_cycles" in str(instruction.attributes)


def _is_outside(instruction: Instruction) -> bool:
    """Whether a kernel comes from an operation that is not in a function that is differentiated."""
    source = re.search(r'op_name="([^"]*)"', instruction.attributes.get("metadata", ""))
    return source is not None and "jvp(" not in source[1]


def _described(computation: Computation, instruction: Instruction, times: int) -> ScheduledCollective:
    kind = KINDS[instruction.opcode.removesuffix("-start")]
    read = sum(shape.size_bytes for shape in computation.operand_shapes(instruction))
    made = sum(shape.size_bytes for shape in instruction.shapes)
    gathered = made - read if instruction.opcode.endswith("-start") else made
    source = re.search(r'op_name="([^"]*)"', instruction.attributes.get("metadata", ""))
    return ScheduledCollective(
        kind=kind, bytes=gathered if kind == "all_gather" else read, count=times, source=source[1] if source else "",
        is_asynchronous=False,
    )  # fmt: skip


def _end(instruction: Instruction) -> str | None:
    """Which end of an async collective fusion a custom call is."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    return target if target in ("AsyncCollectiveStart", "AsyncCollectiveDone") else None


def _class(inside: list[Instruction]) -> str:
    opcodes = {one.opcode for one in inside} - {"fusion"}
    for name, members in _CLASSES:
        if opcodes & members:
            windows = any("conv_general_dilated" in one.attributes.get("metadata", "") for one in inside)
            return "convolutions" if name == "products" and windows else name
    if "custom-call" in opcodes:
        return "opaque"
    return "copies" if opcodes <= _MOVING else "elementwise"
