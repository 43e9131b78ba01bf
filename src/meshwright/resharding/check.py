"""Whether a plan delivers every byte exactly once: two checks, neither of which believes the planner.

`check_transfers` works on ranges of tapes: what enters each domain is, class by class, the whole tape once; first
hops come from domains that hold the class, and a relay passes on only what earlier rounds brought it. `deliver`
carries out the plan on NumPy arrays, device by device, and refuses an element that is read before it is there or
written twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .errors import ReshardError
from .layout import Box
from .messages import Message, local_messages, round_messages
from .plan import ReshardPlan, domains_of_ports


def check_transfers(plan: ReshardPlan) -> None:
    """Refuse a plan whose rounds do not bring every byte exactly once to every domain that lacks it.

    Raises:
      ReshardError: with the class and the domain where it goes wrong.
    """
    demand, moved = plan.demand, plan.transfers
    home = domains_of_ports(demand)
    source, target = home[moved.sender], home[moved.receiver]
    order = np.lexsort((moved.start, target, moved.number))
    keys = np.stack([moved.number[order], target[order]])
    groups = np.split(order, np.flatnonzero(np.any(np.diff(keys, axis=1) != 0, axis=0)) + 1) if len(order) else []
    arrived = {(int(moved.number[g[0]]), int(target[g[0]])): g for g in groups}
    wanted = {(i, d) for i, task in enumerate(demand.classes) if task.bytes for d in task.receivers}
    for number, domain in sorted(wanted.symmetric_difference(arrived)):
        _refuse(number, domain, "nothing" if (number, domain) in wanted else "bytes that it does not lack")
    for (number, domain), entries in sorted(arrived.items()):
        starts, stops = moved.start[entries], moved.stop[entries]
        whole = [0, demand.classes[number].bytes]
        if starts[0] != whole[0] or stops[-1] != whole[1] or np.any(starts[1:] != stops[:-1]):
            _refuse(number, domain, f"ranges {list(zip(starts.tolist(), stops.tolist(), strict=True))[:6]} ...")
    holders = [frozenset(task.senders) for task in demand.classes]
    for entry in np.flatnonzero(moved.hop == 0).tolist():
        if int(source[entry]) not in holders[int(moved.number[entry])]:
            _refuse(
                int(moved.number[entry]), int(target[entry]), f"bytes from domain {source[entry]}, which lacks them"
            )
    for entry in np.flatnonzero(moved.hop == 1).tolist():
        number, relay = int(moved.number[entry]), int(source[entry])
        has = arrived.get((number, relay))
        if has is None:
            _refuse(number, int(target[entry]), f"bytes from domain {relay}, which never gets them")
            continue
        first = int(np.searchsorted(moved.stop[has], moved.start[entry], side="right"))
        last = int(np.searchsorted(moved.start[has], moved.stop[entry], side="left"))
        if np.any(moved.round[has[first:last]] >= moved.round[entry]):
            _refuse(number, int(target[entry]), f"bytes from domain {relay} before it has them")


def deliver(plan: ReshardPlan, tensors: Sequence[np.ndarray]) -> list[dict[int, np.ndarray]]:
    """Carry out `plan` on global `tensors`, as every device would.

    Args:
      plan: the plan.
      tensors: one array of the global shape per tensor of the plan, any dtype.

    Returns:
      for each tensor what every device of its destination ends up with.

    Raises:
      ReshardError: a device sends what it does not have, gets an element twice, or lacks one at the end.
    """
    moves = plan.demand.moves
    sources = [move.source.boxes(move.shape) for move in moves]
    targets = [move.destination.boxes(move.shape) for move in moves]
    held = [{d: t[_at(box)] for d, box in s.items()} for t, s in zip(tensors, sources, strict=True)]
    result = [{d: np.zeros_like(t[_at(box)]) for d, box in s.items()} for t, s in zip(tensors, targets, strict=True)]
    times = [{d: np.zeros(a.shape, dtype=np.int64) for d, a in arrays.items()} for arrays in result]

    def carry(messages: Sequence[Message], *, from_result: bool) -> None:
        taken = []
        for message in messages:
            for piece in message.pieces:
                for box in piece.boxes:
                    i = piece.move
                    places = (targets if from_result else sources)[i]
                    values = (result if from_result else held)[i][message.sender][_at(box, places[message.sender])]
                    there = times[i][message.sender][_at(box, places[message.sender])] if from_result else np.ones(1)
                    if np.any(there != 1):
                        raise _wrong(moves[i].name, f"device {message.sender} sends {box} before it has it")
                    taken.append((i, message.receiver, box, values.copy()))
        for i, device, box, values in taken:
            place = _at(box, targets[i][device])
            result[i][device][place] = values
            times[i][device][place] += 1

    kept, copied = local_messages(plan)
    carry(kept, from_result=False)
    carry(copied, from_result=False)
    # A round is a relay's where its giver holds nothing: asked message by message, by whether the giver is a source.
    for step in round_messages(plan):
        carry([m for m in _singles(step.steps) if _is_source(m, sources)], from_result=False)
        carry([m for m in _singles(step.steps) if not _is_source(m, sources)], from_result=True)
        carry(step.spread, from_result=True)
    for i, arrays in enumerate(times):
        for device, count in arrays.items():
            if np.any(count != 1):
                raise _wrong(moves[i].name, f"device {device} gets {int((count != 1).sum())} elements not exactly once")
    return result


def _singles(steps: Sequence[Sequence[Message]]) -> list[Message]:
    """The messages of a round with one piece each."""
    return [
        Message(sender=m.sender, receiver=m.receiver, pieces=(p,)) for step in steps for m in step for p in m.pieces
    ]


def _is_source(message: Message, sources: Sequence[Mapping[int, Box]]) -> bool:
    (piece,) = message.pieces
    box = sources[piece.move].get(message.sender)
    return box is not None and all(a <= c and d <= b for (a, b), (c, d) in zip(box, piece.slice, strict=True))


def _at(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Index of `box`, in an array that begins where `origin` begins."""
    begins = [a for a, _ in origin] if origin is not None else [0] * len(box)
    return tuple(slice(a - o, b - o) for (a, b), o in zip(box, begins, strict=True))


def _wrong(where: str, got: str) -> ReshardError:
    return ReshardError(
        refused="the plan", got=got, needed="every element exactly once", where=where,
        try_="planning again; if that does not help this is a fault of meshwright: please report it",
    )  # fmt: skip


def _refuse(number: int, domain: int, got: str) -> None:
    raise _wrong(f"class {number}, domain {domain}", got)
