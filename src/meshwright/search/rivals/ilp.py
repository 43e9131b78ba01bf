"""Layouts and stages in one mixed-integer linear program.

Papers: Tarnawski, Narayanan, Phanishayee, "Piper: multidimensional planner for DNN parallelization", NeurIPS 2021,
and Zheng et al. (Alpa), OSDI 2022, whose integer program of one stage this is; solved by HiGHS
(`scipy.optimize.milp`). Method: for each number of microbatches B and of stages n a program of its own. Variables are
whether stage i of n is a candidate s (layers, submesh, logical mesh, rematerialisation), which choice each node of s
has, and which pair of choices each edge has. Stages follow one another in layers and devices; each fits memory with
the min(B, n - i) microbatches that 1F1B keeps there. With o_i the seconds of all microbatches of stage i, and P no
less than any of them, the objective is

    sum_i o_i / B + (B - 1) / B * P

which is Alpa's, with what happens once a step shared out evenly. A step takes no less than P, and the objective is at
most (B + n - 1) / B times P: that is the lower bound; for one stage it is the optimum itself.

Cost: exponential at worst; the program has a variable for each pair of choices of each edge of each candidate.
Limits: refused where no program is small enough to be stated; transfers between stages are left out of the objective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from ..space.choice import Choice, StageChoice
from ..space.layouts import Layouts
from ..space.space import Space
from ..space.stages import Stages
from .protocol import Budget, Found, Incumbent, too_large

# HiGHS states and presolves so many variables in about ten seconds.
MOST_VARIABLES = 150_000

# What HiGHS may take for one program, and what its bounds may be off by, relative.
_MOST_SECONDS, _TOLERANCE = 30.0, 1e-6


class _Candidate(NamedTuple):
    """A stage at a place: stage `place` of a number of stages."""

    place: int
    stage: StageChoice
    layouts: Layouts


class ILP:
    """See the module."""

    name, exact = "ilp", True
    paper = "Tarnawski et al., Piper, NeurIPS 2021; Zheng et al., Alpa, OSDI 2022"

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        most = min(space.cluster.num_devices, space.stages.layers(space.counts[0]))
        numbers = filter(space.stages.may_have, range(1, most + 1))
        best, stated, left = Incumbent(space.bound(Choice())), False, inf
        for count, stages in product(space.counts, list(numbers)):
            if budget.over:
                return
            least = space.work_bound(Choice(count))
            if least >= best.seconds or stages > space.stages.layers(count):
                left = min(left, least)
                continue
            every = _candidates(space.stages, count, stages)
            # Of one stage a program for each candidate, which are the smallest, and of several one for all.
            for some in ([one] for one in every) if stages == 1 else [every]:
                candidates = _few(some)
                if candidates is None:
                    left = min(left, least)  # not stated: nothing more is known of these
                if not candidates:
                    continue
                if budget.over:
                    return
                stated = True
                program = _Program(candidates, count, stages)
                choice, bound = program.solved(space.gap, min(budget.left_seconds, _MOST_SECONDS))
                left = min(left, max(bound, least))
                if choice is not None:
                    yield from best.offer(choice, budget.price(space, choice))
        if not stated:
            raise too_large(self.name, f"more than {MOST_VARIABLES} variables", MOST_VARIABLES)
        yield from best.prove(left)


def _few(candidates: Iterable[_Candidate]) -> list[_Candidate] | None:
    """The candidates; None where their program has too many variables."""
    found, size = [], 0
    for candidate in candidates:
        of = candidate.layouts
        found.append(candidate)
        size += 1 + sum(of.sizes) + sum(table.size for table in of.numbers.edges.values())
        if size > MOST_VARIABLES:
            return None
    return found


def _candidates(of: Stages, count: int, stages: int) -> Iterator[_Candidate]:
    """All stages at all places of so many."""
    layers, devices = of.layers(count), of.cluster.num_devices
    for place, submesh in product(range(stages), of.places):
        after = stages - 1 - place
        if (place == 0) != (submesh.first == 0) or (after == 0) != (submesh.stop == devices):
            continue
        for first in range(place, layers) if place else [0]:
            for last in range(first + 1, layers - after + 1) if after else [layers]:
                if of.ends is None or of.ends[place] == last:
                    for stage in of.ways(count, first, last, submesh):
                        yield _Candidate(place, stage, of.layouts(Choice(count, (stage,) * stages), place))


class _Program:
    """The program of one number of microbatches and of stages, with all stages at all places as candidates."""

    def __init__(self, candidates: list[_Candidate], count: int, stages: int) -> None:
        self.candidates, self.count, self.stages = candidates, count, stages
        of = candidates[0].layouts
        greedy = of.greedy()
        typical = of.seconds(greedy) if greedy is not None else of.problem.fastest.bound
        self.scale = max(typical, 1e-12)  # HiGHS has absolute tolerances
        self.costs: list[float] = []
        self.forbidden: list[bool] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []  # low <= sum of terms <= high
        self.used = [self._variable(0.0) for _ in self.candidates]
        self.picks: list[list[list[int]]] = []
        periods: list[dict[int, float]] = [{} for _ in range(stages)]
        for number, (place, _, of) in enumerate(self.candidates):
            self._state_stage(self.used[number], of, periods[place])
        longest = self._variable(0.0)
        for period in periods:  # the longest is as long as each
            self._rows.append(({longest: -1.0, **period}, -inf, 0.0))
        # So far every variable costs what its stage's seconds are.
        self.costs = [cost / count for cost in self.costs]
        self.costs[longest] = (count - 1) / count
        bounds: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
        for used, (place, stage, _) in zip(self.used, self.candidates, strict=True):
            bounds[place, stage.first, stage.submesh.first][used] = 1.0
            if place < stages - 1:
                bounds[place + 1, stage.last, stage.submesh.stop][used] = -1.0
        for (place, _, _), terms in bounds.items():
            self._rows.append((terms, float(place == 0), float(place == 0)))

    def _variable(self, seconds: float) -> int:
        self.forbidden.append(not isfinite(seconds))
        self.costs.append(seconds / self.scale if isfinite(seconds) else 0.0)
        return len(self.costs) - 1

    def _state_stage(self, used: int, of: Layouts, period: dict[int, float]) -> None:
        numbers = of.numbers
        picks = [[self._variable(one) for one in cost] for cost in numbers.costs]
        self.picks.append(picks)
        for row in picks:
            self._rows.append(({used: -1.0, **dict.fromkeys(row, 1.0)}, 0.0, 0.0))
        pairs: list[int] = []
        for (u, v), table in numbers.edges.items():
            square = np.array([[self._variable(one) for one in row] for row in table])
            pairs += square.ravel().tolist()
            for row, pick in zip([*square, *square.T], [*picks[u], *picks[v]], strict=True):
                self._rows.append(({pick: -1.0, **dict.fromkeys(row.tolist(), 1.0)}, 0.0, 0.0))
        period.update((one, self.costs[one]) for row in (*picks, pairs) for one in row if self.costs[one])
        if numbers.memory is not None and isfinite(numbers.memory_limit):
            limit = numbers.memory_limit
            sizes = zip(picks, numbers.memory, strict=True)
            held = {one: size / limit for row, each in sizes for one, size in zip(row, each.tolist(), strict=True)}
            self._rows.append((held, -inf, 1.0))

    def solved(self, gap: float, seconds: float) -> tuple[Choice | None, float]:
        """The best choice, None where none was found; and what no choice takes less than, infinite where none fits."""
        each = [(row, column, value) for row, one in enumerate(self._rows) for column, value in one[0].items()]
        rows, columns, values = zip(*each, strict=True)
        matrix = coo_array((values, (rows, columns)), shape=(len(self._rows), len(self.costs))).tocsr()
        limits = np.array([(low, high) for _, low, high in self._rows])
        upper = np.where(self.forbidden, 0.0, 1.0)
        upper[-1] = inf  # the longest
        whole = np.zeros(len(self.costs))
        whole[[*self.used, *(one for picks in self.picks for row in picks for one in row)]] = 1
        found: Any = milp(
            np.array(self.costs), integrality=whole, bounds=Bounds(0.0, upper),
            constraints=LinearConstraint(matrix, *limits.T),
            options={"mip_rel_gap": gap, "time_limit": max(seconds, 0.1)},
        )  # fmt: skip
        if found.status == 2:  # infeasible
            return None, inf
        dual = found.mip_dual_bound if found.mip_dual_bound is not None else 0.0
        bound = max(dual, 0.0) * self.scale * self.count / (self.count + self.stages - 1)
        return (self._choice(found.x) if found.x is not None else None), bound * (1 - _TOLERANCE)

    def _choice(self, x: np.ndarray) -> Choice:
        stages: dict[int, StageChoice] = {}
        for used, picks, (place, stage, _) in zip(self.used, self.picks, self.candidates, strict=True):
            if x[used] > 0.5:
                stages[place] = stage._replace(layouts=tuple(int(np.argmax(x[row])) for row in picks))
        return Choice(self.count, tuple(stages[place] for place in range(self.stages)))
