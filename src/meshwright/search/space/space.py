"""The space of plans that every search works on, under the same costs and the same simulator.

A *choice* (`choice`) is priced in three steps. Each stage's layouts are those of the choice, or those that the integer
program finds within the stage's memory limit (`StageProblem`). Their seconds, forward and backward, and the transfers
between stages are the timing of a pipeline (`pipelines.timing`). Of the schedules that fit on all devices the one with
the shortest simulated step is taken (`candidate.scheduled`). A plan of one stage is priced as one program: it keeps
gathered parameters for the backward pass.

So a search needs no knowledge of operators, collectives or schedules, and results of two searches can be compared.

Known limits: stages have devices of their own (no interleaving), there are no replicas, and hosts of several kinds
stand in the cluster's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf, isfinite

from ...plan import Plan
from ...program.staged import StagedProgram
from ...solve import Infeasible
from ..inter.problem import PlacedStage
from ..pipelines.candidate import Candidate, merged, scheduled
from ..pipelines.request import INTERLEAVED, StageRequest, schedules_for
from ..pipelines.timing import best_schedule, staged_timing
from ..prices.least_work import least_work_by_equation
from ..stages.costs import StageCosts, option_of
from ..stages.reserve import MemoryReserve, nothing_reserved
from ..stages.solver import GAP
from .choice import Choice
from .stages import SECONDS_PER_SOLVE, Stages
from .structures import Structures

# Priced choices that are kept, of a large model 10 kB each: a walk comes back to few.
_MOST_PRICES = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The seconds and bytes of a choice.

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
        """Whether the choice fits memory."""
        return self.excess <= 0 and isfinite(self.seconds)


class Space:
    """All plans of a request.

    Args: those of `Stages`.

    Attributes:
      stages: what each stage of a plan may be.
      structures: the tree of decisions.
      counts: numbers of microbatches into which the step can be cut.
    """

    def __init__(
        self, request: StageRequest, *, reserve: Callable[[int], MemoryReserve] = nothing_reserved, gap: float = GAP
    ) -> None:
        self.stages = Stages(request, reserve=reserve, gap=gap)
        self.request, self.cluster, self.gap, self.counts = request, request.cluster, gap, self.stages.counts
        self.structures = Structures(self.stages)
        self._work: dict[int, list[float]] = {}
        self._prices: dict[Choice, Price] = {}

    def reserve_again(self) -> None:
        """Apply the current `reserve`: where it has changed, results within memory limits are computed anew."""
        self.stages.reserve_again()
        self._prices.clear()

    # Prices

    def price(self, choice: Choice, *, time_limit_seconds: float = SECONDS_PER_SOLVE) -> Price:
        """The price of a choice; the layouts of each stage that are left to the integer program are solved in this
        time."""
        if choice not in self._prices:
            if len(self._prices) >= _MOST_PRICES:
                self._prices.clear()
            self._prices[choice] = self._priced(choice, time_limit_seconds)
        return self._prices[choice]

    def _priced(self, choice: Choice, time_limit_seconds: float) -> Price:
        placed = self._placed(choice, time_limit_seconds)
        if placed is None:
            return Price(seconds=inf)
        costs = self.stages.costs_of(choice)
        limits = [self.stages.limit_of(costs, stage) for stage in choice.stages]
        candidate = scheduled(costs, placed, self.schedules, chunks=1)
        if candidate is not None:
            staged, found = candidate.scheduled.staged, candidate.scheduled
        else:
            staged = staged_timing(costs.solver, placed, limit_bytes=[inf] * len(placed))
            best = best_schedule(staged, choice.microbatches, ["one_f_one_b"])
            assert best is not None  # nothing is too large
            found = best
        own = staged.own_bytes(found.schedule)
        held = [size + stage.workspace_bytes for size, stage in zip(own, staged.timing.stages, strict=True)]
        over = max(size / limit - 1 for size, limit in zip(held, limits, strict=True))
        return Price(
            seconds=found.step_seconds, bytes=tuple(held), excess=0.0 if candidate is not None else max(over, 1e-9),
            schedule=found.name,
        )  # fmt: skip

    def _placed(self, choice: Choice, time_limit_seconds: float = SECONDS_PER_SOLVE) -> tuple[PlacedStage, ...] | None:
        placed = []
        for number, stage in enumerate(choice.stages):
            solved = self.stages.solved(choice, number, time_limit_seconds=time_limit_seconds)
            if solved is None:
                return None
            placed.append(PlacedStage(stage.first, stage.last, stage.submesh, option_of(solved)))
        return tuple(placed)

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """Schedules to choose from."""
        asked = schedules_for(self.request, self.stages.program(self.counts[0]))
        return tuple(name for name in asked if name != INTERLEAVED)

    # Bounds

    def work_bound(self, partial: Choice) -> float:
        """As `bound`, by arithmetic alone and at once: no stage takes less than the arithmetic of its layers, shared
        evenly by its devices, nor do the layers that are left on the devices that are left."""
        count = partial.microbatches or self.counts[0]
        work = self._work_before(count)
        parts = [(work[stage.last] - work[stage.first]) / stage.submesh.size for stage in partial.stages]
        if partial.next_layer < len(work) - 1:
            parts.append((work[-1] - work[partial.next_layer]) / (self.cluster.num_devices - partial.next_device))
        return count * max(parts)

    def bound(self, partial: Choice) -> float:
        """A lower bound on the seconds of all choices that a partial one can become; infinite where none fits.

        Each rank runs all microbatches of its stage, so a step takes no less than the fastest layouts of any decided
        stage, nor than the arithmetic of the undecided layers (`work_bound`).
        """
        longest, count = self.work_bound(partial), partial.microbatches
        if not partial.stages:
            return longest
        after = int(partial.next_layer < self.stages.layers(count))
        costs = self.stages.costs_in(count, alone=len(partial.stages) == 1 and not after)
        for number, stage in enumerate(partial.stages):
            in_flight = min(count, len(partial.stages) - number + after)
            try:
                problem = self.stages.problem_of(costs, stage)
                longest = max(longest, problem.fastest.bound)
            except Infeasible:
                continue  # a ZeRO stage that may be relaxed: nothing is known
            if problem.least_bytes.held(in_flight) > self.stages.limit_of(costs, stage) * (1 + 1e-9):
                return inf
        return longest

    def bound_within(self, choice: Choice) -> float:
        """A lower bound on the seconds of this structure, from the bounds of its stages' problems within memory."""
        found = [self.stages.solved(choice, number) for number in range(len(choice.stages))]
        proven = [one.chosen.solution.lower_bound for one in found if one is not None]
        return max(proven) if len(proven) == len(found) else self.bound(choice)

    def _work_before(self, count: int) -> list[float]:
        """Of each layer the arithmetic of all layers before it, seconds of a microbatch on one device; and of all."""
        if count not in self._work:
            program = self.stages.program(count)
            of = least_work_by_equation(program.graph, self.cluster)
            layers = [sum(of.get(equation, 0.0) for equation in range(*ends)) for ends in program.layers]
            self._work[count] = list(accumulate(layers, initial=0.0))
        return self._work[count]

    # Plans

    def plan(self, choice: Choice, *, gap: float = inf) -> tuple[Plan, StagedProgram] | None:
        """The plan of a choice, and the program that its equations count in; None where it does not fit. Other choices
        may save the share `gap` of its seconds at most."""
        placed, alone = self._placed(choice), len(choice.stages) == 1

        def again(costs: StageCosts, stages: tuple[PlacedStage, ...], *, chunks: int = 1) -> Candidate | None:
            return scheduled(costs, stages, self.schedules, chunks=chunks)

        found = again(self.stages.costs_of(choice), placed) if placed is not None else None
        if found is None:
            return None
        whole = merged(found, lambda program: self.stages.costs_of_program(program, alone=alone), again)
        return (whole.plan(gap), whole.costs.program) if whole is not None else None

    def start(self, microbatches: int, stages: int) -> Choice | None:
        """A simple first choice: even stages with greedy layouts; None where the devices cannot be cut so."""
        even = next(self.structures.even(microbatches, stages), None)
        return self.filled(even) if even is not None else None

    def filled(self, choice: Choice) -> Choice:
        """The choice with greedy layouts in stages that have none of their own (`Layouts.greedy`), or where these
        cannot be together the fastest without a limit of memory."""
        for number, stage in enumerate(choice.stages):
            if stage.layouts is None:
                layouts = self.stages.layouts(choice, number)
                found = layouts.greedy() or layouts.problem.fastest.choices
                choice = choice.with_stages(number, stage._replace(layouts=found))
        return choice
