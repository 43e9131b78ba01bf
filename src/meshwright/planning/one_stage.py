"""Plans of one stage: the step in each number of microbatches, traced or extrapolated, as one program."""

from __future__ import annotations

from dataclasses import replace

from ..search.intra.parameters import parameter_infos
from ..search.pipelines.driver import StageSearch
from ..search.pipelines.request import StageRequest
from ..search.result import SearchResult
from ..search.stages.reserve import MissedMemory
from ..search.stages.solver import GAP
from .microbatch_counts import microbatch_counts
from .programs import WholePrograms
from .refine import MARGIN
from .request import PlanRequest

# A program that may fit in up to so many microbatches is searched in one stage first. Gemma 3 27B on 64 v5p takes
# 1.499 s a step after 41 CPU seconds of planning so, and 116 with several stages first. gpt3-15b on 32 V100 needs 64
# microbatches: 75 with one stage first, 26 with several first.
_FEW = 4


class OneStage:
    """The search for plans of one stage, in as many microbatches as are best. What one call learns the next one knows.

    Args:
      asked: the request.
      gap: relative, to which layouts are solved.
    """

    words = "one stage"

    def __init__(self, asked: PlanRequest, *, gap: float = GAP) -> None:
        self._asked = asked
        self._search = StageSearch(replace(_whole(asked), gap=gap))

    def find(self, missed: MissedMemory, faster_than_seconds: float, seconds: float) -> SearchResult:
        """The fastest plan.

        Args:
          missed: what may not be counted on a device.
          faster_than_seconds: a plan whose step takes longer is not wanted.
          seconds: that the search may take.

        Raises:
          PlanError: if the request makes no sense, or nothing fits.
          NothingFaster: if no plan is that fast.
        """
        self._asked.tell("searching one stage")
        found = self._search.run(missed, time_limit_seconds=seconds, faster_than_seconds=faster_than_seconds)
        return replace(found, program=self._asked.program(found.plan.microbatches), part=self.words)


def fits_in_few(asked: PlanRequest) -> bool:
    """Whether a device may hold its share of the batch, in few microbatches, with nothing computed again. One stage is
    soon planned then: many microbatches are of no use, and memory does not bind much."""
    base = StageSearch(_whole(asked)).costs.base
    if base is None:
        return False
    first, usable = base.program.microbatches, asked.cluster.device.usable_memory_bytes / MARGIN
    most = max(count for count in microbatch_counts(asked) if count <= max(_FEW, first))
    return base.solver.least_bytes_alone(most) <= usable


def _whole(asked: PlanRequest) -> StageRequest:
    """The step in each number of microbatches that may be considered, as one stage; asking for one raises PlanError
    where it cannot be cut so."""
    first = asked.program(asked.microbatches if asked.microbatches is not None else 1)
    counts = microbatch_counts(asked)
    return StageRequest(
        programs=WholePrograms(asked, counts if first.marked else counts[:1]), parameters=parameter_infos(first),
        cluster=asked.cluster, constraints=asked.constraints_in(first), remat=asked.remat, alone=True, mesh=asked.mesh,
    )  # fmt: skip
