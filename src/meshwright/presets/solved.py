"""The stages of a preset, to be solved: of those that are the same program on the same mesh one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import PlanError
from ..program.staged import StagedProgram
from ..schedule import Edge, make_schedule
from ..search.inter.problem import PlacedStage
from ..search.inter.submeshes import Submesh
from ..search.intra.workspace import held_together
from ..search.pipelines.timing import stage_timing
from ..search.restrictions.pins import Pins
from ..search.stages.costs import adopted
from ..search.stages.ranges import Ranges
from ..search.stages.solved import SolvedStage
from ..search.stages.solver import Place, StageSolver
from ..simulate import EdgeTiming, Timing, step_seconds
from .least import StageLeast, Way, microbatches_in_flight, searched_schedule
from .other_sizes import without_zero
from .preset import Preset


@dataclass(frozen=True, kw_only=True, eq=False)
class CutProgram:
    """A program in equal stages.

    Args:
      staged: with the stages as its layers, or those alone that are unlike (`equal_stages.unlike_stages`).
      ranges: of these stages.
      find_alike: finds out `alike`.
    """

    staged: StagedProgram
    ranges: Ranges
    find_alike: Callable[[], tuple[int, ...]]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each stage the first layer that is the same program."""
        return self.find_alike()


@dataclass(frozen=True, kw_only=True, eq=False)
class PresetStages:
    """The stages of one preset in one number of microbatches, to be solved.

    Args:
      preset: with all sizes.
      microbatches: in a step.
      cut: the program.
      pins: what the preset fixes.
      solver: of the program.
      places: the submesh of each stage.
      free: solutions whatever their memory, by place and rematerialisation.
    """

    preset: Preset
    microbatches: int
    cut: CutProgram
    pins: Pins
    solver: StageSolver
    places: tuple[Submesh, ...]
    free: dict[tuple[Place, str], SolvedStage] = field(default_factory=dict)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The microbatches that each stage holds at once."""
        return microbatches_in_flight(self.preset, self.microbatches)

    def place(self, stage: int) -> Place:
        """Where a stage is solved: at the first of those that are the same."""
        alike = self.cut.alike[stage]
        return Place(alike, alike + 1, self.solver.kind_of[self.places[stage]], 0)

    def solved(self, stage: int, remat: str) -> SolvedStage:
        """A stage whatever its memory.

        Raises:
          PlanError: if the preset leaves it no layout.
        """
        key = self.place(stage), remat
        if key not in self.free:
            found = self.solver.free(*key)
            if found is None:
                raise PlanError(
                    refused=f"the preset {self.preset}", got=f"stage {stage + 1} of {len(self.places)} without any "
                    "layout in which its axes split what they are to split", needed="one",
                    where=f"{self.microbatches} microbatches", try_="leaving out pins=" if self.pins.layouts
                    else f"{without_zero(self.preset)}, the same without ZeRO" if self.preset.zero
                    else "leaving out preset=",
                )  # fmt: skip
            self.free[key] = found
        return self.free[key]

    def within(self, stage: int, remat: str, limit_bytes: float) -> SolvedStage | None:
        """A stage in so much memory."""
        return self.solver.within(self.place(stage), remat, self.in_flight[stage], limit_bytes)

    def adopted(self, stages: Sequence[PlacedStage]) -> tuple[PlacedStage, ...] | None:
        """Stages solved in a program of those alone that are unlike, as stages of this one; None if some are not the
        same here.

        Args:
          stages: of the same preset.
        """
        found = []
        for stage in stages:
            option = adopted(stage.option, self.solver, stage.first, stage.last)
            if option is None:
                return None
            found.append(stage._replace(option=option))
        return tuple(found)

    def weight(self, stage: SolvedStage) -> float:
        """Seconds of a step."""
        return self.microbatches * least_of(stage).seconds + least_of(stage).once_seconds

    def by_number(self) -> list[int]:
        """A stage for each problem, that of the most stages first."""
        counts = Counter(self.place(stage) for stage in range(len(self.places)))
        first = {self.place(stage): stage for stage in reversed(range(len(self.places)))}
        return sorted(first.values(), key=lambda stage: (-counts[self.place(stage)], stage))

    def ranks(self) -> list[range]:
        """The stages of each rank."""
        return [range(rank, len(self.places), self.preset.stages) for rank in range(self.preset.stages)]


def least_of(solved: SolvedStage) -> StageLeast:
    """What a solved stage takes, for bounds."""
    seconds = solved.seconds
    return StageLeast(
        forward_seconds=seconds.forward_seconds, backward_seconds=seconds.backward_seconds,
        once_seconds=seconds.synchronise_seconds + seconds.update_seconds,
    )  # fmt: skip


def way_of(solved: SolvedStage) -> Way:
    """A stage at its least in everything: the seconds of its fastest layouts, the bytes of its leanest."""
    least = solved.problem.least_bytes
    return Way(seconds=least_of(solved), constant_bytes=least.constant, kept_bytes=least.kept)


def held_by_rank(stages: PresetStages, chosen: Sequence[SolvedStage]) -> tuple[float, ...]:
    """Bytes on a device of each rank."""
    held = [(one.own_bytes(n), one.seconds.workspace_bytes) for one, n in zip(chosen, stages.in_flight, strict=True)]
    return tuple(held_together(held[stage] for stage in rank) for rank in stages.ranks())


def free_transfers_seconds(stages: PresetStages, chosen: Sequence[SolvedStage]) -> float:
    """What a step takes at least whose stages each read what the one before makes: simulated, as if sending that took
    no time.

    Args:
      stages: of the preset.
      chosen: each of them, solved.
    """
    preset, count = stages.preset, len(chosen)
    edges = tuple(Edge(stage, stage + 1) for stage in range(count - 1))
    options = {"chunks": preset.chunks} if preset.chunks > 1 else {}
    schedule = make_schedule(searched_schedule(preset), count, stages.microbatches, edges=edges, **options)
    free = tuple(EdgeTiming(edge=edge, forward_seconds=0.0, backward_seconds=0.0) for edge in edges)
    return step_seconds(schedule, Timing(stages=tuple(map(stage_timing, chosen)), edges=free))
