"""What a compiled program really does: its collectives, FLOPs and memory, read from XLA's own text and analysis.

This is the truth that predicted collectives, FLOPs and bytes are compared with. The optimised HLO is walked from the
entry with a multiplicity: the body of a loop counts once per trip, a conditional counts its dearest branch, a fusion or
call counts as its contents, and an asynchronous pair counts once, at its start.

Known limits: a loop whose trip count depends on data counts once (`CompiledFacts.unknown_loops` says how many there
are); XLA rewrites a product over a contracted dim of size one as a multiplication, which is then no FLOP here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax

from meshwright._jax.hlo_flops import instruction_flops
from meshwright._jax.hlo_origins import Origins
from meshwright._jax.hlo_parse import Computation, Instruction, Module, dtype_bits, parse_groups, parse_module
from meshwright._jax.hlo_roles import Roles, program_types

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
}
# `to_apply` of a reduction, sort or scatter is a scalar function: nothing to count there. Only a call's is walked.
_CALLED = {"fusion": "calls", "async-start": "calls", "call": "to_apply", "custom-call": "called_computations"}

# What HloRematerialization calls its copy of an instruction.
_REMATERIALISED = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+\.remat\d*(?:\.\d+)? = ", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollective:
    """One collective instruction of a compiled program, with how often one run of the program executes it.

    Attributes:
      kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``permute``.
      bytes: per device and execution: operands of all_reduce, reduce_scatter, all_to_all and permute; the *gathered*
        output of all_gather.
      group_size: devices that communicate together (2 for a permute, whose groups are source-target pairs).
      groups: positions in the device assignment, one tuple per group.
      count: executions per run of the program.
      operands: arrays moved together by this instruction (XLA combines several gradients into one).
      dtypes: XLA's dtype name of each operand.
      sent_bytes: as `bytes`, of each operand in the type that the program sends it in: a backend without collectives of
        16-bit numbers widens them.
    """

    kind: str
    bytes: int
    group_size: int
    groups: tuple[tuple[int, ...], ...]
    count: int
    operands: int
    dtypes: tuple[str, ...]
    sent_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFacts:
    """What one device does in one run of a compiled program; all sizes in bytes per device.

    `flops` counts matrix products and convolutions; `peak_bytes` is arguments + outputs - aliased + temporaries.
    `rematerialised`: instructions that XLA computes again by itself to stay within its limit of memory: a peak just
    under that limit then says little of what the program would take.
    """

    collectives: tuple[CompiledCollective, ...]
    flops: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    generated_code_bytes: int
    unknown_loops: int
    rematerialised: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """FLOPs, executions by (computation, instruction), and loops of unknown length of one run of a computation."""

    flops: float
    executions: Mapping[tuple[str, str], int]
    unknown_loops: int


def read_compiled(compiled: jax.stages.Compiled, program: str = "") -> CompiledFacts:
    """Reads the collectives, FLOPs and memory of `compiled`, as ``jax.jit(f).lower(...).compile()`` returns it.

    Args:
      compiled: the program.
      program: the text that it was compiled from, for the types in which that sends arrays; empty where the compiler
        rounds none.

    Raises:
      ValueError: if the backend gives no memory analysis, or prints its program in a form not known here.
    """
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    if memory is None or text is None:
        raise ValueError(
            "refused to read a compiled program · got no memory analysis or no text from this backend · needed both"
            " · where: hlo.read_compiled · try: the CPU, GPU or TPU backend of a JAX release this package supports"
        )
    # Only TPUs have tiles, and only their compiler writes collectives as sums.
    collectives, flops, unknown_loops = read_text(text, rewritten=":T(" in text)
    types = program_types(program)
    return CompiledFacts(
        collectives=tuple(_unrounded(one, types) for one in collectives),
        flops=flops,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        generated_code_bytes=memory.generated_code_size_in_bytes,
        unknown_loops=unknown_loops,
        rematerialised=len(_REMATERIALISED.findall(text)),
    )


def read_text(text: str, *, rewritten: bool = False) -> tuple[tuple[CompiledCollective, ...], float, int]:
    """The collectives, the FLOPs per device and the number of loops of unknown length in optimised HLO text.

    Args:
      text: of one module.
      rewritten: whether the compiler writes small gathers and scatters as sums (`hlo_roles`).

    Raises:
      ValueError: if the text is not a compiled program.
    """
    module = parse_module(text)
    origins = Origins(module)
    totals = _walk(module, module.entry, {}, origins)
    roles, names_sources = Roles(module, origins), rewritten and "op_name=" in text
    found: list[CompiledCollective] = []
    chains = set[str]()
    for (computation_name, name), count in totals.executions.items():
        computation = module.computations[computation_name]
        instruction = computation.instructions[name]
        if (chain := chain_of(instruction)) is not None:
            if chain in chains:
                continue
            chains.add(chain)
        one = _collective(module, computation, instruction, count, origins)
        if one.kind == "permute" and names_sources and "op_name=" not in instruction.attributes.get("metadata", ""):
            # No operation of the program: of a scatter into parts that are no whole tiles the TPU compiler moves rows.
            continue
        sizes = [shape.size_bytes for shape in computation.operand_shapes(instruction)]
        if rewritten and one.kind == "all_reduce" and len(sizes) == len(instruction.operands):  # none of them a tuple
            found.extend(_by_role(one, roles.of(computation, instruction), sizes))
        else:
            found.append(one)
    return tuple(found), totals.flops, totals.unknown_loops


def collective_kind(opcode: str) -> str | None:
    """What a collective instruction is, or begins; None for any other, and for the end of one."""
    return KINDS.get(opcode.removesuffix("-start"))


def chain_of(instruction: Instruction) -> str | None:
    """What all parts of one collective have in common where the TPU compiler has spread it over several kernels (an
    async collective fusion); None for others."""
    found = re.search(r'chain_id="(\d+)"', instruction.attributes.get("frontend_attributes", ""))
    return found[1] if found else None


def _collective(
    module: Module, computation: Computation, instruction: Instruction, count: int, origins: Origins
) -> CompiledCollective:
    kind = KINDS[instruction.opcode.removesuffix("-start")]
    shapes = computation.operand_shapes(instruction)
    if instruction.opcode == "ragged-all-to-all":
        shapes = shapes[:1]  # the other operands are the output buffer and the offsets
    if kind == "permute":
        groups = parse_groups(instruction.attributes["source_target_pairs"], module.num_devices)
        shapes = shapes[:1]
    else:
        groups = parse_groups(instruction.attributes.get("replica_groups", ""), module.num_devices)
    group_size = len(groups[0])
    moved = sum(shape.size_bytes for shape in shapes)
    times = group_size if kind == "all_gather" else 1
    names = instruction.operands[: len(shapes)]
    sent = [origins.sent(computation, instruction, name).size_bytes for name in names]
    if len(names) != len(shapes) or any(len(computation.instructions[name].shapes) != 1 for name in names):
        sent = [shape.size_bytes for shape in shapes]  # of tuples
    return CompiledCollective(
        kind=kind,
        bytes=moved * times,
        group_size=group_size,
        groups=groups,
        count=count,
        operands=len(shapes),
        dtypes=tuple(shape.dtype for shape in shapes),
        sent_bytes=tuple(size * times for size in sent),
    )


def _unrounded(one: CompiledCollective, types: Mapping[tuple[str, int], set[int]]) -> CompiledCollective:
    """A collective with `sent_bytes` in the types in which the program sends as many elements."""
    if one.kind not in ("all_gather", "all_to_all", "permute"):
        return one
    sent = []
    for size, dtype in zip(one.sent_bytes, one.dtypes, strict=True):
        bits = dtype_bits(dtype)
        widths = types.get((one.kind, 8 * size // bits), {bits})
        sent.append(size if bits in widths or 8 * size % bits else size * max(widths) // bits)
    return replace(one, sent_bytes=tuple(sent))


def _by_role(joined: CompiledCollective, kinds: tuple[str, ...], sizes: list[int]) -> Iterator[CompiledCollective]:
    """An all-reduce as the collectives of the program that the compiler has made one of.

    Args:
      joined: the all-reduce.
      kinds: of each of its arrays.
      sizes: bytes of each.
    """
    for kind in dict.fromkeys(kinds):
        places = [place for place, one in enumerate(kinds) if one == kind]
        yield replace(
            joined, kind=kind, bytes=sum(sizes[place] for place in places), operands=len(places),
            dtypes=tuple(joined.dtypes[place] for place in places),
            sent_bytes=tuple(joined.sent_bytes[place] for place in places),
        )  # fmt: skip


def _walk(module: Module, name: str, seen: dict[str, _Totals], origins: Origins) -> _Totals:
    if name in seen:
        return seen[name]
    computation = module.computations[name]
    flops, unknown_loops = 0.0, 0
    executions: dict[tuple[str, str], int] = {}

    def add(totals: _Totals, times: int) -> None:
        nonlocal flops, unknown_loops
        flops += totals.flops * times
        unknown_loops += totals.unknown_loops
        for key, count in totals.executions.items():
            executions[key] = executions.get(key, 0) + count * times

    for instruction in computation.instructions.values():
        if collective_kind(instruction.opcode):
            executions[name, instruction.name] = 1
        elif instruction.opcode == "while":
            body, condition = instruction.computations("body")[0], instruction.computations("condition")[0]
            trips = trip_count(module, computation, instruction)
            unknown_loops += trips is None
            times = 1 if trips is None else trips
            add(_walk(module, body, seen, origins), times)
            add(_walk(module, condition, seen, origins), times + 1)
        elif instruction.opcode == "conditional":
            branches = instruction.computations("branch_computations") or (
                instruction.computations("true_computation") + instruction.computations("false_computation")
            )
            add(_dearest(module, [_walk(module, branch, seen, origins) for branch in branches]), 1)
        elif instruction.opcode in _CALLED:
            for called in instruction.computations(_CALLED[instruction.opcode]):
                add(_walk(module, called, seen, origins), 1)
            flops += instruction_flops(computation, instruction, origins.extents)
        else:
            flops += instruction_flops(computation, instruction, origins.extents)
    seen[name] = _Totals(flops=flops, executions=executions, unknown_loops=unknown_loops)
    return seen[name]


def _dearest(module: Module, branches: list[_Totals]) -> _Totals:
    """FLOPs and collectives of the worst branch, each by its own measure."""

    def moved_bytes(totals: _Totals) -> int:
        total = 0
        for (computation_name, name), count in totals.executions.items():
            computation = module.computations[computation_name]
            total += count * sum(s.size_bytes for s in computation.operand_shapes(computation.instructions[name]))
        return total

    return _Totals(
        flops=max(branch.flops for branch in branches),
        executions=max(branches, key=moved_bytes).executions,
        unknown_loops=max(branch.unknown_loops for branch in branches),
    )


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trips of a while loop: as XLA states it, else from a counter compared with a constant; None if neither."""
    stated = re.search(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)', loop.attributes.get("backend_config", ""))
    if stated:
        return int(stated[1])
    condition = module.computations[loop.computations("condition")[0]]
    body = module.computations[loop.computations("body")[0]]
    compare = _operation(module, condition, condition.root)
    if compare is None or compare[0].opcode != "compare":
        return None
    counter, limit = compare[1]
    index, stop = _tuple_index(condition, counter), _constant(condition, limit)
    init = computation.instructions.get(loop.operands[0])
    step = body.instructions[body.root]
    if index is None or stop is None or init is None or init.opcode != "tuple" or step.opcode != "tuple":
        return None
    start = _constant(computation, init.operands[index])
    increment = _operation(module, body, step.operands[index])
    if start is None or increment is None or increment[0].opcode != "add":
        return None
    steps = [value for operand in increment[1] if (value := _constant(body, operand)) is not None]
    counted = any(_tuple_index(body, operand) == index for operand in increment[1])
    if len(steps) != 1 or steps[0] == 0 or not counted:
        return None
    direction = compare[0].attributes.get("direction")
    distance = {"LT": stop - start, "LE": stop - start + 1, "GT": start - stop, "GE": start - stop + 1}.get(
        direction or ""
    )
    sign = 1 if direction in ("LT", "LE") else -1
    return None if distance is None or steps[0] * sign < 0 else max(0, math.ceil(distance / abs(steps[0])))


def _operation(module: Module, computation: Computation, name: str) -> tuple[Instruction, tuple[str, ...]] | None:
    """The binary operation that computes `name`, seen through a fusion of just it, with its outer operands."""
    instruction = _through_copies(computation, name)
    if instruction.opcode != "fusion":
        return (instruction, instruction.operands) if len(instruction.operands) == 2 else None
    inner = module.computations[instruction.computations("calls")[0]]
    root = inner.instructions[inner.root]
    parameters = [inner.instructions[operand] for operand in root.operands]
    if len(parameters) != 2 or any(parameter.opcode != "parameter" for parameter in parameters):
        return None
    return root, tuple(instruction.operands[int(parameter.attributes["literal"])] for parameter in parameters)


def _through_copies(computation: Computation, name: str) -> Instruction:
    instruction = computation.instructions[name]
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    instruction = _through_copies(computation, name)
    literal = instruction.attributes.get("literal", "")
    return int(literal) if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", literal) else None


def _tuple_index(computation: Computation, name: str) -> int | None:
    instruction = _through_copies(computation, name)
    return int(instruction.attributes["index"]) if instruction.opcode == "get-tuple-element" else None
