"""What `plan_for` was asked for, with names and files looked up, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from ..cluster import Cluster
from ..errors import MemoryExceeded
from ..plan import Plan
from ..presets import Preset
from ..presets.roles_in_program import roles_in
from ..program.batch import batch_inputs
from ..program.expected import Expectations, Unexpected
from ..program.padded_dims import PaddedDim
from ..program.staged import StagedProgram
from ..program.trace import Program
from ..program.traces import Traces
from ..search.alternative import Alternative
from ..search.considered import Considered
from ..search.driver import WORTH, Part, best_of_parts
from ..search.prices.least_work import least_work_seconds
from ..search.restrictions.constraints import Constraints
from ..search.result import NothingFaster, Priced, SearchResult

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
    padding: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan: options of `planning.plan_for`, checked, and what each part of the search adds to them.

    Args:
      traces: the step, with a memory of its traces.
      args: its arguments.
      cluster: where it is to run, with the memory that a device may use.
      mesh: logical meshes to consider, as (names, sizes); empty for all.
      constraints: what is fixed, the ZeRO stage included.
      stages: how many; None to choose.
      preset: with all its sizes, or None.
      started: when the work began, by `time.perf_counter`; `time_limit_seconds` are from then on.
      pads: whether dims may be padded that mesh axes do not divide.
      may_idle: whether a plan may leave devices out: a process that runs it has to have some that it does not.
      faster_than_seconds: a plan whose step counts for more is not wanted.
      expectations: of the step's programs.
      padded: dims that the step's programs have longer.
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
    stages: int | None
    schedule: str | None
    submeshes: tuple[int, ...] | None
    preset: Preset | None
    started: float
    time_limit_seconds: float
    tell: Callable[[str], None]
    pads: bool = True
    may_idle: bool = True
    faster_than_seconds: float = inf
    expectations: Expectations = field(default_factory=Expectations)
    padded: tuple[PaddedDim, ...] = ()

    @property
    def left_seconds(self) -> float:
        """Of the time limit; negative once it is over."""
        return self.time_limit_seconds - (time.perf_counter() - self.started)

    def within(self, faster_than_seconds: float, seconds: float) -> PlanRequest:
        """The same request for something that is faster, with so many seconds from now on."""
        return replace(
            self, faster_than_seconds=faster_than_seconds, started=time.perf_counter(),
            time_limit_seconds=max(seconds, 0.0),
        )  # fmt: skip

    @property
    def least_work_seconds(self) -> float:
        """What no plan takes less than."""
        count = 1 if self.microbatches is None or self.schedule == "inference" else self.microbatches
        return least_work_seconds(self.program(count).graph, count, self.cluster)

    def best_of(self, parts: Iterable[Part], *, worth: float = WORTH) -> SearchResult:
        """The best plan of all parts of the space (`search.driver.search_parts`)."""
        return best_of_parts(
            parts, left_seconds=lambda: self.left_seconds, floor=lambda: self.least_work_seconds,
            faster_than_seconds=self.faster_than_seconds, worth=worth,
        )  # fmt: skip

    def as_expected(self, search: Callable[[], SearchResult]) -> SearchResult:
        """What a search finds over programs that may be expected; where one is another program than that, what it finds
        from the beginning, with every number of microbatches traced."""
        try:
            try:
                found = search()
            except (NothingFaster, MemoryExceeded):
                self.expectations.check()
                raise
            self.expectations.check()
            return found
        except Unexpected:
            self.expectations.give_up()
            return search()

    def program(self, microbatches: int, *, warn: bool = False) -> Program:
        """The step in so many microbatches; `warn` as of `Traces.program`."""
        return self.traces.program(
            self.args, microbatches=microbatches, batch_axis=self.batch_axis, reduction=self.reduction,
            padded=self.padded, warn=warn,
        )  # fmt: skip

    def traced(self) -> frozenset[int]:
        """The numbers of microbatches whose programs have been asked for."""
        return self.traces.traced(self.args, batch_axis=self.batch_axis, reduction=self.reduction, padded=self.padded)

    def constraints_in(self, program: Program) -> Constraints:
        """What is fixed in a program: the layouts and the ZeRO stage, and what a preset's axes are for.

        Raises:
          PlanError: if a pin is of no input, or the program has nothing that an axis of the preset could split.
        """
        constraints, preset = self.constraints, self.preset
        if preset is not None:
            batch = batch_inputs(program, self.traces, self.args, batch_axis=self.batch_axis)
            roles = roles_in(preset, program, batch, where=self.traces.name)
            constraints = replace(constraints, roles=roles, gradient_exchange=preset.gradient_exchange)
        constraints.check(program.input_names, [program.graph.values[v].name for v in program.graph.inputs])
        return constraints


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

    def __str__(self) -> str:
        """The plan in a short paragraph; `meshwright.report.explain` shows all of it."""
        return f"{self.plan} Planned in {self.seconds:.1f} s."

    def __repr__(self) -> str:
        return f"<{self}>"  # a dataclass would write its whole program out

    @classmethod
    def of(cls, result: SearchResult, cluster: Cluster) -> Planning:
        """What a search has found for a cluster."""
        return cls(
            program=program_of(result), plan=result.plan,
            cluster=cluster, considered=result.considered, alternatives=result.alternatives,
        )  # fmt: skip


def program_of(result: SearchResult) -> Program:
    """The whole program of a plan that was searched for."""
    program = result.program
    assert program is not None  # planning has it
    return program.source if isinstance(program, StagedProgram) else program


def on_devices(plan: Plan, devices: Sequence[int], cluster: Cluster) -> Plan:
    """A plan for some devices of a cluster, numbered among themselves, as one for the cluster."""
    stages = tuple(replace(stage, devices=tuple(devices[d] for d in stage.devices)) for stage in plan.stages)
    return replace(plan, stages=stages, cluster=cluster.name, cluster_fingerprint=cluster.fingerprint())
