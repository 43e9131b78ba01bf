"""Plans whose stages are all solved, and the simulated steps of those that may be the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from ..best_known import BestKnown, handicap
from ..inter.problem import Found, Order, PlacedStage
from ..stages.costs import StageCosts
from .candidate import Candidate
from .deadline import Deadline

# A number of microbatches and stages.
PlanKey = tuple[int, tuple[PlacedStage, ...]]


class FinishedPlans:
    """The plans that one run of the stage search has finished.

    Args:
      costs: of a number of microbatches.
      scheduled: of costs and stages, and how many of these a rank has, the plan under the schedule that is fastest for
        it; None where it fits under none.
      deadline: when it is over one plan that has been simulated is enough.

    Attributes:
      seconds: what each counts for by the objective of the search.
      order: in which each was found.
      simulated: the least seconds of all that was simulated, by what is said of it.
      dropped: plans that do not fit after all.
    """

    def __init__(
        self,
        costs: Callable[[int], StageCosts],
        scheduled: Callable[..., Candidate | None],
        deadline: Deadline,
    ) -> None:
        self.seconds: dict[PlanKey, float] = {}
        self.order: dict[PlanKey, Order] = {}
        self.simulated: dict[str, float] = {}
        self.dropped: set[PlanKey] = set()
        self._candidates: dict[PlanKey, Candidate | None] = {}
        self._costs, self._scheduled, self._deadline = costs, scheduled, deadline

    def add(self, number: int, found: Found, order: Order) -> None:
        """Record a plan under its best objective: several orders may find the same stages."""
        key, seconds = (number, found.stages), found.seconds * handicap(order)
        if seconds < self.seconds.get(key, inf):
            self.seconds[key], self.order[key] = seconds, order

    def ascending(self) -> list[PlanKey]:
        """All plans by their objective, the fastest first."""
        return sorted(self.seconds, key=self.seconds.__getitem__)

    def simulate(self, best: BestKnown, number: int | None = None) -> Iterator[Candidate]:
        """Simulate the plans that may be the best, in one number of microbatches or in all; `best` records their
        seconds."""
        for key in self.ascending():
            count, stages = key
            if number is not None and count != number:
                continue
            if key not in self._candidates:
                if self.seconds[key] > best.worth(self.order[key]) * handicap(self.order[key]):
                    continue
                if any(self._candidates.values()) and self._deadline.over:
                    continue
                self._candidates[key] = found = self._scheduled(self._costs(count), stages, chunks=1)
                if found is not None:
                    self.compare(found)
            candidate = self._candidates[key]
            if candidate is not None:
                best.simulate(candidate.penalised_seconds)
                yield candidate

    def drop(self, candidate: Candidate) -> None:
        """Leave out a plan that does not fit after all."""
        self.dropped.add(candidate.key)
        self._candidates[candidate.key] = None

    def compare(self, candidate: Candidate) -> None:
        """Record a candidate's seconds for the alternatives that a report shows."""
        for words, seconds in candidate.all_schedules():
            self.simulated[words] = min(seconds, self.simulated.get(words, inf))
