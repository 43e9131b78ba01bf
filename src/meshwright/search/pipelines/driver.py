"""The stage search: stages, their submeshes, logical meshes and rematerialisation, microbatches and schedule, jointly.

For each number of microbatches and each order of a pipeline, `inter.dynamic_program` finds the best stages under the
costs of `stages.costs`, which are estimates at first. The ranges that the best of all plans uses are solved, and it is
searched again, until the best plan consists of solved ranges: it is then the best under costs that are exact for it
and, but for conversions between layers, too low for all others. The best plans found on the way are simulated under
every schedule they fit in memory with, the adaptive one included, and the one with the shortest simulated step is
taken.

Nothing here needs a device: the cluster is a description, and programs are shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf, isfinite

from ...errors import MemoryExceeded, PlanError
from ..alternative import nearest
from ..best_known import BestKnown, bounds, gap_of, handicap
from ..considered import Considered
from ..inter.bounds import most_seconds
from ..inter.dynamic_program import solve_inter_op
from ..inter.problem import ORDERS, Crossing, InterOpProblem, Order, PlacedStage
from ..inter.submeshes import Submeshes
from ..result import NothingFaster as NothingFaster, SearchResult as SearchResult
from ..stages.costs import StageCosts
from ..stages.part_rows import OutOfTime
from ..stages.reserve import MemoryReserve, nothing_reserved
from .candidate import Candidate, better, certified, merged, scheduled, words_of_one
from .deadline import Deadline
from .finished import FinishedPlans
from .interleaving import Interleaving
from .microbatch_bounds import FEW_LABELS, MicrobatchBounds
from .microbatch_costs import MicrobatchCosts
from .problems import first_seconds, of_stages, problem_of, restricted
from .request import (
    INTERLEAVED,
    SIMULATED as SIMULATED,
    StageRequest as StageRequest,
    check_request,
    check_room,
    is_asked,
    placements,
    schedules_for,
)

# An estimated plan may turn out to take this many times its estimate: the smaller factor is tried first. Chosen, not
# measured.
_ESTIMATE_SLACK = (1.1, 1.5)

# What is said of numbers of microbatches and orders that are out of the question.
_NOTHING = "nothing that fits or is as fast"

# Labels of a state; and the number of submeshes above which there are an eighth of these, so that a large cluster is
# planned in time. Chosen, not measured; the lower bound covers what is dropped.
_MOST_LABELS, _MANY_PLACES = 256, 400

# Plans of the last run that are solved first in a repeated search. Chosen, not measured.
_AGAIN = 3

# After this share of the time all numbers of microbatches that are left are bounded, before one is searched: the gap
# then says how much better those can be that are not searched when the time is over. (A U-Net of a public diffusion
# code on 16 A100, in 60 s: 1 % instead of 78 %.)
_BOUNDED_AT = 0.25

# Orders whose steps the objective of adaptive pipelines bounds as well: where that excludes all, they need no search.
# (Gemma 3 4B on 32 TPU v5e: 92 CPU seconds instead of 107.)
_RUN_AHEAD: tuple[Order, ...] = ("eager_one_f_one_b", "gpipe")

# Rounds of solving and searching again for one number of microbatches and one order, at most. Chosen, not measured.
_MOST_ROUNDS = 24


def search_stages(request: StageRequest) -> SearchResult:
    """The fastest staged plan that fits memory; raises what `StageSearch` and its `run` do."""
    return StageSearch(request).run()


class StageSearch:
    """The search for plans of one request, run once for each memory limit: results that do not depend on memory are
    kept between runs.

    Args:
      request: what is asked.

    Attributes:
      request: the same.
      places: submeshes that stages may have.
      costs: of stages, by number of microbatches.
      bounds: of numbers of microbatches.
      interleaving: the search over stages that share devices.
      deadline: of the run.
      schedules: to choose from.
      scheduled: a candidate of costs and stages, `chunks` a rank; None if they do not fit.
      beam: labels of a state of the dynamic program.
      taken: the plan of the last run.

    Raises:
      PlanError: for a request that makes no sense.
    """

    def __init__(self, request: StageRequest) -> None:
        check_request(request)
        submeshes = Submeshes(request.cluster)
        self.request, self.places = request, placements(request, submeshes)
        self.deadline = deadline = Deadline()
        self.costs = costs = MicrobatchCosts(
            request, submeshes, self.places, self.deadline.check, lambda: deadline.left_seconds
        )
        self.schedules = schedules_for(request, costs.base.program if costs.base is not None else None)
        self.scheduled = partial(scheduled, schedules=self.schedules)
        self.beam = _MOST_LABELS if len(self.places) <= _MANY_PLACES else _MOST_LABELS // 8
        self.interleaving = Interleaving(request, costs, self.scheduled)
        places = self.places
        self.bounds = MicrobatchBounds(
            costs, lambda of, share, order: problem_of(request, places, of, order, (), share), self.schedules
        )
        self.taken: Candidate | None = None
        self._finished: FinishedPlans | None = None  # of the last run

    def run(
        self,
        reserve: Callable[[int], MemoryReserve] = nothing_reserved,
        *,
        time_limit_seconds: float | None = None,
        faster_than_seconds: float | None = None,
    ) -> SearchResult:
        """The fastest plan that fits.

        Args:
          reserve: what the search may not count on a device in so many microbatches.
          time_limit_seconds: for this run; None for the request's.
          faster_than_seconds: the same.

        Raises:
          MemoryExceeded: if no plan fits.
          NothingFaster: if none is faster than what is known.
        """
        request, last = self.request, self._finished
        known = request.faster_than_seconds if faster_than_seconds is None else faster_than_seconds
        seconds = request.time_limit_seconds if time_limit_seconds is None else time_limit_seconds
        self.deadline.begin(seconds, has_plan=isfinite(known))
        self.bounds.reset()
        self.interleaving.reset()
        if self.costs.reserve({count: reserve(count) for count in self.costs.counts}):
            self.interleaving.forget()
        if self.costs.base is not None:
            check_room(request, self.costs.base.solver.least_state_bytes, self.costs.base.program)
        run = _Run(self, known)
        self._finished = run.finished
        found, self.taken = run.result(last)
        return found


class _Run:
    """One run of a search.

    Args:
      of: the search.
      known: a plan whose step counts for more is not wanted.

    Attributes:
      finished: plans whose stages are solved.
    """

    def __init__(self, of: StageSearch, known: float) -> None:
        self._of, self._known = of, known
        self._best = BestKnown(known)
        self.finished = FinishedPlans(of.costs, of.scheduled, of.deadline)
        self._considered: list[Considered] = []
        self._unsearched = inf  # what plans take at least that were not looked at to the end
        self._shared: Candidate | None = None  # the best of the interleaved ones
        self._slack = _ESTIMATE_SLACK[0]

    def result(self, last: FinishedPlans | None) -> tuple[SearchResult, Candidate]:
        """The fastest plan, and the candidate that it is; raises what `StageSearch.run` does.

        Args:
          last: the finished plans of the last run.
        """
        known, best = self._known, self._again(last)
        for self._slack in _ESTIMATE_SLACK:
            self._search(bounded=True)
            if (best := self._simulate(best)) is not None or isfinite(known):
                break
        if isfinite(known) and (best is None or best.penalised_seconds >= known):
            raise self._nothing_faster()
        if best is None:
            # What was thought possible was not: nothing is left out then.
            self._unsearched, self._best = inf, BestKnown(known)
            self._of.bounds.reset()
            self._search(bounded=False)
            best = self._simulate(None)
        if best is None:
            raise self._nothing_fits()
        best, whole = self._merged(best)
        if whole.penalised_seconds >= known:
            raise self._nothing_faster()
        whole, taken = certified(whole), best.words(best.scheduled.name)
        found = SearchResult(
            plan=whole.plan(gap_of(whole.penalised_seconds, self._least_seconds)), program=whole.costs.program,
            considered=tuple(dict.fromkeys(self._considered)), alternatives=nearest(self.finished.simulated, but=taken),
            stages=best.stages,
        )  # fmt: skip
        return found, best

    def _merged(self, best: Candidate | None) -> tuple[Candidate, Candidate]:
        """The best plan that fits with the pieces of its scans merged too: as it was searched, and merged.

        Raises:
          MemoryExceeded: if no plan does.
          NothingFaster: the same, where another plan is known.
        """
        while best is not None:
            whole = merged(best, self._of.costs.of_program, self._of.scheduled)
            if whole is not None:
                return best, whole
            self.finished.drop(best)
            self._of.interleaving.reset()
            self._best, self._shared = BestKnown(self._known), None
            best = self._simulate(None)
        if isfinite(self._known):
            raise self._nothing_faster()
        raise self._nothing_fits()

    def _nothing_fits(self) -> PlanError:
        """Why there is no plan; a refusal for memory has the bound of what was ruled out for the moment."""
        error = self._of.costs.nothing_fits()
        if isinstance(error, MemoryExceeded) and (isfinite(self._of.costs.left_open) or self.finished.dropped):
            error.least_seconds = self._least_seconds
        return error

    def _again(self, last: FinishedPlans | None) -> Candidate | None:
        """The best plan of the last run that fits in the memory of this run: the first incumbent."""
        if last is None:
            return None
        for number, stages in last.ascending()[:_AGAIN]:
            if self._of.deadline.over:
                break
            costs = self._of.costs(number)
            found = last.order[number, stages]
            # What a split backward takes is a guess, and bounds nothing.
            for order in (found,) if found != "zero_bubble" else ORDERS:
                if is_asked(order, self._of.schedules):
                    count = len(stages) if order == "zero_bubble" else self._of.request.stage_count
                    problem = replace(self._problem(costs, order, costs.crossings()), num_stages=count)
                    costs.solve_all(problem, stages)
                    self._keep(number, costs, problem, stages)
        return self._simulate(None, again=True) if last.seconds else None

    @property
    def _least_seconds(self) -> float:
        """Lower bound of all plans. Interleavings are tried, not bounded."""
        least = 0.0 if set(self._of.schedules) == {INTERLEAVED} else self._unsearched
        return max(min(least, self._of.costs.left_open), self._of.bounds.floor)

    def _nothing_faster(self) -> NothingFaster:
        return NothingFaster(self._least_seconds, tuple(dict.fromkeys(self._considered)))

    def _search(self, *, bounded: bool) -> None:
        """Search all numbers of microbatches, in the order of what they promise; `bounded` leaves out what the
        incumbent, or before there is one a first plan by estimates, excludes.

        Raises:
          PlanError: what was wrong with the first number, if the step cannot be cut into any.
        """
        counts = self._of.costs.counts
        left, expected = sorted(counts, reverse=True), dict.fromkeys(counts, self._of.bounds.floor)
        # Where there is no plan yet the next finer number is the next best guess. One stage has no ends that more
        # microbatches would fill.
        last: int | None = counts[0] if self._of.request.alone else None
        refused: PlanError | None = None
        all_bounded = not bounded
        while left:
            if not all_bounded and self._of.deadline.share > _BOUNDED_AT and isfinite(self._best.seconds):
                all_bounded = True
                for count in left:
                    self._bound_count(count, expected)
            count = last = self._of.bounds.promising(left, expected, self._best.seconds, self._near() or last)
            left.remove(count)
            known = bounded and isfinite(self._best.seconds)
            if known:
                self._bound_count(count, expected)
            if self._is_slower(count, expected[count]):
                continue
            if self._of.deadline.over:
                searched = any(number == count for number, _ in self.finished.seconds)
                how = "searched no further, out of time" if searched else "out of time"
                self._considered.append(Considered(count, how, searched=searched))
                self._unsearched = min(self._unsearched, expected[count])
                continue
            try:
                costs = self._of.costs(count)
            except PlanError as error:
                # Some steps cannot be cut so finely: these numbers need not have been the user's idea.
                refused = refused or error
                self._considered.append(Considered(count, str(error)))
                continue
            self._of.costs.searched.add(count)
            if not bounded:
                costs.forget_estimates()
            excluded: tuple[Order, ...] = ()
            shares_tried = not bounded
            for problem in self._problems(costs, bounded=bounded):
                if not shares_tried and isfinite(self._best.seconds):
                    # Interleaved stages are soon found, and often the best: then they exclude most of the rest.
                    shares_tried = True
                    list(self.finished.simulate(self._best, count))
                    self._interleave([count])
                if self._of.deadline.over:
                    self._unsearched = min(self._unsearched, expected[count])
                elif problem.order in excluded:
                    self._considered.append(Considered(count, _NOTHING, schedule=problem.order))
                else:
                    with self._in_time(expected[count], Considered(count, "broken off, out of time")):
                        possible = self._refine(count, costs, problem, bounded=bounded)
                        if problem.order == "adaptive" and not possible:
                            excluded = _RUN_AHEAD
            list(self.finished.simulate(self._best, count))  # what it takes bounds other numbers
            for made in self._of.costs.all:
                if made.program.microbatches != self._near():
                    made.release()
        if refused is not None and not self._of.costs.all:
            raise refused

    def _bound_count(self, count: int, expected: dict[int, float]) -> None:
        """Raise the lower bound of a number of microbatches, unless that already excludes it or the time is over."""
        if expected[count] <= self._best.worth_searching and not self._of.deadline.over:
            with self._in_time(expected[count]):
                expected[count] = max(expected[count], self._of.bounds.of(count, self._best.seconds))
                expected[count] = max(expected[count], self._of.bounds.with_split(count, self._best.seconds))

    def _is_slower(self, count: int, least: float) -> bool:
        """Whether the lower bound of a number of microbatches excludes it; if so, record that."""
        if least <= self._best.worth_searching:
            return False
        self._unsearched = min(self._unsearched, least)
        self._considered.append(Considered(count, searched=False, least_seconds=least))
        return True

    @contextmanager
    def _in_time(self, least_seconds: float, *broken_off: Considered) -> Iterator[None]:
        """Run work that the time limit may break off; then record its lower bound, and what was broken off."""
        self._of.deadline.may_stop = True
        try:
            yield
        except OutOfTime:
            self._unsearched = min(self._unsearched, least_seconds)
            self._considered += broken_off
            self._of.costs.forget_estimates()
        finally:
            self._of.deadline.may_stop = False

    def _near(self) -> int | None:
        """The incumbent's number of microbatches, near which the search goes on."""
        if finished := self.finished.seconds:
            return min(finished, key=finished.__getitem__)[0]
        last = self._of.taken
        return last.key[0] if last is not None else None

    def _problems(self, costs: StageCosts, *, bounded: bool) -> Iterator[InterOpProblem]:
        """The problems of a number of microbatches, one for each order, or of zero bubble for each number of stages, if
        any may be worth it; `bounded` excludes by the incumbent."""
        crossings = costs.crossings()
        for order in ORDERS:
            if not is_asked(order, self._of.schedules):
                continue
            problem = self._problem(costs, order, crossings)
            if order != "zero_bubble" or problem.num_stages is not None:
                yield problem
                continue
            if bounded and set(self._of.request.schedules) != {"zero_bubble"}:
                # Of any number of stages it is a bound, which seldom leaves anything.
                self._bound(costs, problem)
                most = self._best.worth(order)
                if solve_inter_op(problem, beam=FEW_LABELS, upper_bound=most, check=self._of.deadline.check) is None:
                    continue
            yield from (replace(problem, num_stages=count) for count in range(2, problem.most_places + 1))

    def _refine(self, number: int, costs: StageCosts, problem: InterOpProblem, *, bounded: bool) -> bool:
        """Solve a problem by estimates, then the ranges of its best plan, and repeat until that plan has only solved
        ranges. Returns whether there may be a plan that is faster than the incumbent."""
        order = problem.order if not self._of.request.alone else None
        considered = partial(Considered, costs.program.microbatches, schedule=order)
        if bounded:
            self._bound(costs, problem)
        least = inf
        for _ in range(_MOST_ROUNDS):
            most = self._best.worth(problem.order)
            found = solve_inter_op(problem, beam=self._of.beam, upper_bound=most, check=self._of.deadline.check)
            if found is None:
                self._considered.append(considered(_NOTHING))
                if bounds(problem.order):
                    self._unsearched = min(self._unsearched, most * handicap(problem.order))
                return not isfinite(most)
            left = costs.solve_all(problem, found.stages)
            if len(found.stages) == 1:
                self._tell_ways(costs, found.stages[0])
            for stages in (found.stages, *found.others):
                self._keep(number, costs, problem, stages)
            least = found.lower_bound
            if not left:
                if len(found.stages) > 1:
                    sizes = " ".join(f"{s.last - s.first}x{s.submesh.size}" for s in found.stages)
                    self._considered.append(considered(f"with layers x devices {sizes}", seconds=found.seconds))
                break
            if self._of.deadline.over:
                if len(found.stages) > 1:
                    self._considered.append(considered(f"{found.seconds:.6g} s by estimates, out of time"))
                break
        if bounds(problem.order):
            self._unsearched = min(self._unsearched, least * handicap(problem.order))
        return True

    def _tell_ways(self, costs: StageCosts, stage: PlacedStage) -> None:
        """Record each way to run the step in one stage that was solved."""
        for option in costs.solved_ways(stage.first, stage.last, stage.submesh, 1):
            seconds = costs.estimates.step_seconds(option)
            words = words_of_one(costs.program.microbatches, option.tag)
            self._considered.append(Considered(words, seconds=seconds))
            self.finished.simulated[words] = min(seconds, self.finished.simulated.get(words, inf))

    def _bound(self, costs: StageCosts, problem: InterOpProblem) -> None:
        """Exclude ranges that are too slow for any plan to beat the incumbent, or before there is one a first plan by
        estimates."""
        bound = self._best.worth(problem.order)
        if not isfinite(bound):
            easy = replace(self._problem(costs.easy(), problem.order, problem.crossings), num_stages=problem.num_stages)
            bound = self._slack * first_seconds(easy, problem, costs.program)
        costs.focus(most_seconds(problem, bound))
        if bounds(problem.order):
            self._unsearched = min(self._unsearched, bound * handicap(problem.order))

    def _problem(self, costs: StageCosts, order: Order, crossings: Sequence[Crossing]) -> InterOpProblem:
        return problem_of(self._of.request, self._of.places, costs, order, crossings)

    def _keep(self, number: int, costs: StageCosts, problem: InterOpProblem, stages: Sequence[PlacedStage]) -> None:
        """Record the best options for these stages, if all of them are solved."""
        chain = {(s.first, s.last, s.submesh) for s in stages}
        if costs.unsolved(problem, stages):
            return
        found = solve_inter_op(restricted(problem, chain, len(stages)), upper_bound=self._best.worth(problem.order))
        if found is not None:
            self._best.estimate(found.seconds * handicap(problem.order))
            self.finished.add(number, found, problem.order)
            self._of.deadline.has_plan = True
            if "zero_bubble" in self._of.schedules and len(stages) > 1 and problem.order != "zero_bubble":
                # With a split backward these stages may be the fastest too, where estimates of them are too high.
                splitting = solve_inter_op(of_stages(replace(problem, order="zero_bubble"), found.stages))
                if splitting is not None:
                    self.finished.add(number, splitting, "zero_bubble")

    def _simulate(self, best: Candidate | None, *, again: bool = False) -> Candidate | None:
        """The best of the finished plans by simulation, and of interleaved ones.

        Args:
          best: what is known; None for nothing.
          again: whether the plans are those of the last run: they are interleaved if its best was.
        """
        best = better(best, self.finished.simulate(self._best))
        last = self._of.taken
        if again and not (last is not None and last.is_interleaved):
            return best
        self._interleave(None, again=again)
        return better(best, [self._shared] if self._shared is not None else [])

    def _interleave(self, counts: Sequence[int] | None, *, again: bool = False) -> None:
        """Try interleaved plans whose estimate beats the incumbent, in these numbers of microbatches or all; in a
        repeated run as far as time allows."""
        for costs in self._of.costs.all if counts is None else map(self._of.costs, counts):
            costs.forget_estimates()  # what takes too long for a stage alone may do for one of several
        for candidate in self._of.interleaving.candidates(
            counts, self._of.bounds.looked_at, below_seconds=self._best.simulated,
            late=lambda: self._of.deadline.over or (again and self._of.deadline.late),
        ):  # fmt: skip
            if candidate.key not in self.finished.dropped:
                self.finished.compare(candidate)
                count, ranks = candidate.key[0], len(candidate.scheduled.schedule.ranks)
                shape = f"with {ranks} ranks of {len(candidate.stages) // ranks} stages"
                self._considered.append(Considered(count, shape, schedule="interleaved", seconds=candidate.seconds))
                self._shared = better(self._shared, [candidate])
                self._best.simulate(candidate.penalised_seconds)
