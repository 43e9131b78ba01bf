"""What presets take: many of them on one cluster, over one memory of traces.

A preset with its sizes, the number of microbatches and the rematerialisation leaves next to nothing to choose. Stages
are cut as papers cut them (`program.equal_stages`), the schedule is known, and of every operator the roles leave an
algorithm or two. So there is no stage search here: of stages that are the same program on the same mesh one is solved
(the first, an inner one, the last), by the problem that the stage search solves (`search.stages.solver`), and the
schedule is simulated as it simulates one (`search.pipelines.timing`). A plan found under a preset and one found alone
have the same costs, counted in the same way, and a preset costs tenths of a second once the step is traced.

What cannot win or fit is told from a part of the stages, and of few microbatches what more take at least (`least`).

Known limits: with several stages on a device, each may have the same share of memory where they do not fit as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil, inf
from typing import Any

from ..cluster import Cluster
from ..errors import MemoryExceeded, PlanError, size_words
from ..program.batch import batch_extents, batch_inputs
from ..program.equal_stages import equal_stages, main_scan, unlike_stages
from ..program.trace import Program
from ..program.traces import Traces
from ..search.inter.problem import PlacedStage
from ..search.inter.submeshes import Submesh, Submeshes
from ..search.intra.parameters import parameter_infos
from ..search.pipelines.timing import best_schedule, staged_timing
from ..search.restrictions.pins import Layout, Pins
from ..search.restrictions.roles import Roles
from ..search.stages.costs import option_of
from ..search.stages.ranges import Ranges
from ..search.stages.solved import SolvedStage, in_turn
from ..search.stages.solver import Kinds, StageSolver
from .leaner import leaner_words
from .least import Floor, StageLeast, least_step_seconds, searched_schedule
from .other_sizes import check_interleaved
from .preset import Preset
from .priced import PlacedPreset, PricedPreset
from .solved import (
    CutProgram,
    PresetStages,
    held_by_rank,
    least_of,
    way_of,
)

# Presets, each in a number of microbatches, whose stages are remembered: layouts soon follow a bound.
_REMEMBERED = 64


class PresetPrices:
    """Prices of presets, for one step on one cluster.

    Args:
      traces: of the step.
      args: of the step.
      cluster: where it runs; no device need be present.
      layouts: of parameters and inputs that are given besides (`Pins.layouts`).
      batch_axis: which axis of every array outside the state is the batch.
      reduction: "mean" or "sum", how losses of microbatches combine; None to find out from the program.

    Attributes:
      submeshes: of the cluster.
    """

    def __init__(
        self,
        traces: Traces,
        args: Sequence[Any],
        cluster: Cluster,
        *,
        layouts: Mapping[str, Layout] | None = None,
        batch_axis: int = 0,
        reduction: str | None = None,
    ) -> None:
        self.traces, self.args, self.cluster = traces, args, cluster
        self.submeshes = Submeshes(cluster)
        self._layouts = dict(layouts or {})
        self._batch_axis, self._reduction = batch_axis, reduction
        self._programs: dict[int, Program] = {}
        self._batches: dict[int, frozenset[tuple[str, int]]] = {}
        self._cut: dict[tuple[int, int, bool], CutProgram] = {}
        self._kinds: dict[Any, Kinds] = {}
        self._state_bytes: tuple[float, ...] = ()
        self._refused: dict[tuple[int, int], PlanError] = {}
        self._known_stages: dict[tuple[Preset, int, bool], PresetStages] = {}

    def program(self, microbatches: int) -> Program:
        """The step in so many microbatches.

        Raises:
          PlanError: if it cannot be cut so.
        """
        if microbatches not in self._programs:
            self._programs[microbatches] = self.traces.program(
                self.args, microbatches=microbatches, batch_axis=self._batch_axis, reduction=self._reduction, warn=False
            )
        return self._programs[microbatches]

    def any_program(self, counts: Sequence[int]) -> Program:
        """The step in the fewest of these microbatches into which it can be cut.

        Raises:
          PlanError: if it can be cut into none of them.
        """
        refused: PlanError | None = None
        for count in sorted(counts):
            try:
                return self.program(count)
            except PlanError as error:
                refused = refused or error
        assert refused is not None, "there are numbers of microbatches"
        raise refused

    def priced(
        self,
        preset: Preset,
        microbatches: int,
        *,
        remat: str | None = None,
        below_seconds: float = inf,
        limit_bytes: Sequence[float] | None = None,
    ) -> PricedPreset | None:
        """The layouts of a preset, and what its step takes.

        Args:
          preset: with all sizes.
          microbatches: in a step.
          remat: "none", "layer", or None for the better of each stage.
          below_seconds: what takes longer is not wanted.
          limit_bytes: that may be counted on a device of each rank; None for what a device has.

        Returns:
          None for a step that takes `below_seconds` or longer.

        Raises:
          PlanError: if the preset, or the number of microbatches, does not suit the program.
          MemoryExceeded: if it does not fit.
        """
        found = self.placed(preset, microbatches, remat=remat, below_seconds=below_seconds, limit_bytes=limit_bytes)
        return self.timed(found, below_seconds=below_seconds)

    def placed(
        self,
        preset: Preset,
        microbatches: int,
        *,
        remat: str | None = None,
        below_seconds: float = inf,
        limit_bytes: Sequence[float] | None = None,
    ) -> PlacedPreset:
        """The layouts of a preset, and what its step takes at least: as soon as that is `below_seconds` or longer, no
        more is found out.

        Args:
          preset: as of `priced`.
          microbatches: the same.
          remat: the same.
          below_seconds: the same.
          limit_bytes: the same.

        Raises:
          PlanError: as of `priced`.
          MemoryExceeded: the same.
        """
        limits = self.limits(preset) if limit_bytes is None else tuple(limit_bytes)
        check_interleaved(preset, microbatches, batch_extents(self.args, self._batch_axis))
        return self._placed(self._stages(preset, microbatches, unlike=True), remat, below_seconds, limits)

    def _placed(
        self, stages: PresetStages, remat: str | None, below_seconds: float, limits: tuple[float, ...]
    ) -> PlacedPreset:
        """As `placed`, of these stages."""
        preset, microbatches = stages.preset, stages.microbatches
        least = [StageLeast()] * len(stages.places)
        # Rematerialised, a stage takes no less.
        first = remat or "none"
        for number in stages.by_number():
            solved, place = stages.solved(number, first), stages.place(number)
            mine = [stage for stage in range(len(least)) if stages.place(stage) == place]
            for stage in mine:
                least[stage] = least_of(solved)
            seconds = least_step_seconds(least, preset.stages, microbatches)
            if seconds >= below_seconds:
                return PlacedPreset(source=stages, remat=remat, limit_bytes=limits, work_seconds=seconds)
            if remat is not None:
                self._check_least(stages, solved, mine, limits)
        placed = self._in_memory(stages, remat, limits)
        chosen = [stage.option.tag for stage in placed]
        held = held_by_rank(stages, chosen)
        if any(size > limit * (1 + 1e-12) for size, limit in zip(held, limits, strict=True)):
            raise self._exceeded(stages, max(held), max(limits))
        return PlacedPreset(
            source=stages, remat=remat, limit_bytes=limits, held_bytes=held, stages=placed,
            work_seconds=least_step_seconds(list(map(least_of, chosen)), preset.stages, microbatches),
        )  # fmt: skip

    def timed(self, found: PlacedPreset, *, below_seconds: float = inf) -> PricedPreset | None:
        """What the step of a preset with its layouts takes.

        Args:
          found: of `placed`.
          below_seconds: what takes longer is not wanted.

        Returns:
          None for a step that takes `below_seconds` or longer.

        Raises:
          PlanError: if not all of its stages can be cut.
          MemoryExceeded: if these do not fit.
        """
        if found.stages is None or found.work_seconds >= below_seconds:
            return None
        stages, placed, limits = found.source, found.stages, found.limit_bytes
        preset, microbatches = stages.preset, stages.microbatches
        whole = self._stages(preset, microbatches)
        if whole.cut is not stages.cut:
            adopted = whole.adopted(placed)
            if adopted is None:
                again = self._placed(whole, found.remat, below_seconds, limits)
                return self.timed(again, below_seconds=below_seconds)
            placed = adopted
        of_stages = [limits[stage % preset.stages] for stage in range(len(placed))]
        timing = staged_timing(whole.solver, placed, limit_bytes=of_stages)
        scheduled = best_schedule(timing, microbatches, [searched_schedule(preset)], chunks=preset.chunks)
        assert scheduled is not None, "what it keeps in flight was counted"
        seconds = scheduled.step_seconds
        if seconds >= below_seconds:
            return None
        return PricedPreset(
            preset=preset, microbatches=microbatches, remat=found.remat, step_seconds=seconds,
            counted_bytes=found.held_bytes, program=whole.cut.staged, pins=whole.pins, stages=placed,
            timing=timing, scheduled=scheduled,
        )  # fmt: skip

    def floor(self, preset: Preset, microbatches: int, *, remat: str | None = None) -> Floor:
        """What a preset takes and keeps at least in this number of microbatches or any larger one.

        Args:
          preset: with all sizes.
          microbatches: the fewest of interest.
          remat: "none", "layer", or None for whichever.

        Raises:
          PlanError: if the preset does not suit the program.
        """
        stages = self._stages(preset, microbatches, unlike=True)
        wishes = ("none", "layer") if remat is None else (remat,)
        ways = []
        for stage in range(len(stages.places)):
            mine = [stages.solved(stage, wish) for wish in wishes]
            ways.append(tuple(way_of(solved) for solved in mine))
        return Floor(preset=preset, microbatches=microbatches, stages=tuple(ways))

    def limits(self, preset: Preset) -> tuple[float, ...]:
        """What a device of each rank can hold."""
        places = self._places(preset)
        return tuple(self.submeshes.part(place).device.usable_memory_bytes for place in places)

    def _places(self, preset: Preset) -> list[Submesh]:
        """The equal submeshes of its ranks.

        Raises:
          PlanError: if the cluster cannot be cut so.
        """
        size = self.cluster.num_devices // preset.stages
        places = [Submesh(rank * size, (rank + 1) * size) for rank in range(preset.stages)]
        for place in places:
            self.submeshes.check(place)
        return places

    def needed_stages(self) -> int:
        """How many stages there have to be for a device to hold its share of the state, where products are split over
        the devices of a host and optimizer state over all."""
        weights, optimizer = self._state()
        usable = self.cluster.device.usable_memory_bytes - optimizer / self.cluster.num_devices
        host = min(host.devices for host in self.cluster.hosts)
        return ceil(weights / host / usable) if usable > 0 else self.cluster.num_devices

    def _state(self) -> tuple[float, ...]:
        """Bytes of parameters and their gradients, and of optimizer state."""
        if not self._state_bytes:
            program = self.any_program([1, 2])
            graph = program.graph
            self._state_bytes = (
                sum(2 * graph.values[graph.inputs[p]].bytes for p in graph.parameters),
                sum(info.optimizer_bytes for info in parameter_infos(program)),
            )
        return self._state_bytes

    def least_bytes(self, preset: Preset) -> float:
        """Bytes of parameters, gradients and optimizer state on the device that holds most, at least: its share."""
        weights, optimizer = self._state()
        split = preset.stages * preset.size("tensor") * preset.size("expert")
        storing = split * preset.size("batch")
        return weights / (storing if preset.zero == 3 else split) + optimizer / (storing if preset.zero else split)

    def check(self, preset: Preset) -> None:
        """Refuse a preset that does not suit the program in any number of microbatches, or whose share of the state
        alone does not fit a device.

        Raises:
          PlanError: if the program has nothing that an axis could split.
          MemoryExceeded: saying how much there is to hold.
        """
        # What the fewest microbatches do not allow, no more do: nothing in them is larger.
        program = self.any_program([1, 2])
        self._roles(preset, program)
        usable, least = self.cluster.device.usable_memory_bytes, self.least_bytes(preset)
        if least > usable:
            raise MemoryExceeded(
                refused=f"the preset {preset} on {self.cluster.num_devices} x {self.cluster.device.kind}",
                got=f"{size_words(usable)} usable on a device",
                needed=f"at least {size_words(least)} on a device for parameters, gradients and optimizer state alone",
                where="the stages of the preset", try_="a preset that splits them further",
            )  # fmt: skip

    def allows(self, preset: Preset, microbatches: int) -> bool:
        """Whether a preset can have so many microbatches: each cut into its blocks, and one or more for every stage."""
        whole = all(extent % (microbatches * preset.blocks) == 0 for extent in self._batch_extents)
        return whole and microbatches >= preset.stages and (preset.chunks == 1 or microbatches % preset.stages == 0)

    @cached_property
    def _batch_extents(self) -> list[int]:
        return batch_extents(self.args, self._batch_axis)

    def _roles(self, preset: Preset, program: Program) -> Roles:
        """What the axes of a preset may split.

        Raises:
          PlanError: if the program has nothing that an axis could split.
        """
        count = program.microbatches
        if count not in self._batches:
            self._batches[count] = batch_inputs(program, self.traces, self.args, batch_axis=self._batch_axis)
        return preset.roles_in(program, self._batches[count], where=self.traces.name)

    def _in_memory(self, stages: PresetStages, remat: str | None, limits: Sequence[float]) -> tuple[PlacedStage, ...]:
        """All stages solved, so that every rank's fit a device.

        Raises:
          MemoryExceeded: if a rank's do not.
        """
        chosen = [stages.solved(stage, remat or "none") for stage in range(len(stages.places))]
        for rank, limit, held in zip(stages.ranks(), limits, held_by_rank(stages, chosen), strict=True):
            if held > limit:
                for stage in rank:
                    chosen[stage] = self._in_share(stages, stage, remat, limit)
                if held_by_rank(stages, chosen)[rank[0] % stages.preset.stages] > limit:
                    for stage in rank:  # they need unlike workspaces: each has its own in an equal share
                        chosen[stage] = self._alone(stages, stage, remat, limit / len(rank)) or chosen[stage]
        return tuple(
            PlacedStage(number, number + 1, place, option_of(solved))
            for number, (place, solved) in enumerate(zip(stages.places, chosen, strict=True))
        )

    def _alone(self, stages: PresetStages, stage: int, remat: str | None, share: float) -> SolvedStage | None:
        """A stage with its own workspace in so much memory, the fastest way; None if there is none."""
        wishes = ("none", "layer") if remat is None else (remat,)
        found = (stages.within(stage, wish, share) for wish in wishes)
        return min((way for way in found if way is not None), key=stages.weight, default=None)

    def _in_share(self, stages: PresetStages, stage: int, remat: str | None, limit: float) -> SolvedStage:
        """A stage in its share of a device's memory, the fastest way."""
        chunks, in_flight = stages.preset.chunks, stages.in_flight[stage]
        wishes = ("none", "layer") if remat is None else (remat,)
        found = (
            in_turn(lambda share, wish=wish: stages.within(stage, wish, share), in_flight, chunks, limit)
            for wish in wishes
        )
        ways = [way for way in found if way is not None]
        if not ways:
            least = [stages.solved(stage, wish).problem.least_bytes for wish in wishes]
            held = min(chunks * one.held(in_flight) - (chunks - 1) * one.workspace for one in least)
            raise self._exceeded(stages, held, limit)
        return min(ways, key=stages.weight)

    def _check_least(
        self, stages: PresetStages, solved: SolvedStage, mine: Sequence[int], limits: Sequence[float]
    ) -> None:
        """Refuse stages that no layout makes small enough.

        Raises:
          MemoryExceeded: if a rank that has some of them cannot hold even these.
        """
        ranks, least = stages.preset.stages, solved.problem.least_bytes
        for rank in sorted({stage % ranks for stage in mine}):
            each = [least.held(stages.in_flight[stage]) for stage in mine if stage % ranks == rank]
            held = sum(each) - (len(each) - 1) * least.workspace
            if held > limits[rank]:
                raise self._exceeded(stages, held, limits[rank])

    def _exceeded(self, stages: PresetStages, held: float, limit: float) -> MemoryExceeded:
        return MemoryExceeded(
            refused=f"the preset {stages.preset} on {self.cluster.num_devices} x {self.cluster.device.kind}",
            got=f"{size_words(limit)} usable on a device",
            needed=f"at least {size_words(held)} on a device, in {stages.microbatches} microbatches",
            where="the stages of the preset",
            try_=leaner_words(stages.preset, self.cluster.num_devices),
        )  # fmt: skip

    def _stages(self, preset: Preset, microbatches: int, *, unlike: bool = False) -> PresetStages:
        """What there is to solve.

        Args:
          preset: with all sizes.
          microbatches: in a step.
          unlike: whether a program of the stages that are unlike will do.

        Raises:
          PlanError: if the preset does not suit the program, the cluster or the number of microbatches.
        """
        key = preset, microbatches, unlike
        if key not in self._known_stages:
            if len(self._known_stages) == _REMEMBERED:
                del self._known_stages[next(iter(self._known_stages))]
            self._known_stages[key] = self._new_stages(*key)
        return self._known_stages[key]

    def _new_stages(self, preset: Preset, microbatches: int, unlike: bool) -> PresetStages:
        count, places = preset.stages * preset.chunks, self._places(preset)
        program = self.program(microbatches)
        roles = self._roles(preset, program)
        cut = self._cut_into(microbatches, count, unlike)
        pins = Pins(
            layouts=self._layouts, zero=preset.zero, roles=roles, gradient_exchange=preset.gradient_exchange
        )  # fmt: skip
        if preset.mesh not in self._kinds:
            self._kinds[preset.mesh] = Kinds(self.submeshes, [preset.mesh])
        solver = StageSolver(
            cut.staged, parameters=parameter_infos(program), submeshes=self.submeshes, pins=pins,
            kinds=self._kinds[preset.mesh], ranges=cut.ranges,
        )  # fmt: skip
        return PresetStages(
            preset=preset, microbatches=microbatches, cut=cut, pins=pins, solver=solver,
            places=tuple(places[stage % preset.stages] for stage in range(count)),
        )  # fmt: skip

    def _cut_into(self, microbatches: int, count: int, unlike: bool) -> CutProgram:
        """The program in so many equal stages, or with those alone that are unlike.

        Raises:
          PlanError: if it has not the layers for them.
        """
        key = microbatches, count
        if key in self._refused:
            raise self._refused[key]
        if unlike and (*key, True) not in self._cut:
            self._cut[*key, True] = self._unlike(*key) or self._cut_into(*key, False)
        if (*key, unlike) not in self._cut:
            program = self.program(microbatches)
            try:
                layered = self.traces.staged(program) if count > 1 and main_scan(program) is None else None
                staged = equal_stages(program, count, layered)
            except PlanError as error:
                self._refused[key] = error
                raise
            ranges = Ranges(staged)
            self._cut[*key, False] = CutProgram(staged=staged, ranges=ranges, find_alike=lambda: self._alike(ranges))
        return self._cut[*key, unlike]

    def _unlike(self, microbatches: int, count: int) -> CutProgram | None:
        try:
            found = unlike_stages(self.program(microbatches), count)
        except PlanError:
            return None  # as who cuts it into all of them says
        if found is None:
            return None
        staged, alike = found
        return CutProgram(staged=staged, ranges=Ranges(staged), find_alike=lambda: alike)

    def _alike(self, ranges: Ranges) -> tuple[int, ...]:
        """For each stage the first one that is the same program."""
        staged = ranges.program
        solver = StageSolver(
            staged, parameters=parameter_infos(staged.source), submeshes=self.submeshes,
            pins=Pins(layouts=self._layouts), kinds=Kinds(self.submeshes), ranges=ranges,
        )  # fmt: skip
        first: dict[Any, int] = {}
        found = []
        for stage in range(len(staged.layers)):
            # What roles make of a stage depends on what its dims stand for in the whole program.
            number, origins = solver.number(stage, stage + 1), ranges.cut(stage, stage + 1).origins
            found.append(first.setdefault((number, origins), stage))
        return tuple(found)
