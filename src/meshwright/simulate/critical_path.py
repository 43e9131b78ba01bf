"""The chain of events that makes a step as long as it is, walked back from its end.

Every event starts at the very moment something else ends (or at 0), because that moment was chosen as a maximum: no
tolerance is needed to find what it waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ..schedule import Kind, Schedule
from .events import Events
from .timing import Timing

Piece = tuple[Literal["instruction", "transfer", "update"], int]


def critical_numbers(schedule: Schedule, timing: Timing, events: Events, *, blocking: bool) -> tuple[Piece, ...]:
    """What lies on the critical path, first to last.

    Args:
      schedule: that was run.
      timing: it was run with.
      events: when everything happened.
      blocking: whether transfers occupied both ranks.

    Returns:
      ("instruction", its number in the walk), of an update its synchronisation; ("update", number) for the optimizer;
      ("transfer", its position among the transfers).
    """
    graph = _Graph(schedule, timing, events, blocking=blocking)
    last = max(range(len(events.ends)), key=lambda number: (events.ends[number], -number))
    piece: Piece | None = ("update" if graph.is_update(last) else "instruction", last)
    path: list[Piece] = []
    while piece is not None:
        path.append(piece)
        start = graph.start(piece)
        piece = next((before for before in graph.before(piece) if graph.end(before) == start), None)
    return tuple(reversed(path))


class _Graph:
    """What can come right before what."""

    def __init__(self, schedule: Schedule, timing: Timing, events: Events, *, blocking: bool) -> None:
        self.walk, self.timing, self.events = schedule.walk, timing, events
        self.updates = [number for number, one in enumerate(self.walk.instructions) if one.kind is Kind.UPDATE]
        # For each instruction and transfer: what it reads first, then what was before it on its ranks or channel.
        self.instruction_before: list[list[Piece]] = [[] for _ in self.walk.instructions]
        self.transfer_before: list[list[Piece]] = []
        ranks: list[Piece | None] = [None] * len(schedule.ranks)
        channels: list[Piece | None] = [None] * (2 * len(schedule.edges))
        for number, sender, channel in self.walk.steps:
            if sender < 0:
                rank = self.walk.ranks[number]
                self.instruction_before[number] += _present(ranks[rank])
                ranks[rank] = self._end_piece(number)
                continue
            piece: Piece = ("transfer", len(self.transfer_before))
            if blocking:
                ends = (self.walk.ranks[sender], self.walk.ranks[number])
                self.transfer_before.append([before for rank in ends for before in _present(ranks[rank])])
                for rank in ends:
                    ranks[rank] = piece
            else:
                self.transfer_before.append([("instruction", sender), *_present(channels[channel])])
                self.instruction_before[number].append(piece)
                channels[channel] = piece

    def is_update(self, number: int) -> bool:
        return self.walk.instructions[number].kind is Kind.UPDATE

    def start(self, piece: Piece) -> float:
        what, number = piece
        if what == "transfer":
            return self.events.transfer_starts[number]
        return self.events.update_starts[number] if what == "update" else self.events.starts[number]

    def end(self, piece: Piece) -> float:
        what, number = piece
        if what == "transfer":
            return self.events.transfer_ends[number]
        if what == "instruction" and self.is_update(number):
            return self._synchronised(number)
        return self.events.ends[number]

    def before(self, piece: Piece) -> Iterator[Piece]:
        what, number = piece
        if what == "transfer":
            yield from self.transfer_before[number]
        elif what == "instruction":
            yield from self.instruction_before[number]
        elif not self.timing.updates_wait_for_all:
            yield ("instruction", number)
        else:
            rank = self.walk.ranks[number]
            yield from (("instruction", other) for other in self.updates)
            yield from (("update", n) for n in reversed(self.updates) if n < number and self.walk.ranks[n] == rank)

    def _end_piece(self, number: int) -> Piece:
        """The last of what an instruction is, as the next one on its rank sees it."""
        if self.is_update(number) and not self.timing.updates_wait_for_all:
            return ("update", number)
        return ("instruction", number)

    def _synchronised(self, number: int) -> float:
        return self.events.starts[number] + self.timing.stages[self.walk.instructions[number].stage].synchronise_seconds


def _present(piece: Piece | None) -> list[Piece]:
    return [] if piece is None else [piece]
