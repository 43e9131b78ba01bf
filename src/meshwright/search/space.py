"""The space of plans that every search looks at, under the same costs and the same simulator.

A *choice* (`choice`) is priced in three steps. Each stage's layouts are those that the choice names, or those that the
integer program finds within the memory that the stage may count at its place (`StageProblem`). Their seconds, forward
and backward, and what crosses between stages make the timing of a pipeline (`staged_timing`). Of the schedules that fit
the memory of all devices the one with the shortest simulated step is taken (`candidate.scheduled`). A stage that is
alone in its plan is priced as a plan of one stage: it keeps what it has gathered for the backward pass.

So a search needs to know nothing of operators, collectives or schedules; and what two searches find can be compared.

Known limits: stages of a plan have devices of their own (no interleaving), no copies of the program share the
microbatches (no replicas), and hosts of several kinds stand in the order in which the cluster names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf, isfinite

from ..plan import Plan
from ..program.staged import StagedProgram
from ..solve import Infeasible
from .candidate import Candidate, merged, scheduled
from .choice import Choice, LayoutNumbers, Partial, StageChoice, Structures
from .inter_op_problem import PlacedStage
from .layouts import Layouts
from .least_work import least_work_seconds
from .memory_reserve import MemoryReserve, nothing_reserved
from .solved_stage import SolvedStage, kept_bytes
from .stage_costs import StageCosts, option_of
from .stage_problem import StageProblem
from .stage_request import INTERLEAVED, StageRequest, check_layers, check_request, placements, schedules_for
from .stage_solver import Kinds, Place, WantedMesh, meshes_of
from .staged_timing import best_schedule, staged_timing
from .submeshes import Submesh, Submeshes

# Three-axis meshes are tried on programs of up to this many operators, as in `one_stage`.
_SMALL_PROGRAM = 150

# To this relative gap the integer program solves layouts that are left to it, as in `one_stage`.
GAP = 2e-3

# The integer program may take so long for one stage, beyond what prices of memory find; seconds.
_SECONDS_PER_SOLVE = 20.0

# Priced choices and laid-out stages that are kept: a walk comes back to few, and a laid-out stage of a large model
# takes a megabyte.
_MOST_PRICES, _MOST_STAGES = 20_000, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a choice takes.

    Args:
      seconds: of the simulated step; where it does not fit, of one with 1F1B as if it did; infinite where its layouts
        cannot be together or, left to the integer program, do not exist within memory.
      bytes: on a device of each stage.
      excess: by how much of what it may count the fullest device is over; 0 where it fits.
      schedule: its name.
    """

    seconds: float
    bytes: tuple[float, ...] = ()
    excess: float = inf
    schedule: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is a plan that can run."""
        return self.excess <= 0 and isfinite(self.seconds)


class Space:
    """All plans of a request.

    Args:
      request: programs, parameters, cluster, and what is fixed. A time limit is of no account here.
      reserve: what may not be counted on a device, by microbatches.
      gap: relative, to which layouts that are left to the integer program are solved.

    Attributes:
      structures: the tree of decisions.

    Raises:
      PlanError: for a request that makes no sense.
    """

    def __init__(
        self, request: StageRequest, *, reserve: Callable[[int], MemoryReserve] = nothing_reserved, gap: float = GAP
    ) -> None:
        check_request(request)
        self.request, self.gap = request, gap
        self.cluster, self.submeshes = request.cluster, Submeshes(request.cluster)
        self._reserve = reserve
        self._kinds = Kinds(self.submeshes, request.mesh)
        self._costs: dict[tuple[int, bool], StageCosts] = {}
        self._work: dict[tuple[int, int, int], float] = {}
        self._solved: dict[object, SolvedStage | None] = {}
        self._layouts: dict[tuple[int, int, float], Layouts] = {}
        self._laid_out: dict[object, SolvedStage] = {}
        self._prices: dict[Choice, Price] = {}
        counts, stages = sorted(request.by_microbatches), request.stage_count
        self.structures = Structures(
            counts=counts, layers=lambda count: len(self.program(count).layers),
            submeshes=placements(request, self.submeshes), devices=self.cluster.num_devices,
            meshes=self._count_meshes, remats=self._remats, stage_counts=None if stages is None else {stages},
            ends=None if request.layers is None else list(accumulate(request.layers)),
        )  # fmt: skip

    def program(self, microbatches: int) -> StagedProgram:
        """The step in so many microbatches.

        Raises:
          PlanError: if it cannot be cut so.
        """
        program = self.request.by_microbatches[microbatches]
        check_layers(self.request, program)
        return program

    # Stages

    def layouts(self, choice: Choice, number: int) -> Layouts:
        """What the nodes of a stage may choose from, with the microbatches in flight that 1F1B keeps there.

        Args:
          choice: with the stage.
          number: of the stage.
        """
        stage, costs = choice.stages[number], self._costs_of(choice)
        in_flight = min(choice.microbatches, len(choice.stages) - number)
        problem, limit = self._problem(costs, stage), self._limit(costs, stage)
        key = id(problem), in_flight, limit  # a solver keeps its problems
        if key not in self._layouts:
            self._layouts[key] = Layouts(problem, in_flight, limit)
        return self._layouts[key]

    def _costs_of(self, choice: Choice) -> StageCosts:
        return self._costs_in(choice.microbatches, alone=len(choice.stages) == 1)

    def _costs_in(self, microbatches: int, *, alone: bool) -> StageCosts:
        key = microbatches, alone
        if key not in self._costs:
            self._costs[key] = self._costs_of_program(self.program(microbatches), alone=alone)
        return self._costs[key]

    def _costs_of_program(self, program: StagedProgram, *, alone: bool) -> StageCosts:
        request, own = self.request, {self._whole: self._meshes_alone} if alone else None
        costs = StageCosts(
            program, parameters=request.parameters, submeshes=self.submeshes, pins=request.pins, remat=request.remat,
            meshes=request.mesh, own_meshes=own, alone=alone,
        )  # fmt: skip
        costs.reserve(self._reserve(program.microbatches))
        return costs

    @property
    def _whole(self) -> Submesh:
        return Submesh(0, self.cluster.num_devices)

    @cached_property
    def _meshes_alone(self) -> Sequence[WantedMesh]:
        """Of the only stage of a plan: of a small program also meshes of three axes."""
        if self.request.mesh:
            return self.request.mesh
        small = len(self.program(self.structures.counts[0]).graph.operators) <= _SMALL_PROGRAM
        found = meshes_of(self.cluster, (), max_axes=3 if small else 2)
        return [(tuple(a.name for a in one.axes), tuple(a.size for a in one.axes)) for one in found]

    def _count_meshes(self, microbatches: int, first: int, last: int, submesh: Submesh) -> int:
        if first == 0 and last == len(self.program(microbatches).layers):
            solver = self._costs_in(microbatches, alone=True).solver
            return len(solver.meshes[solver.kind_of[submesh]])
        return len(self._kinds.meshes[self._kinds[submesh]])

    def _remats(self, microbatches: int, first: int, last: int) -> tuple[str, ...]:
        if self.request.remat is not None:
            return (self.request.remat,)
        alone = first == 0 and last == len(self.program(microbatches).layers)
        segments = self._costs_in(microbatches, alone=alone).solver.segments(first, last)
        return ("none", "layer") if segments else ("none",)

    def _place(self, costs: StageCosts, stage: StageChoice) -> Place:
        return Place(stage.first, stage.last, costs.solver.kind_of[stage.submesh], stage.mesh)

    def _problem(self, costs: StageCosts, stage: StageChoice) -> StageProblem:
        return costs.solver.problem(self._place(costs, stage), stage.remat)[0]

    def _limit(self, costs: StageCosts, stage: StageChoice) -> float:
        return costs.limit_bytes(stage.submesh, stage.last == len(costs.program.layers), stage.remat)

    def solved(self, choice: Choice, number: int) -> SolvedStage | None:
        """A stage in its layouts; None where there are none within memory, or they cannot be together.

        Args:
          choice: with the stage.
          number: of the stage.
        """
        costs, stage = self._costs_of(choice), choice.stages[number]
        solver, place = costs.solver, self._place(costs, stage)
        alone = len(choice.stages) == 1
        key = choice.microbatches, alone, solver.number(stage.first, stage.last), place.kind, place.mesh, stage.remat
        if stage.layouts is None:
            limit, in_flight = self._limit(costs, stage), min(choice.microbatches, len(choice.stages) - number)
            full = (*key, in_flight, limit)
            if full not in self._solved:
                self._solved[full] = solver.proven(
                    place, stage.remat, in_flight, limit, gap=self.gap, time_limit_seconds=_SECONDS_PER_SOLVE
                )
            return self._solved[full]
        full = (*key, stage.layouts)
        if full not in self._laid_out:
            if not isfinite(self.layouts(choice, number).seconds(stage.layouts)):
                return None
            while len(self._laid_out) >= _MOST_STAGES:
                del self._laid_out[next(iter(self._laid_out))]
            self._laid_out[full] = solver.laid_out(place, stage.remat, stage.layouts)
        return self._laid_out[full]

    def with_layouts(self, choice: Choice) -> Choice | None:
        """The same choice with the layouts that the integer program finds written into it; None where it finds none."""
        found = [self.solved(choice, number) for number in range(len(choice.stages))]
        stages = [
            stage._replace(layouts=one.chosen.solution.choices)
            for stage, one in zip(choice.stages, found, strict=True)
            if one is not None
        ]
        return Choice(choice.microbatches, tuple(stages)) if len(stages) == len(found) else None

    # Prices

    def price(self, choice: Choice) -> Price:
        """What a choice takes and holds."""
        if choice not in self._prices:
            if len(self._prices) >= _MOST_PRICES:
                self._prices.clear()
            self._prices[choice] = self._priced(choice)
        return self._prices[choice]

    def _priced(self, choice: Choice) -> Price:
        placed = self._placed(choice)
        if placed is None:
            return Price(seconds=inf)
        costs = self._costs_of(choice)
        limits = [self._limit(costs, stage) for stage in choice.stages]
        candidate = scheduled(costs, placed, self._schedules, chunks=1)
        if candidate is not None:
            staged, found = candidate.staged, candidate.scheduled
        else:
            staged = staged_timing(costs.solver, placed, limit_bytes=[inf] * len(placed))
            best = best_schedule(staged, choice.microbatches, ["one_f_one_b"])
            assert best is not None  # nothing is too large
            found = best
        schedule = found.schedule
        held = [
            fixed + kept_bytes(size, later, count, delayed) + stage.workspace_bytes
            for fixed, size, later, count, delayed, stage in zip(
                staged.bytes_throughout, staged.bytes_in_flight, staged.bytes_delayed, schedule.in_flight,
                schedule.delayed, staged.timing.stages, strict=True,
            )
        ]  # fmt: skip
        over = max(size / limit - 1 for size, limit in zip(held, limits, strict=True))
        return Price(
            seconds=found.step_seconds, bytes=tuple(held), excess=0.0 if candidate is not None else max(over, 1e-9),
            schedule=found.name,
        )  # fmt: skip

    def _placed(self, choice: Choice) -> tuple[PlacedStage, ...] | None:
        placed = []
        for number, stage in enumerate(choice.stages):
            solved = self.solved(choice, number)
            if solved is None:
                return None
            placed.append(PlacedStage(stage.first, stage.last, stage.submesh, option_of(solved)))
        return tuple(placed)

    @cached_property
    def _schedules(self) -> tuple[str, ...]:
        asked = schedules_for(self.request, self.program(self.structures.counts[0]))
        return tuple(name for name in asked if name != INTERLEAVED)

    # Bounds

    def bound(self, partial: Partial) -> float:
        """What every choice that a partial one may become takes at least; infinite where none fits. Seconds.

        Each rank runs all microbatches of its stage: a step takes no less than the fastest layouts of any stage that is
        decided, nor than the arithmetic of the layers that are left, shared evenly by the devices that are left.
        """
        count = partial.microbatches or self.structures.counts[0]
        if not partial.stages:
            return self._least_work(count, 0, len(self.program(count).layers), self.cluster.num_devices)
        layers, longest = len(self.program(count).layers), 0.0
        alone = len(partial.stages) == 1 and partial.next_layer == layers
        costs = self._costs_in(count, alone=alone)
        after = int(partial.next_layer < layers)
        for number, stage in enumerate(partial.stages):
            in_flight = min(count, len(partial.stages) - number + after)
            try:
                problem = self._problem(costs, stage)
                longest = max(longest, problem.fastest.bound)
            except Infeasible:
                continue  # a ZeRO stage that may be relaxed: nothing is known
            if problem.least_bytes.held(in_flight) > self._limit(costs, stage) * (1 + 1e-9):
                return inf
        if after:
            devices = self.cluster.num_devices - partial.next_device
            longest = max(longest, self._least_work(count, partial.next_layer, layers, devices))
        return longest

    def bound_within(self, choice: Choice) -> float:
        """What every choice of this structure takes at least, by what is proven of its stages within memory; seconds.

        Args:
          choice: whose layouts are left to the integer program.
        """
        found = [self.solved(choice, number) for number in range(len(choice.stages))]
        proven = [one.chosen.solution.lower_bound for one in found if one is not None]
        return max(proven) if len(proven) == len(found) else self.bound(Partial(choice.microbatches, choice.stages))

    def _least_work(self, count: int, first: int, last: int, devices: int) -> float:
        key = count, first, last
        if key not in self._work:
            graph = self._costs_in(count, alone=False).solver.cut(first, last).graph
            self._work[key] = least_work_seconds(graph, count, self.cluster) * self.cluster.num_devices
        return self._work[key] / devices

    # Plans

    def candidate(self, choice: Choice) -> Candidate | None:
        """A choice as the stage search has it; None where it does not fit."""
        placed = self._placed(choice)
        return scheduled(self._costs_of(choice), placed, self._schedules, chunks=1) if placed is not None else None

    def plan(self, choice: Choice, *, gap: float = inf) -> tuple[Plan, StagedProgram] | None:
        """The plan of a choice, and the program that its equations count in; None where it does not fit.

        Args:
          choice: of this space.
          gap: how much of its seconds other choices may save at most, as a share.
        """
        found = self.candidate(choice)
        if found is None:
            return None
        alone = len(choice.stages) == 1

        def again(costs: StageCosts, stages: tuple[PlacedStage, ...], *, chunks: int) -> Candidate | None:
            return scheduled(costs, stages, self._schedules, chunks=chunks)

        whole = merged(found, lambda program: self._costs_of_program(program, alone=alone), again)
        return (whole.plan(gap), whole.costs.program) if whole is not None else None

    def start(self, microbatches: int, stages: int) -> Choice | None:
        """A simple choice to begin with: even stages, every node in what is fastest after those before it.

        Args:
          microbatches: in a step.
          stages: how many.

        Returns:
          None where the devices cannot be cut so.
        """
        even = next(self.structures.even(microbatches, stages), None)
        return self.filled(even) if even is not None else None

    def filled(self, choice: Choice) -> Choice:
        """The choice with greedy layouts in stages that have none of their own (`Layouts.greedy`), or where these
        cannot be together the fastest without a limit of memory."""
        for number, stage in enumerate(choice.stages):
            if stage.layouts is None:
                layouts = self.layouts(choice, number)
                found: LayoutNumbers | None = layouts.greedy() or layouts.problem.fastest.choices
                choice = choice.with_stage(number, stage._replace(layouts=found))
        return choice
