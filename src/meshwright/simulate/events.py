"""When everything of a schedule starts and ends: discrete events over ranks and links, in numbers.

Method: the order on ranks and on channels is fixed by the schedule, so the events need no queue: one pass over the walk
of the schedule finds the earliest start of each. Cost: linear, half a microsecond for an instruction or transfer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import PlanError
from ..schedule import Kind, Mode, Schedule
from .timing import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Seconds from the start of the step.

    Args:
      starts: of each instruction of the walk, by number.
      ends: the same.
      update_starts: by the number of an update, when its gradients are synchronised and the optimizer starts.
      transfer_starts: of each transfer of the walk, in the order of its steps.
      transfer_ends: the same.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    update_starts: dict[int, float]
    transfer_starts: tuple[float, ...]
    transfer_ends: tuple[float, ...]


def run_events(schedule: Schedule, timing: Timing, *, blocking: bool) -> Events:
    """Run a schedule with given times.

    Args:
      schedule: to run.
      timing: of its stages and edges.
      blocking: whether a transfer occupies both ranks, in the global order, instead of a channel of its own.

    Raises:
      PlanError: the timing lacks what the schedule has.
      ScheduleError: the schedule deadlocks.
    """
    seconds, channels = slot_seconds(schedule, timing), channel_seconds(schedule, timing)
    walk = schedule.walk
    ranks, slots = walk.ranks, walk.slots
    starts, ends = [0.0] * len(ranks), [0.0] * len(ranks)
    arrived = [0.0] * len(ranks)
    free = [0.0] * len(schedule.ranks)
    busy = [0.0] * len(channels)
    transfer_starts: list[float] = []
    transfer_ends: list[float] = []
    # The stage search runs this loop thousands of times: it is plain arithmetic on lists.
    for number, sender, channel in walk.steps:
        if sender < 0:
            rank = ranks[number]
            start, ready = free[rank], arrived[number]
            if ready > start:
                start = ready
            starts[number] = start
            ends[number] = free[rank] = start + seconds[slots[number]]
            continue
        if blocking:
            rank, other = ranks[number], ranks[sender]
            start = max(free[rank], free[other])
            end = free[rank] = free[other] = start + channels[channel]
        else:
            start, ready = ends[sender], busy[channel]
            if ready > start:
                start = ready
            end = busy[channel] = start + channels[channel]
            if end > arrived[number]:
                arrived[number] = end
        transfer_starts.append(start)
        transfer_ends.append(end)
    return Events(
        update_starts=_place_updates(schedule, timing, starts, ends),
        starts=tuple(starts),
        ends=tuple(ends),
        transfer_starts=tuple(transfer_starts),
        transfer_ends=tuple(transfer_ends),
    )


def slot_seconds(schedule: Schedule, timing: Timing) -> list[float]:
    """The table that the slots of a walk point into; NaN where a stage lacks a time that the schedule does not use."""
    if len(timing.stages) != schedule.stages:
        needed = f"{schedule.stages}, as the schedule {schedule.name} has"
        raise _refusal("Timing.stages", f"{len(timing.stages)} stages", needed, "a StageTiming for each stage")
    if timing.updates_wait_for_all and schedule.mode is Mode.ASYNCHRONOUS:
        got, needed = f"True with the asynchronous schedule {schedule.name}", "False"
        raise _refusal("Timing.updates_wait_for_all", got, needed, "a synchronous schedule")
    split, table = schedule.splits_backward, []
    for number, stage in enumerate(timing.stages):
        if split and (stage.backward_input_seconds is None or stage.backward_weight_seconds is None):
            got, needed = f"stage {number} without the parts of its backward", "backward_input_seconds and the other"
            raise _refusal(f"Timing.stages[{number}]", got, needed, f"{schedule.name} with a whole backward")
        update = stage.synchronise_seconds + (0.0 if timing.updates_wait_for_all else stage.update_seconds)
        by_kind = {
            Kind.FORWARD: stage.forward_seconds,
            Kind.BACKWARD: stage.backward_seconds,
            Kind.BACKWARD_INPUT: stage.backward_input_seconds,
            Kind.BACKWARD_WEIGHT: stage.backward_weight_seconds,
            Kind.UPDATE: update,
        }
        for kind in Kind:
            seconds = by_kind[kind]
            table.append(math.nan if seconds is None else float(seconds))
    return table


def channel_seconds(schedule: Schedule, timing: Timing) -> list[float]:
    """Of each channel of the walk: two for each edge, forward and back."""
    given, seconds = {e.edge: e for e in timing.edges}, []
    for edge in schedule.edges:
        one = given.get(edge)
        if one is not None:
            seconds += [float(one.forward_seconds), float(one.backward_seconds)]
        elif schedule.stage_ranks[edge.source] == schedule.stage_ranks[edge.target]:
            seconds += [0.0, 0.0]
        else:
            needed = f"an EdgeTiming for {edge}, as the schedule {schedule.name} has it"
            raise _refusal("Timing.edges", f"none for the edge {edge}", needed, "zero seconds if its transfer is free")
    return seconds


def _place_updates(schedule: Schedule, timing: Timing, starts: list[float], ends: list[float]) -> dict[int, float]:
    """When each optimizer starts; where updates wait for all stages, their ends are put where they belong."""
    walk, update_starts = schedule.walk, {}
    updates = [number for number, one in enumerate(walk.instructions) if one.kind is Kind.UPDATE]
    if not timing.updates_wait_for_all:
        for number in updates:
            update_starts[number] = starts[number] + timing.stages[walk.instructions[number].stage].synchronise_seconds
        return update_starts
    synchronised = max((ends[number] for number in updates), default=0.0)
    free = [synchronised] * len(schedule.ranks)
    for number in updates:
        rank = walk.ranks[number]
        update_starts[number] = free[rank]
        ends[number] = free[rank] = free[rank] + timing.stages[walk.instructions[number].stage].update_seconds
    return update_starts


def _refusal(where: str, got: str, needed: str, try_: str) -> PlanError:
    return PlanError(refused="to simulate with this timing", got=got, needed=needed, where=where, try_=try_)
