"""Plans of one stage and of several, whichever is asked for or faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf, prod

from ..errors import PlanError
from ..search.driver import WORTH, Part, best_of_parts
from ..search.one_stage.driver import GAP
from ..search.result import NothingFaster, SearchResult
from .one_stage import OneStagePlanner, fits_in_few, plan_one_stage
from .refine import ATTEMPTS
from .request import PlanRequest
from .stages import is_large, plan_stages

# The search for one stage may take this share of the time where several stages are searched afterwards.
_ONE_STAGE_SHARE = 0.5


def plan_in_stages(asked: PlanRequest, stages: int | None, *, faster_than_seconds: float = inf) -> SearchResult:
    """The fastest plan of so many stages, or of any number.

    Where one stage is soon planned and its first plan fits, it comes first, and bounds the search for several. Else
    several come first. One stage is a part of its own in both, since it runs as one program: that need not gather
    parameters again for its backward pass, and holds more than a pipeline of one would. (Beside a plan of several
    stages, few ways to run one need a search: at most 7 CPU seconds more in eleven rows of
    `benchmarks/golden_plans.py` and `never_worse.py`. Where the first plan is too large, memory binds, and many more
    would be written out for a plan that is seldom the best: 36 of 64 CPU seconds for wresnet-13b on 64 V100, whose best
    plan of one stage takes ten times as long as that of four.)

    Args:
      asked: the request.
      stages: how many; None to choose.
      faster_than_seconds: a plan whose step counts for more is not wanted.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
      NothingFaster: if no plan is that fast.
    """
    if stages is not None:
        plan = plan_one_stage if stages == 1 else partial(plan_stages, stages=stages)
        return plan(asked, faster_than_seconds=faster_than_seconds)
    if asked.schedule == "inference":
        return _inference(asked, faster_than_seconds)
    count = asked.microbatches if asked.microbatches is not None else 1
    program = asked.program(count)
    devices = asked.cluster.num_devices
    of_all = [one for one in asked.mesh if prod(one[1]) == devices]
    whole = devices == 1 or (asked.mesh and len(of_all) == len(asked.mesh))
    if whole or not program.marked or program.host_inputs or program.host_outputs:
        return plan_one_stage(asked, faster_than_seconds=faster_than_seconds)
    if asked.mesh and not of_all:
        return plan_stages(asked, None, faster_than_seconds=faster_than_seconds)
    return best_of_parts(
        _parts(asked, replace(asked, mesh=of_all), is_soon_planned=not is_large(program) or fits_in_few(asked)),
        left_seconds=lambda: asked.left_seconds, floor=lambda: asked.least_work_seconds,
        faster_than_seconds=faster_than_seconds,
    )  # fmt: skip


def _parts(asked: PlanRequest, of_one: PlanRequest, *, is_soon_planned: bool) -> Iterator[Part]:
    """One stage and several, in the order in which they are searched.

    Args:
      asked: the request.
      of_one: the same with the logical meshes that one stage may have.
      is_soon_planned: whether one stage is.
    """
    planner, tried = OneStagePlanner(of_one, gap=GAP if is_soon_planned else WORTH), False

    def one(most_seconds: float, seconds: float, attempts: int = ATTEMPTS) -> SearchResult:
        return planner.plan(
            faster_than_seconds=most_seconds, time_limit_seconds=max(seconds, 0.0), attempts=attempts
        )  # fmt: skip

    def first(most_seconds: float, seconds: float) -> SearchResult:
        nonlocal tried
        tried = True
        try:
            return one(most_seconds, seconds, 1)
        except PlanError:
            tried = False
            raise

    def several(most_seconds: float, seconds: float) -> SearchResult:
        return plan_stages(replace(asked.within(seconds), several=True), None, faster_than_seconds=most_seconds)

    # Without time to write a plan out one stage is the answer, whose memory is counted closest; not over unlike
    # devices, where several stages are most of what there is to gain.
    is_soon_planned |= planner.is_late and len({host.device for host in asked.cluster.hosts}) == 1
    if is_soon_planned:
        yield Part(words="one stage", search=first, share=_ONE_STAGE_SHARE)
    yield Part(words="several stages", search=several)
    if not tried:
        words = "one stage in less memory" if is_soon_planned else "one stage"
        yield Part(words=words, search=one, goes_on=is_soon_planned)


def _inference(asked: PlanRequest, faster_than_seconds: float) -> SearchResult:
    """Of a step that computes no gradients, which has no stages otherwise."""
    try:
        return plan_stages(asked, None, faster_than_seconds=faster_than_seconds)
    except NothingFaster:
        one = plan_one_stage(replace(asked, microbatches=None), faster_than_seconds=faster_than_seconds)
        if asked.microbatches in (None, 1):
            return one
        note = f"the {asked.microbatches} microbatches are not used: one stage takes the batch at once"
        return replace(one, plan=replace(one.plan, notes=(*one.plan.notes, note)))
