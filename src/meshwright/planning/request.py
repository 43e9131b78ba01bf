"""What `plan_for` was asked for, with names and files looked up, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

import jax

from ..cluster import Cluster, HostOrder
from ..errors import PlanError
from ..plan import Plan
from ..presets import Preset
from ..program.batch import batch_extents, batch_inputs
from ..program.expected import Expectations
from ..program.staged import StagedProgram
from ..program.trace import Program, abstract
from ..program.traces import Traces
from ..search.alternative import Alternative
from ..search.considered import Considered
from ..search.inter.submeshes import Submesh, Submeshes
from ..search.prices.least_work import least_work_seconds
from ..search.restrictions.constraints import Constraints
from ..search.result import Priced, SearchResult

# The search method that is taken where none is named, by its name.
DEFAULT_METHOD = "hierarchical"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a user says of a plan, unchecked: the options of `planning.plan_for`, which describes them."""

    cluster: Cluster | str = "local"
    microbatches: int | None = None
    mesh: Any = None
    pins: Mapping[str, Sequence[Any]] | None = None
    zero: int | None = None
    remat: str | None = None
    memory_per_device: float | None = None
    batch_axis: int = 0
    reduction: str | None = None
    stages: int | None = None
    schedule: str | None = None
    submeshes: Sequence[int] | None = None
    preset: Preset | str | None = None
    devices: Any = None
    time_limit_seconds: float = 60.0
    refine: str | None = None
    check: str | None = None
    method: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan.

    Args:
      traces: the step, with a memory of its traces.
      args: its arguments.
      cluster: where it is to run, with the memory that a device may use.
      microbatches: as of `planning.plan_for`, like all that follows.
      mesh: logical meshes to consider, as (names, sizes); empty for all.
      constraints: what is fixed, the ZeRO stage included.
      remat: as there.
      batch_axis: as there.
      reduction: as there.
      schedule: as there.
      submeshes: as there.
      preset: with all its sizes, or None.
      started: when the work began, by `time.perf_counter`.
      time_limit_seconds: from then on.
      tell: called with a few words at each part of the work.
      may_idle: whether a plan may leave devices out: a process that runs it has to have some that it does not.
      several: whether plans of one stage are left out, since the best of those is known.
      expectations: of the step's programs.
    """

    traces: Traces
    args: Sequence[Any]
    cluster: Cluster
    microbatches: int | None
    mesh: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]
    constraints: Constraints
    remat: str | None
    batch_axis: int
    reduction: str | None
    schedule: str | None
    submeshes: tuple[int, ...] | None
    preset: Preset | None
    started: float
    time_limit_seconds: float
    tell: Callable[[str], None]
    may_idle: bool = True
    several: bool = False
    expectations: Expectations = field(default_factory=Expectations)

    @property
    def left_seconds(self) -> float:
        """Of the time limit; negative once it is over."""
        return self.time_limit_seconds - (time.perf_counter() - self.started)

    def within(self, seconds: float) -> PlanRequest:
        """The same request, with so many seconds from now on."""
        return replace(self, started=time.perf_counter(), time_limit_seconds=max(seconds, 0.0))

    @property
    def least_work_seconds(self) -> float:
        """What no plan takes less than."""
        count = self.microbatches if self.microbatches is not None else 1
        return least_work_seconds(self.program(count).graph, count, self.cluster)

    def program(self, microbatches: int, *, warn: bool = False) -> Program:
        """The step in so many microbatches; `warn` as of `Traces.program`."""
        return self.traces.program(
            self.args, microbatches=microbatches, batch_axis=self.batch_axis, reduction=self.reduction, warn=warn
        )

    def constraints_in(self, program: Program) -> Constraints:
        """What is fixed in a program: the layouts and the ZeRO stage, and what a preset's axes are for.

        Raises:
          PlanError: if a pin is of no input, or the program has nothing that an axis of the preset could split.
        """
        constraints, preset = self.constraints, self.preset
        if preset is not None:
            batch = batch_inputs(program, self.traces, self.args, batch_axis=self.batch_axis)
            roles = preset.roles_in(program, batch, where=self.traces.name)
            constraints = replace(constraints, roles=roles, gradient_exchange=preset.gradient_exchange)
        constraints.check(program.input_names, [program.graph.values[v].name for v in program.graph.inputs])
        return constraints

    def is_traced(self, microbatches: int) -> bool:
        """Whether that program has been asked for."""
        return self.traces.is_traced(
            self.args, microbatches=microbatches, batch_axis=self.batch_axis, reduction=self.reduction
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning(Priced):
    """A plan, which is `plan`, and what finding it took.

    Args:
      program: the traced step.
      cluster: it is for.
      considered: the candidates.
      alternatives: plans that were not taken, the fastest first.
      seconds: in all; like what follows, once planning is over.
      trace_seconds: for tracing and analysing the step.
      solve_seconds: for everything else: all searches, also those whose plan was not taken, and writing plans out.
    """

    program: Program
    cluster: Cluster
    considered: tuple[Considered, ...]
    alternatives: tuple[Alternative, ...] = ()
    seconds: float = 0.0
    trace_seconds: float = 0.0
    solve_seconds: float = 0.0

    @classmethod
    def of(cls, result: SearchResult, cluster: Cluster) -> Planning:
        """What a search has found for a cluster."""
        program = result.program
        assert program is not None  # planning has it
        return cls(
            program=program.source if isinstance(program, StagedProgram) else program, plan=result.plan,
            cluster=cluster, considered=result.considered, alternatives=result.alternatives,
        )  # fmt: skip


def in_cluster(plan: Plan, order: HostOrder, cluster: Cluster) -> Plan:
    """A plan for the cluster in another order of its hosts as one for the cluster itself.

    Args:
      plan: its devices numbered in that order.
      order: of the hosts.
      cluster: as it was given.
    """
    return on_devices(plan, order.devices, cluster)


def on_devices(plan: Plan, devices: Sequence[int], cluster: Cluster) -> Plan:
    """A plan for some devices of a cluster, numbered among themselves, as one for the cluster.

    Args:
      plan: for these devices.
      devices: for each number there the one in the cluster.
      cluster: the whole one.
    """
    stages = [replace(stage, devices=tuple(devices[d] for d in stage.devices)) for stage in plan.stages]
    return replace(plan, stages=tuple(stages), cluster=cluster.name, cluster_fingerprint=cluster.fingerprint())


def check_refine(refine: Any) -> None:
    """Refuse what is no way to refine a plan.

    Raises:
      PlanError: for anything but None and "measure".
    """
    _check_word("refinement", "refine", refine, "measure")


def check_check(check: Any) -> None:
    """Refuse what is no way to check a plan.

    Raises:
      PlanError: for anything but None and "compile".
    """
    _check_word("check", "check", check, "compile")


def _check_word(what: str, option: str, value: Any, word: str) -> None:
    if value not in (None, word):
        raise PlanError(
            refused=f"the {what}", got=repr(value), needed=f'"{word}", or None for none', where=f"{option}=",
            try_=f'{option}="{word}"',
        )  # fmt: skip


def check_time_limit(seconds: Any) -> None:
    """Refuse what is no time.

    Raises:
      PlanError: for anything but a number of seconds that is not negative.
    """
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not isfinite(seconds) or seconds < 0:
        raise PlanError(
            refused="the time limit", got=repr(seconds), needed="a number of seconds, 0 or more",
            where="time_limit_seconds=", try_="time_limit_seconds=60",
        )  # fmt: skip


def check_batch_axis(args: Sequence[Any], batch_axis: Any) -> None:
    """Refuse an axis that no array of the batch has.

    Args:
      args: of the step.
      batch_axis: which axis of every array outside the state is the batch; that it is one is checked elsewhere.

    Raises:
      PlanError: naming the array with the most axes.
    """
    if isinstance(batch_axis, bool) or not isinstance(batch_axis, int) or batch_axis <= 0:
        return
    if batch_extents(args, batch_axis):
        return
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract(tuple(args[1:])))]
    longest = max(shapes, key=len, default=None)
    raise PlanError(
        refused="the batch axis", got=str(batch_axis), where="batch_axis=", try_="batch_axis=0",
        needed="an axis of an array outside the state, of which there is none" if longest is None
        else f"one of the {len(longest)} axes of the array of shape {longest}, counted from 0",
    )  # fmt: skip


def checked_submeshes(submeshes: Any, cluster: Cluster, stages: int | None) -> tuple[int, ...]:
    """How many devices each stage has.

    Args:
      submeshes: as the user said it.
      cluster: to be cut.
      stages: how many there are to be; None if it was not said.

    Raises:
      PlanError: if these are no submeshes, or not of the cluster.
    """
    sizes = list(submeshes) if isinstance(submeshes, Sequence) and not isinstance(submeshes, str) else []
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise PlanError(
            refused="the submeshes", got=repr(submeshes), needed="for each stage how many devices it has",
            where="submeshes=", try_="submeshes=(2, 2, 4), or None",
        )  # fmt: skip
    shown = ", ".join(map(str, sizes))
    if sum(sizes) != cluster.num_devices:
        raise PlanError(
            refused=f"stages on {shown} devices", got=f"{sum(sizes)} devices in all",
            needed=f"the {cluster.num_devices} of cluster {cluster.name}", where="submeshes=", try_="submeshes=None",
        )  # fmt: skip
    if stages is not None and stages != len(sizes):
        raise PlanError(
            refused=f"submeshes of {shown} devices", got=f"{len(sizes)} submeshes and stages={stages}",
            needed="one for each stage", where="submeshes=", try_="leaving out stages=",
        )  # fmt: skip
    known = Submeshes(cluster)
    for first, stop in pairwise(accumulate(sizes, initial=0)):
        known.check(Submesh(first, stop))
    return tuple(sizes)


def mesh_argument(mesh: object) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The logical meshes of a user's `mesh=`: None, a shape, a mapping of axis names to sizes, or a list of those.

    Raises:
      PlanError: for anything else.
    """
    if mesh is None:
        return []
    sizes = list(mesh.values()) if isinstance(mesh, Mapping) else []
    if sizes and all(isinstance(n, int) and not isinstance(n, bool) for n in sizes):
        assert isinstance(mesh, Mapping)
        return [(tuple(mesh), tuple(int(n) for n in mesh.values()))]
    if isinstance(mesh, Sequence) and mesh and all(isinstance(n, int) for n in mesh):
        names = ("x", "y", "z")
        return [(names[: len(mesh)], tuple(mesh))]
    if isinstance(mesh, Sequence) and not isinstance(mesh, str):
        return [entry for one in mesh for entry in mesh_argument(one)]
    raise PlanError(
        refused="the logical mesh",
        got=repr(mesh),
        needed="a shape, or axis names with sizes",
        where="mesh=",
        try_='mesh=(2, 4) or mesh={"data": 2, "model": 4}',
    )
