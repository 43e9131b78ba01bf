"""The options of `plan_for`, checked: a request, or a refusal that says what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

import jax
from jax import process_count

from .._jax.cudnn import as_on
from .._jax.devices import named_devices
from ..cluster import Cluster, cluster_of, load_cluster
from ..compilers.gpu_target import compute_capability
from ..errors import PlanError
from ..notes.device_memory import with_given_memory, with_memory_here
from ..presets import Preset, check_free, parse_preset
from ..program.batch import batch_extents
from ..program.trace import abstract
from ..program.traces import Traces
from ..search.inter.submeshes import Submesh, Submeshes
from ..search.pipelines.replicas import REPLICAS
from ..search.pipelines.request import INTERLEAVED, SIMULATED, check_remat
from ..search.restrictions.constraints import Constraints
from ..search.rivals import search_named
from .request import DEFAULT_METHOD, PlanOptions, PlanRequest
from .stages import SEARCHED_AS


def request_of(
    traces: Traces, args: Sequence[Any], options: PlanOptions, *, started: float,
    tell: Callable[[str], None] = lambda text: None,
) -> PlanRequest:  # fmt: skip
    """What a user asks of the step with these traces, checked; the work on it `started` then, by `time.perf_counter`.

    Raises:
      PlanError: if something is wrong with it.
    """
    where = cluster_asked(options)
    preset, stages, schedule, zero, remat = (
        options.preset, options.stages, options.schedule, options.zero, options.remat
    )  # fmt: skip
    _require(isinstance(where, Cluster), "cluster", _typed(where), "a name or a Cluster", refused="the cluster",
        try_='cluster="local", "p4d.24xlarge:2" or meshwright.load_cluster("cluster.toml")')  # fmt: skip
    _require(options.pins is None or isinstance(options.pins, Mapping), "pins", _typed(options.pins),
        "layouts by path pattern", 'pins={"*kernel*": (None, "model")}', refused="the pins")  # fmt: skip
    _require(preset is None or isinstance(preset, (str, Preset)), "preset", _typed(preset), "a Preset or its text",
        'preset="megatron(tp=2, pp=2)"', refused="the preset")  # fmt: skip
    check_time_limit(options.time_limit_seconds)
    check_batch_axis(args, options.batch_axis)
    check_remat(remat)
    if (limit := options.memory_per_device) is not None:
        _require(_is_number(limit) and 0 < limit < float("inf"), "memory_per_device", repr(limit),
            "a positive number of bytes", "memory_per_device=16e9")  # fmt: skip
        where = where.with_memory_limit(float(limit))
    meshes = mesh_argument(options.mesh)
    if preset is not None:
        preset = (parse_preset(preset) if isinstance(preset, str) else preset).on(where.num_devices)
        check_free(preset, mesh=options.mesh, zero=zero, remat=remat, stages=stages, schedule=schedule)
        _require(options.submeshes is None, "submeshes", f"the preset {preset} as well, whose stages are on equal ones",
            "one or the other", "leaving out submeshes= or preset=", refused="the submeshes")  # fmt: skip
        meshes, zero, remat = [preset.mesh], preset.zero, preset.remat or remat
        stages, schedule = preset.stages, preset.schedule
    layouts = {path: _layout(path, dims) for path, dims in (options.pins or {}).items()}
    submeshes = None
    if options.submeshes is not None:
        submeshes = checked_submeshes(options.submeshes, where, stages)
        stages = len(submeshes)
    if preset is None:  # which has sensible ones
        check_stages(stages, schedule, where.num_devices)
    return PlanRequest(
        traces=traces, args=args, cluster=where, microbatches=options.microbatches, mesh=meshes,
        constraints=Constraints(layouts=layouts, zero=zero), remat=remat, batch_axis=options.batch_axis,
        reduction=options.reduction, stages=stages, schedule=schedule, submeshes=submeshes, preset=preset,
        started=started, time_limit_seconds=options.time_limit_seconds, tell=tell, pads=bool(options.padding),
        may_idle=(options.cluster != "local" and options.devices is None) or process_count() == 1,
    )  # fmt: skip


def as_traced_for(options: PlanOptions) -> AbstractContextManager[None]:
    """Trace as on the devices of the cluster that is asked for; those that are here answer for themselves."""
    where = cluster_asked(options) if options.cluster != "local" else None
    return as_on(compute_capability(where.device.kind) if isinstance(where, Cluster) else None)


def cluster_asked(options: PlanOptions) -> Any:
    """The cluster, as it is called and on the devices that are named. One that is called by name has the memory that
    the environment gives programs, that of local devices what JAX gives of them; another says itself what they may use.

    Raises:
      PlanError: if it has not as many devices as are named.
    """
    found, named = options.cluster, None if options.devices is None else named_devices(options.devices)
    if found == "local":
        found = with_memory_here(with_given_memory(cluster_of(named)), named or jax.devices())
    elif isinstance(found, str):
        found = with_given_memory(load_cluster(found))
    if named is not None and isinstance(found, Cluster):
        _require(found.num_devices == len(named), "devices", str(len(named)),
            f"the {found.num_devices} of cluster {found.name}", 'cluster="local", or as many devices',
            refused="the devices")  # fmt: skip
    return found


def _require(right: object, option: str, got: str, needed: str, try_: str, *, refused: str | None = None) -> None:
    """Refuse an option that is not right."""
    if not right:
        raise PlanError(refused=refused or option, got=got, needed=needed, where=f"{option}=", try_=try_)


def _typed(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.40}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_refine(refine: Any) -> None:
    """Refuse what is no way to refine a plan.

    Raises:
      PlanError: for anything but None, "measure" and "compile".
    """
    _require(refine in (None, "measure", "compile"), "refine", repr(refine), '"measure", "compile", or None for none',
        'refine="measure"', refused="the refinement")  # fmt: skip


def check_trials(options: PlanOptions) -> None:
    """Refuse what is no way to refine or check a plan or no search method, and those that do not go together.

    Raises:
      PlanError: saying what to leave out.
    """
    refine, check = options.refine, options.check
    check_refine(refine)
    _require(check in (None, "compile"), "check", repr(check), '"compile", or None for none', 'check="compile"',
        refused="the check")  # fmt: skip
    _require(refine is None or check is None, "check", "both",
        "one or the other: plans that are measured or compared have been compiled", "leaving out check=",
        refused=f'refine="{refine}" and check="{check}"')  # fmt: skip
    if options.method is None or (name := search_named(options.method).name) == DEFAULT_METHOD:
        return
    beside = {"preset=": options.preset, "refine=": refine}
    given = next((name for name, value in beside.items() if value is not None), None)
    if options.schedule is not None and (options.schedule not in SIMULATED or options.schedule == INTERLEAVED):
        given = f"schedule={options.schedule!r}"
    _require(given is None, "method", f"{given} as well", "one or the other",
        f"leaving out {given}, or method={DEFAULT_METHOD!r}", refused=f"the search method {name}")  # fmt: skip


def check_time_limit(seconds: Any) -> None:
    """Refuse what is no time.

    Raises:
      PlanError: for anything but a number of seconds that is not negative.
    """
    _require(_is_number(seconds) and isfinite(seconds) and seconds >= 0, "time_limit_seconds", repr(seconds),
        "a number of seconds, 0 or more", "time_limit_seconds=60", refused="the time limit")  # fmt: skip


def check_batch_axis(args: Sequence[Any], batch_axis: Any) -> None:
    """Refuse an axis that no array of the batch has; that it is one is checked elsewhere.

    Raises:
      PlanError: naming the array with the most axes.
    """
    if not _is_whole(batch_axis) or batch_axis <= 0 or batch_extents(args, batch_axis):
        return
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract(tuple(args[1:])))]
    longest = max(shapes, key=len, default=None)
    needed = (
        "an axis of an array outside the state, of which there is none" if longest is None
        else f"one of the {len(longest)} axes of the array of shape {longest}, counted from 0"
    )  # fmt: skip
    _require(False, "batch_axis", str(batch_axis), needed, "batch_axis=0", refused="the batch axis")


def checked_submeshes(submeshes: Any, cluster: Cluster, stages: int | None) -> tuple[int, ...]:
    """How many devices each of so many stages, if these are given, has in a cluster.

    Raises:
      PlanError: if these are no submeshes, or not of the cluster.
    """
    sizes = list(submeshes) if isinstance(submeshes, Sequence) and not isinstance(submeshes, str) else []
    _require(sizes and all(_is_whole(n) and n >= 1 for n in sizes), "submeshes", repr(submeshes),
        "for each stage how many devices it has", "submeshes=(2, 2, 4), or None", refused="the submeshes")  # fmt: skip
    shown = ", ".join(map(str, sizes))
    _require(sum(sizes) == cluster.num_devices, "submeshes", f"{sum(sizes)} devices in all",
        f"the {cluster.num_devices} of cluster {cluster.name}", "submeshes=None",
        refused=f"stages on {shown} devices")  # fmt: skip
    _require(stages is None or stages == len(sizes), "submeshes", f"{len(sizes)} submeshes and stages={stages}",
        "one for each stage", "leaving out stages=", refused=f"submeshes of {shown} devices")  # fmt: skip
    known = Submeshes(cluster)
    for first, stop in pairwise(accumulate(sizes, initial=0)):
        known.check(Submesh(first, stop))
    return tuple(sizes)


def check_stages(stages: Any, schedule: Any, devices: int) -> None:
    """Refuse a number of stages that is none or that the schedule cannot have on so many devices, and schedules that do
    not exist.

    Raises:
      PlanError: saying which there are.
    """
    _require(stages is None or (_is_whole(stages) and stages >= 1), "stages", repr(stages),
        "a whole number, at least 1, or None", "stages=None, for as many as are best",
        refused="the number of stages")  # fmt: skip
    if schedule is None:
        return
    known = (*SIMULATED, *SEARCHED_AS, REPLICAS)
    near = " or ".join(get_close_matches(str(schedule), known, n=2)) if schedule not in known else ""
    _require(schedule in known, "schedule", repr(schedule), f"one of {', '.join(known)}, or None",
        near or "schedule=None, for the best of them", refused="the schedule")  # fmt: skip
    ranks = [n for n in range(2, devices + 1) if devices % n == 0]
    if schedule == INTERLEAVED and stages is not None:
        _require(any(stages > n and stages % n == 0 for n in ranks), "stages",
            f"{INTERLEAVED} of {stages} stages on {devices} devices",
            "several stages for each of several equal ranks",
            f"stages={2 * ranks[0]}, or another schedule" if ranks else "several devices",
            refused="the schedule")  # fmt: skip
    _require(stages != 1, "schedule", f"{schedule!r} for one stage", "several stages to be scheduled",
        "stages=2, or stages=None for as many as are best", refused="the schedule")  # fmt: skip


def mesh_argument(mesh: object) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The logical meshes of a user's `mesh=`: None, a shape, a mapping of axis names to sizes, or a list of those.

    Raises:
      PlanError: for anything else.
    """
    if mesh is None:
        return []
    if isinstance(mesh, Mapping) and mesh and all(map(_is_whole, mesh.values())):
        return [(tuple(mesh), tuple(int(n) for n in mesh.values()))]
    if isinstance(mesh, Sequence) and mesh and all(isinstance(n, int) for n in mesh):
        return [(("x", "y", "z")[: len(mesh)], tuple(mesh))]
    if not isinstance(mesh, Sequence) or isinstance(mesh, str):
        _require(False, "mesh", repr(mesh), "a shape, or axis names with sizes",
            'mesh=(2, 4) or mesh={"data": 2, "model": 4}', refused="the logical mesh")  # fmt: skip
        return []
    return [entry for one in mesh for entry in mesh_argument(one)]


def _layout(path: str, dims: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim of a pin."""
    example = 'pins={"*kernel": (None, "model")}'
    listed = isinstance(path, str) and not isinstance(dims, str) and isinstance(dims, Iterable)
    _require(listed, "pins", repr(dims), "a path pattern, and for each dim None, an axis or several", example,
        refused=f"the pin {path!r}")  # fmt: skip
    layout: list[tuple[str, ...]] = []
    for dim in dims:
        axes = () if dim is None else (dim,) if isinstance(dim, str) else dim
        _require(isinstance(axes, Sequence) and all(isinstance(axis, str) for axis in axes), "pins", repr(dim),
            "None, an axis name or a tuple of axis names", example, refused=f"the pin of {path}")  # fmt: skip
        layout.append(tuple(axes))
    return tuple(layout)
