"""The fastest plan of a step as it is, or with dims padded that mesh axes do not divide (`program.padding`).

The step as it is comes first, then with a batch that as many as the devices divide, where that is not much larger: the
best plan of 6001 rows on 7 devices is a pipeline, of 6006 data parallelism. Then the uneven dims of the best plan so
far with the most at stake are padded, each time in a search for something faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..notes.uneven_dims import PlannedWork, padded_words, vocabularies
from ..program.batch import batch_extents, batch_inputs
from ..program.expected import Expectations
from ..program.padded_dims import PaddedDim
from ..program.trace import Program
from ..report.table import format_seconds
from ..search.considered import Considered
from ..search.driver import Part
from ..search.result import SearchResult
from .device_kinds import plan_for_kinds
from .request import PlanRequest, program_of

# How many sets of dims are padded at most, each in a search of its own; and by how much a batch grows at most. Chosen,
# not measured.
_TRIES, _BATCH_GROWS = 3, 1.25


class PaddedPlanning:
    """The search for a request over the step as it is, and with dims padded.

    Args:
      asked: the request.

    Attributes:
      tried: the dims of which it is known whether they make the plan faster.
    """

    def __init__(self, asked: PlanRequest) -> None:
        self._asked = asked
        self._plain: SearchResult | None = None
        self._best: SearchResult | None = None
        self._candidates: tuple[Considered, ...] = ()
        self._offered: set[PaddedDim] = set()
        self.tried: set[PaddedDim] = set()

    def run(self) -> SearchResult:
        """The fastest plan, with a note on what is padded in it.

        Raises:
          PlanError: if the request makes no sense, or nothing fits.
        """
        found = self._asked.best_of(self._parts())
        found = replace(found, considered=(*self._candidates, *found.considered))
        if not found.plan.padded:
            return found
        before = (
            "without there is none" if self._plain is None else f"{format_seconds(self._plain.step_seconds)} without"
        )
        words = padded_words(program_of(found), found.plan.padded)
        return found.noted(f"padded: {words}; {format_seconds(found.step_seconds)} a step, {before}")

    def _parts(self) -> Iterator[Part]:
        yield self._part("as it is", ())
        tries = _TRIES if self._asked.pads and self._asked.schedule != "inference" else 0
        while tries and self._asked.left_seconds > 0 and (dims := self._next()):
            self._offered.update(dims)
            tries -= 1
            known = () if self._best is None else self._best.plan.padded
            words = padded_words(self._program(), dims)
            yield self._part(f"padded, {words}", (*known, *dims))

    def _part(self, words: str, padded: tuple[PaddedDim, ...]) -> Part:
        """The plans of the program with these dims padded."""

        def search(most_seconds: float, seconds: float) -> SearchResult:
            asked = self._asked
            if padded:
                asked.tell(f"planning {words}")
                asked = replace(asked, padded=padded, expectations=Expectations())
                asked = asked.within(most_seconds, seconds)
            try:
                found = plan_for_kinds(asked)
            finally:
                if self._asked.left_seconds > 0:  # else it was broken off
                    self.tried.update(padded)
            self._best = found
            if not padded:
                self._plain = found
            # What is told of the search is that of the plan's own program; of the others the driver tells the step.
            self._candidates = found.considered
            return replace(found, considered=())

        return Part(words=words, search=search)

    def _program(self) -> Program:
        """That of the best plan so far, or the step's own."""
        asked = self._asked
        return asked.program(asked.microbatches or 1) if self._best is None else program_of(self._best)

    def _next(self) -> tuple[PaddedDim, ...]:
        """The dims to be padded next, which have not been; none where there are none."""
        best, asked, program = self._best, self._asked, self._program()
        sets = [self._batch(program)]
        if best is None:
            sets[0] += vocabularies(program, asked.cluster.num_devices)
        elif best.plan.num_devices > 1:
            work = PlannedWork(program, best.plan, asked.cluster, asked.constraints_in(program).roles)
            sets += [one.padded(program) for one in work.uneven_dims()]
        left = (tuple(sorted(set(dims) - self._offered)) for dims in sets)
        return next((dims for dims in left if dims), ())

    def _batch(self, program: Program) -> tuple[PaddedDim, ...]:
        """The batch, as many as there are devices dividing it, unless they do or it grows by too much."""
        asked, number = self._asked, self._asked.cluster.num_devices
        (extent, *others) = batch_extents(asked.args, asked.batch_axis) or (0,)
        if others or extent % number == 0 or -(-extent // number) * number > _BATCH_GROWS * extent:
            return ()
        batch = batch_inputs(program, asked.traces, asked.args, batch_axis=asked.batch_axis)
        return tuple(PaddedDim(name, dim, number) for name, dim in sorted(batch))
