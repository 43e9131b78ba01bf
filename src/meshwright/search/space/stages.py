"""The stages of the plans of a request: their logical meshes, layouts and prices.

A stage is a range of layers of the program in some number of microbatches, on a submesh. Its intra-operator problem is
built once for all ranges that are the same program, and each solution is shared by them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, product
from math import isfinite

from ...cluster import LogicalMesh
from ...errors import PlanError
from ...program.ladder import ALL, NONE, SELECTIVE, Ladder
from ...program.staged import StagedProgram
from ..inter.logical_meshes import Kinds, meshes_alone
from ..inter.submeshes import Submesh, Submeshes
from ..pipelines.request import StageRequest, check_layers, check_request, placements
from ..prices.choices import OperatorChoice
from ..stages.costs import StageCosts
from ..stages.problem import StageProblem
from ..stages.reserve import MemoryReserve, nothing_reserved
from ..stages.solved import SolvedStage
from ..stages.solver import GAP, Place
from .choice import Choice, LayoutNumbers, StageChoice
from .layouts import Layouts

# The integer program may take so long for one stage, beyond what prices of memory find; seconds.
SECONDS_PER_SOLVE = 20.0

# Laid-out stages that are kept: a walk changes one at a time, and one of a large model takes a megabyte.
_MOST_STAGES = 64


class Stages:
    """All stages of plans of a request.

    Args:
      request: programs, parameters, cluster, and what is fixed. A time limit is of no account here.
      reserve: what may not be counted on a device, by microbatches.
      gap: relative, to which layouts that are left to the integer program are solved.

    Attributes:
      counts: numbers of microbatches into which the step can be cut.
      places: the submeshes that a stage may have.
      stage_counts: allowed numbers of stages; None for any.
      ends: one past the last layer of each stage, where these are given; None to choose.

    Raises:
      PlanError: for a request that makes no sense.
    """

    def __init__(
        self, request: StageRequest, *, reserve: Callable[[int], MemoryReserve] = nothing_reserved, gap: float = GAP
    ) -> None:
        check_request(request)
        self.request, self.reserve, self.gap = request, reserve, gap
        self.cluster, self.submeshes = request.cluster, Submeshes(request.cluster)
        self._kinds = Kinds(self.submeshes, request.mesh)
        self._costs: dict[tuple[int, bool], StageCosts] = {}
        self._solved: dict[object, SolvedStage | None] = {}
        self._layouts: dict[tuple[int, int, float], Layouts] = {}
        self._laid_out: dict[object, SolvedStage] = {}
        self.counts = self._possible(sorted(request.by_microbatches))
        self.places: Collection[Submesh] = dict.fromkeys(placements(request, self.submeshes))
        self.stage_counts = None if request.stage_count is None else {request.stage_count}
        self.ends = None if request.layers is None else list(accumulate(request.layers))

    def _possible(self, counts: Sequence[int]) -> list[int]:
        """Of these numbers of microbatches those into which the step can be cut; these were our idea."""
        found, refused = [], None
        for count in counts:
            try:
                self.program(count)
                found.append(count)
            except PlanError as error:
                refused = refused or error
        if not found:
            assert refused is not None  # there is a number
            raise refused
        return found

    def program(self, microbatches: int) -> StagedProgram:
        """The step in so many microbatches.

        Raises:
          PlanError: if it cannot be cut so.
        """
        program = self.request.by_microbatches[microbatches]
        check_layers(self.request, program)
        return program

    def layers(self, microbatches: int) -> int:
        """How many layers the step has in so many microbatches."""
        return len(self.program(microbatches).layers)

    def may_have(self, stages: int) -> bool:
        """Whether a plan may have so many stages."""
        return self.stage_counts is None or stages in self.stage_counts

    def reserve_again(self) -> None:
        """Apply the current `reserve`: where it has changed, results within memory limits are computed anew."""
        for (count, _), costs in self._costs.items():
            costs.reserve(self.reserve(count))

    def layouts(self, choice: Choice, number: int) -> Layouts:
        """The layouts of a stage, for the microbatches in flight that 1F1B keeps there."""
        stage, costs = choice.stages[number], self.costs_of(choice)
        in_flight = min(choice.microbatches, len(choice.stages) - number)
        problem, limit = self.problem_of(costs, stage), self.limit_of(costs, stage)
        key = id(problem), in_flight, limit  # a solver keeps its problems
        if key not in self._layouts:
            self._layouts[key] = Layouts(problem, in_flight, limit)
        return self._layouts[key]

    def costs_of(self, choice: Choice) -> StageCosts:
        """What solves the stages of a choice."""
        return self.costs_in(choice.microbatches, alone=len(choice.stages) == 1)

    def costs_in(self, microbatches: int, *, alone: bool) -> StageCosts:
        """What solves stages in so many microbatches, of several stages or of one alone."""
        key = microbatches, alone
        if key not in self._costs:
            self._costs[key] = self.costs_of_program(self.program(microbatches), alone=alone)
        return self._costs[key]

    def costs_of_program(self, program: StagedProgram, *, alone: bool) -> StageCosts:
        """The same of the program cut in another way."""
        request = self.request
        operators = len(self.program(self.counts[0]).graph.operators)
        own = {self.whole: meshes_alone(request.cluster, request.mesh, operators)} if alone else None
        costs = StageCosts(
            program, parameters=request.parameters, submeshes=self.submeshes, constraints=request.constraints,
            remat=request.remat, meshes=request.mesh, own_meshes=own, alone=alone,
        )  # fmt: skip
        costs.reserve(self.reserve(program.microbatches))
        return costs

    @property
    def whole(self) -> Submesh:
        """All devices."""
        return Submesh(0, self.cluster.num_devices)

    def _is_whole(self, microbatches: int, first: int, last: int) -> bool:
        return first == 0 and last == self.layers(microbatches)

    def meshes(self, microbatches: int, first: int, last: int, submesh: Submesh) -> tuple[LogicalMesh, ...]:
        """The logical meshes that a stage of these layers may have on a submesh."""
        if self._is_whole(microbatches, first, last):
            solver = self.costs_in(microbatches, alone=True).solver
            return solver.meshes[solver.kind_of[submesh]]
        return self.meshes_beside(submesh)

    def meshes_beside(self, submesh: Submesh) -> tuple[LogicalMesh, ...]:
        """The logical meshes of a submesh for one of several stages."""
        return self._kinds.meshes[self._kinds[submesh]]

    def remats(self, microbatches: int, first: int, last: int) -> tuple[int, ...]:
        """The ways to rematerialise a stage of these layers (`program.ladder`), from nothing to everything."""
        ladder, wish = self.ladder(microbatches, first, last), self.request.remat
        if wish is None:
            return tuple(range(ladder.top + 1))
        return (ladder.number({"none": NONE, "selective": SELECTIVE, "layer": ALL}[wish]),)

    def ladder(self, microbatches: int, first: int, last: int) -> Ladder:
        """What these ways are."""
        alone = self._is_whole(microbatches, first, last)
        return self.costs_in(microbatches, alone=alone).solver.ladder(first, last)

    def ways(self, microbatches: int, first: int, last: int, submesh: Submesh) -> Iterator[StageChoice]:
        """A stage of these layers on a submesh, in all ways to run it."""
        meshes = range(len(self.meshes(microbatches, first, last, submesh)))
        for mesh, remat in product(meshes, self.remats(microbatches, first, last)):
            yield StageChoice(first, last, submesh, mesh, remat)

    def _place(self, costs: StageCosts, stage: StageChoice) -> Place:
        return Place(stage.first, stage.last, costs.solver.kind_of[stage.submesh], stage.mesh)

    def problem_of(self, costs: StageCosts, stage: StageChoice) -> StageProblem:
        """The intra-operator problem of a stage."""
        return costs.solver.problem(self._place(costs, stage), stage.remat)[0]

    def limit_of(self, costs: StageCosts, stage: StageChoice) -> float:
        """Bytes that a stage may count on a device."""
        return costs.limit_bytes(stage.submesh, stage.last == len(costs.program.layers), stage.remat > 0)

    def like(self, submesh: Submesh) -> Submesh:
        """The first of the submeshes that cost a stage the same as this one."""
        kind = self._kinds[submesh]
        return next(one for one in self.places if self._kinds[one] == kind)

    def paths(self, choice: Choice, number: int) -> dict[tuple[int, ...], int]:
        """Of a stage the operators of its problem, by where they stand in the whole program."""
        costs, stage = self.costs_of(choice), choice.stages[number]
        solved_at = costs.solver.problem(self._place(costs, stage), stage.remat)[2]
        by = costs.solver.cut(stage.first, stage.last).equations[0] - solved_at.equations[0]
        return {(one.path[0] + by, *one.path[1:]): one.index for one in solved_at.graph.operators}

    def operators(self, choice: Choice, number: int, layouts: LayoutNumbers) -> dict[tuple[int, ...], OperatorChoice]:
        """Of a stage in these layouts what each operator chooses, by where it stands in the whole program."""
        chosen = self.problem_of(self.costs_of(choice), choice.stages[number]).operator_choices(layouts)
        found = {path: chosen[operator] for path, operator in self.paths(choice, number).items()}
        return {path: one for path, one in found.items() if one is not None}

    def solved(
        self, choice: Choice, number: int, *, time_limit_seconds: float = SECONDS_PER_SOLVE
    ) -> SolvedStage | None:
        """A stage in its layouts; None where there are none within memory, or they cannot be together. Layouts that are
        left to the integer program are solved in this time."""
        costs, stage = self.costs_of(choice), choice.stages[number]
        solver, place = costs.solver, self._place(costs, stage)
        alone = len(choice.stages) == 1
        key = choice.microbatches, alone, solver.number(stage.first, stage.last), place.kind, place.mesh, stage.remat
        if stage.layouts is None:
            limit, in_flight = self.limit_of(costs, stage), min(choice.microbatches, len(choice.stages) - number)
            full = (*key, in_flight, limit)
            if full not in self._solved:
                self._solved[full] = solver.proven(
                    place, stage.remat, in_flight, limit, gap=self.gap, time_limit_seconds=time_limit_seconds
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
