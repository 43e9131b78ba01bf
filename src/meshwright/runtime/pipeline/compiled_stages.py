"""What the stages of a step compile, how often a step runs it, and what it moves between them.

Results that microbatches leave behind are put together by programs of their own (`StageRuntime.join`), which have no
collectives and no products, and are not listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...lowering.pipeline.stage_memory import StageMemory, Temporaries, passed_on, round_name, stage_memory
from ...schedule.schedule import Mode
from .operations import Move, Run, Update
from .stage_runtime import Compiled, StageRuntime
from .step import PipelinedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRuns:
    """A program of a stage.

    Args:
      name: as of `stage_memory`; and `begin`, `update beside` and `report`.
      stage: on its devices.
      program: of it.
      runs: how often a step runs it.
    """

    name: str
    stage: StageRuntime
    program: Compiled
    runs: int

    def lower(self) -> Any:
        """It lowered from shapes alone; compiled, it is what a step runs."""
        return self.stage.lower(self.program)


def programs_of(step: PipelinedStep, number: int) -> tuple[ProgramRuns, ...]:
    """The programs that a step runs on a stage.

    Args:
      step: of several stages.
      number: of the stage.
    """
    stage, own = step.stages[number], [one for one in step.operations if not isinstance(one, Move)]
    works = Counter(one.work for one in own if isinstance(one, Run) and one.stage == number)
    updates = Counter(one.in_place for one in own if isinstance(one, Update) and one.stage == number)
    found: list[tuple[str, Compiled | None, int]] = [("prepare", stage.prepare, 1), ("begin", stage.begin, 1)]
    found += [(work.value, getattr(stage, work.value), runs) for work, runs in works.items()]
    if step.schedule.mode is Mode.ASYNCHRONOUS:
        found += [(round_name(0), stage.rounds[0], updates[True])] if updates[True] else []
        found += [("update beside", stage.update_beside, updates[False])] if updates[False] else []
        found += [("report", stage.report, 1)]
    else:
        found += [(round_name(place), one, 1) for place, one in enumerate(stage.rounds)]
    return tuple(
        ProgramRuns(name=name, stage=stage, program=one, runs=runs)
        for name, one, runs in found
        if one is not None and one.outputs
    )


def memory_of(step: PipelinedStep, compiled: Sequence[Mapping[str, Temporaries]]) -> tuple[StageMemory, ...]:
    """What stages hold, by the temporaries of their compiled programs.

    Args:
      step: of several stages.
      compiled: for each stage what its programs take, by name.
    """
    local = step.local
    return tuple(
        passed_on(
            stage_memory(
                stage, update, splits_backward=local.schedule.splits_backward, platform=local.platform, compiled=facts
            ),
            stage,
        )
        for stage, update, facts in zip(local.stages, local.updates, compiled, strict=True)
    )  # fmt: skip


def moved_bytes(step: PipelinedStep) -> dict[tuple[int, int], float]:
    """Bytes of whole values that a step moves for its microbatches, by the stages that have and that get them."""
    total: dict[tuple[int, int], float] = {}
    for one in step.operations:
        if isinstance(one, Move):
            shapes = [step.stages[one.source].stage.global_shape(slot) for slot in one.sent]
            size = float(sum(shape.size * shape.dtype.itemsize for shape in shapes))
            total[one.source, one.target] = total.get((one.source, one.target), 0.0) + size
    return total
