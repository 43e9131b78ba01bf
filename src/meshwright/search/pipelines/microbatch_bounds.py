"""What the best plan takes at least in each number of microbatches, before its layouts are searched.

Cutting a microbatch makes no work less: others take and keep at least their share of what a microbatch does in a number
that is known. Not even their programs have to be traced for that. What is bound to be slower than the best plan is left
out; what is thought to be fast is looked at first.

A bound has to hold for every order. With a whole backward they are 1F1B or adaptive at best, with free transfers. A
split backward fills the ends of the pipeline: it is bounded by itself, of any number of stages, where others would be
too slow.
(Interleaving fills them too; where others are asked for as well, it is tried in numbers that these rule out.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..best_known import handicap
from ..inter.bounds import most_seconds
from ..inter.dynamic_program import solve_inter_op
from ..inter.problem import InterOpProblem, Order
from ..prices.least_work import least_work_seconds
from ..stages.costs import StageCosts
from .microbatch_costs import MicrobatchCosts
from .request import INTERLEAVED

# Labels of a state where nothing but a bound is wanted. Chosen, not measured.
FEW_LABELS = 8

# A bound is no more than this many times the seconds of the incumbent: closer ones exclude nothing more. Chosen, not
# measured.
_MAY_BE_BEST = 1.25


class MicrobatchBounds:
    """Bounds of one search.

    Args:
      costs: of its stages.
      problem: the stages of an order with free transfers, under these costs, in microbatches of this share of the
        program's.
      schedules: to choose from.

    Attributes:
      runs_ahead: whether one is asked for that has more in flight than 1F1B.
      fills_ends: whether one is asked for that keeps a pipeline busy at its ends.
      splits: what a split backward counts for beside a whole one; None where none is asked for.
    """

    def __init__(
        self, costs: MicrobatchCosts, problem: Callable[[StageCosts, float, Order], InterOpProblem],
        schedules: Collection[str],
    ) -> None:  # fmt: skip
        self._costs, self._problem = costs, problem
        self.splits = handicap("zero_bubble") if "zero_bubble" in schedules else None
        self.runs_ahead = not {"adaptive", "eager_one_f_one_b", "gpipe"}.isdisjoint(schedules)
        self.fills_ends = self.splits is not None or set(schedules) == {INTERLEAVED}
        self._floor: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all bounds: they are of the memory that there was."""
        # What orders with a whole backward take at least.
        self._whole: dict[int, float] = {}

    @property
    def floor(self) -> float:
        """Seconds that any number takes at least, which is soon known: all arithmetic, shared evenly."""
        if self._floor is None:
            base = self._costs.base
            self._floor = 0.0
            if base is not None:
                program, cluster = base.program, base.submeshes.cluster
                self._floor = least_work_seconds(program.graph, program.microbatches, cluster)
        return self._floor

    @property
    def looked_at(self) -> list[int]:
        """Numbers of microbatches that have been searched, and the fewest, whose estimates bound all others."""
        fewest = self._costs.counts[0]
        return sorted({*self._costs.searched, *([fewest] if self._is_known(fewest) else [])})

    def promising(
        self, left: Sequence[int], expected: Mapping[int, float], best_seconds: float, near: int | None
    ) -> int:
        """Which number of microbatches to look at.

        What finer ones lose is in no bound: the nearest to the number that has the best plan comes first, but for those
        that only a split backward may make fast; of equals the most microbatches.

        Args:
          left: to choose from.
          expected: bounds.
          best_seconds: of the best plan that is known.
          near: its number of microbatches, or where to look; None to begin in the middle.
        """
        if near is None:
            return sorted(left)[(len(left) - 1) // 2]
        guesses = {count: max(expected[count], self._whole.get(count, 0.0)) for count in left}
        return min(left, key=lambda n: (guesses[n] > best_seconds, max(n / near, near / n), guesses[n], -n))

    def of(self, count: int, best_seconds: float) -> float:
        """Seconds that a number of microbatches takes at least, as the most say that have been searched and are no more
        than these; where that is much more than the best plan takes, no more is said than that.

        Args:
          count: the number.
          best_seconds: of the best plan that is known.
        """
        source = self._nearest(count)
        if len(self._costs.counts) == 1 or not self._is_known(source):
            return 0.0
        bound = _MAY_BE_BEST * best_seconds
        orders: tuple[Order, ...] = ("one_f_one_b", "adaptive") if self.runs_ahead else ("one_f_one_b",)
        whole = self._least(source, count, orders, bound)
        self._whole[count] = max(whole, self._whole.get(count, 0.0))
        if not self.fills_ends:
            return whole
        # Of such a pipeline it is work alone that is certain.
        layers = len(self._costs(source).program.layers)
        return count / (count + min(layers, self._costs.num_devices) - 1) * whole

    def _nearest(self, count: int) -> int:
        """The most microbatches that have been searched and divide these, or else the fewest there are. Others say
        nothing: 3 devices may share the samples of a microbatch in one number and not in the other."""
        return max((one for one in self._costs.searched if count % one == 0), default=self._costs.counts[0])

    def _is_known(self, source: int) -> bool:
        """Whether a number can say anything: the step may be one that cannot be cut into the fewest microbatches."""
        return source != self._costs.counts[0] or self._costs.base is not None

    def with_split(self, count: int, best_seconds: float) -> float:
        """What a number of microbatches counts for at least, a split backward among its orders: asked last, since there
        is much to look at; 0 where nothing more than `of` says is known.

        Args:
          count: the number.
          best_seconds: what the best plan that is known counts for.
        """
        source, whole = self._nearest(count), self._whole.get(count, 0.0)
        if self.splits is None or not self._is_known(source) or whole <= best_seconds:
            return 0.0
        return min(self.splits * self._least(source, count, ("zero_bubble",), best_seconds / self.splits), whole)

    def _least(self, source: int, count: int, orders: Sequence[Order], bound: float) -> float:
        """What a plan in one of these orders takes at least, as one number says; no more than the bound."""
        costs = self._costs(source)
        costs.reserve(self._costs.reserved[count])
        costs.forget_estimates()  # of what was of interest before
        for order in orders:
            problem = self._problem(costs, costs.program.microbatches / count, order)
            costs.focus(most_seconds(problem, bound))
            best = solve_inter_op(problem, beam=FEW_LABELS, upper_bound=bound, check=costs.check)
            bound = best.lower_bound if best is not None else bound
        costs.forget_estimates()
        return bound
