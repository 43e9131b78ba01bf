"""What a preset says: the axes of every stage's mesh and what they are for, stages, schedule, ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..errors import PlanError
from ..program.graph import Value
from ..program.trace import Program
from ..search.restrictions.roles import Role, Roles
from . import other_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetAxis:
    """An axis of the mesh of every stage: its size, None for what the devices leave; what it may split; and what the
    preset's function calls its size."""

    name: str
    size: int | None
    role: Role
    argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a plan of a family is held to.

    Args:
      family: the function that made it.
      axes: of the mesh of every stage, major first.
      stages: how many equal submeshes with stages there are.
      stages_argument: what its function calls their number.
      stages_follow: whether that follows from the devices; then `stages` is 1 until they are known (`on`).
      pipeline_schedule: of several stages.
      zero: the ZeRO stage of every parameter.
      zero_argument: what its function calls that; "" where it has no such argument.
      chunks: stages on each submesh; of more than one, the schedule is its interleaved form.
      remat: "none", "layer", or None for the better.
      sequence_parallel: whether tensor axes also split the sequence between products.
      gradient_exchange: as in `plan.Stage`.

    Raises:
      PlanError: for several chunks of one stage.

    >>> from meshwright.presets import megatron
    >>> str(megatron(tp=2, pp=2)), str(megatron(tp=2, pp=2).on(8))
    ('megatron(tp=2, pp=2)', 'megatron(tp=2, pp=2, dp=2)')
    """

    family: str
    axes: tuple[PresetAxis, ...]
    stages: int = 1
    stages_argument: str = "pp"
    stages_follow: bool = False
    pipeline_schedule: str = "one_f_one_b"
    zero: int | None = 0
    zero_argument: str = "zero"
    chunks: int = 1
    remat: str | None = None
    sequence_parallel: bool = False
    gradient_exchange: str = "collective"

    def __post_init__(self) -> None:
        if self.chunks > 1 and self.stages < 2 and not self.stages_follow:
            raise PlanError(
                refused=f"the preset {self.family}", got=f"chunks={self.chunks} and pp={self.stages}",
                needed="at least 2 groups of devices to interleave stages on", where="chunks=",
                try_="pp=2, or chunks=1",
            )  # fmt: skip

    def __str__(self) -> str:
        """As it is written in Python."""
        given: dict[str, Any] = {axis.argument: axis.size for axis in self.axes}
        given |= {self.stages_argument: self.stages if self.stages > 1 else None, self.zero_argument: self.zero}
        given |= {"chunks": self.chunks if self.chunks > 1 else None, "sequence_parallel": self.sequence_parallel}
        order = [name for name in _ORDER if given.get(name)]
        return f"{self.family}({', '.join(f'{name}={given[name]!r}' for name in order)})"

    def refusal(self, got: str, needed: str, try_: str, where: str = "preset=") -> PlanError:
        """The error for a preset that does not suit the devices or the program."""
        return PlanError(refused=f"the preset {self}", got=got, needed=needed, where=where, try_=try_)

    @property
    def schedule(self) -> str | None:
        """Of several stages; None where there is one."""
        return self.pipeline_schedule if self.stages > 1 else None

    def sized(self, sizes: Mapping[str, int], stages: int | None = None) -> Preset:
        """The same preset with other sizes of some axes, by name, and another number of stages."""
        axes = tuple(replace(axis, size=sizes.get(axis.name, axis.size)) for axis in self.axes)
        return replace(self, axes=axes, stages=self.stages if stages is None else stages)

    @property
    def mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and sizes of the axes of a stage's mesh; an axis of one device is none, unless it is the only one."""
        sized = [(axis.name, axis.size or 1) for axis in self.axes]
        real = [pair for pair in sized if pair[1] > 1] or sized[:1]
        return tuple(name for name, _ in real), tuple(size for _, size in real)

    @property
    def roles(self) -> dict[str, Role]:
        """The role of each axis of the mesh."""
        names, _ = self.mesh
        return {axis.name: axis.role for axis in self.axes if axis.name in names}

    def size(self, role: Role) -> int:
        """How many devices share what axes of a role split."""
        return prod(axis.size or 1 for axis in self.axes if axis.role == role)

    @property
    def blocks(self) -> int:
        """Into how many blocks the batch of one microbatch is cut."""
        return self.size("batch") * self.size("expert")

    def on(self, devices: int) -> Preset:
        """The same preset with every size given, for so many devices.

        Raises:
          PlanError: if the sizes do not multiply to it.
        """
        known = self.stages * prod(axis.size for axis in self.axes if axis.size is not None)
        missing = [axis for axis in self.axes if axis.size is None]
        if len(missing) > 1:
            names = [f"{axis.argument}=" for axis in missing]
            raise self.refusal(
                f"neither {' nor '.join(names)}", "all sizes but one: that one follows from the devices",
                f"giving {' or '.join(names)}",
            )  # fmt: skip
        follows = self.stages_follow or bool(missing)
        # A pipeline whose stages follow has two of them at least.
        one = self.stages_follow and len(self.axes) == 1 and devices == known
        if devices % known or one or (not follows and known != devices):
            product = f"at least {2 * known}" if one else f"a multiple of {known}" if follows else str(known)
            sizes = [f"{self.stages_argument}={self.stages}"] if self.stages > 1 else []
            sizes += [f"{axis.argument}={axis.size}" for axis in self.axes if axis.size is not None]
            needed = f"{product} devices, for {' '.join(sizes)}" if sizes else f"{product} devices"
            raise self.refusal(f"{devices} devices", needed, other_sizes.for_devices(self, devices))
        if self.stages_follow:
            return replace(self, stages=devices // known, stages_follow=False).on(devices)
        return self.sized({axis.name: devices // known for axis in missing})

    def roles_in(self, program: Program, batch: frozenset[tuple[str, int]], *, where: str) -> Roles:
        """What its axes may split in a program, whose inputs of the batch are those of `batch_inputs`.

        Raises:
          PlanError: if the program has nothing that an axis could split.
        """
        if not program.marked:
            raise self.refusal(
                program.marks.got, "a step whose loss function is marked, so that its parameters are known",
                f"{program.marks.advice}; or, for a step without gradients, mesh= or pins= in place of preset=", where,
            )  # fmt: skip
        roles = Roles(axes=self.roles, batch=batch, sequence_parallel=self.sequence_parallel, gathered=self.zero == 3)
        for axis in self.axes:
            size = axis.size or 1
            # A data axis of one device splits nothing: a batch may be of one example.
            if size > 1 and not roles.can_split(program.graph, axis.role, size):
                raise self.refusal(
                    f"a program without {_SPLIT[axis.role]} that {size} divides", "one, for its axis to split",
                    other_sizes.for_batch(program, batch, size) if axis.role == "batch"
                    else other_sizes.for_program(self, program, roles, axis), where,
                )  # fmt: skip
        tensor = self.size("tensor")
        if self.sequence_parallel and tensor > 1 and not roles.can_split_sequence(program.graph, tensor):
            raise self.refusal(
                f"a program without a sequence that {tensor} divides",
                "one beside a residual stream, for sequence_parallel=True to split",
                f"leaving out sequence_parallel=, or a sequence that is padded to a multiple of {tensor}", where,
            )  # fmt: skip
        check_storage(self, [program.graph.values[program.graph.inputs[p]] for p in program.graph.parameters])
        return roles


# What an axis of each role splits.
_SPLIT: Mapping[Role, str] = {
    "batch": "a batch",
    "tensor": "an inner width of products (heads, feed-forward)",
    "expert": "a stack of experts",
}

# The order of arguments in a preset's name.
_ORDER = ("stage", "stages", "tp", "pp", "ep", "dp", "zero", "chunks", "sequence_parallel")


def check_storage(preset: Preset, parameters: Sequence[Value]) -> None:
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
        ", or ".join([*tries, f"{other_sizes.without_zero(preset)}, the same without ZeRO"]),
    )


def check_free(preset: Preset, **options: Any) -> None:
    """Refuse options of `plan_for`, those that are not None, that the preset decides.

    Raises:
      PlanError: if one is given.
    """
    decided = {"mesh", "zero", "stages", "schedule"} | ({"remat"} if preset.remat is not None else set())
    for name, value in options.items():
        if value is not None and name in decided:
            raise PlanError(
                refused=f"the option {name}={value!r}", got=f"the preset {preset} as well, which decides it",
                needed="one or the other", where="preset=", try_=f"leaving out {name}= or preset=",
            )  # fmt: skip
