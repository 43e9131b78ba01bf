"""Bytes on one device of each rank over a step.

What is counted: all that is constant; the further weight versions of an asynchronous schedule, all the time; for each
microbatch what is kept from the start of its forward to the end of its backward (of its weight gradient where that is
split off, another amount from its input gradient on); a workspace while an instruction runs; and values that cross an
edge: on the sender from the start of the instruction that computes them until they have left, on the receiver from the
moment they start to arrive until the instruction that reads them ends; and on both what moving them takes.

Known limits: a value that leaves over two edges counts twice; an input that is also kept for the backward counts twice
while its forward runs; one workspace per stage, the largest of its instructions. All err on the safe side.
"""

from __future__ import annotations

from ..schedule import Kind, Mode, Schedule
from .events import Events
from .timing import Timing

Curve = tuple[tuple[float, float], ...]


def memory_curves(schedule: Schedule, timing: Timing, events: Events) -> tuple[Curve, ...]:
    """For each rank (seconds, bytes) wherever the bytes change; the first at 0.

    Args:
      schedule: that was run.
      timing: with its bytes.
      events: when everything happened.
    """
    # Changes of one rank as (seconds, place, bytes). The place orders changes of one moment as the rank makes them: its
    # instruction number n starts at 2n and ends at 2n + 1, so what ends makes room for what starts.
    changes: list[list[tuple[float, int, float]]] = [[] for _ in schedule.ranks]
    _count_instructions(schedule, timing, events, changes)
    _count_transfers(schedule, timing, events, changes)
    constant = [0.0] * len(schedule.ranks)
    for stage, (rank, versions) in enumerate(zip(schedule.stage_ranks, schedule.weight_versions, strict=True)):
        given = timing.stages[stage]
        constant[rank] += given.constant_bytes + (versions - 1) * given.version_bytes
    return tuple(_add_up(start, sorted(found)) for start, found in zip(constant, changes, strict=True))


def _count_instructions(
    schedule: Schedule, timing: Timing, events: Events, changes: list[list[tuple[float, int, float]]]
) -> None:
    walk, forward_only = schedule.walk, schedule.mode is Mode.INFERENCE
    for number, one in enumerate(walk.instructions):
        given = timing.stages[one.stage]
        kept = given.in_flight_bytes
        handed = given.handed_bytes
        delayed = kept + handed if given.delayed_bytes is None else given.delayed_bytes
        workspace = given.workspace_bytes
        if one.kind is Kind.UPDATE and given.update_workspace_bytes is not None:
            workspace = given.update_workspace_bytes
        taken, given_back = workspace, workspace
        if one.kind is Kind.FORWARD:
            taken += kept
            given_back += kept if forward_only else 0.0
        elif one.kind is Kind.BACKWARD:
            given_back += kept
        elif one.kind is Kind.BACKWARD_INPUT:
            taken += handed
            given_back += kept + handed - delayed
        elif one.kind is Kind.BACKWARD_WEIGHT:
            given_back += delayed
        found = changes[walk.ranks[number]]
        found.append((events.starts[number], 2 * number, taken))
        found.append((events.ends[number], 2 * number + 1, -given_back))


def _count_transfers(
    schedule: Schedule, timing: Timing, events: Events, changes: list[list[tuple[float, int, float]]]
) -> None:
    walk, given = schedule.walk, {e.edge: e for e in timing.edges}
    moves = [step for step in walk.steps if step[1] >= 0]
    for (receiver, sender, channel), start, end in zip(
        moves, events.transfer_starts, events.transfer_ends, strict=True
    ):
        edge = given[schedule.edges[channel // 2]]
        at_sender, at_receiver = edge.source_bytes, edge.target_bytes
        sending, receiving = edge.source_workspace_bytes, edge.target_workspace_bytes
        if channel % 2:
            at_sender, at_receiver = at_receiver, at_sender
            sending, receiving = receiving, sending
        found = changes[walk.ranks[sender]]
        found.append((events.starts[sender], 2 * sender, at_sender))
        found.append((start, 2 * sender + 1, sending))
        found.append((end, 2 * sender + 1, -at_sender - sending))
        found = changes[walk.ranks[receiver]]
        found.append((start, 2 * receiver, at_receiver + receiving))
        found.append((end, 2 * receiver, -receiving))
        found.append((events.ends[receiver], 2 * receiver + 1, -at_receiver))


def _add_up(constant: float, changes: list[tuple[float, int, float]]) -> Curve:
    """The curve of one rank; what changes at one moment and place is one change."""
    curve, held = [(0.0, constant)], constant
    for position, (seconds, place, size) in enumerate(changes):
        held += size  # exact while bytes are whole numbers below 2**53
        if position + 1 < len(changes) and changes[position + 1][:2] == (seconds, place):
            continue
        if held != curve[-1][1]:
            curve.append((seconds, held))
    return tuple(curve)
