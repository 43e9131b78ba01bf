"""Whether a program has what a preset splits, and what to try where it has not, as it is written in Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd, prod

from ..program.graph import Value
from ..program.trace import Program
from ..search.restrictions.roles import Role, Roles
from .preset import Preset, PresetAxis, divisors

# What an axis of each role splits.
_SPLIT: Mapping[Role, str] = {
    "batch": "a batch",
    "tensor": "an inner width of products (heads, feed-forward)",
    "expert": "a stack of experts",
}


def roles_in(preset: Preset, program: Program, batch: frozenset[tuple[str, int]], *, where: str) -> Roles:
    """What the axes of a preset may split in a program, whose inputs of the batch are those of `batch_inputs`.

    Raises:
      PlanError: if the program has nothing that an axis could split.
    """
    if not program.marked:
        raise preset.refusal(
            program.marks.got, "a step whose loss function is marked, so that its parameters are known",
            f"{program.marks.advice}; or, for a step without gradients, mesh= or pins= in place of preset=", where,
        )  # fmt: skip
    roles = Roles(axes=preset.roles, batch=batch, sequence_parallel=preset.sequence_parallel, gathered=preset.zero == 3)
    for axis in preset.axes:
        size = axis.size or 1
        # A data axis of one device splits nothing: a batch may be of one example.
        if size > 1 and not roles.can_split(program.graph, axis.role, size):
            raise preset.refusal(
                f"a program without {_SPLIT[axis.role]} that {size} divides", "one, for its axis to split",
                _for_batch(program, batch, size) if axis.role == "batch"
                else _for_program(preset, program, roles, axis), where,
            )  # fmt: skip
    tensor = preset.size("tensor")
    if preset.sequence_parallel and tensor > 1 and not roles.can_split_sequence(program.graph, tensor):
        raise preset.refusal(
            f"a program without a sequence that {tensor} divides",
            "one beside a residual stream, for sequence_parallel=True to split",
            f"leaving out sequence_parallel=, or a sequence that is padded to a multiple of {tensor}", where,
        )  # fmt: skip
    _check_storage(preset, [program.graph.values[program.graph.inputs[p]] for p in program.graph.parameters])
    return roles


def check_interleaved(preset: Preset, microbatches: int, extents: Sequence[int]) -> None:
    """Refuse numbers of microbatches, of batches of these extents, that ranks with several stages each cannot take
    turns with.

    Raises:
      PlanError: if it is no multiple of the ranks.
    """
    ranks, block = preset.stages, preset.stages * preset.blocks
    if preset.chunks == 1 or microbatches % ranks == 0:
        return
    batch = gcd(*extents)
    counts = [n for n in range(ranks, batch + 1, ranks) if batch % (n * preset.blocks) == 0]
    nearest = min(counts, key=lambda n: (abs(n - microbatches), n), default=None)
    larger = _larger(extents, block)
    raise preset.refusal(
        f"{microbatches} microbatches", f"a multiple of {ranks}: stages are interleaved",
        f"microbatches={nearest}, or chunks=1" if nearest is not None
        else f"chunks=1, or microbatches={ranks} and a batch of {larger}", "microbatches=",
    )  # fmt: skip


def _check_storage(preset: Preset, parameters: Sequence[Value]) -> None:
    """Refuse a ZeRO stage that would split nothing.

    Raises:
      PlanError: if its axes divide no dim of any parameter.
    """
    sizes = [axis.size for axis in preset.axes if axis.role != "tensor" and axis.size is not None and axis.size > 1]
    if not preset.zero or not sizes or not parameters:
        return
    extents = {extent for value in parameters for extent in value.shape}
    if any(extent % size == 0 for extent in extents for size in sizes):
        return
    largest = max(parameters, key=lambda value: value.bytes)
    size = max(sizes)
    parts = [n for n in range(2, size) if size % n == 0 and any(extent % n == 0 for extent in extents)]
    tries = []
    if parts and size == prod(axis.size or 1 for axis in preset.axes) and preset.stages == 1:
        mesh = {"x": max(parts), "y": size // max(parts)}
        tries = [
            f"zero={preset.zero}, mesh={mesh} in place of preset=, which splits over {max(parts)} of {size} devices"
        ]
    raise preset.refusal(
        f"parameters without a dim that {size} divides (the largest: {largest.name} of shape {largest.shape})",
        f"one, for ZeRO stage {preset.zero} to split",
        ", or ".join([*tries, f"{_without_zero(preset)}, the same without ZeRO"]),
    )


def _for_program(preset: Preset, program: Program, roles: Roles, axis: PresetAxis) -> str:
    """What suits a program in which a tensor or expert axis finds nothing to split: another size of it, or none."""
    data = preset.axes[0]
    devices = prod(one.size or 1 for one in preset.axes)
    graph = program.graph
    extents = {extent for p in graph.parameters for extent in graph.values[graph.inputs[p]].shape}
    for size in sorted(divisors(devices), key=lambda n: (abs(n - (axis.size or 1)), n)):
        # What the axis does not take is left to the data axis, which has to have something to split itself.
        left = devices // size
        splits = size == 1 or (size != axis.size and roles.can_split(graph, axis.role, size))
        if splits and (left == 1 or roles.can_split(graph, "batch", left)):
            if size == preset.stages == 1 and not preset.zero:
                return "data_parallel()"
            other = preset.sized({axis.name: size, data.name: left})
            stored = not preset.zero or left == 1 or any(extent % left == 0 for extent in extents)
            return str(other) if stored else _without_zero(other)
    return "leaving out preset="


def _for_batch(program: Program, batch: Iterable[tuple[str, int]], size: int) -> str:
    """Numbers of microbatches and batches that an axis of this size divides. The dims of inputs that hold the batch are
    (name, dim)."""
    shapes = {program.graph.values[v].name: program.graph.values[v].shape for v in program.graph.inputs}
    extents = sorted({shapes[name][dim] * program.microbatches for name, dim in batch})
    fewer = [n for n in range(1, program.microbatches) if extents and all(e % (n * size) == 0 for e in extents)]
    larger = _larger(extents, size * program.microbatches)
    tries = [*([f"microbatches={max(fewer)}"] if fewer else []), *([f"a batch of {larger}"] if larger else [])]
    return ", or ".join(tries) or "leaving out preset="


def _without_zero(preset: Preset) -> str:
    """The plans of a preset with all sizes, with optimizer state that is not split."""
    if preset.family == "zero":
        return "data_parallel()"
    pipeline = f", pp={preset.stages}" if preset.stages > 1 else ""
    return f"megatron(tp={preset.size('tensor')}{pipeline}, dp={preset.size('batch')})"


def _larger(extents: Sequence[int], block: int) -> str:
    """The next extents that a block divides."""
    return " and ".join(str(-(-extent // block) * block) for extent in extents)
