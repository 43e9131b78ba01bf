"""The loop of every search for a plan: search, write the plan out, count its memory, reserve what was missed, repeat.

Searches count memory by layouts. A plan that is found is therefore written out (nothing is compiled), and the peak of
its programs is counted. Where a device cannot hold that, what the search missed is reserved (`MissedMemory`), and the
search is repeated in less memory; what it knows by then makes that quick. Until a plan fits, what plans in some numbers
of microbatches have missed is reserved in all numbers. That is a guess, so that the others are searched once more then,
without it, for something faster. So are all where a plan computes again what would fit, since its search counted bytes
that its programs do not need: in as much more memory.

The time limit, with one trace of the step on top, covers all of that: a search leaves time to write its plan out. Where
no time is left for it and no other plan is known, the plan is returned with the memory that the search counts, and a
note says so. A plan that was counted to be too large is never returned.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import NamedTuple

from ..errors import MemoryExceeded, PlanError, size_words, smaller_words
from ..lowering.pipeline.stage_memory import StageMemory
from ..lowering.written_out import written_out
from ..plan import Plan, Stage
from ..plan.words import microbatches_words
from ..search.considered import Considered
from ..search.driver import WORTH
from ..search.result import NothingFaster, SearchResult, plan_words
from ..search.stages.reserve import MissedMemory
from .request import PlanRequest

# A plan has to fit with this much to spare: predicted peaks are off by a percent or two (`benchmarks/memory.py`).
MARGIN = 1.04

# How many plans of a part of the space may turn out to be too large. With 12 a perceptron of five layers of 64 x 64 is
# refused on 8 V100s of 80 to 95 kB, where 19 to 25 plans of two parts lead to one that fits.
ATTEMPTS = 24

# From this share of a device's memory on that a plan leaves free, since its search counted as much in vain, there is a
# search in more memory. Chosen, not measured: the smallest steps of rematerialisation are half of it.
_IN_VAIN = 0.05

# How many plans of such searches may turn out to be too large. Chosen, not measured.
_FURTHER = 3

# What a search may take of the time that writing its plan out leaves: the rest is for the next one, if that plan is too
# large, as it is in six of nine rows of `benchmarks/time_limits.py` (gpt3-1.3b, and a loop in little memory). With 0.75
# Gemma 3 4B on 32 TPU v5e is broken off at a gap of 27 % after 54 s of 60, with 0.9 it is searched to the end in 56 s.
_SEARCH_SHARE = 0.9

# Until a plan has been written out, what that takes, in traces of the step: a plan is traced with its derivatives, and
# its buffers are counted. 1.5 to 3.1 CPU seconds a second of tracing for GPT, MoE, wide ResNets and U-Nets.
_WRITING_TRACES = 3.0

# A note on a plan that was not written out.
NOT_COUNTED = (
    "memory as the search counts it: no time was left to write the plan's programs out and count their peak, which a "
    "longer time limit does"
)

# What may not be counted on a device, by part of the space of plans (`SearchResult.part`).
Missed = Callable[[str], MissedMemory]

# Given that, the seconds that a step of a wanted plan counts for at most, and the seconds that the search may take, the
# best plan.
Search = Callable[[Missed, float, float], SearchResult]


class _TooLarge(NamedTuple):
    """A plan that was too large, by the rank that exceeds its memory the most."""

    share: float  # of what a device of it can hold, what it needs with what is to spare
    peak_bytes: float  # predicted, on a device
    usable_bytes: float  # of a device
    microbatches: int


class Refinement:
    """The loop for one request on one cluster.

    Args:
      asked: the request, with its time limit.
    """

    def __init__(self, asked: PlanRequest) -> None:
        self._asked = asked
        self._missed: dict[str, MissedMemory] = {}
        # Of the plans that were too large, the one that exceeds the memory of its fullest device the least.
        self._leanest: _TooLarge | None = None
        self._writing_seconds: float | None = None  # that the last plan took
        # Of all plans, by the first search, which had all memory: what is reserved later may rule out plans that fit.
        # And by those with more.
        self._least_seconds: float | None = None
        self._counts_in_vain = False  # whether the search of the last plan that fits did, and memory binds it
        self._counted: dict[Hashable, StageMemory] = {}

    def missed(self, part: str) -> MissedMemory:
        """What the search of a part of the space may not count, as plans of it have shown."""
        return self._missed.setdefault(part, MissedMemory(MARGIN))

    @property
    def _spare_seconds(self) -> float:
        """Of the time limit and one trace on top, beside what writing a plan out takes: as long as the last one, or as
        is expected of the first. Negative where there is no time for that."""
        tracing, writing = self._asked.traces.longest_seconds, self._writing_seconds
        return self._asked.left_seconds + tracing - (_WRITING_TRACES * tracing if writing is None else writing)

    def run(self, search: Search, *, what: str, where: str, try_: str | None = None) -> SearchResult:
        """The first plan of a search whose programs fit, with the memory that they need, or a faster one that is found
        once no reserve is a guess and no memory is counted in vain; where no time is left to write it out, the first
        one, with a note.

        Args:
          search: given what may not be counted on a device, the seconds that a step may count for at most, and those
            that the search may take, the best plan; once the time is over, the first.
          what: is refused where no plan fits.
          where: the same.
          try_: the same; None for less to hold.

        Raises:
          MemoryExceeded: if no plan fits.
          NothingFaster: if the search says so, or no time is left and the request is for what is faster than a plan.
        """
        exceeded = partial(self._exceeded, what, where, try_ or smaller_words(self._asked.remat))
        best = self._first_that_fits(search, self.missed, self._asked.faster_than_seconds, exceeded, ATTEMPTS)
        # What was missed in some numbers of microbatches was reserved in the others too, where less may be missed.
        guessed = self._leanest is not None and self._asked.microbatches is None
        guessed = guessed and best.counted_seconds > (1 + WORTH) * best.least_seconds
        while self._spare_seconds > 0 and (guessed or self._counts_in_vain):
            attempts, guessed = ATTEMPTS if guessed else _FURTHER, False
            most = (1 - WORTH) * best.counted_seconds
            try:
                best = self._first_that_fits(search, self._known, most, exceeded, attempts).preferred_to(best)
            except (NothingFaster, PlanError):
                break
        return best

    def _known(self, part: str) -> MissedMemory:
        """What plans of a part of the space have missed, reserved in their own numbers of microbatches alone."""
        return self.missed(part).known

    def _first_that_fits(
        self, search: Search, missed: Missed, most: float, exceeded: Callable[[float], MemoryExceeded], attempts: int
    ) -> SearchResult:
        """The first plan of a search whose programs fit, and whose step counts for less than `most` seconds; so many
        plans of a part of the space may be too large."""
        made = Counter[str]()
        while max(made.values(), default=0) < attempts:
            try:
                found = search(missed, most, max(_SEARCH_SHARE * self._spare_seconds, 0.0))
            except NothingFaster as nothing:
                if self._least_seconds is None:
                    raise
                raise NothingFaster(self._least_seconds, nothing.considered) from None
            except MemoryExceeded as error:
                if self._least_seconds is None:
                    raise
                raise exceeded(self._least_seconds) from error
            if self._least_seconds is None:
                self._least_seconds = found.least_seconds
            elif self._counts_in_vain:  # what has more memory is ruled out by this search alone
                self._least_seconds = min(self._least_seconds, found.least_seconds)
            found = found.bounded(self._least_seconds)
            assert found.program is not None  # what is written out
            if self._spare_seconds < 0:
                return self._not_written_out(found, most)
            self._asked.tell("predicting memory")
            begun = time.perf_counter()
            # Of a cluster of several kinds the slowest device: stages on others count as its compiler would have it.
            platform = self._asked.cluster.device.compiler
            plan = written_out(found.plan, found.program, platform, counted=self._counted)
            self._writing_seconds = time.perf_counter() - begun
            made[found.part] += 1
            if self._fits(plan, held_bytes(found.plan), found.part):
                return replace(found, plan=plan)
        assert self._least_seconds is not None  # there was an attempt
        raise exceeded(self._least_seconds)

    def _not_written_out(self, found: SearchResult, most: float) -> SearchResult:
        """A plan with a note that nothing but the search has counted its memory.

        Raises:
          NothingFaster: if it is of no use, since another plan is known, whose step counts for `most` seconds.
        """
        if isfinite(most):
            late = Considered(plan_words(found.plan), "not written out, out of time", seconds=found.step_seconds)
            raise NothingFaster(found.least_seconds, (*found.considered, late))
        return found.noted(NOT_COUNTED)

    def _fits(self, plan: Plan, counted: Sequence[float], part: str) -> bool:
        """Whether a plan fits that was written out. What the search of its part of the space missed or counted in vain,
        which `counted` these bytes on a device of each rank, is learned."""
        peaks, usable, stages = held_bytes(plan), usable_bytes(plan), _ranks(plan)
        plain = [any(not stage.rematerialised for stage in each) for each in stages]
        self.missed(part).learn(plan.microbatches, counted, peaks, usable, plain)
        share, rank = max(
            (MARGIN * peak / most, rank) for rank, (peak, most) in enumerate(zip(peaks, usable, strict=True))
        )
        if share <= 1:
            self._counts_in_vain = any(
                stage.rematerialised and min(most / MARGIN, seen) - peak > _IN_VAIN * most
                for each, seen, peak, most in zip(stages, counted, peaks, usable, strict=True)
                for stage in each
            )
            return True
        if self._leanest is None or share < self._leanest.share:
            self._leanest = _TooLarge(share, peaks[rank], usable[rank], plan.microbatches)
        return False

    def _exceeded(self, what: str, where: str, try_: str, least_seconds: float) -> MemoryExceeded:
        assert self._leanest is not None  # a plan was too large
        lean = self._leanest
        error = MemoryExceeded(
            refused=what, got=f"{size_words(lean.usable_bytes)} usable on a device",
            needed=f"about {size_words(MARGIN * lean.peak_bytes)} on a device: {size_words(lean.peak_bytes)}, the "
            f"predicted peak of the leanest plan found, with {microbatches_words(lean.microbatches)}, and "
            f"{MARGIN - 1:.0%} to spare",
            where=where, try_=try_,
        )  # fmt: skip
        error.least_seconds = least_seconds
        return error


def _ranks(plan: Plan) -> list[list[Stage]]:
    """The stages of each rank: those on the same devices."""
    found: dict[tuple[int, ...], list[Stage]] = {}
    for stage in plan.stages:
        found.setdefault(stage.devices, []).append(stage)
    return list(found.values())


def usable_bytes(plan: Plan) -> tuple[float, ...]:
    """What a device of each rank of a plan can hold."""
    return tuple(stages[-1].memory_limit_bytes for stages in _ranks(plan))


def held_bytes(plan: Plan) -> tuple[float, ...]:
    """What a device of each rank of a plan holds, all of its stages together."""
    return tuple(sum(stage.memory.total for stage in stages) for stages in _ranks(plan))
