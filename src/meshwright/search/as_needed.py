"""Estimates of submeshes made as they are needed: a kind of submesh is priced when a plan would use one.

Most of a search's time goes into what parts of the program cost on each kind of submesh, and the best plan uses few
kinds. So all of them begin with what bounds say of them, which is soon known; the inter-operator problem is solved, of
the kinds that its plan uses more is found out, and so on until nothing is left to find out of them. No plan is better
then under estimates of all kinds, since bounds are below estimates: of both passes together and of the forward pass,
which is all that an order needs but GPipe. Of that all kinds are estimated at once, if bounds leave any hope.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from math import inf, isfinite

import numpy as np

from .inter_op import least_seconds, solve_inter_op
from .inter_op_problem import Found, InterOpProblem, Option
from .stage_costs import StageCosts
from .submeshes import Submesh

# A problem with the costs that it is of.
Level = tuple[InterOpProblem, StageCosts]


class AsNeeded:
    """One problem, of which more and more is known.

    Args:
      levels: the problem as bounds of fewer microbatches say, if any, and as it is, the same submeshes in each; all
        costs are focused on what is of interest.
    """

    def __init__(self, *levels: Level) -> None:
        self._levels = levels
        self._problem = levels[-1][0]
        self._kinds = levels[-1][1].solver.kind_of
        self._check = levels[-1][1].check
        self._is_whole = False
        self._level: dict[int, int] = {}  # of a kind, what is known of it; nothing but bounds before the first
        self._rough: dict[tuple[int, tuple[int, ...]], tuple[np.ndarray, np.ndarray]] = {}
        self._least: dict[int, tuple[list[list[float]], list[list[float]]]] = {}

    def find_all(self) -> None:
        """Estimate all kinds at once."""
        self._level = {self._kinds[submesh]: len(self._levels) - 1 for submesh in self._problem.submeshes}
        self._is_whole = True

    def find_used(self) -> None:
        """Estimate the kinds that plans in this order and these microbatches have used so far: the best one's are
        likely to be among them."""
        self._find(self._levels[-1][1].used.get(self._problem.order, frozenset()), len(self._levels) - 1)

    @property
    def found(self) -> frozenset[int]:
        """The kinds that are estimated by now."""
        return frozenset(kind for kind, level in self._level.items() if level == len(self._levels) - 1)

    def solved(self, *, beam: int, upper_bound: float = inf, alone_bound: float = inf) -> Found | None:
        """As `inter_op.solve_inter_op`.

        Raises:
          OutOfTime: if it is late.
        """
        last = len(self._levels) - 1
        if self._problem.order == "gpipe" and not self._is_whole:
            if least_seconds(replace(self._problem, fastest=self._fastest), self._check) > upper_bound:
                return None
            self.find_all()
        while True:
            problem = replace(self._problem, options=self._options, fastest=self._fastest)
            found = solve_inter_op(
                problem, beam=beam, upper_bound=upper_bound, alone_bound=alone_bound, check=self._check
            )
            used = {self._kinds[stage.submesh] for stage in found.stages} if found is not None else set()
            left = {kind: self._level.get(kind, -1) + 1 for kind in used if self._level.get(kind, -1) < last}
            if not left:
                return found
            for level in sorted(set(left.values())):
                self._find({kind for kind, one in left.items() if one == level}, level)

    def _find(self, kinds: Set[int], level: int) -> None:
        """Find out so much of these kinds."""
        problem, costs = self._levels[level]
        self._level.update(dict.fromkeys(kinds, level))
        if problem.microbatches == costs.program.microbatches:
            costs.used[problem.order] = costs.used.get(problem.order, frozenset()) | kinds

    def _at(self, submesh: Submesh) -> InterOpProblem | None:
        """The problem that is known of a submesh, None if nothing is but bounds."""
        level = self._level.get(self._kinds[submesh], -1)
        return self._levels[level][0] if level >= 0 else None

    def _fastest(self, submesh: Submesh, in_flight: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        known = self._at(submesh)
        if known is not None and known.fastest is not None:
            return known.fastest(submesh, in_flight)
        key = self._kinds[submesh], tuple(in_flight)
        if key not in self._rough:
            problem, costs = self._levels[0]
            assert problem.least is not None
            fits = costs.may_fit(submesh, in_flight, costs.program.microbatches / problem.microbatches)
            both, forward = (np.where(fits, one, inf) for one in problem.least(submesh))
            self._rough[key] = both, forward
        return self._rough[key]

    def _options(self, first: int, last: int, submesh: Submesh, in_flight: int) -> Sequence[Option]:
        known = self._at(submesh)
        if known is not None:
            return known.options(first, last, submesh, in_flight)
        both, forward = (one[first][last] for one in self._least_of(submesh))
        if not isfinite(both):
            return ()
        # Of a split backward no more stands in the sum than the forward pass.
        return (Option(forward_seconds=forward, backward_seconds=both - forward, weight_seconds=both - forward),)

    def _least_of(self, submesh: Submesh) -> tuple[list[list[float]], list[list[float]]]:
        """What bounds say of a submesh, as lists: a plan is made of single numbers."""
        kind = self._kinds[submesh]
        if kind not in self._least:
            least = self._levels[0][0].least
            assert least is not None
            both, forward = least(submesh)
            self._least[kind] = both.tolist(), forward.tolist()
        return self._least[kind]
