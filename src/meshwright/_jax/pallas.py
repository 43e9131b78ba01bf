"""Pallas kernels: how they may be split, read off their structure, and the same kernel on blocks.

A `pallas_call` runs its body once for each point of a grid. An *index map* says for each operand and result which block
a point of the grid is given. Along an axis of the grid a kernel may be split among devices if every operand and result
either is the same along it, or has one dim that is cut into as many blocks, in order; if the body does not ask where
along the axis it runs; and if nothing is carried from one point of the axis to the next (scratch memory, or a result
that several points write to), or the kernel declares the axis parallel. A device then runs the same kernel with a
shorter grid.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import jax
import numpy as np

from .jaxpr import ClosedJaxpr, Equation, Jaxpr, bind, consts_of, is_dropped, is_literal, open_jaxpr

# What reads a reference and does not write it.
_READS = frozenset(["get", "masked_load", "load"])

# What a body asks of its place in the grid.
_PLACE = frozenset(["program_id", "num_programs"])


@dataclass(frozen=True, slots=True)
class GridDim:
    """A dim of an operand or result that an axis of the grid runs over.

    Args:
      axis: of the grid.
      block: elements of the dim that a point of the grid is given.
      share: neighbouring points of the axis that are given the same block (query heads that share a key head).
    """

    axis: int
    block: int
    share: int


@dataclass(frozen=True, slots=True)
class Grid:
    """How a kernel may be split.

    Args:
      sizes: of the axes along which it may be.
      operands: for each operand, for each dim, what runs over it; None for a dim that is not to be split.
      results: the same of results.
      why: of an axis that is left out, or where there is none, why.
    """

    sizes: Mapping[int, int]
    operands: tuple[tuple[GridDim | None, ...], ...]
    results: tuple[tuple[GridDim | None, ...], ...]
    why: str


def is_pallas_call(equation: Equation) -> bool:
    """Whether an equation is a call of a Pallas kernel."""
    return equation.primitive.name == "pallas_call"


def has_kernel(jaxpr: Jaxpr) -> bool:
    """Whether a program calls a Pallas kernel, at any depth."""
    return any(is_pallas_call(one) or any(map(has_kernel, _programs(one))) for one in jaxpr.eqns)


def grid_of(equation: Equation) -> Grid:
    """The axes of a kernel's grid along which it may be split."""
    mapping = equation.params["grid_mapping"]
    # What is no block: sizes of the grid that are known at run time only, and what index maps read.
    first = len(equation.invars) - mapping.num_inputs
    tensors = [
        [_reads(one, dim, mapping.grid) for dim in range(len(one.block_shape))] for one in mapping.block_mappings
    ]
    inputs, outputs = tensors[: mapping.num_inputs], tensors[mapping.num_inputs :]
    sizes: dict[int, int] = {}
    why = "its grid has one point"
    for axis, size in enumerate(mapping.grid):
        if size == 1:
            continue
        refused = _refused(equation, axis, inputs, outputs)
        if refused is None:
            sizes[axis] = size
        else:
            why = refused

    def dims(tensor: Sequence[_Read]) -> tuple[GridDim | None, ...]:
        return tuple(one.dim if one.dim is not None and one.dim.axis in sizes else None for one in tensor)

    others = [(None,) * len(getattr(atom.aval, "shape", ())) for atom in equation.invars[:first]]
    return Grid(sizes, (*others, *map(dims, inputs)), tuple(map(dims, outputs)), why)


@dataclass(frozen=True, slots=True)
class _Read:
    """What the block of one dim depends on: axes of the grid; and what runs over it, if it is one of them in order."""

    axes: frozenset[int]
    dim: GridDim | None


