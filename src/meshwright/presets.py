"""The parallelisms of the literature as restrictions of the search: `plan_for(step, args, preset=megatron(tp=2))`.

A preset says what the mesh axes are for (`search.roles`), how many equal stages there are, their schedule and the ZeRO
stage. What it leaves open (layouts inside these limits, where stages begin, microbatches, rematerialisation) is
searched as ever, and what comes out is a plan like any other, which says in its notes what it was held to. The search
alone can find each of these plans; `meshwright compare` shows by how much it does better.

Sizes that are not given follow from the number of devices. Tensor axes lie inside: their devices are neighbours.

`docs/presets.md` says what each restricts, and the communication it shows.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import Any

from .errors import PlanError
from .program.batch import batch_inputs
from .program.trace import Program
from .program.traces import Traces
from .search.roles import Role, Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetAxis:
    """An axis of the mesh of every stage.

    Args:
      name: of the axis.
      size: of the axis; None for what the devices leave.
      role: what it may split.
      argument: what the preset's function calls its size.
    """

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
      stages: how many, on equal submeshes.
      zero: the ZeRO stage of every parameter.
      schedule: of several stages; None where there is one.
      remat: "none", "layer", or None for the better.
      sequence_parallel: whether tensor axes also split the sequence between products.
      gradient_exchange: as in `plan.Stage`.
      shown: arguments that are no sizes, as the name shows them.

    >>> str(megatron(tp=2, pp=2)), str(megatron(tp=2, pp=2).on(8))
    ('megatron(tp=2, pp=2)', 'megatron(tp=2, pp=2, dp=2)')
    """

    family: str
    axes: tuple[PresetAxis, ...]
    stages: int = 1
    zero: int | None = 0
    schedule: str | None = None
    remat: str | None = None
    sequence_parallel: bool = False
    gradient_exchange: str = "collective"
    shown: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """As it is written in Python."""
        sizes = {axis.argument: axis.size for axis in self.axes if axis.size is not None}
        given = {**sizes, **dict(self.shown)}
        order = [name for name in _ORDER if name in given]
        return f"{self.family}({', '.join(f'{name}={given[name]!r}' for name in order)})"

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
        """The same preset with every size given.

        Args:
          devices: how many there are.

        Raises:
          PlanError: if the sizes do not multiply to it.
        """
        known = self.stages * prod(axis.size for axis in self.axes if axis.size is not None)
        missing = [axis for axis in self.axes if axis.size is None]
        if len(missing) > 1:
            names = [f"{axis.argument}=" for axis in missing]
            raise PlanError(
                refused=f"the preset {self}", got=f"neither {' nor '.join(names)}",
                needed="all sizes but one: that one follows from the devices", where="preset=",
                try_=f"giving {' or '.join(names)}",
            )  # fmt: skip
        if devices % known or (not missing and known != devices):
            product = f"a multiple of {known}" if missing else str(known)
            sizes = [f"{name}={size}" for name, size in self.shown if name in ("pp", "stages")]
            sizes += [f"{axis.argument}={axis.size}" for axis in self.axes if axis.size is not None]
            raise PlanError(
                refused=f"the preset {self}", got=f"{devices} devices",
                needed=f"{product} devices, for {' '.join(sizes)}" if sizes else f"{product} devices", where="preset=",
                try_=f"sizes whose product is {devices}, or leaving one out",
            )  # fmt: skip
        axes = tuple(axis if axis.size is not None else replace(axis, size=devices // known) for axis in self.axes)
        return replace(self, axes=axes)

    def roles_in(self, program: Program, traces: Traces, args: Sequence[Any], *, batch_axis: int) -> Roles:
        """What its axes may split in a program.

        Args:
          program: the step, traced at the size of a microbatch.
          traces: that it is one of.
          args: of the step.
          batch_axis: which axis of every array outside the state is the batch.

        Raises:
          PlanError: if the program has nothing that an axis could split.
        """
        where = getattr(traces, "__name__", "the step")
        if not program.marked:
            raise PlanError(
                refused=f"the preset {self}", got="a step without meshwright.value_and_grad",
                needed="a step whose loss function is marked, so that its parameters are known", where=where,
                try_="meshwright.value_and_grad in place of jax.value_and_grad",
            )  # fmt: skip
        roles = Roles(
            axes=self.roles, batch=batch_inputs(program, traces, args, batch_axis=batch_axis),
            sequence_parallel=self.sequence_parallel, gathered=self.zero == 3,
        )  # fmt: skip
        for axis in self.axes:
            if axis.name in self.roles and not roles.can_split(program.graph, axis.role, axis.size or 1):
                raise PlanError(
                    refused=f"the preset {self}",
                    got=f"a program without {_SPLIT[axis.role]} that {axis.size} divides",
                    needed="one, for its axis to split", where=where, try_=_OTHERWISE[axis.role],
                )  # fmt: skip
        return roles


# What an axis of each role splits.
_SPLIT: Mapping[Role, str] = {
    "batch": "a batch",
    "tensor": "an inner width of products (heads, feed-forward)",
    "expert": "a stack of experts",
}

_OTHERWISE: Mapping[Role, str] = {
    "batch": "a larger batch, fewer microbatches, or a smaller dp=",
    "tensor": "another tp=, or data_parallel()",
    "expert": "another ep=, or data_parallel()",
}

# The order of arguments in a preset's name.
_ORDER = ("stage", "stages", "tp", "pp", "ep", "dp", "zero", "sequence_parallel")


def data_parallel() -> Preset:
    """Every device has all parameters and a part of the batch; gradients are summed once a step.

    >>> str(data_parallel())
    'data_parallel()'
    """
    return Preset(family="data_parallel", axes=(_data(None, shown=False),))


def zero(stage: int) -> Preset:
    """Data parallelism with optimizer state split over the devices too (Rajbhandari et al. 2020).

    Args:
      stage: 1 or 2: gradients are reduce-scattered, updated in parts, parameters gathered, once a step; 3: parameters
        are stored in parts and gathered where they are used.

    >>> str(zero(stage=3))
    'zero(stage=3)'
    """
    _check_one_of("stage", stage, (1, 2, 3))
    return Preset(family="zero", axes=(_data(None, shown=False),), zero=stage, shown=(("stage", stage),))


def parameter_server() -> Preset:
    """Data parallelism whose gradients are summed by one device, which sends the sums back (Li et al. 2014).

    >>> str(parameter_server())
    'parameter_server()'
    """
    return Preset(family="parameter_server", axes=(_data(None, shown=False),), gradient_exchange="central")


def megatron(*, tp: int | None = 1, pp: int = 1, dp: int | None = None, sequence_parallel: bool = False) -> Preset:
    """Tensor, pipeline and data parallelism (Narayanan et al. 2021).

    Args:
      tp: devices that share every product.
      pp: stages.
      dp: devices among which the batch is split.
      sequence_parallel: between products the sequence is split over the tensor devices.

    >>> str(megatron(tp=4, sequence_parallel=True))
    'megatron(tp=4, sequence_parallel=True)'
    """
    return _three_dimensional("megatron", tp, pp, dp, stage=0, sequence_parallel=sequence_parallel)


def deepspeed_3d(*, tp: int | None = 1, pp: int = 1, dp: int | None = None, zero: int = 1) -> Preset:
    """As `megatron`, with optimizer state split over the data axis.

    Args:
      tp: devices that share every product.
      pp: stages.
      dp: devices among which the batch is split.
      zero: the ZeRO stage, 1 or 2.

    >>> str(deepspeed_3d(tp=2, pp=2, dp=2))
    'deepspeed_3d(tp=2, pp=2, dp=2, zero=1)'
    """
    _check_one_of("zero", zero, (1, 2))
    preset = _three_dimensional("deepspeed_3d", tp, pp, dp, stage=zero, sequence_parallel=False)
    return replace(preset, shown=(*preset.shown, ("zero", zero)))


def fsdp_tp(*, tp: int | None, dp: int | None = None) -> Preset:
    """Tensor parallelism inside, ZeRO-3 outside.

    Args:
      tp: devices that share every product.
      dp: devices among which the batch is split, and over which parameters are stored.

    >>> str(fsdp_tp(tp=2).on(8))
    'fsdp_tp(tp=2, dp=4)'
    """
    return Preset(family="fsdp_tp", axes=(_data(dp), _tensor(tp)), zero=3)


def gpipe(stages: int, *, dp: int | None = None) -> Preset:
    """Stages that see all microbatches forward, then all backward, and compute activations again (Huang et al. 2019).

    Args:
      stages: how many.
      dp: devices of each stage, among which a microbatch is split.

    >>> str(gpipe(4))
    'gpipe(stages=4)'
    """
    return _pipeline("gpipe", stages, dp, schedule="gpipe", remat="layer")


def pipedream(stages: int, *, dp: int | None = None) -> Preset:
    """A pipeline that is never drained: an update for each microbatch, weights stashed (Narayanan et al. 2019).

    Args:
      stages: how many.
      dp: devices of each stage, among which a microbatch is split.

    >>> str(pipedream(2, dp=4))
    'pipedream(stages=2, dp=4)'
    """
    return _pipeline("pipedream", stages, dp, schedule="pipedream", remat=None)


def expert_parallel(*, ep: int | None = None, dp: int | None = 1) -> Preset:
    """Experts split over the devices that share the batch, tokens exchanged between them (Lepikhin et al. 2020).

    Args:
      ep: devices that share the experts.
      dp: groups of such devices, each with all experts.

    >>> str(expert_parallel(dp=2).on(8))
    'expert_parallel(ep=4, dp=2)'
    """
    _check_size("ep", ep)
    expert = PresetAxis(name="expert", size=ep, role="expert", argument="ep")
    return Preset(family="expert_parallel", axes=(_data(dp), expert))


def _data(size: int | None, *, shown: bool = True) -> PresetAxis:
    _check_size("dp", size)
    return PresetAxis(name="data", size=size, role="batch", argument="dp" if shown else "devices")


def _tensor(size: int | None) -> PresetAxis:
    _check_size("tp", size)
    return PresetAxis(name="model", size=size, role="tensor", argument="tp")


def _three_dimensional(
    family: str, tp: int | None, pp: int, dp: int | None, *, stage: int, sequence_parallel: bool
) -> Preset:
    _check_size("pp", pp, optional=False)
    shown = (("pp", pp), *((("sequence_parallel", True),) if sequence_parallel else ()))
    return Preset(
        family=family, axes=(_data(dp), _tensor(tp)), stages=pp, zero=stage,
        schedule="one_f_one_b" if pp > 1 else None, sequence_parallel=sequence_parallel,
        shown=shown if pp > 1 else shown[1:],
    )  # fmt: skip


def _pipeline(family: str, stages: int, dp: int | None, *, schedule: str, remat: str | None) -> Preset:
    _check_size("stages", stages, optional=False)
    if stages < 2:
        raise PlanError(
            refused=f"the preset {family}", got=f"stages={stages}", needed="at least 2 stages", where="stages=",
            try_=f"{family}(2), or data_parallel()",
        )  # fmt: skip
    return Preset(
        family=family, axes=(_data(dp),), stages=stages, schedule=schedule, remat=remat, shown=(("stages", stages),)
    )


def _check_size(name: str, size: Any, *, optional: bool = True) -> None:
    if (size is not None or not optional) and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise PlanError(
            refused="the preset's size", got=f"{name}={size!r}", needed="a whole number, at least 1",
            where=f"{name}=", try_=f"{name}=2",
        )  # fmt: skip


def _check_one_of(name: str, value: Any, allowed: tuple[int, ...]) -> None:
    if isinstance(value, bool) or value not in allowed:
        raise PlanError(
            refused="the preset's ZeRO stage", got=f"{name}={value!r}", needed=" or ".join(map(str, allowed)),
            where=f"{name}=", try_=f"{name}={allowed[0]}",
        )  # fmt: skip


def check_free(preset: Preset, **options: Any) -> None:
    """Refuse options that the preset decides.

    Args:
      preset: with what it decides.
      options: of `plan_for`, by name; None for one that is not given.

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


FAMILIES: Mapping[str, Callable[..., Preset]] = {
    "data_parallel": data_parallel,
    "zero": zero,
    "parameter_server": parameter_server,
    "megatron": megatron,
    "deepspeed_3d": deepspeed_3d,
    "fsdp_tp": fsdp_tp,
    "gpipe": gpipe,
    "pipedream": pipedream,
    "expert_parallel": expert_parallel,
}


def parse_preset(text: str) -> Preset:
    """A preset as it is written in Python, the parentheses optional.

    Raises:
      PlanError: for an unknown name or other arguments than the preset has.

    >>> str(parse_preset("megatron(tp=2, pp=2)")), str(parse_preset("data_parallel"))
    ('megatron(tp=2, pp=2)', 'data_parallel()')
    """
    try:
        expression = ast.parse(text.strip(), mode="eval").body
        call = expression if isinstance(expression, ast.Call) else None
        function = call.func if call is not None else expression
        name = function.id if isinstance(function, ast.Name) else text
        positional = [ast.literal_eval(one) for one in call.args] if call is not None else []
        named = {one.arg or "": ast.literal_eval(one.value) for one in call.keywords} if call is not None else {}
    except (SyntaxError, ValueError):
        name, positional, named = text, [], {}
    if name not in FAMILIES:
        near = get_close_matches(name, FAMILIES, n=3, cutoff=0.4)
        raise PlanError(
            refused="the preset", got=repr(text), needed=f"one of {', '.join(FAMILIES)}", where="preset=",
            try_=" or ".join(near or ("megatron(tp=2, pp=2)",)),
        )  # fmt: skip
    try:
        return FAMILIES[name](*positional, **named)
    except TypeError as error:
        raise PlanError(
            refused=f"the preset {name}", got=str(error), needed="the arguments it has", where="preset=",
            try_=f"help(meshwright.presets.{name})",
        ) from error  # fmt: skip
