"""How long a step takes, and nothing else of it: what whoever compares many schedules asks for.

The end of what `simulate` shows, by the same sums, without the order of everything (`Schedule.walk`) and without the
times of anything but the end. Where transfers run beside the compute of both ends, a channel carries values in the
order in which its one sender makes them, so that each rank can be followed as far as what it reads has arrived.

Cost: linear, about a microsecond for an instruction.
"""

from __future__ import annotations

from ..schedule import Kind, Schedule
from .events import channel_seconds, slot_seconds
from .simulate import simulate
from .timing import Timing

_FORWARDS, _COTANGENTS = 0, 1


def step_seconds(schedule: Schedule, timing: Timing) -> float:
    """The seconds of a step, transfers being asynchronous.

    >>> from meshwright.schedule import one_f_one_b
    >>> timing = Timing.uniform(stages=4, forward_seconds=1, backward_seconds=2, transfer_seconds=0.5)
    >>> step_seconds(one_f_one_b(4, 64), timing)
    251.0

    Args:
      schedule: sound, as all schedules made by functions of `meshwright.schedule` are.
      timing: of its stages and edges.

    Raises:
      PlanError: as `simulate`.
      ScheduleError: the schedule deadlocks.
    """
    seconds, channels = slot_seconds(schedule, timing), channel_seconds(schedule, timing)
    slots, rank_of = {kind: place for place, kind in enumerate(Kind)}, schedule.stage_ranks
    passes = {Kind.FORWARD: _FORWARDS, Kind.BACKWARD: _COTANGENTS, Kind.BACKWARD_INPUT: _COTANGENTS}
    # By pass and stage: who reads what it makes, as (stage, channel or -1 on the same rank).
    readers: list[list[list[tuple[int, int]]]] = [[[] for _ in range(schedule.stages)] for _ in range(2)]
    for number, edge in enumerate(schedule.edges):
        apart = rank_of[edge.source] != rank_of[edge.target]
        readers[_FORWARDS][edge.source].append((edge.target, 2 * number if apart else -1))
        readers[_COTANGENTS][edge.target].append((edge.source, 2 * number + 1 if apart else -1))
    # By pass, stage and microbatch: how many values have not arrived, and when the last did.
    missing = [
        [[sum(stage == reader for row in of_pass for reader, _ in row)] * schedule.microbatches for stage in range(n)]
        for of_pass in readers
        for n in [schedule.stages]
    ]
    arrived = [[[0.0] * schedule.microbatches for _ in range(schedule.stages)] for _ in range(2)]
    # By pass and stage: the microbatch at which its rank stands still.
    stands = [[-1] * schedule.stages for _ in range(2)]
    busy, free, head = [0.0] * len(channels), [0.0] * len(schedule.ranks), [0] * len(schedule.ranks)
    synchronised = 0.0
    runnable = list(reversed(range(len(head))))
    while runnable:
        rank = runnable.pop()
        time, program = free[rank], schedule.ranks[rank]
        for place in range(head[rank], len(program)):
            one = program[place]
            kind, stage, microbatch = one.kind, one.stage, one.microbatch
            which = passes.get(kind)
            if which is None or microbatch is None:
                time += seconds[stage * len(slots) + slots[kind]]
                if kind is Kind.UPDATE and time > synchronised:
                    synchronised = time
                continue
            if missing[which][stage][microbatch]:
                stands[which][stage] = microbatch
                head[rank] = place
                break
            ready = arrived[which][stage][microbatch]
            time = (ready if ready > time else time) + seconds[stage * len(slots) + slots[kind]]
            for reader, channel in readers[which][stage]:
                end = time
                if channel >= 0:
                    start = busy[channel]
                    end = busy[channel] = (start if start > time else time) + channels[channel]
                if end > arrived[which][reader][microbatch]:
                    arrived[which][reader][microbatch] = end
                missing[which][reader][microbatch] -= 1
                if stands[which][reader] == microbatch and not missing[which][reader][microbatch]:
                    stands[which][reader] = -1
                    runnable.append(rank_of[reader])
        else:
            head[rank] = len(program)
        free[rank] = time
    if any(place < len(program) for place, program in zip(head, schedule.ranks, strict=True)):
        return simulate(schedule, timing).step_seconds  # which says what is wrong
    if timing.updates_wait_for_all:
        for rank, program in enumerate(schedule.ranks):
            time = synchronised
            for one in program:
                if one.kind is Kind.UPDATE:
                    time += timing.stages[one.stage].update_seconds
            free[rank] = max(free[rank], time)
    return max(free)