def _reads(mapping: Any, dim: int, grid: Sequence[int]) -> _Read:
    jaxpr = open_jaxpr(mapping.index_map_jaxpr)
    if len(jaxpr.outvars) != len(mapping.block_shape):  # some dim has a block of a size of its own
        known = _dependences(jaxpr)
        return _Read(frozenset[int]().union(*(known[out] for out in jaxpr.outvars if not is_literal(out))), None)
    out = jaxpr.outvars[dim]
    axes = frozenset() if is_literal(out) else _dependences(jaxpr)[out]
    block = mapping.block_shape[dim]
    # By name: whoever has such a kernel has imported Pallas, which takes a fifth of a second.
    size = {"Squeezed": 1, "Blocked": getattr(block, "block_size", 0)}.get(type(block).__name__)
    if size is None:
        return _Read(axes, None)  # blocks may overlap
    if len(axes) != 1 or mapping.transforms or min(axes) >= len(grid):
        return _Read(axes, None)
    (axis,) = axes
    if not isinstance(grid[axis], int):
        return _Read(axes, None)
    share = _share(mapping.index_map_jaxpr, out, axis, grid[axis])
    if share is None or mapping.array_aval.shape[dim] != size * (grid[axis] // share):
        return _Read(axes, None)
    return _Read(axes, GridDim(axis, size, share))


def _dependences(jaxpr: Jaxpr) -> dict[Any, frozenset[int]]:
    """Of each value of an index map the arguments that it depends on: axes of the grid, and arrays that it reads."""
    found: dict[Any, frozenset[int]] = dict.fromkeys(jaxpr.constvars, frozenset[int]())
    found |= {var: frozenset([n]) for n, var in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        made = frozenset[int]().union(*(found[atom] for atom in equation.invars if not is_literal(atom)))
        found.update(dict.fromkeys(equation.outvars, made))
    return found


def _share(closed: ClosedJaxpr, out: Any, axis: int, size: int) -> int | None:
    """How many neighbouring points of an axis have one block; None where blocks do not follow each other in order."""
    jaxpr = open_jaxpr(closed)
    if out is jaxpr.invars[axis]:
        return 1
    needed, equations = {out}, []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(atom for atom in equation.invars if not is_literal(atom))
            equations.append(equation)

    def block(point: Any) -> Any:
        values = {jaxpr.invars[axis]: point, **dict(zip(jaxpr.constvars, consts_of(closed), strict=True))}
        for equation in reversed(equations):
            atoms = [atom.val if is_literal(atom) else values[atom] for atom in equation.invars]
            values.update(zip(equation.outvars, bind(equation, *atoms), strict=True))
        return values[out]

    with jax.ensure_compile_time_eval():
        blocks = np.asarray(jax.vmap(block)(np.arange(size, dtype=np.int32)))
    count = int(blocks[-1]) + 1
    if count < 1 or size % count or not np.array_equal(blocks, np.arange(size) // (size // count)):
        return None
    return size // count


def _refused(
    equation: Equation, axis: int, inputs: Sequence[Sequence[_Read]], outputs: Sequence[Sequence[_Read]]
) -> str | None:
    """Why a kernel is not to be split along an axis of its grid; None if it may be."""
    mapping = equation.params["grid_mapping"]
    body = open_jaxpr(equation.params["jaxpr"])
    given = body.invars[: len(body.invars) - mapping.num_outputs - len(mapping.scratch_avals)]
    words, carries = f"axis {axis} of its grid", bool(mapping.scratch_avals) or _asks_for_bits(body)
    if getattr(equation.params["compiler_params"], "collective_id", None) is not None:
        return "it talks to other devices itself"
    if mapping.grid_names is not None:
        return "its body may ask where it runs by the names of its grid's axes"
    if not isinstance(mapping.grid[axis], int):
        return f"the size of {words} is known at run time only"
    if _writes(body, set(given)):
        return "its body writes what it is given"
    if axis in _places_read(body, mapping):
        return f"its body asks where it runs along {words}"
    for tensor in (*inputs, *outputs):
        along = [one for one in tensor if axis in one.axes]
        if len(along) > 1 or any(one.dim is None for one in along):
            return f"its blocks do not follow {words} one after the other"
    for taken, made in equation.params["input_output_aliases"]:
        operand = taken - (len(equation.invars) - mapping.num_inputs)
        if operand < 0 or [one.dim for one in inputs[operand]] != [one.dim for one in outputs[made]]:
            return "a result takes over an operand of other blocks"
    for var, tensor in zip(equation.outvars, outputs, strict=True):
        along = [one.dim for one in tensor if one.dim is not None and one.dim.axis == axis]
        if any(dim.share > 1 for dim in along) or (not along and not is_dropped(var)):
            return f"a result has one block for several points of {words}"
        carries = carries or not along
    if carries and not (_is_parallel(equation, axis) or _starts_anew(equation, axis, outputs)):
        return f"it may carry something along {words}, which dimension_semantics= does not call parallel"
    return None


def _places_read(jaxpr: Jaxpr, mapping: Any) -> set[int]:
    """The axes of the grid along which a body asks where it runs. Axes of `jax.vmap` are not counted there."""
    counted = [axis for axis in range(len(mapping.grid)) if axis not in mapping.vmapped_dims]
    found = set[int]()
    for equation in jaxpr.eqns:
        if equation.primitive.name in _PLACE:
            found.add(counted[equation.params["axis"]])
        for inner in _programs(equation):
            found |= _places_read(inner, mapping)
    return found


def _writes(jaxpr: Jaxpr, refs: set[Any]) -> bool:
    """Whether a body may write to any of these references."""
    for equation in jaxpr.eqns:
        mine = [atom for atom in equation.invars if not is_literal(atom) and atom in refs]
        if not mine:
            continue
        inner, inside = list(_programs(equation)), None
        if not inner and equation.primitive.name not in _READS:
            return True
        if inner and (inside := _inside(equation, inner)) is None:
            return True
        for body, atoms in zip(inner, inside or [], strict=True):
            given = zip(body.invars, atoms, strict=True)
            if _writes(body, {var for var, atom in given if any(atom is one for one in mine)}):
                return True
    return False


def _inside(equation: Equation, programs: Sequence[Jaxpr]) -> list[list[Any]] | None:
    """For each program inside an equation what its arguments are outside; None where that is not known."""
    name, invars = equation.primitive.name, list(equation.invars)
    if name == "while":
        first = equation.params["cond_nconsts"]
        carry = invars[first + equation.params["body_nconsts"] :]
        found = [[*invars[:first], *carry], invars[first:]]
    elif name == "cond":
        found = [invars[1:]] * len(programs)
    elif name in ("jit", "pjit", "scan"):
        found = [invars]
    else:
        return None
    fits = [len(one) == len(body.invars) for one, body in zip(found, programs, strict=True)]
    return found if all(fits) else None


def _asks_for_bits(jaxpr: Jaxpr) -> bool:
    """Whether a body draws from the generator of its core, whose state it may have from the point before."""
    return any("prng" in one.primitive.name or any(map(_asks_for_bits, _programs(one))) for one in jaxpr.eqns)


def _programs(equation: Equation) -> Iterator[Jaxpr]:
    """The programs inside an equation of a body."""
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(open_jaxpr(one), "eqns"):
                yield open_jaxpr(one)


def _is_parallel(equation: Equation, axis: int) -> bool:
    """Whether a kernel says, or `jax.vmap` has made sure, that points of an axis may run in any order. On GPUs they
    always may."""
    mapping, params = equation.params["grid_mapping"], equation.params["compiler_params"]
    if axis in mapping.vmapped_dims or type(params).__module__.startswith("jax._src.pallas.triton"):
        return True
    semantics = getattr(params, "dimension_semantics", None)
    counted = [n for n in range(len(mapping.grid)) if n not in mapping.vmapped_dims]
    if semantics is None or len(semantics) != len(counted):
        return False
    said = semantics[counted.index(axis)]
    return str(getattr(said, "value", said)).lower() == "parallel"


class _Carried(Exception):
    """A body may read what another point of the grid has left."""


# What is evaluated of a body whose place in the grid is known.
_KNOWN: Mapping[str, Callable[..., Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_,
    "convert_element_type": lambda one: one,
}  # fmt: skip


def _is_whole_number(value: Any) -> bool:
    return value is not None and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biu"


def _starts_anew(equation: Equation, axis: int, outputs: Sequence[Sequence[_Read]]) -> bool:
    """Whether a body overwrites, at each point of an axis of the grid, whatever the point before may have left in
    scratch memory and in results that several points write to, before it reads any of it: at the first point of all
    axes that run faster."""
    mapping, body = equation.params["grid_mapping"], open_jaxpr(equation.params["jaxpr"])
    counted = [number for number in range(len(mapping.grid)) if number not in mapping.vmapped_dims]
    results = len(body.invars) - len(mapping.scratch_avals) - mapping.num_outputs
    same = [all(axis not in one.axes for one in tensor) for tensor in outputs]
    left = [*(n for n, is_same in enumerate(same, results) if is_same),
            *range(results + mapping.num_outputs, len(body.invars))]  # fmt: skip

    def walk(jaxpr: Jaxpr, known: dict[Any, Any], refs: dict[Any, int], written: set[int]) -> set[int]:
        """What is written once a program has run of which these values are known, and what these references are to."""
        used = {atom for one in jaxpr.eqns for atom in one.invars if not is_literal(atom)}
        used |= {atom for atom in jaxpr.outvars if not is_literal(atom)}
        for one in jaxpr.eqns:
            name, atoms = one.primitive.name, [None if is_literal(atom) else atom for atom in one.invars]
            values = [atom.val if is_literal(atom) else known.get(atom) for atom in one.invars]
            read = {refs[atom] for atom in atoms if atom in refs}
            inner = list(_programs(one))
            if name in _PLACE:
                place = counted[one.params["axis"]]
                if name == "num_programs" and isinstance(mapping.grid[place], int):
                    known[one.outvars[0]] = mapping.grid[place]
                elif name == "program_id" and place > axis:
                    known[one.outvars[0]] = 0
            elif name == "cond":
                branches = inner if values[0] is None else [inner[int(values[0])]]
                written = set.intersection(*(
                    walk(branch, *bound(branch, values[1:], atoms[1:], refs), set(written)) for branch in branches
                ))  # fmt: skip
            elif name == "jit" or (name == "scan" and one.params["length"] > 0):
                values = values if name == "jit" else [None] * len(values)
                written = walk(inner[0], *bound(inner[0], values, atoms, refs), written)
            elif name == "swap" and read:
                to, value = refs[atoms[0]], one.invars[1]
                if one.outvars[0] in used and to not in written:  # what was there before
                    raise _Carried
                # All of it: places that are arrays may be any.
                if value.aval.shape == one.invars[0].aval.shape and not any(a.aval.shape for a in one.invars[2:]):
                    written = written | {to}
            elif name in _KNOWN and all(map(_is_whole_number, values)):
                known[one.outvars[0]] = _KNOWN[name](*values)
            elif not read <= written:
                raise _Carried
        return written

    def bound(
        jaxpr: Jaxpr, values: Sequence[Any], atoms: Sequence[Any], refs: dict[Any, int]
    ) -> tuple[dict[Any, Any], dict[Any, int]]:
        """The known values and the references of a program inside, which is given these."""
        given = [(var, refs[atom]) for var, atom in zip(jaxpr.invars, atoms, strict=True) if atom in refs]
        return dict(zip(jaxpr.invars, values, strict=True)), dict(given)

    if _asks_for_bits(body):
        return False
    try:
        written = walk(body, {}, {body.invars[number]: number for number in left}, set())
    except _Carried:
        return False
    # What is not written at the first point of the faster axes may be read at a later one: a result is written only.
    return all(number in written or not _reads_ref(body, body.invars[number]) for number in left)


def _reads_ref(jaxpr: Jaxpr, ref: Any) -> bool:
    """Whether a body may read what is in a reference: does anything with it but overwrite."""
    used = {atom for one in jaxpr.eqns for atom in one.invars if not is_literal(atom)}
    used |= {atom for atom in jaxpr.outvars if not is_literal(atom)}
    for equation in jaxpr.eqns:
        if not any(atom is ref for atom in equation.invars):
            continue
        inner, inside = list(_programs(equation)), None
        if not inner and (equation.primitive.name != "swap" or equation.outvars[0] in used):
            return True
        if inner and (inside := _inside(equation, inner)) is None:
            return True
        for body, atoms in zip(inner, inside or [], strict=True):
            if any(_reads_ref(body, var) for var, atom in zip(body.invars, atoms, strict=True) if atom is ref):
                return True
    return False


def on_blocks(equation: Equation, pieces: Mapping[int, int], operands: Sequence[Any]) -> Sequence[Any]:
    """The results of a kernel on one device's blocks.

    Args:
      equation: the kernel.
      pieces: for each axis of its grid along which it is split, among how many devices.
      operands: blocks of its operands.
    """
    params, mapping = dict(equation.params), equation.params["grid_mapping"]
    axes = grid_of(equation)
    inputs = [tuple(operand.shape) for operand in operands[len(operands) - mapping.num_inputs :]]
    results = [
        tuple(n // (pieces.get(d.axis, 1) if d is not None else 1) for n, d in zip(aval.shape, dims, strict=True))
        for aval, dims in zip(params["out_avals"], axes.results, strict=True)
    ]
    params["grid_mapping"] = mapping.replace(
        grid=tuple(size // pieces[axis] if axis in pieces else size for axis, size in enumerate(mapping.grid)),
        block_mappings=tuple(
            one.replace(array_aval=one.array_aval.update(shape=shape))
            for one, shape in zip(mapping.block_mappings, [*inputs, *results], strict=True)
        ),
    )
    params["out_avals"] = tuple(
        aval.update(shape=shape) for aval, shape in zip(params["out_avals"], results, strict=True)
    )
    if (cost := params["cost_estimate"]) is not None:
        shares = {one.name: getattr(cost, one.name) // prod(pieces.values()) for one in fields(cost)}
        params["cost_estimate"] = replace(cost, **shares)
    return equation.primitive.bind(*operands, **params)


def kernel_flops(equation: Equation, body_flops: Callable[[Jaxpr], tuple[float, bool]]) -> tuple[float, bool]:
    """FLOPs of a kernel, and whether they are those of products: as many as it says itself, or else those of its body
    at each point of the grid.

    Args:
      equation: the kernel.
      body_flops: the same of a program.
    """
    flops, matmul = body_flops(open_jaxpr(equation.params["jaxpr"]))
    said = equation.params["cost_estimate"]
    if said is not None and said.flops > 0:
        return float(said.flops), matmul
    sizes = [size for size in equation.params["grid_mapping"].grid if isinstance(size, int)]
    return flops * prod(sizes), matmul


def slices_read(body: Jaxpr) -> int:
    """How often the body of a loop in a kernel runs to read all of the blocks of which it reads a slice at a time; 1
    where it reads none."""
    found = 1
    for equation in body.eqns:
        if equation.primitive.name in ("get", "masked_load"):
            found = max(found, prod(equation.invars[0].aval.shape) // max(prod(equation.outvars[0].aval.shape), 1))
        elif equation.primitive.name in ("jit", "cond"):
            found = max(found, *map(slices_read, _programs(equation)))
    return found
