"""The schedule as data: for each rank the instructions it runs, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from .errors import refusal
from .instruction import Edge, Instruction, Kind
from .walk import Walk, walk

# A split backward has to gain this share of a step: what it takes beside a whole one is told with less certainty.
WORTH_SPLITTING = 0.02


class Mode(StrEnum):
    """When the optimizer steps.

    `SYNCHRONOUS`: once, after all microbatches; the numbers are those of one device. `ASYNCHRONOUS`: after each
    microbatch, with the weights of its forward kept for its backward (weight stashing); the numbers are those of
    delayed gradients. `INFERENCE`: never; there are forwards only.
    """

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"
    INFERENCE = "inference"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of everything in one step of a pipeline.

    Made by the functions of this package; one made by hand should pass `check_schedule`.

    >>> from meshwright.schedule import one_f_one_b
    >>> schedule = one_f_one_b(2, 3)
    >>> for instruction in schedule.ranks[1][:2]:
    ...     print(instruction)
    forward of stage 1, microbatch 0
    backward of stage 1, microbatch 0
    >>> schedule.in_flight
    (2, 1)

    Args:
      name: of the function that made it.
      stages: how many.
      microbatches: how many.
      mode: when the optimizer steps.
      ranks: for each rank (group of devices) what it runs, in order.
      stage_ranks: for each stage the rank that holds it; a rank may hold several (interleaving).
      edges: which stages read what which others compute, sorted.
      in_flight_limit: for each rank, the most pairs (stage, microbatch) whose forward has begun and whose last backward
        instruction has not ended, as the schedule promises.
      shares: where stages are copies of one program, how many microbatches each runs, the first of them those from the
        beginning; empty where every stage runs all.
    """

    name: str
    stages: int
    microbatches: int
    mode: Mode
    ranks: tuple[tuple[Instruction, ...], ...]
    stage_ranks: tuple[int, ...]
    edges: tuple[Edge, ...]
    in_flight_limit: tuple[int, ...]
    shares: tuple[int, ...] = ()

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that a stage runs."""
        if not self.shares:
            return range(self.microbatches)
        first = sum(self.shares[:stage])
        return range(first, first + self.shares[stage])

    def __str__(self) -> str:
        counts = f"{self.stages} stages on {len(self.ranks)} ranks, {self.microbatches} microbatches"
        return f"{self.name} ({self.mode}): {counts}"

    @cached_property
    def walk(self) -> Walk:
        """One order of all instructions and transfers that respects every rank and every edge; found once.

        Raises:
          ScheduleError: there is none: the ranks wait for each other.
        """
        return walk(self.ranks, self.edges, stages=self.stages, name=self.name)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the most microbatches it holds at once, counted."""
        if self.mode is Mode.INFERENCE:  # nothing is kept for a backward
            return (1,) * self.stages
        now, most = [0] * self.stages, [0] * self.stages
        last = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        for program in self.ranks:
            for one in program:
                if one.kind is Kind.FORWARD:
                    now[one.stage] = held = now[one.stage] + 1
                    if held > most[one.stage]:
                        most[one.stage] = held
                elif one.kind in last:
                    now[one.stage] -= 1
        return tuple(most)

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """For each stage, the most versions of its weights that are needed at once, counted; 1 when synchronous."""
        most = [1] * self.stages
        for program in self.ranks:
            version = dict.fromkeys(range(self.stages), 0)
            used: dict[int, dict[int | None, int]] = {stage: {} for stage in version}
            for one in program:
                if one.kind is Kind.FORWARD:
                    used[one.stage][one.microbatch] = version[one.stage]
                elif one.kind is Kind.UPDATE:
                    version[one.stage] += 1
                else:
                    # The update that follows writes a new version beside those still needed.
                    used[one.stage].pop(one.microbatch, None)
                most[one.stage] = max(most[one.stage], len({version[one.stage], *used[one.stage].values()}))
        return tuple(most)

    @cached_property
    def delayed(self) -> tuple[int, ...]:
        """For each stage the most microbatches whose input gradient is there and whose weight gradient is not."""
        now, most = [0] * self.stages, [0] * self.stages
        if not self.splits_backward:
            return tuple(most)
        for one in (one for program in self.ranks for one in program):
            now[one.stage] += (one.kind is Kind.BACKWARD_INPUT) - (one.kind is Kind.BACKWARD_WEIGHT)
            most[one.stage] = max(most[one.stage], now[one.stage])
        return tuple(most)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are instructions of their own."""
        return any(one.kind is Kind.BACKWARD_WEIGHT for program in self.ranks for one in program)


def stage_on_each_rank(
    name: str,
    microbatches: int,
    ranks: Sequence[Sequence[Instruction]],
    *,
    held: Sequence[int],
    edges: Sequence[Edge] | None,
    mode: Mode = Mode.SYNCHRONOUS,
) -> Schedule:
    """A schedule with as many stages as ranks; a synchronous one ends each rank with its update.

    Args:
      name: of the schedule.
      microbatches: how many.
      ranks: for each rank what it runs on microbatches, in order.
      held: for each rank the most microbatches in flight.
      edges: of the stage graph; None for a chain.
      mode: when the optimizer steps.

    Raises:
      ScheduleError: an edge that is not of the stages.
    """
    stages = len(ranks)
    updates = [Instruction(kind=Kind.UPDATE, stage=stage, microbatch=None) for stage in range(stages)]
    return Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        mode=mode,
        ranks=tuple(
            (*program, update) if mode is Mode.SYNCHRONOUS else tuple(program)
            for program, update in zip(ranks, updates, strict=True)
        ),
        stage_ranks=tuple(range(stages)),
        edges=check_edges(name, stages, edges),
        in_flight_limit=tuple(held),
    )


def most_held(program: Iterable[Instruction], mode: Mode) -> int:
    """The most pairs (stage, microbatch) that a rank holds, by its program."""
    held = most = 0
    for one in program:
        if one.kind is Kind.FORWARD:
            most = max(most, held + 1)
            held += mode is not Mode.INFERENCE  # which keeps nothing for a backward
        elif one.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held -= 1
    return most


def neighbours(stages: int) -> tuple[Edge, ...]:
    """The edges of a chain of stages.

    >>> print(*neighbours(3))
    0->1 1->2
    """
    return tuple(Edge(stage, stage + 1) for stage in range(stages - 1))


def check_edges(schedule: str, stages: int, edges: Sequence[Edge] | None) -> tuple[Edge, ...]:
    """The edges sorted, those of a chain where None is given.

    Raises:
      ScheduleError: an edge goes backwards, leaves the stages, or is there twice.
    """
    if edges is None:
        return neighbours(stages)
    for edge in edges:
        if not 0 <= edge.source < edge.target < stages:
            needed = f"source < target, both of 0..{stages - 1}"
            raise refusal(schedule, "edges", f"the edge {edge}", needed, "stages numbered in program order")
    if len(set(edges)) != len(edges):
        raise refusal(schedule, "edges", "an edge twice", "each edge once", "one edge for all that two stages share")
    return tuple(sorted(edges))
