"""What `plan_for` was asked for, with names and files looked up, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .cluster import Cluster
from .plan import Plan
from .presets import Preset
from .program.trace import Program
from .program.traces import Traces
from .search.pins import Pins


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan.

    Args:
      traces: the step, with a memory of its traces.
      args: its arguments.
      cluster: where it is to run, with the memory that a device may use.
      microbatches: as of `planning.plan_for`, like all that follows.
      mesh: logical meshes to consider, as (names, sizes); empty for all.
      pins: what is fixed, the ZeRO stage included.
      remat: as there.
      batch_axis: as there.
      reduction: as there.
      schedule: as there.
      preset: with all its sizes, or None.
      started: when the work began, by `time.perf_counter`.
      time_limit_seconds: from then on.
      tell: called with a few words at each part of the work.
    """

    traces: Traces
    args: Sequence[Any]
    cluster: Cluster
    microbatches: int | None
    mesh: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]
    pins: Pins
    remat: str | None
    batch_axis: int
    reduction: str | None
    schedule: str | None
    preset: Preset | None
    started: float
    time_limit_seconds: float
    tell: Callable[[str], None]

    @property
    def left_seconds(self) -> float:
        """Of the time limit; negative once it is over."""
        return self.time_limit_seconds - (time.perf_counter() - self.started)

    def program(self, microbatches: int) -> Program:
        """The step in so many microbatches."""
        return self.traces.program(
            self.args, microbatches=microbatches, batch_axis=self.batch_axis, reduction=self.reduction
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A plan and what finding it took.

    Args:
      program: the traced step.
      plan: the plan.
      cluster: it is for.
      seconds: in all.
      trace_seconds: for tracing and analysing the step.
      solve_seconds: for the search.
      considered: the candidates, a line each.
    """

    program: Program
    plan: Plan
    cluster: Cluster
    seconds: float
    trace_seconds: float
    solve_seconds: float
    considered: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """Predicted, of one step."""
        assert self.plan.predicted is not None  # planning prices what it finds
        return self.plan.predicted.step_seconds
