"""One stage or several: two parts of the space of plans, under one incumbent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod

from ..errors import PlanError
from ..search.driver import WORTH, Part
from ..search.pipelines.driver import StageSearch
from ..search.result import NothingFaster, SearchResult
from ..search.stages.solver import GAP
from .one_stage import OneStagePlanner, fits_in_few, plan_one_stage
from .request import PlanRequest
from .stages import is_large, plan_stages

# What one stage may take of the time where several are searched afterwards. Chosen, not measured.
_ONE_STAGE_SHARE = 0.5


def plan_in_stages(asked: PlanRequest) -> SearchResult:
    """The fastest plan of as many stages as are asked for, or of any number; errors as of `_in_stages`."""
    return asked.as_expected(lambda: _in_stages(asked))


def _in_stages(asked: PlanRequest) -> SearchResult:
    """The fastest plan of as many stages as are asked for, or of any number.

    Where one stage is soon planned it comes first, and bounds the search for several. Its plan is written out only if
    no plan of several stages is faster; where it is too large then, several are searched without that bound. Else
    several come first. One stage is a part of its own in both, since it runs as one program: that need not gather
    parameters again for its backward pass, and holds more than a pipeline of one would. (Beside a plan of several
    stages, few ways to run one need a search: at most 7 CPU seconds more in eleven rows of
    `benchmarks/golden_plans.py` and `never_worse.py`. Where the first plan is too large, memory binds, and many more
    would be written out for a plan that is seldom the best: 36 of 64 CPU seconds for wresnet-13b on 64 V100, whose best
    plan of one stage takes ten times as long as that of four.)

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
      NothingFaster: if no plan is as fast as asked for.
    """
    if asked.stages is not None:
        return plan_one_stage(asked) if asked.stages == 1 else plan_stages(asked)
    if asked.schedule == "inference":
        return _inference(asked)
    program = asked.program(asked.microbatches if asked.microbatches is not None else 1)
    devices = asked.cluster.num_devices
    of_all = [one for one in asked.mesh if prod(one[1]) == devices]
    whole = devices == 1 or (asked.mesh and len(of_all) == len(asked.mesh))
    if whole or not program.marked or program.host_inputs or program.host_outputs:
        return plan_one_stage(asked)
    if asked.mesh and not of_all:
        return plan_stages(asked)
    of_one = replace(asked, mesh=of_all)  # the logical meshes that one stage may have
    return asked.best_of(_one_or_several(asked, of_one, is_soon_planned=not is_large(program) or fits_in_few(asked)))


def _one_or_several(asked: PlanRequest, of_one: PlanRequest, *, is_soon_planned: bool) -> Iterator[Part]:
    """One stage and several, in the order in which they are searched."""
    planner, is_open = OneStagePlanner(of_one, gap=GAP if is_soon_planned else WORTH), True
    searches: dict[tuple[int, ...], StageSearch] = {}

    def one(plan: Callable[..., SearchResult], most_seconds: float, seconds: float) -> SearchResult:
        nonlocal is_open
        is_open = False
        try:
            return plan(most_seconds, time_limit_seconds=max(seconds, 0.0))
        except PlanError:
            is_open = True
            raise

    def stages(most_seconds: float, seconds: float) -> SearchResult:
        # An incumbent is written out only if no plan of these is, or if that is too large.
        kept = 0.0 if is_open else planner.writing_seconds
        within = asked.within(most_seconds, seconds)
        return plan_stages(replace(within, several=True, kept_seconds=kept), searches)

    # Without time to write a plan out one stage is the answer, whose memory is counted closest; not over unlike
    # devices, where several stages are most of what there is to gain.
    is_soon_planned |= planner.is_late and len({host.device for host in asked.cluster.hosts}) == 1
    several = Part(words="several stages", search=stages)
    if is_soon_planned:
        yield Part(words="one stage", search=partial(one, planner.draft), share=_ONE_STAGE_SHARE)
    drafted = not is_open
    yield several
    if drafted:
        yield Part(words="one stage", search=partial(one, partial(planner.plan, attempts=1)), confirms=True)
        if is_open:
            yield several
    if is_open:
        words = "one stage in less memory" if is_soon_planned else "one stage"
        yield Part(words=words, search=partial(one, planner.plan), goes_on=is_soon_planned)


def _inference(asked: PlanRequest) -> SearchResult:
    """Of a step that computes no gradients, which has no stages otherwise."""
    try:
        return plan_stages(asked)
    except NothingFaster:
        one = plan_one_stage(replace(asked, microbatches=None))
        if asked.microbatches in (None, 1):
            return one
        note = f"the {asked.microbatches} microbatches are not used: one stage takes the batch at once"
        return one.noted(note)
