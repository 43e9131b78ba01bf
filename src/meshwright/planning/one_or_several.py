"""One stage or several: two parts of the space of plans, under one incumbent."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property, partial
from math import prod

from ..errors import MemoryExceeded
from ..presets.leaner import leaner_words
from ..search.driver import WORTH, Part, best_of_parts
from ..search.result import NothingFaster, SearchResult
from ..search.stages.reserve import MissedMemory
from ..search.stages.solver import GAP
from .one_stage import OneStage, fits_in_few
from .refine import Missed, Refinement
from .request import PlanRequest
from .stages import SeveralStages, is_large

# What the first of the two may take of the time, so that the other is searched too: one stage, or several. Chosen, not
# measured.
_ONE_FIRST, _SEVERAL_FIRST = 0.5, 0.75


def plan_in_stages(asked: PlanRequest) -> SearchResult:
    """The fastest plan of as many stages as are asked for, or of any number.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
      NothingFaster: if no plan is as fast as asked for.
    """
    return asked.as_expected(lambda: _in_stages(asked))


def _in_stages(asked: PlanRequest) -> SearchResult:
    several = asked.stages is not None and asked.stages > 1
    try:
        found = Refinement(asked).run(
            _Parts(asked).find,
            what=f"a plan{' of several stages' if several else ''} for {asked.cluster.num_devices} x "
            f"{asked.cluster.device.kind}",
            where="stage 1 of 1" if asked.stages == 1 else "the stage search",
        )  # fmt: skip
    except MemoryExceeded as error:
        if asked.preset is None or asked.stages == 1:
            raise
        refused = f"the preset {asked.preset} on {asked.cluster.num_devices} x {asked.cluster.device.kind}"
        raise error.named(refused, leaner_words(asked.preset)) from error
    if asked.schedule == "inference" and asked.microbatches not in (None, 1) and len(found.plan.stages) == 1:
        return found.noted(f"the {asked.microbatches} microbatches are not used: one stage takes the batch at once")
    return found


class _Parts:
    """One stage and several, as far as they are asked for, each with a search that goes on from one run to the next.

    One stage is a part of its own since it runs as one program: that need not gather parameters again for its backward
    pass, and holds more than a pipeline of one would. Where it is soon planned it comes first, and bounds the search
    for several; else several come first. (Beside a plan of several stages few ways to run one need a search: at most 7
    CPU seconds more in eleven rows of `benchmarks/golden_plans.py` and `never_worse.py`.)
    """

    def __init__(self, asked: PlanRequest) -> None:
        self._asked = asked
        self._runs = 0
        self._least_seconds = 0.0  # of all plans of one stage, by the first run, which has all memory

    def find(self, missed: Missed, faster_than_seconds: float, seconds: float) -> SearchResult:
        """The best plan of all parts.

        Args:
          missed: what may not be counted on a device, by part.
          faster_than_seconds: a plan whose step takes longer is not wanted.
          seconds: that the search may take.

        Raises:
          PlanError: if the request makes no sense, or nothing fits.
          NothingFaster: if no plan is as fast as asked for.
        """
        asked, until = self._asked, time.perf_counter() + seconds
        self._runs += 1
        parts = self._parts(missed, late=seconds <= 0)
        if len(parts) == 1:
            return parts[0].search(faster_than_seconds, seconds)
        return best_of_parts(
            parts, left_seconds=lambda: until - time.perf_counter(), floor=lambda: asked.least_work_seconds,
            faster_than_seconds=faster_than_seconds,
        )  # fmt: skip

    def _parts(self, missed: Missed, *, late: bool) -> list[Part]:
        """In the order in which they are searched."""
        asked = self._asked
        one, several = self._wanted
        # Without time to write a plan out one stage is the answer, whose memory is counted closest; not over unlike
        # devices, where several stages are most of what there is to gain.
        late = late and len({host.device for host in asked.cluster.hosts}) == 1
        first = one and (not several or late or self._is_soon_planned)
        alone = Part(
            words=OneStage.words, search=partial(self._find_one, missed(OneStage.words)),
            share=_ONE_FIRST if first else 1.0,
        )  # fmt: skip
        if not several:
            return [alone]
        staged = Part(
            words="several stages", search=partial(self._several.find, missed),
            share=_SEVERAL_FIRST if one and not first else 1.0,
        )  # fmt: skip
        if not one:
            return [staged]
        return [alone, staged] if first else [staged, alone]

    def _find_one(self, missed: MissedMemory, faster_than_seconds: float, seconds: float) -> SearchResult:
        if self._least_seconds >= faster_than_seconds:
            raise NothingFaster(self._least_seconds, ())
        try:
            return self._one.find(missed, faster_than_seconds, seconds)
        except NothingFaster as nothing:
            if self._runs == 1:
                self._least_seconds = nothing.least_seconds
            raise

    @cached_property
    def _wanted(self) -> tuple[bool, bool]:
        """Whether one stage may be the answer, and several."""
        asked = self._asked
        if asked.stages is not None:
            return asked.stages == 1, asked.stages > 1
        cannot = asked.cluster.num_devices == 1 or (asked.mesh and len(self._of_all) == len(asked.mesh))
        if asked.schedule != "inference" and not cannot:
            program = asked.program(asked.microbatches if asked.microbatches is not None else 1)
            cannot = not program.marked or program.host_inputs or program.host_outputs
        if cannot:
            return True, False
        return not asked.mesh or bool(self._of_all), True

    @property
    def _of_all(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Of the logical meshes asked for those that one stage may have."""
        return [one for one in self._asked.mesh if prod(one[1]) == self._asked.cluster.num_devices]

    @cached_property
    def _is_soon_planned(self) -> bool:
        asked = self._asked
        if asked.schedule == "inference":
            return False
        program = asked.program(asked.microbatches if asked.microbatches is not None else 1)
        return not is_large(program) or fits_in_few(self._for_one)

    @property
    def _for_one(self) -> PlanRequest:
        """The request as one stage has it."""
        asked = self._asked
        counts = None if asked.schedule == "inference" else asked.microbatches
        return replace(asked, microbatches=counts, mesh=self._of_all if self._wanted[1] else asked.mesh)

    @cached_property
    def _one(self) -> OneStage:
        alone = self._wanted == (True, False) or self._is_soon_planned
        return OneStage(self._for_one, gap=GAP if alone else WORTH)

    @cached_property
    def _several(self) -> SeveralStages:
        return SeveralStages(self._asked)
