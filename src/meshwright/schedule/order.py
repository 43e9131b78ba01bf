"""The one order of transfers that all processes agree on, and each rank's share of it.

Between processes a transfer is a call that both ends must make, in the same order relative to all their other
transfers, or they wait for each other for ever. Every rank therefore runs its part of one order of *everything*,
instructions and transfers alike, that is known before the step: whoever is earliest in that order can always go on, so
blocking calls of both ends cannot deadlock. A transfer stands right after the instruction that computes its value.
"""

from __future__ import annotations

from .instruction import Direction, Instruction, Transfer
from .schedule import Schedule

Step = Instruction | Transfer


def global_order(schedule: Schedule) -> tuple[Step, ...]:
    """Every instruction and transfer of a step, each after all that it waits for.

    The same on every process: it depends on the schedule alone. Stages on one rank need no transfers between them.

    >>> from meshwright.schedule import inference
    >>> for step in global_order(inference(2, 1)):
    ...     print(step)
    forward of stage 0, microbatch 0
    activations of microbatch 0 from stage 0 to 1
    forward of stage 1, microbatch 0

    Raises:
      ScheduleError: the schedule deadlocks.
    """
    return tuple(step for step, _ in _placed(schedule))


def transfer_order(schedule: Schedule) -> tuple[Transfer, ...]:
    """The transfers of `global_order`.

    Raises:
      ScheduleError: the schedule deadlocks.
    """
    return tuple(step for step, _ in _placed(schedule) if isinstance(step, Transfer))


def rank_programs(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """For each rank its instructions and the transfers it takes part in, in the global order.

    Raises:
      ScheduleError: the schedule deadlocks.
    """
    programs: list[list[Step]] = [[] for _ in schedule.ranks]
    for step, ranks in _placed(schedule):
        for rank in ranks:
            programs[rank].append(step)
    return tuple(tuple(program) for program in programs)


def _placed(schedule: Schedule) -> list[tuple[Step, tuple[int, ...]]]:
    """Each step of the global order with the ranks that take part in it."""
    walk, placed = schedule.walk, []
    for number, sender, channel in walk.steps:
        one = walk.instructions[number]
        if sender < 0:
            placed.append((one, (walk.ranks[number],)))
            continue
        assert one.microbatch is not None  # only updates have none, and nobody sends to them
        direction = Direction.BACKWARD if channel % 2 else Direction.FORWARD
        transfer = Transfer(edge=schedule.edges[channel // 2], direction=direction, microbatch=one.microbatch)
        placed.append((transfer, (walk.ranks[sender], walk.ranks[number])))
    return placed
