"""A candidate of the stage search: solved stages with the schedule whose simulated step is the shortest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...plan import Plan
from ...program.staged import StagedProgram, merge_scans
from ...schedule import WORTH_SPLITTING
from ..alternative import one_stage_words, stages_words
from ..inter.problem import PlacedStage
from ..stages.costs import StageCosts
from ..stages.solved import SolvedStage
from .assembly import assemble
from .rank_sharing import sharing
from .request import INTERLEAVED, SIMULATED
from .timing import Scheduled, best_schedule, staged_timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Solved stages with a schedule.

    Args:
      costs: that solved the stages.
      stages: in program order.
      scheduled: the schedule and its simulation.
    """

    costs: StageCosts
    stages: tuple[PlacedStage, ...]
    scheduled: Scheduled

    @property
    def seconds(self) -> float:
        """Of a simulated step."""
        return self.scheduled.step_seconds

    @property
    def key(self) -> tuple[int, tuple[PlacedStage, ...]]:
        """Its number of microbatches and its stages."""
        return self.costs.program.microbatches, self.stages

    @property
    def is_interleaved(self) -> bool:
        """Whether stages share devices."""
        return len(self.scheduled.schedule.ranks) < len(self.stages)

    @property
    def penalised_seconds(self) -> float:
        """Its seconds, with the penalty of a split backward."""
        return self.seconds * (1 + (WORTH_SPLITTING if self.scheduled.schedule.splits_backward else 0.0))

    def plan(self, gap: float) -> Plan:
        """The plan, of which others may save at most this share of its seconds."""
        return assemble(self.costs, self.stages, self.scheduled, gap=gap)

    def words(self, schedule: str) -> str:
        """These stages under a schedule, in a few words."""
        count = self.costs.program.microbatches
        if len(self.stages) == 1:
            return words_of_one(count, self.stages[0].option.tag)
        return stages_words(count, schedule, [(s.last - s.first, s.submesh.size) for s in self.stages])

    def all_schedules(self) -> Iterator[tuple[str, float]]:
        """The words and the seconds of a step under every schedule that fits."""
        for name, seconds in ((self.scheduled.name, self.seconds), *self.scheduled.others):
            yield self.words(name), seconds


def words_of_one(microbatches: int, stage: SolvedStage) -> str:
    """A plan of one stage, in a few words."""
    mesh = [(axis.name, axis.size) for axis in stage.mesh.axes]
    return one_stage_words(microbatches, mesh, rematerialised=bool(stage.segments))


def better(best: Candidate | None, others: Iterable[Candidate]) -> Candidate | None:
    """The candidate with the least penalised seconds; the first of those that differ by rounding only.

    Args:
      best: what is known; None for nothing.
      others: to be tried in this order.
    """
    for one in others:
        if best is None or one.penalised_seconds < best.penalised_seconds * (1 - 1e-9):
            best = one
    return best


def scheduled(
    costs: StageCosts, stages: tuple[PlacedStage, ...], schedules: Sequence[str], *, chunks: int
) -> Candidate | None:
    """The candidate of these stages; None if they fit under no schedule.

    Args:
      costs: that solved the stages, with what may be counted on a device.
      stages: in program order.
      schedules: to choose from.
      chunks: stages on each rank.
    """
    ends = len(costs.program.layers)
    limits = [costs.limit_bytes(one.submesh, one.last == ends, bool(one.option.tag.segments)) for one in stages]
    staged = staged_timing(costs.solver, stages, limit_bytes=limits)
    orders = [name for name in SIMULATED if name in schedules and name != INTERLEAVED]
    orders = orders if len(stages) > 1 else ["one_f_one_b"]
    found = best_schedule(staged, costs.program.microbatches, orders, chunks=chunks)
    return Candidate(costs=costs, stages=stages, scheduled=found) if found is not None else None


def merged(
    best: Candidate,
    costs_of: Callable[[StagedProgram], StageCosts],
    schedule: Callable[..., Candidate | None],
) -> Candidate | None:
    """The same plan with all pieces of a scan that lie in one stage merged into one scan; None if that does not fit.

    Args:
      best: the plan.
      costs_of: of another program.
      schedule: the candidate of costs and stages, `chunks` a rank.
    """
    program = best.costs.program
    bounds = [program.layers[stage.first][0] for stage in best.stages[1:]]
    if not program.scan_splits:
        return best
    whole = merge_scans(program, bounds)
    # A stage that begins inside a piece: its ranges have to be looked at as they are, no piece folded into another.
    costs = costs_of(whole if whole is not None else replace(program, piece_starts={}))
    ranks, in_flight = len(best.scheduled.schedule.ranks), best.scheduled.schedule.in_flight
    chunks = len(best.stages) // ranks
    ranges = [(n, n + 1) if whole is not None else (one.first, one.last) for n, one in enumerate(best.stages)]
    places = [stage.submesh for stage in best.stages]
    options = [costs.adopted(stage.option, *one) for stage, one in zip(best.stages, ranges, strict=True)]
    if chunks > 1 and None in options:
        shared = (schedule(costs, one, chunks=chunks) for one in sharing(costs, ranges, places[:ranks], in_flight))
        return better(None, (one for one in shared if one is not None))
    stages = []
    for stage, (first, last), place, count, adopted in zip(
        best.stages, ranges, places, in_flight, options, strict=True
    ):
        limit = costs.limit_bytes(place, last == len(costs.program.layers), bool(stage.option.tag.segments))
        option = adopted if adopted is not None else costs.solve_within(first, last, place, count, limit)
        if option is None:
            return None
        stages.append(PlacedStage(first, last, place, option))
    return schedule(costs, tuple(stages), chunks=chunks)


def certified(best: Candidate) -> Candidate:
    """The same plan with closer lower bounds of its stages' seconds, where they share devices."""
    in_flight = best.scheduled.schedule.in_flight
    stages = tuple(
        stage._replace(option=best.costs.certified(stage.option, stage.first, stage.last, stage.submesh, count))
        for stage, count in zip(best.stages, in_flight, strict=True)
    )
    return replace(best, stages=stages)
