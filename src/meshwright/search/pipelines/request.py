"""The request of a stage search, and its validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from ...cluster import Cluster
from ...errors import MemoryExceeded, PlanError, room_words, size_words, smaller_words
from ...plan.words import microbatches_words
from ...program.staged import StagedProgram
from ..inter.logical_meshes import WantedMesh
from ..inter.submeshes import Submesh, Submeshes
from ..intra.problem import ParameterInfo
from ..restrictions.constraints import Constraints

# A program that runs more operators is one for several stages; up to this many, one stage is soon planned, and bounds
# the search for more.
SMALL_PROGRAM = 1200

# The schedule of stages that share their devices.
INTERLEAVED = "interleaved_one_f_one_b"

# Schedules tried on the best plans, the preferred first where steps are equal.
SIMULATED = ("one_f_one_b", "adaptive", "eager_one_f_one_b", "gpipe", "zero_bubble", INTERLEAVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """The request of a stage search.

    Args:
      programs: the program in layers, one for each number of microbatches to be considered; or by these numbers, of
        which not all may be looked at (so that they can be traced on demand).
      parameters: by position in the programs' `graph.parameters`.
      cluster: where it runs; no device need be present.
      constraints: what is fixed.
      remat: "none", "selective", "layer", or None to choose for each stage.
      schedules: schedules to choose from, names of `SIMULATED`.
      stages: how many stages there are to be; None to choose.
      alone: whether there is to be one stage, as the one program that it runs as (`StageProblem`). Programs are whole
        then (`program.staged.whole_program`).
      several: whether plans of one stage are left out.
      submeshes: how many devices each stage has, in order; None to choose.
      layers: how many layers each stage has, in order; None to choose.
      mesh: logical meshes to consider on submeshes of so many devices, as (names, sizes); none for all.
      stage_meshes: the logical mesh of each stage, in order, as (names, sizes); None to choose. Needs `submeshes`.
      time_limit_seconds: after it, the best plan found by then is taken.
      faster_than_seconds: of the step of a plan that is known; others are not wanted.
      gap: relative, to which ranges are solved; None for what is usual.
    """

    programs: Sequence[StagedProgram] | Mapping[int, StagedProgram]
    parameters: Sequence[ParameterInfo]
    cluster: Cluster
    constraints: Constraints = field(default_factory=Constraints)
    remat: str | None = None
    schedules: Sequence[str] = SIMULATED
    stages: int | None = None
    alone: bool = False
    several: bool = False
    submeshes: Sequence[int] | None = None
    layers: Sequence[int] | None = None
    mesh: Sequence[WantedMesh] = ()
    stage_meshes: Sequence[WantedMesh] | None = None
    time_limit_seconds: float = 60.0
    faster_than_seconds: float = float("inf")
    gap: float | None = None

    @property
    def by_microbatches(self) -> Mapping[int, StagedProgram]:
        """The programs by their numbers of microbatches."""
        if isinstance(self.programs, Mapping):
            return self.programs
        return {program.microbatches: program for program in self.programs}

    @property
    def stage_count(self) -> int | None:
        """The given number of stages, whether as `stages`, `submeshes` or `layers`; None for any number."""
        if self.alone:
            return 1
        told = next((given for given in (self.submeshes, self.layers) if given is not None), None)
        return self.stages if told is None else len(told)


def is_asked(order: str, schedules: Sequence[str]) -> bool:
    """Whether some schedule of these runs stages in an order."""
    ahead = {"adaptive", "eager_one_f_one_b"}
    return order in schedules or (order in ahead and not ahead.isdisjoint(schedules))


def schedules_for(request: StageRequest, program: StagedProgram | None) -> tuple[str, ...]:
    """Those asked for, but for a split backward where it cannot be split: a scan makes its weight gradients with its
    cotangents, and putting off their sum would keep the gradients of a whole stage for every microbatch.

    Args:
      request: of the search.
      program: in any number of microbatches; None where there is none.
    """
    if request.alone:
        return ("one_f_one_b",)  # of all orders of one stage the first
    asked = tuple(request.schedules)
    if program is None or not program.scan_splits or set(asked) == {"zero_bubble"}:
        return asked
    return tuple(name for name in asked if name != "zero_bubble")


def check_remat(remat: Any) -> None:
    """Refuse what is no kind of rematerialisation.

    Raises:
      PlanError: for anything but "none", "selective", "layer" and None.
    """
    if remat not in (None, "none", "selective", "layer"):
        raise PlanError(
            refused="the rematerialisation", got=repr(remat), needed='"none", "selective", "layer" or None',
            where="remat=", try_="remat=None",
        )  # fmt: skip


def check_request(request: StageRequest) -> None:
    """Validate a request.

    Raises:
      PlanError: saying what is wrong with it.
    """
    if not request.programs:
        raise _refusal("a stage search", "no program", "one for each number of microbatches", "microbatches=(4, 8, 16)")
    if (fewest := min(request.by_microbatches)) < 1:
        raise _refusal("the number of microbatches", str(fewest), "at least 1", "microbatches=1")
    devices, stages = request.cluster.num_devices, request.stage_count
    if stages is not None and (isinstance(stages, bool) or not isinstance(stages, int) or stages < 1):
        raise _refusal("the number of stages", repr(stages), "a whole number of at least 1", "stages=None")
    _check_given(request)
    if request.submeshes is not None and sum(request.submeshes) != devices:
        sizes, needed = ", ".join(map(str, request.submeshes)), f"the {devices} of cluster {request.cluster.name}"
        got = f"{sum(request.submeshes)} devices in all"
        raise _refusal(f"stages on {sizes} devices", got, needed, "submeshes=None")
    for names, sizes in request.mesh if request.alone else ():
        request.cluster.logical_mesh(sizes, names)  # which refuses what is none of these devices
    check_remat(request.remat)
    for name in request.schedules or ("",):
        if name not in SIMULATED:
            got, needed = "a name that the stage search does not try", f"of {', '.join(SIMULATED)}"
            raise _refusal(f"the schedule {name!r}", got, needed, "schedules=SIMULATED")


def check_layers(request: StageRequest, program: StagedProgram) -> None:
    """Refuse a program that has not the layers for what is asked.

    Raises:
      PlanError: saying how many it has.
    """
    count, devices, stages = len(program.layers), request.cluster.num_devices, request.stage_count
    shared = set(request.schedules) == {INTERLEAVED}  # several stages have the same devices
    most = count if shared else min(count, devices)
    if stages is not None and stages > most:
        needed = f"a layer {'' if shared else 'and a device '}for each stage"
        got = f"{count} layers and {devices} devices"
        raise _refusal(f"{stages} stages", got, needed, f"stages={most}, or more layers")
    if request.layers is not None and (sum(request.layers) != count or min(request.layers, default=0) < 1):
        total, sizes = sum(request.layers), ", ".join(map(str, request.layers))
        raise _refusal(
            f"stages of {sizes} layers", f"{total} layers in all", f"at least one each, and the {count} there are",
            f"staged_program(..., layers={total}, exactly=True), or layers=None",
        )  # fmt: skip


def _check_given(request: StageRequest) -> None:
    """What is given for each stage has to be of as many stages, and layers those of the program."""
    lists = {"submeshes=": request.submeshes, "layers=": request.layers, "stage_meshes=": request.stage_meshes}
    told = {"stages=": request.stages} if request.stages is not None else {}
    told |= {name: len(each) for name, each in lists.items() if each is not None}
    if len(set(told.values())) > 1:
        raise _refusal(
            "stages of which more than one thing is given",
            " and ".join(f"{name} for {count} stages" for name, count in told.items()),
            "the same number of stages in all of them", "one entry for each stage",
        )  # fmt: skip
    if set(request.schedules) == {INTERLEAVED} and (request.submeshes or request.layers):
        needed = "nothing but their number: stages share equal submeshes"
        raise _refusal(f"the schedule {INTERLEAVED} for given stages", "submeshes= or layers=", needed, "stages= alone")
    if request.stage_meshes is not None:
        sizes = [prod(shape) for _, shape in request.stage_meshes]
        if request.submeshes is None or sizes != list(request.submeshes):
            words = ", ".join(map(str, sizes))
            got, needed = f"meshes of {words} devices", "submeshes of as many devices each"
            raise _refusal("a logical mesh for each stage", got, needed, f"submeshes=({words},)")


def _refusal(refused: str, got: str, needed: str, try_: str) -> PlanError:
    return PlanError(refused=refused, got=got, needed=needed, where="the request for stages", try_=try_)


def placements(request: StageRequest, submeshes: Submeshes) -> tuple[Submesh, ...]:
    """The submeshes that stages may have.

    Raises:
      PlanError: if those asked for are not of the cluster.
    """
    if request.submeshes is None:
        devices = request.cluster.num_devices
        if request.alone:
            return (Submesh(0, devices),)
        return tuple(one for one in submeshes.all if not request.several or one.size < devices)
    bounds = list(accumulate(request.submeshes, initial=0))
    found = tuple(Submesh(a, b) for a, b in pairwise(bounds))
    for submesh in found:
        submeshes.check(submesh)
    return found


def check_room(request: StageRequest, least_bytes: float, program: StagedProgram) -> None:
    """Refuse at once what cannot fit however it is cut: of which all devices together do not hold parameters, gradients
    and optimizer state, `least_bytes` on each.

    Raises:
      MemoryExceeded: if they do not.
    """
    cluster = request.cluster
    room = sum(host.devices * host.device.usable_memory_bytes for host in cluster.hosts) / cluster.num_devices
    if least_bytes > room and request.alone:
        raise nothing_fits_alone(request, room, room, least_bytes, program)
    if least_bytes > room:
        raise nothing_fits(request, room, room, least_bytes)


def no_layouts(request: StageRequest) -> PlanError:
    """The error for a request of which no layouts satisfy what is fixed."""
    return PlanError(
        refused=_plan_words(request),
        got="pins or a ZeRO stage that no choice of layouts satisfies, whatever the memory",
        needed="wishes that some layouts satisfy", where="pins=, zero=", try_="leaving one of them out",
    )  # fmt: skip


def unsolved(request: StageRequest) -> MemoryExceeded:
    """The error for a request for which the solver found nothing in time."""
    return MemoryExceeded(
        refused=_plan_words(request), got="layouts of which the solver found none that fit in the time that it had",
        needed="more time, or more memory", where="time_limit_seconds=", try_="a longer time limit, or more devices",
    )  # fmt: skip


def _plan_words(request: StageRequest) -> str:
    what = "a plan" if request.alone else "a staged plan"
    return f"{what} for {request.cluster.num_devices} x {request.cluster.device.kind}"


def nothing_fits_alone(
    request: StageRequest, usable_bytes: float, counted_bytes: float, least_bytes: float, program: StagedProgram
) -> MemoryExceeded:  # fmt: skip
    """The error for a request for one stage that does not fit.

    Args:
      request: of the search.
      usable_bytes: of a device.
      counted_bytes: what of it the search may count.
      least_bytes: on a device, of all layouts.
      program: in the number of microbatches that has them.
    """
    graph = program.graph
    largest = max((graph.values[graph.inputs[p]] for p in graph.parameters), key=lambda v: v.bytes, default=None)
    what = f", largest parameter {largest.name} {largest.shape} of {size_words(largest.bytes)}" if largest else ""
    return MemoryExceeded(
        refused=_plan_words(request), got=room_words(usable_bytes, counted_bytes),
        needed=f"at least {size_words(least_bytes)} on a device, with {microbatches_words(program.microbatches)}{what}",
        where="stage 1 of 1", try_=smaller_words(request.remat),
    )  # fmt: skip


def nothing_fits(
    request: StageRequest, usable_bytes: float, counted_bytes: float, least_bytes: float
) -> MemoryExceeded:  # fmt: skip
    """The error for a request of which no plan fits.

    Args:
      request: of the search.
      usable_bytes: of a device.
      counted_bytes: what of it the search may count.
      least_bytes: of parameters, gradients and optimizer state spread over all devices.
    """
    counts = ", ".join(map(str, sorted(request.by_microbatches)))
    return MemoryExceeded(
        refused=_plan_words(request),
        got=room_words(usable_bytes, counted_bytes),
        needed=f"more in every plan: {size_words(least_bytes)} for parameters, gradients and optimizer state, if split "
        f"evenly, and what {counts} microbatches keep",
        where="the stage search",
        try_=smaller_words(request.remat),
    )
