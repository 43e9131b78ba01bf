"""The families of presets, a function each, and their text."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from ..errors import PlanError
from .preset import Preset, PresetAxis


def data_parallel() -> Preset:
    """Every device has all parameters and a part of the batch; gradients are summed once a step.

    >>> str(data_parallel())
    'data_parallel()'
    """
    return Preset(family="data_parallel", axes=(_data(None, shown=False),))


def zero(stage: int) -> Preset:
    """Data parallelism with optimizer state split over the devices too (Rajbhandari et al. 2020).

    Args:
      stage: 1: gradients are reduce-scattered, updated in parts, parameters gathered, once a step; 2: each microbatch's
        gradients are reduce-scattered, and added up in parts; 3: parameters are stored in parts and gathered where they
        are used.

    >>> str(zero(stage=3))
    'zero(stage=3)'
    """
    _check_one_of("stage", stage, (1, 2, 3))
    return Preset(family="zero", axes=(_data(None, shown=False),), zero=stage, zero_argument="stage")


def parameter_server() -> Preset:
    """Data parallelism whose gradients are summed by one device, which sends the sums back (Li et al. 2014).

    >>> str(parameter_server())
    'parameter_server()'
    """
    return Preset(family="parameter_server", axes=(_data(None, shown=False),), gradient_exchange="central")


def megatron(
    *, tp: int | None = None, pp: int | None = None, dp: int | None = None, zero: int = 0, chunks: int = 1,
    sequence_parallel: bool = False,
) -> Preset:  # fmt: skip
    """Tensor, pipeline and data parallelism (Narayanan et al. 2021).

    Args:
      tp: devices that share every product; None for what the others leave of the devices, if `dp` is given, or else 1.
      pp: stages, or groups of devices that share the stages; None for what the others leave, if both of these are
        given, or else 1.
      dp: devices among which the batch is split; None for what the others leave.
      zero: 1 for optimizer state split over the data axis (its distributed optimizer), else 0.
      chunks: stages of each such group, interleaved.
      sequence_parallel: between products the sequence is split over the tensor devices.

    >>> str(megatron(tp=4, sequence_parallel=True))
    'megatron(tp=4, sequence_parallel=True)'
    """
    _check_one_of("zero", zero, (0, 1))
    return three_dimensional("megatron", tp, pp, dp, stage=zero, chunks=chunks, sequence_parallel=sequence_parallel)


def deepspeed_3d(*, tp: int | None = None, pp: int | None = None, dp: int | None = None, zero: int = 1) -> Preset:
    """As `megatron`, with optimizer state split over the data axis.

    Args:
      tp: as there, like the next two.
      pp: stages.
      dp: devices among which the batch is split.
      zero: the ZeRO stage, 1 or 2.

    >>> str(deepspeed_3d(tp=2, pp=2, dp=2))
    'deepspeed_3d(tp=2, pp=2, dp=2, zero=1)'
    """
    _check_one_of("zero", zero, (1, 2))
    return three_dimensional("deepspeed_3d", tp, pp, dp, stage=zero)


def fsdp_tp(*, tp: int | None = None, dp: int | None = None) -> Preset:
    """Tensor parallelism inside, ZeRO-3 outside.

    Args:
      tp: devices that share every product; None for what `dp` leaves of the devices.
      dp: devices among which the batch is split, and over which parameters are stored.

    >>> str(fsdp_tp(tp=2).on(8))
    'fsdp_tp(tp=2, dp=4)'
    """
    return Preset(family="fsdp_tp", axes=(_data(dp), _tensor(tp)), zero=3, zero_argument="")


def gpipe(stages: int | None = None, *, dp: int | None = None) -> Preset:
    """Stages that see all microbatches forward, then all backward, and compute activations again (Huang et al. 2019).

    Args:
      stages: how many; None for what `dp` leaves of the devices.
      dp: devices of each stage, among which a microbatch is split; None for what the stages leave.

    >>> str(gpipe(4))
    'gpipe(stages=4)'
    """
    return _pipeline("gpipe", stages, dp, schedule="gpipe", remat="layer")


def pipedream(stages: int | None = None, *, dp: int | None = None) -> Preset:
    """A pipeline that is never drained: an update for each microbatch, weights stashed (Narayanan et al. 2019).

    Args:
      stages: how many; None for what `dp` leaves of the devices.
      dp: devices of each stage, among which a microbatch is split; None for what the stages leave.

    >>> str(pipedream(2, dp=4))
    'pipedream(stages=2, dp=4)'
    """
    return _pipeline("pipedream", stages, dp, schedule="pipedream", remat=None)


def expert_parallel(*, ep: int | None = None, dp: int | None = None) -> Preset:
    """Experts split over the devices that share the batch, tokens exchanged between them (Lepikhin et al. 2020).

    Args:
      ep: devices that share the experts; None for what `dp` leaves of the devices, or all of them.
      dp: groups of such devices, each with all experts; None for what `ep` leaves.

    >>> str(expert_parallel(dp=2).on(8)), str(expert_parallel(ep=4).on(8)), str(expert_parallel().on(8))
    ('expert_parallel(ep=4, dp=2)', 'expert_parallel(ep=4, dp=2)', 'expert_parallel(ep=8, dp=1)')
    """
    _check_size("ep", ep)
    expert = PresetAxis(name="expert", size=ep, role="expert", argument="ep")
    return Preset(family="expert_parallel", axes=(_data(1 if ep is dp is None else dp), expert))


def _data(size: int | None, *, shown: bool = True) -> PresetAxis:
    _check_size("dp", size)
    return PresetAxis(name="data", size=size, role="batch", argument="dp" if shown else "devices")


def _tensor(size: int | None) -> PresetAxis:
    _check_size("tp", size)
    return PresetAxis(name="model", size=size, role="tensor", argument="tp")


def three_dimensional(
    family: str, tp: int | None, pp: int | None, dp: int | None, *, stage: int, chunks: int = 1,
    sequence_parallel: bool = False,
) -> Preset:  # fmt: skip
    """Tensor, pipeline and data axes with any ZeRO stage: what Megatron-LM and DeepSpeed can be set to between them.

    Args are those of `megatron`, but for `family`, what it is called, and `stage`, the ZeRO stage, 0 to 3.
    """
    _check_size("pp", pp)
    _check_size("chunks", chunks, optional=False)
    return Preset(
        family=family, axes=(_data(dp), _tensor(1 if tp is dp is None else tp)), stages=pp or 1,
        stages_follow=pp is None and tp is not None and dp is not None, zero=stage, chunks=chunks,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip


def _pipeline(family: str, stages: int | None, dp: int | None, *, schedule: str, remat: str | None) -> Preset:
    _check_size("stages", stages)
    if stages is dp is None:
        raise PlanError(
            refused=f"the preset {family}", got="neither stages= nor dp=",
            needed="one of them: the other follows from the devices", where="preset=", try_=f"{family}(2)",
        )  # fmt: skip
    if stages is not None and stages < 2:
        raise PlanError(
            refused=f"the preset {family}", got=f"stages={stages}", needed="at least 2 stages", where="stages=",
            try_=f"{family}(2), or data_parallel()",
        )  # fmt: skip
    return Preset(
        family=family, axes=(_data(dp),), stages=stages or 1, stages_argument="stages", stages_follow=stages is None,
        pipeline_schedule=schedule, remat=remat,
    )  # fmt: skip


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


FAMILIES: Mapping[str, Callable[..., Preset]] = {
    one.__name__: one
    for one in (
        data_parallel, zero, parameter_server, megatron, deepspeed_3d, fsdp_tp, gpipe, pipedream, expert_parallel
    )
}  # fmt: skip


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
