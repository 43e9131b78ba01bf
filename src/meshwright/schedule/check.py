"""What every schedule must satisfy, proved instruction by instruction.

Each pair of a stage and a microbatch that it runs has each of its instructions exactly once, on the rank that holds the
stage; on that rank forward comes before backward, input gradient before weight gradient, all gradients before the
update; the ranks do not wait for each other in a circle; and no rank has more in flight than the schedule promises.

Cost: linear in the instructions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .errors import ScheduleError
from .instruction import Instruction, Kind
from .schedule import Mode, Schedule, most_held


def check_schedule(schedule: Schedule) -> tuple[str, ...]:
    """The faults of a schedule, a sentence each; none for a sound one.

    >>> from dataclasses import replace
    >>> from meshwright.schedule import gpipe
    >>> good = gpipe(1, 1)
    >>> check_schedule(good)
    ()
    >>> check_schedule(replace(good, ranks=(good.ranks[0][1:],)))
    ('stage 0, microbatch 0: got 0 times forward; needed once',)

    Args:
      schedule: made by this package or by hand.
    """
    # Each check builds on the one before: what is missing is out of order too, but that is not news.
    for find in (_misplaced, _not_once, _out_of_order, _too_many_in_flight):
        if faults := tuple(find(schedule)):
            return faults
    try:
        schedule.walk  # noqa: B018  walking it is the proof
    except ScheduleError as error:
        return (str(error),)
    return ()


def _misplaced(schedule: Schedule) -> Iterator[str]:
    count = len(schedule.ranks)
    if schedule.stages < 1 or schedule.microbatches < 1:
        yield f"got {schedule.stages} stages and {schedule.microbatches} microbatches; needed at least one of each"
    for what, got, needed in (
        ("stage_ranks", len(schedule.stage_ranks), schedule.stages),
        ("in_flight_limit", len(schedule.in_flight_limit), count),
        ("shares", len(schedule.shares) or schedule.stages, schedule.stages),
    ):
        if got != needed:
            yield f"{what}: got {got} numbers; needed {needed}"
            return
    if schedule.shares and (min(schedule.shares) < 1 or sum(schedule.shares) != schedule.microbatches):
        yield f"shares: got {schedule.shares}; needed at least one each, {schedule.microbatches} together"
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < count:
            yield f"stage {stage}: got rank {rank}; needed one of 0..{count - 1}"
    for edge in schedule.edges:
        if not 0 <= edge.source < edge.target < schedule.stages:
            yield f"edge {edge}: got stages out of order or range; needed source < target < {schedule.stages}"
    if len(set(schedule.edges)) != len(schedule.edges):
        yield "edges: got one twice; needed each once"
    for rank, program in enumerate(schedule.ranks):
        for one in program:
            if not 0 <= one.stage < schedule.stages or schedule.stage_ranks[one.stage] != rank:
                yield f"rank {rank}: got {one}; needed a stage that it holds"
            elif one.microbatch is not None and not 0 <= one.microbatch < schedule.microbatches:
                yield f"rank {rank}: got {one}; needed a microbatch of 0..{schedule.microbatches - 1}"


def _not_once(schedule: Schedule) -> Iterator[str]:
    counts = Counter((one.stage, one.microbatch, one.kind) for program in schedule.ranks for one in program)
    split = schedule.splits_backward
    for stage in range(schedule.stages):
        mine = schedule.microbatches_of(stage)
        for microbatch in (*range(schedule.microbatches), None):
            for kind in Kind:
                got = counts[stage, microbatch, kind]
                others = microbatch is not None and microbatch not in mine
                needed = 0 if others else _needed(kind, microbatch, schedule.mode, split)
                if got != needed:
                    where = f"stage {stage}" + ("" if microbatch is None else f", microbatch {microbatch}")
                    yield f"{where}: got {got} times {kind}; needed {'once' if needed else 'none'}"


def _needed(kind: Kind, microbatch: int | None, mode: Mode, split: bool) -> int:
    """How often a kind of instruction belongs to a stage's microbatch (None: to the whole step), 0 or 1."""
    if kind is Kind.UPDATE:
        per_microbatch = mode is Mode.ASYNCHRONOUS
        return int(mode is not Mode.INFERENCE and per_microbatch == (microbatch is not None))
    if microbatch is None:
        return 0
    if kind is Kind.FORWARD:
        return 1
    return int(mode is not Mode.INFERENCE and split == (kind is not Kind.BACKWARD))


_AFTER = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.BACKWARD_INPUT: Kind.FORWARD,
    Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT,
}


def _out_of_order(schedule: Schedule) -> Iterator[str]:
    """Instructions that come before those they follow from on their own rank."""
    last = Kind.BACKWARD_WEIGHT if schedule.splits_backward else Kind.BACKWARD
    for rank, program in enumerate(schedule.ranks):
        seen: set[tuple[Kind, int, int | None]] = set()
        for one in program:
            for before in _befores(one, last, schedule.microbatches_of(one.stage)):
                if (before.kind, before.stage, before.microbatch) not in seen:
                    yield f"rank {rank}: got {one} before {before}; needed it after"
            seen.add((one.kind, one.stage, one.microbatch))


def _befores(one: Instruction, last: Kind, microbatches: range) -> Iterator[Instruction]:
    if one.kind in _AFTER:
        yield Instruction(kind=_AFTER[one.kind], stage=one.stage, microbatch=one.microbatch)
    elif one.kind is Kind.UPDATE:
        for microbatch in microbatches if one.microbatch is None else (one.microbatch,):
            yield Instruction(kind=last, stage=one.stage, microbatch=microbatch)


def _too_many_in_flight(schedule: Schedule) -> Iterator[str]:
    for rank, (program, limit) in enumerate(zip(schedule.ranks, schedule.in_flight_limit, strict=True)):
        most = most_held(program, schedule.mode)
        if most > limit:
            yield f"rank {rank}: got {most} microbatches in flight; needed at most {limit}"
