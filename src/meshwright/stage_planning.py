"""Plans of several stages: the step traced for each number of microbatches, cut into layers, and searched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .cluster import Cluster
from .errors import PlanError
from .program.staged import staged_program
from .program.trace import Program, abstract, is_batched, trace_program
from .search.parameters import parameter_infos
from .search.pins import Pins
from .search.pipeline import SIMULATED, StageRequest, StageSearchResult, search_stages

# Microbatches tried where the user names none: more cost more launches than they save in bubbles.
_MOST_MICROBATCHES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlanning:
    """A staged plan and what finding it took.

    Args:
      program: the step traced with the plan's microbatches.
      result: of the search.
      trace_seconds: for tracing and analysing the step, for all numbers of microbatches.
    """

    program: Program
    result: StageSearchResult
    trace_seconds: float


def plan_stages(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    cluster: Cluster,
    stages: int | None,
    schedule: str | None,
    microbatches: int | None,
    mesh: Sequence[tuple[tuple[str, ...], tuple[int, ...]]],
    pins: Pins,
    remat: str | None,
    batch_axis: int,
    reduction: str | None,
    time_limit_seconds: float,
    tell: Callable[[str], None],
) -> StagePlanning:
    """The fastest plan with so many stages, or with any number of them.

    Args: as of `planning.plan_for`.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
    """
    start = time.perf_counter()
    _check(stages, schedule)
    programs = []
    for count in [microbatches] if microbatches is not None else _counts(args, batch_axis):
        tell(f"tracing {count} microbatches")
        program = trace_program(step, args, microbatches=count, batch_axis=batch_axis, reduction=reduction)
        if not program.marked:
            raise PlanError(
                refused=f"a plan of {stages or 'several'} stages", got="a step without meshwright.value_and_grad",
                needed="a step whose loss function is marked: its forward program is what is cut",
                where=getattr(step, "__name__", "the step"),
                try_="meshwright.value_and_grad in place of jax.value_and_grad, or stages=1",
            )  # fmt: skip
        programs.append(staged_program(program))
    traced = time.perf_counter() - start
    pins.check(programs[0].source.input_names, [programs[0].graph.values[v].name for v in programs[0].graph.inputs])
    tell("searching stages")
    request = StageRequest(
        programs=programs, parameters=parameter_infos(programs[0].source), cluster=cluster, pins=pins, remat=remat,
        schedules=SIMULATED if schedule is None else (schedule,), stages=stages, mesh=mesh,
        time_limit_seconds=max(time_limit_seconds - traced, 1.0),
    )  # fmt: skip
    result = search_stages(request)
    return StagePlanning(program=result.program.source, result=result, trace_seconds=traced)


def _check(stages: Any, schedule: Any) -> None:
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        raise PlanError(
            refused="the number of stages", got=repr(stages), needed="a whole number, at least 1, or None",
            where="stages=", try_="stages=None, for as many as are best",
        )  # fmt: skip
    if schedule is not None and schedule not in SIMULATED:
        raise PlanError(
            refused="the schedule", got=repr(schedule), needed=f"one of {', '.join(SIMULATED)}, or None",
            where="schedule=", try_="schedule=None, for the best of them",
        )  # fmt: skip


def _counts(args: Sequence[Any], batch_axis: int) -> list[int]:
    """Powers of two that divide the batch."""
    shapes = abstract(tuple(args))
    leaves = zip(jax.tree.leaves(shapes), is_batched(shapes, batch_axis), strict=True)
    extents = {leaf.shape[batch_axis] for leaf, batched in leaves if batched}
    powers = [2**i for i in range(_MOST_MICROBATCHES.bit_length()) if 2**i <= _MOST_MICROBATCHES]
    return [m for m in powers if all(extent % m == 0 for extent in extents)]
