"""The timeline of one step, and what follows from it: bubbles, exposed communication, memory, the critical path."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from ..schedule import Direction, Edge, Kind, Schedule, Transfer, transfer_order
from .critical_path import critical_numbers
from .events import Events, run_events
from .memory import memory_curves
from .timing import EdgeTiming, StageTiming, Timing

SYNCHRONISE = "synchronise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A rank at work.

    Args:
      rank: which.
      kind: that of its instruction; "synchronise" for the gradient synchronisation that an update begins with.
      stage: to which stage.
      microbatch: to which microbatch; None for the one update of a synchronous step.
      start_seconds: from the start of the step.
      end_seconds: from the start of the step.
    """

    rank: int
    kind: str
    stage: int
    microbatch: int | None
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    """A link at work.

    Args:
      edge: between which stages.
      direction: activations forward or cotangents backward.
      microbatch: whose.
      sender: rank.
      receiver: rank.
      start_seconds: from the start of the step.
      end_seconds: from the start of the step.
    """

    edge: Edge
    direction: Direction
    microbatch: int
    sender: int
    receiver: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One predicted step.

    >>> from meshwright.schedule import gpipe
    >>> from meshwright.simulate import Timing, simulate
    >>> timeline = simulate(gpipe(2, 3), Timing.uniform(stages=2, forward_seconds=1, backward_seconds=1))
    >>> timeline.step_seconds, timeline.bubble_fraction
    (8.0, 0.25)

    Args:
      schedule: that was run.
      timing: it was run with.
      blocking: whether transfers occupied both ranks.
      raw: starts and ends by number; `events` and `transfers` say the same with names.
    """

    schedule: Schedule
    timing: Timing
    blocking: bool
    raw: Events = field(repr=False)

    @cached_property
    def step_seconds(self) -> float:
        """Until the last rank is done."""
        return max(self.raw.ends)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """What ranks do, rank after rank, in order."""
        walk, raw, found = self.schedule.walk, self.raw, []
        for number, one in enumerate(walk.instructions):
            start, end = raw.starts[number], raw.ends[number]
            if one.kind is Kind.UPDATE:
                split = start + self.timing.stages[one.stage].synchronise_seconds
                pieces = ((SYNCHRONISE, start, split), (str(one.kind), raw.update_starts[number], end))
            else:
                pieces = ((str(one.kind), start, end),)
            found += [
                Event(
                    rank=walk.ranks[number],
                    kind=kind,
                    stage=one.stage,
                    microbatch=one.microbatch,
                    start_seconds=begin,
                    end_seconds=finish,
                )
                for kind, begin, finish in pieces
            ]
        return tuple(found)

    @cached_property
    def transfers(self) -> tuple[TransferEvent, ...]:
        """What links do, in the global order of transfers."""
        stage_ranks, raw = self.schedule.stage_ranks, self.raw
        moves: tuple[Transfer, ...] = transfer_order(self.schedule)
        return tuple(
            TransferEvent(
                edge=one.edge,
                direction=one.direction,
                microbatch=one.microbatch,
                sender=stage_ranks[one.sender],
                receiver=stage_ranks[one.receiver],
                start_seconds=start,
                end_seconds=end,
            )
            for one, start, end in zip(moves, raw.transfer_starts, raw.transfer_ends, strict=True)
        )

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """How long each rank is at work: instructions and gradient synchronisation, without waiting or transfers."""
        walk, raw = self.schedule.walk, self.raw
        total = [0.0] * len(self.schedule.ranks)
        for rank, start, end in zip(walk.ranks, raw.starts, raw.ends, strict=True):
            total[rank] += end - start
        # An update that waits for other ranks does so between its synchronisation and its optimizer.
        for number, start in raw.update_starts.items():
            stage = self.timing.stages[walk.instructions[number].stage]
            total[walk.ranks[number]] -= start - (raw.starts[number] + stage.synchronise_seconds)
        return tuple(total)

    @cached_property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which they are not at work; 0 for a step of no time."""
        whole = self.step_seconds * len(self.schedule.ranks)
        return max(0.0, 1.0 - sum(self.busy_seconds) / whole) if whole > 0 else 0.0

    @cached_property
    def exposed_communication_seconds(self) -> float:
        """How much shorter the step would be if transfers and gradient synchronisation took no time."""
        free = replace(
            self.timing,
            stages=tuple(_without_synchronisation(stage) for stage in self.timing.stages),
            edges=tuple(_without_transfers(edge) for edge in self.timing.edges),
        )
        ideal = run_events(self.schedule, free, blocking=False)
        return max(0.0, self.step_seconds - max(ideal.ends))

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank (seconds, bytes on one device) wherever the bytes change; each holds until the next."""
        return memory_curves(self.schedule, self.timing, self.raw)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """For each rank the most bytes on one device."""
        return tuple(max(held for _, held in curve) for curve in self.memory)

    @cached_property
    def critical_path(self) -> tuple[Event | TransferEvent, ...]:
        """Events and transfers, each starting when the one before ends, from the start of the step to its end.

        Making any of them shorter is the only way to a shorter step. Where several such paths exist, it is the one that
        follows values rather than the order on ranks and links.
        """
        # An update's two events share a number: its optimizer's is counted as the next.
        first = [0]
        for one in self.schedule.walk.instructions:
            first.append(first[-1] + (2 if one.kind is Kind.UPDATE else 1))
        path: list[Event | TransferEvent] = []
        for what, number in critical_numbers(self.schedule, self.timing, self.raw, blocking=self.blocking):
            if what == "transfer":
                path.append(self.transfers[number])
            else:
                path.append(self.events[first[number] + (1 if what == "update" else 0)])
        return tuple(path)


def _without_synchronisation(stage: StageTiming) -> StageTiming:
    return replace(stage, synchronise_seconds=0.0)


def _without_transfers(edge: EdgeTiming) -> EdgeTiming:
    return replace(edge, forward_seconds=0.0, backward_seconds=0.0)
