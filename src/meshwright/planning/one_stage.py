"""Plans of one stage: the step in each number of microbatches, traced or extrapolated, searched, and refined."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf, isfinite

from ..errors import smaller_words
from ..search.intra.parameters import parameter_infos
from ..search.pipelines.driver import StageSearch
from ..search.pipelines.request import StageRequest
from ..search.result import SearchResult
from ..search.stages.reserve import MissedMemory
from ..search.stages.solver import GAP
from .microbatch_counts import microbatch_counts
from .programs import WholePrograms
from .refine import ATTEMPTS, MARGIN, Refinement, Search
from .request import PlanRequest

# A program that may fit in up to so many microbatches is searched in one stage first. Gemma 3 27B on 64 v5p takes
# 1.499 s a step after 41 CPU seconds of planning so, and 116 with several stages first. gpt3-15b on 32 V100 needs 64
# microbatches: 75 with one stage first, 26 with several first.
_FEW = 4


def plan_one_stage(asked: PlanRequest) -> SearchResult:
    """The fastest plan of one stage; errors as of `OneStagePlanner.plan`."""
    return OneStagePlanner(asked).plan(asked.faster_than_seconds)


class OneStagePlanner:
    """Plans of one stage, in as many microbatches as are best. What one call learns the next one knows.

    Args:
      asked: the request.
      gap: relative, to which layouts are solved.
    """

    def __init__(self, asked: PlanRequest, *, gap: float = GAP) -> None:
        self._asked = asked
        self._search = StageSearch(replace(_whole(asked), gap=gap))
        self._refinement = Refinement(asked)
        self._draft: SearchResult | None = None

    @property
    def is_late(self) -> bool:
        """Whether no time is left to write a plan out."""
        return self._refinement.spare_seconds < 0

    @property
    def writing_seconds(self) -> float:
        """What writing a plan out may take."""
        return self._refinement.writing_seconds

    def draft(self, faster_than_seconds: float, *, time_limit_seconds: float) -> SearchResult:
        """The fastest plan as the search counts its memory; `plan` writes it out. Arguments and errors as of `plan`."""
        self._draft = self._refinement.searched(self._search_for(faster_than_seconds, time_limit_seconds))
        return self._draft

    def plan(
        self, faster_than_seconds: float, *, time_limit_seconds: float = inf, attempts: int = ATTEMPTS
    ) -> SearchResult:
        """The fastest plan.

        Args:
          faster_than_seconds: a plan whose step takes longer is not wanted.
          time_limit_seconds: for all searches, beside that of the request.
          attempts: how many plans may turn out to be too large.

        Raises:
          PlanError: if the request makes no sense, or nothing fits.
          NothingFaster: if no plan is that fast.
        """
        asked, device = self._asked, self._asked.cluster.device
        return self._refinement.run(
            self._search_for(faster_than_seconds, time_limit_seconds),
            what=f"a plan for {asked.cluster.num_devices} x {device.kind}", where="stage 1 of 1",
            try_=smaller_words(asked.remat),
            known=isfinite(faster_than_seconds), attempts=attempts,
        )  # fmt: skip

    def _search_for(self, faster_than_seconds: float, time_limit_seconds: float) -> Search:
        asked = self._asked
        until = time.perf_counter() + time_limit_seconds

        def find(missed: MissedMemory, seconds: float) -> SearchResult:
            drafted, self._draft = self._draft, None
            if drafted is not None:
                return drafted
            asked.tell("searching one stage")
            left = max(min(seconds, until - time.perf_counter()), 0.0)
            found = self._search.run(missed, time_limit_seconds=left, faster_than_seconds=faster_than_seconds)
            return replace(found, program=asked.program(found.plan.microbatches))

        return find


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
