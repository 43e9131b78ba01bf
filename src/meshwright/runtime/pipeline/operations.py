"""A schedule as the list of what is done in a step: programs run, values moved, each value let go after its last use.

The list is the same on every process, which skips what is not its own. It is made once; a step walks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...lowering.pipeline.slots import PASSING, Access, Role, Slot
from ...schedule import Schedule, global_order
from ...schedule.instruction import Direction, Edge, Instruction, Kind, Transfer
from ...schedule.schedule import Mode


class Work(StrEnum):
    """What a stage runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A stage runs a program on a microbatch.

    Args:
      stage: which.
      work: which program.
      microbatch: which.
      last: arrays of the microbatch that nobody reads afterwards.
    """

    stage: int
    work: Work
    microbatch: int
    last: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a microbatch sends from one stage to another in one go.

    Args:
      source: the stage that has it.
      target: the stage that gets it.
      microbatch: which.
      sent: the arrays at the source.
      received: the arrays at the target.
      last: those that nobody reads at the source afterwards.
    """

    source: int
    target: int
    microbatch: int
    sent: tuple[Slot, ...]
    received: tuple[Slot, ...]
    last: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A stage begins its update, or what else follows its last microbatch.

    Args:
      stage: which.
      microbatch: whose gradient it takes; None for that of all.
      in_place: whether no microbatch in flight needs the old weights.
    """

    stage: int
    microbatch: int | None = None
    in_place: bool = True


Operation = Run | Move | Update


def operations(
    schedule: Schedule,
    sent: Sequence[Sequence[tuple[int, int]]],
    programs: Sequence[Mapping[Work, Access]],
) -> tuple[Operation, ...]:
    """The operations of one step, in the order all processes keep.

    Args:
      schedule: of the stages.
      sent: for each stage the values it sends and the stages that read them.
      programs: for each stage what its programs read and write.
    """
    order = _in_order(schedule, sent, programs)
    if schedule.mode is Mode.ASYNCHRONOUS:
        return _with_versions(_with_last_uses(order, programs, passing=PASSING | {Role.PARAMETER}))
    if schedule.mode is Mode.INFERENCE:
        # Nothing is updated, but what microbatches gave is put together.
        order += [Update(stage=stage) for stage in range(schedule.stages)]
    return _with_last_uses(order, programs, passing=PASSING)


def _in_order(
    schedule: Schedule, sent: Sequence[Sequence[tuple[int, int]]], programs: Sequence[Mapping[Work, Access]]
) -> list[Operation]:
    found: list[Operation] = []
    for step in global_order(schedule):
        if isinstance(step, Transfer):
            found += _moves(step.edge, step.direction, step.microbatch, sent, programs)
            continue
        found += _run(step, programs)
        # Stages on one rank have no transfers in the schedule: what they share moves at once.
        if step.microbatch is not None:
            for edge in schedule.edges:
                if schedule.stage_ranks[edge.source] == schedule.stage_ranks[edge.target]:
                    if step.kind is Kind.FORWARD and edge.source == step.stage:
                        found += _moves(edge, Direction.FORWARD, step.microbatch, sent, programs)
                    elif step.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and edge.target == step.stage:
                        found += _moves(edge, Direction.BACKWARD, step.microbatch, sent, programs)
    return found


def _run(step: Instruction, programs: Sequence[Mapping[Work, Access]]) -> Iterable[Operation]:
    if step.kind is Kind.UPDATE:
        yield Update(stage=step.stage, microbatch=step.microbatch)
        return
    work = Work(step.kind.value)
    assert step.microbatch is not None
    if programs[step.stage][work].outputs:
        yield Run(stage=step.stage, work=work, microbatch=step.microbatch, last=())


def _moves(
    edge: Edge,
    direction: Direction,
    microbatch: int,
    sent: Sequence[Sequence[tuple[int, int]]],
    programs: Sequence[Mapping[Work, Access]],
) -> Iterable[Operation]:
    values = [value for value, target in sent[edge.source] if target == edge.target]
    if direction is Direction.FORWARD:
        source, target = edge.source, edge.target
        ends = [(Slot(Role.SENT, value), Slot(Role.RECEIVED, value)) for value in values]
    else:
        source, target = edge.target, edge.source
        ends = [(Slot(Role.RETURNED, value), Slot(Role.COTANGENT, value, edge.target)) for value in values]
    read = {slot for access in programs[target].values() for slot in access.inputs}
    if found := [(out, into) for out, into in ends if into in read]:
        out, into = zip(*found, strict=True)
        yield Move(source=source, target=target, microbatch=microbatch, sent=out, received=into, last=())


def _with_versions(order: Sequence[Operation]) -> tuple[Operation, ...]:
    """The same operations, where each microbatch has an update of its own: it leaves the weights alone that a
    microbatch in flight has gone forward with."""
    version: dict[int, int] = {}
    used: dict[int, dict[int, int]] = {}
    found: list[Operation] = []
    for one in order:
        if isinstance(one, Run):
            mine, now = used.setdefault(one.stage, {}), version.setdefault(one.stage, 0)
            if one.work is Work.FORWARD:
                mine[one.microbatch] = now
            else:
                mine.pop(one.microbatch, None)
        elif isinstance(one, Update):
            in_place = version[one.stage] not in used[one.stage].values()
            version[one.stage] += 1
            one = Update(stage=one.stage, microbatch=one.microbatch, in_place=in_place)
        found.append(one)
    return tuple(found)


def _with_last_uses(
    order: Sequence[Operation], programs: Sequence[Mapping[Work, Access]], *, passing: frozenset[Role]
) -> tuple[Operation, ...]:
    """The same operations, each with what is read there for the last time; what nobody reads goes at once."""
    used: set[tuple[int, int, Slot]] = set()
    found: list[Operation] = []
    for one in reversed(order):
        if isinstance(one, Run):
            access = programs[one.stage][one.work]
            touched = [
                s for s in (*access.inputs, *access.outputs) if s.role in passing and s.role is not Role.COLLECTED
            ]
            last = tuple(s for s in dict.fromkeys(touched) if (one.stage, one.microbatch, s) not in used)
            used.update((one.stage, one.microbatch, s) for s in touched)
            one = Run(stage=one.stage, work=one.work, microbatch=one.microbatch, last=last)
        elif isinstance(one, Move):
            last = tuple(slot for slot in one.sent if (one.source, one.microbatch, slot) not in used)
            used.update((one.source, one.microbatch, slot) for slot in one.sent)
            one = Move(
                source=one.source, target=one.target, microbatch=one.microbatch, sent=one.sent,
                received=one.received, last=last,
            )  # fmt: skip
        found.append(one)
    return tuple(reversed(found))
