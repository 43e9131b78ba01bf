"""The grammar of XLA's text form of a compiled program (HLO): text in, computations and instructions out.

Only what reading a compiled program needs is kept: names, opcodes, result shapes, operand names and attributes as text.
The printed form differs between releases in three ways that matter, and all are read here: operand shapes are sometimes
printed and sometimes not, replica groups come as a list, as an iota or (in newer releases) as axes of a mesh, and
tuples carry ``/*index=5*/`` comments. Cost: linear in the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=\s]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_FOOTER = re.compile(r"^\s*\}\s*(,|$)")
_ASSIGN = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPENERS = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayShape:
    """One array of an HLO shape: XLA's name of the dtype (``f32``) and the dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense array; types under a byte are packed."""
        return -(-self.elements * dtype_bits(self.dtype) // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One HLO instruction: `shapes` are its results' arrays, tuples flattened; `attributes` are raw text by name."""

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    attributes: Mapping[str, str]
    is_root: bool

    def computations(self, key: str) -> tuple[str, ...]:
        """The names of the computations in attribute `key` (``calls``, ``branch_computations``...); empty if absent."""
        return tuple(name.strip().lstrip("%") for name in self.attributes.get(key, "").strip("{}").split(",") if name)


@dataclass(slots=True, kw_only=True)
class Computation:
    """One HLO computation: its instructions by name, in the printed (scheduled) order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def operand_shapes(self, instruction: Instruction) -> tuple[ArrayShape, ...]:
        """The arrays `instruction` reads, in order, tuples flattened."""
        return tuple(shape for name in instruction.operands for shape in self.instructions[name].shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A compiled program: computations by name, the entry's name, and how many devices run it together."""

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int


def parse_module(text: str) -> Module:
    """Reads optimised HLO text.

    Raises:
      ValueError: if the text holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current, header = "", None, ""
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw) if "/*" in raw else raw
        if line.startswith("HloModule"):
            header = line
        elif current is not None and _FOOTER.match(line):
            current = None
        elif current is not None:
            instruction = _parse_instruction(line)
            if instruction is not None:
                current.instructions[instruction.name] = instruction
                if instruction.is_root:
                    current.root = instruction.name
        elif match := _HEADER.match(line):
            current = computations.setdefault(match[2], Computation(name=match[2]))
            if match[1]:
                entry = match[2]
    if not entry:
        raise ValueError(
            "refused to read a compiled program · got text without an ENTRY computation · needed optimised HLO text"
            " · where: hlo_parse.parse_module · try: jax.jit(f).lower(...).compile().as_text()"
        )
    counts = [
        int(found[1]) for key in ("num_partitions", "replica_count") if (found := re.search(rf"{key}=(\d+)", header))
    ]
    return Module(computations=computations, entry=entry, num_devices=math.prod(counts))


def parse_groups(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Replica groups (or source-target pairs) in any printed form; empty means one group of all `num_devices`.

    Forms: ``{{0,1},{2,3}}``, ``[2,4]<=[8]``, ``[4,2]<=[2,4]T(1,0)``, ``mesh['x'=2,'y'=4] {'y'}`` (with a part of an
    axis as ``'y':(2)2`` and an own device order as ``device_ids=(...)``).

    Raises:
      ValueError: if the text has none of these forms.
    """
    text = text.strip()
    if text in ("", "{}", "{{}}"):
        return (tuple(range(num_devices)),)
    if text.startswith("{"):
        return tuple(_integers(group) for group in re.findall(r"\{([0-9,\s]+)\}", text))
    if text.startswith("["):
        return _as_groups(_iota(text))
    if text.startswith("mesh["):
        return _mesh_groups(text)
    raise ValueError(
        f"refused to read replica groups · got {text!r} · needed a list, an iota or mesh axes"
        " · where: the compiled text · try: report this text, a newer XLA prints groups in a form not known here"
    )


def _as_groups(rows: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(device) for device in row) for row in rows)


def _iota(text: str) -> np.ndarray:
    shape, _, source = text.partition("<=")
    dims, _, permutation = source.partition("T")
    devices = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    if permutation:
        devices = devices.transpose(_integers(permutation))
    return devices.reshape(_integers(shape))


