"""What a preset says: the axes of every stage's mesh and what they are for, stages, schedule, ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..errors import PlanError
from ..search.restrictions.roles import Role


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
      remat: "none", "selective", "layer", or None for the better.
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
            raise self.refusal(f"{devices} devices", needed, _other_sizes(self, devices))
        if self.stages_follow:
            return replace(self, stages=devices // known, stages_follow=False).on(devices)
        return self.sized({axis.name: devices // known for axis in missing})


# The order of arguments in a preset's name.
_ORDER = ("stage", "stages", "tp", "pp", "ep", "dp", "zero", "chunks", "sequence_parallel")


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


def _other_sizes(preset: Preset, devices: int) -> str:
    """Presets of the family for so many devices: with one size as the others leave it, or else with the nearest sizes.

    >>> from meshwright.presets import gpipe, megatron
    >>> _other_sizes(megatron(tp=2, pp=2, dp=4), 8), _other_sizes(gpipe(3), 8)
    ('megatron(tp=1, pp=2, dp=4) or megatron(tp=2, pp=2, dp=2)', 'gpipe(stages=2, dp=4)')

    Args:
      preset: whose sizes do not multiply to the devices, nor leave a size that does.
      devices: how many there are.
    """
    given = [axis for axis in preset.axes if axis.size is not None]
    known = preset.stages * prod(axis.size or 1 for axis in given)
    found = []
    for axis in given if len(given) == len(preset.axes) and not preset.stages_follow else ():
        rest = known // (axis.size or 1)
        if devices % rest == 0:
            found.append(str(preset.sized({axis.name: devices // rest})))
    if found:
        return " or ".join(sorted(found))
    if preset.stages_follow and len(preset.axes) == 1:
        several = [n for n in divisors(devices) if n < devices]  # these pipelines have two stages at least
        sizes = sorted(several, key=lambda n: (abs(n - (preset.axes[0].size or 1)), n))
        return str(preset.sized({preset.axes[0].name: sizes[0]})) if sizes else "data_parallel()"
    stages = _nearest(preset.stages, devices) if preset.stages > 1 else 1
    if preset.stages > 1 and stages == 1:
        return "data_parallel()"
    left = devices // stages
    inner: dict[str, int] = {}
    for axis in reversed(preset.axes[1:]):
        inner[axis.name] = _nearest(axis.size or 1, left)
        left //= inner[axis.name]
    return str(preset.sized({**inner, preset.axes[0].name: left}, stages))


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(size: int, devices: int) -> int:
    """The divisor of the devices that is nearest to a size; more than 1 if the size is and there is one."""
    return min((n for n in divisors(devices) if n > 1 or size == 1 or devices == 1), key=lambda n: (abs(n - size), n))
