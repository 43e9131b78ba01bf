"""A staged plan as the simulator sees it: edges, seconds and bytes, and the schedule that suits it best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from ...schedule import WORTH_SPLITTING, Edge, Schedule, adaptive_warm_up, filling_warm_up, make_schedule
from ...simulate import EdgeTiming, StageTiming, Timeline, Timing, simulate, step_seconds
from ..inter.problem import PlacedStage
from ..inter.submeshes import Submesh
from ..intra.workspace import held_together
from ..stages.crossings import Sent, boundary_layouts, edge_bytes, edge_seconds, exchanged_bytes, stage_crossings
from ..stages.solved import SolvedStage, kept_bytes
from ..stages.solver import StageSolver

ScheduleOptions = tuple[tuple[str, int | tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class StagedTiming:
    """The numbers from which a staged plan is simulated.

    Args:
      timing: of its stages and edges.
      sent: what crosses edges, by source, target and value.
      bytes_delayed: of each stage, on one device, for each microbatch between its input and its weight gradient.
      limit_bytes: of each stage, what may be counted on one device.
    """

    timing: Timing
    sent: tuple[Sent, ...]
    bytes_delayed: tuple[float, ...]
    limit_bytes: tuple[float, ...]

    def own_bytes(self, schedule: Schedule) -> list[float]:
        """What each stage holds on one device besides its workspace."""
        numbers = zip(self.timing.stages, self.bytes_delayed, schedule.in_flight, schedule.delayed, strict=True)
        return [
            one.constant_bytes + kept_bytes(one.in_flight_bytes, later, count, delayed)
            for one, later, count, delayed in numbers
        ]

    def fits(self, schedule: Schedule) -> bool:
        """Whether every rank can hold what the schedule keeps in flight on its stages."""
        held: list[list[tuple[float, float]]] = [[] for _ in schedule.ranks]
        limits = [inf] * len(schedule.ranks)
        numbers = zip(schedule.stage_ranks, self.own_bytes(schedule), self.limit_bytes, self.timing.stages, strict=True)
        for rank, own, limit, stage in numbers:
            held[rank].append((own, stage.workspace_bytes))
            limits[rank] = min(limits[rank], limit)
        return all(held_together(each) <= limit * (1 + 1e-12) for each, limit in zip(held, limits, strict=True))

    def room(self, microbatches: int) -> list[int]:
        """How many of the microbatches each stage can hold, where it has a rank to itself."""
        free = [
            (max(limit - one.constant_bytes - one.workspace_bytes, 0.0), one.in_flight_bytes)
            for limit, one in zip(self.limit_bytes, self.timing.stages, strict=True)
        ]
        return [int(min(microbatches, rest / size)) if size > 0 else microbatches for rest, size in free]


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A schedule of a staged plan with its predicted step.

    Args:
      name: of the schedule.
      options: its options, as a plan stores them.
      schedule: itself.
      staged: the stages.
      step_seconds: simulated.
      others: seconds of a step under the other schedules that fit, by their names.
    """

    name: str
    options: ScheduleOptions
    schedule: Schedule
    staged: StagedTiming
    step_seconds: float
    others: tuple[tuple[str, float], ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """All of its simulation, made when it is asked for."""
        return simulate(self.schedule, self.staged.timing)


def staged_timing(
    solver: StageSolver, stages: Sequence[PlacedStage], *, limit_bytes: Sequence[float] | None = None
) -> StagedTiming:
    """The timing of solved stages; `limit_bytes` None for all memory of their devices."""
    program, submeshes = solver.program, solver.submeshes
    if limit_bytes is None:
        limit_bytes = [submeshes.part(stage.submesh).device.usable_memory_bytes for stage in stages]
    ranges = [(stage.first, stage.last) for stage in stages]
    places: list[Submesh] = [stage.submesh for stage in stages]
    sent = stage_crossings(program, ranges)
    exchange = [0.0] * len(stages)
    for (source, target), size in exchanged_bytes(program, ranges).items():
        exchange[source] += submeshes.transfer_seconds(places[source], places[target], size)
    layouts = [boundary_layouts(stage, solver.cut(stage.first, stage.last)) for stage in stages]
    edges = []
    for source, target in sorted({(one.source, one.target) for one in sent}):
        forward, _ = edge_bytes(sent, source, target)
        there, back = edge_seconds(solver, sent, (source, target), layouts)
        edges.append(
            EdgeTiming(
                edge=Edge(source, target),
                forward_seconds=there,
                backward_seconds=back,
                source_bytes=forward / places[source].size,
                target_bytes=forward / places[target].size,
            )
        )
    timings = (stage_timing(stage.option.tag, more) for stage, more in zip(stages, exchange, strict=True))
    return StagedTiming(
        timing=Timing(stages=tuple(timings), edges=tuple(edges)),
        sent=sent,
        bytes_delayed=tuple(stage.option.tag.delayed_bytes for stage in stages),
        limit_bytes=tuple(limit_bytes),
    )


def stage_timing(stage: SolvedStage, exchange_seconds: float = 0.0) -> StageTiming:
    """The timing of a solved stage, with the seconds in which it sums gradients with other stages."""
    seconds = stage.seconds
    return StageTiming(
        forward_seconds=seconds.forward_seconds,
        backward_seconds=seconds.backward_seconds,
        backward_input_seconds=seconds.backward_seconds - seconds.weight_seconds,
        backward_weight_seconds=seconds.weight_seconds,
        synchronise_seconds=seconds.synchronise_seconds + exchange_seconds,
        update_seconds=seconds.update_seconds,
        constant_bytes=seconds.constant_bytes,
        workspace_bytes=seconds.workspace_bytes,
        in_flight_bytes=seconds.in_flight_bytes,
    )


def best_schedule(
    staged: StagedTiming, microbatches: int, orders: Sequence[str], *, chunks: int = 1
) -> Scheduled | None:
    """The schedule with the shortest simulated step among those that fit, the first of equals; None if none does.

    Args:
      staged: the stages.
      microbatches: in a step.
      orders: names of schedules to try, the preferred first.
      chunks: stages on each rank; of more than one, the order can only be the interleaved one.
    """
    best: Scheduled | None = None
    seconds: dict[str, float] = {}
    tries = _tries(staged, microbatches, orders)
    if chunks > 1:
        tries = iter([("interleaved_one_f_one_b", (("chunks", chunks),))])
    for name, options in tries:
        edges = tuple(edge.edge for edge in staged.timing.edges)
        schedule = make_schedule(name, len(staged.timing.stages), microbatches, edges=edges, **dict(options))
        if not staged.fits(schedule):
            continue
        taken = step_seconds(schedule, staged.timing)
        seconds[name] = min(taken, seconds.get(name, inf))
        # A schedule that keeps more in flight has to be faster, and not by the last bits; one that splits the backward
        # is priced by a guess at its halves, and has to be worth it.
        gain = WORTH_SPLITTING if schedule.splits_backward else 1e-6
        if best is None or taken < best.step_seconds * (1 - gain):
            best = Scheduled(name=name, options=options, schedule=schedule, staged=staged, step_seconds=taken)
    if best is None:
        return None
    return replace(best, others=tuple((name, taken) for name, taken in seconds.items() if name != best.name))


def _tries(staged: StagedTiming, microbatches: int, orders: Sequence[str]) -> Iterator[tuple[str, ScheduleOptions]]:
    timing, stages = staged.timing, len(staged.timing.stages)
    edges = [edge.edge for edge in timing.edges]
    for name in orders:
        if name != "adaptive":
            yield name, ()
            continue
        period = max(stage.forward_seconds + stage.backward_seconds for stage in timing.stages)
        both_ways = [edge.forward_seconds + edge.backward_seconds for edge in timing.edges]
        # The bound of what runs ahead counts on as many in flight as an eager pipeline has (`inter.dynamic_program`).
        # Plain warm-ups have fewer only at edges that take no time at all.
        if period > 0 and {edge.source for edge in edges} == {*range(stages - 1)}:
            warm_up = adaptive_warm_up([seconds / 2 for seconds in both_ways], period_seconds=period)
            eager = [2 * place - 1 for place in range(stages, 0, -1)]
            fillings = (
                filling_warm_up(
                    warm_up, edges=edges, transfer_seconds=both_ways, least_in_flight=eager, most_in_flight=most,
                    forward_seconds=[stage.forward_seconds for stage in timing.stages],
                    backward_seconds=[stage.backward_seconds for stage in timing.stages],
                ) for most in (eager, staged.room(microbatches))
            )  # fmt: skip
            for one in dict.fromkeys(fillings):
                yield name, (("warm_up", one),)
