"""The fastest plan of a step as it is, or with dims padded that mesh axes do not divide (`program.padding`).

The step as it is comes first, then with a batch that as many as the devices divide, where that is not much larger: the
best plan of 6001 rows on 7 devices is a pipeline, of 6006 data parallelism. Then the uneven dims of the best plan so
far with the most at stake are padded, each time in a search for something faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..notes.uneven_dims import PlannedWork
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
      tried: all dims that were padded in a search.
    """

    def __init__(self, asked: PlanRequest) -> None:
        self._asked = asked
        self._plain: SearchResult | None = None
        self._best: SearchResult | None = None
        self._candidates: tuple[Considered, ...] = ()
        self.tried: set[PaddedDim] = set()

    def run(self) -> SearchResult:
        """The fastest plan, with a note on what is padded in it.

        Raises:
          PlanError: if the request makes no sense, or nothing fits.
        """
        found = self._asked.best_of(self._parts())
        found = replace(found, considered=(*self._candidates, *found.considered))
        if self._plain is None or not found.plan.padded:
            return found
        dims = _words(program_of(found), found.plan.padded)
        return found.noted(
            f"padded: {dims}; {format_seconds(found.step_seconds)} a step, {format_seconds(self._plain.step_seconds)} "
            "as it is"
        )

    def _parts(self) -> Iterator[Part]:
        yield self._part("as it is", ())
        for _ in range(_TRIES if self._asked.pads and self._asked.schedule != "inference" else 0):
            dims = self._next()
            if self._best is None or not dims:
                return
            words = _words(program_of(self._best), dims)
            yield self._part(f"with {words} padded", (*self._best.plan.padded, *dims))

    def _part(self, words: str, padded: tuple[PaddedDim, ...]) -> Part:
        """The plans of the program with these dims padded."""

        def search(most_seconds: float, seconds: float) -> SearchResult:
            asked = self._asked
            if padded:
                asked.tell(f"planning {words}")
                asked = replace(asked, padded=padded, expectations=Expectations())
                asked = asked.within(most_seconds, seconds)
                self.tried.update(padded)
            found = plan_for_kinds(asked)
            self._best = found
            self._plain = self._plain or found
            # Of the other programs the best plan's step is enough to know.
            self._candidates = found.considered
            return replace(found, considered=())

        return Part(words=words, search=search)

    def _next(self) -> tuple[PaddedDim, ...]:
        """The dims of the best plan so far that are to be padded next; none where there are none."""
        best, asked = self._best, self._asked
        if best is None or best.plan.num_devices == 1:
            return ()
        program = program_of(best)
        work = PlannedWork(program, best.plan, asked.cluster, asked.constraints_in(program).roles)
        for dims in (self._batch(program), *(one.padded(program) for one in work.uneven_dims())):
            if not self.tried.issuperset(dims):
                return tuple(sorted(set(dims) - self.tried))
        return ()

    def _batch(self, program: Program) -> tuple[PaddedDim, ...]:
        """The batch, as many as there are devices dividing it, unless they do or it grows by too much."""
        asked, number = self._asked, self._asked.cluster.num_devices
        (extent, *others) = batch_extents(asked.args, asked.batch_axis) or (0,)
        if others or extent % number == 0 or -(-extent // number) * number > _BATCH_GROWS * extent:
            return ()
        batch = batch_inputs(program, asked.traces, asked.args, batch_axis=asked.batch_axis)
        return tuple(PaddedDim(name, dim, number) for name, dim in sorted(batch))


def _words(program: Program, padded: tuple[PaddedDim, ...]) -> str:
    """Dims of a program and what they are padded to."""
    shapes = {value.name: value.shape for value in (program.graph.values[v] for v in program.graph.inputs)}
    words = [f"dim {d.dim} of {d.name} from {shapes[d.name][d.dim]} to {d.extent(shapes[d.name])}" for d in padded]
    more = f" and {len(words) - 1} more" if len(words) > 1 else ""
    return words[0] + more + (f" in each of {program.microbatches} microbatches" if program.microbatches > 1 else "")