def _mesh_groups(text: str) -> tuple[tuple[int, ...], ...]:
    sizes = {name.strip("'"): int(size) for name, size in re.findall(r"('[^']*'|\w+)=(\d+)", text[: text.index("]")])}
    order = re.search(r"device_ids=\(((?:[^()]|\([^()]*\))*)\)", text)
    ids = np.arange(math.prod(sizes.values()))
    if order and order[1].startswith("["):
        # The TPU compiler leaves out the flat shape in front of its source.
        ids = _iota(order[1] if "<=" in order[1] else f"[{len(ids)}]<={order[1]}")
    elif order:
        ids = np.array(_integers(order[1]))
    grouped = re.findall(r"(?:'([^']*)'|(\w+))(?::\((\d+)\)(\d+))?", text[text.rindex("{") :])
    # Every axis is split into (before, taken, after): a whole axis has nothing before or after its taken part.
    dims: list[int] = []
    taken: list[int] = []
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for rank, (quoted, bare, before, size) in enumerate(grouped):
        name = quoted or bare
        parts.setdefault(name, []).append((int(before or 1), int(size or sizes[name]), rank))
    ranks: list[int] = []
    for name, axis_size in sizes.items():
        done = 1
        for before, size, rank in sorted(parts.get(name, [])):
            dims += [before // done, size]
            taken.append(len(dims) - 1)
            ranks.append(rank)
            done = before * size
        dims.append(axis_size // done)
    ordered = [dim for _, dim in sorted(zip(ranks, taken, strict=True))]
    kept = [dim for dim in range(len(dims)) if dim not in taken]
    group_size = math.prod(dims[dim] for dim in ordered)
    return _as_groups(ids.reshape(dims).transpose(kept + ordered).reshape(-1, group_size))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def dtype_bits(dtype: str) -> int:
    """Bits of one element, by XLA's name of its type."""
    if dtype in _BITS:
        return _BITS[dtype]
    # f32, bf16, s4, u8, and the float8 family (f8e4m3fn), whose first number is the width.
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 0


def _parse_shapes(text: str) -> tuple[ArrayShape, ...]:
    return tuple(
        ArrayShape(dtype=dtype, dims=_integers(dims)) for dtype, dims in _ARRAY.findall(text) if dtype != "token"
    )


def _parse_instruction(line: str) -> Instruction | None:
    assign = _ASSIGN.match(line)
    if assign is None:
        return None
    start = assign.end()
    shape_end = _balanced_end(line, start) if line[start] == "(" else line.index(" ", start)
    open_at = line.index("(", shape_end)
    close_at = _balanced_end(line, open_at)
    opcode = line[shape_end:open_at].strip()
    literal = opcode in ("constant", "parameter", "iota")
    operands = (
        () if literal else tuple(part.split()[-1].lstrip("%") for part in _split(line[open_at + 1 : close_at - 1]))
    )
    attributes: dict[str, str] = {}
    for part in _split(line[close_at:].lstrip(",")):
        key, _, value = part.partition("=")
        if key == "device_ids" and "replica_groups" in attributes:
            # A mesh's own device order is printed after a comma but belongs to the groups.
            attributes["replica_groups"] += ", " + part
        else:
            attributes[key] = value
    if literal:
        attributes["literal"] = line[open_at + 1 : close_at - 1]
    shapes = _parse_shapes(line[start:shape_end])
    return Instruction(
        name=assign[2], opcode=opcode, shapes=shapes, operands=operands, attributes=attributes, is_root=bool(assign[1])
    )


def _balanced_end(text: str, start: int) -> int:
    """The index just past the bracket that closes the one at `start`; quoted text is skipped."""
    depth, at = 0, start
    while at < len(text):
        char = text[at]
        if char == '"':
            at = _quote_end(text, at)
            continue
        depth += (char in "({[") - (char in ")}]")
        at += 1
        if depth == 0:
            return at
    return len(text)


def _quote_end(text: str, start: int) -> int:
    at = start + 1
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _split(text: str) -> Iterator[str]:
    """Splits at commas outside brackets and quotes; empty parts are dropped."""
    begin = at = 0
    while at < len(text):
        char = text[at]
        if char == '"':
            at = _quote_end(text, at)
        elif char in _OPENERS:
            at = _balanced_end(text, at)
        elif char == ",":
            if part := text[begin:at].strip():
                yield part
            at += 1
            begin = at
        else:
            at += 1
    if part := text[begin:].strip():
        yield part
