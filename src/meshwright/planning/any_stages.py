"""Plans of one stage and of several, whichever is asked for or faster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf, prod

from ..search.driver import WORTH, Part, best_of_parts
from ..search.result import NothingFaster, SearchResult
from .one_stage import fits_in_few, plan_one_stage
from .request import PlanRequest
from .stages import is_large, plan_stages

# The search for one stage may take this share of the time where several stages are searched afterwards.
_ONE_STAGE_SHARE = 0.5


def plan_in_stages(asked: PlanRequest, stages: int | None, *, faster_than_seconds: float = inf) -> SearchResult:
    """The fastest plan of so many stages, or of any number.

    Where one stage is soon planned it comes first, and bounds the search for several. Else several come first, in a
    search that prices one stage too, as a pipeline of one; then the best program of one stage, whose layouts are priced
    as they run and need not be gathered again for the backward pass. (Beside a plan of several stages, few ways to run
    one need a search: at most 7 CPU seconds more in eleven rows of `benchmarks/golden_plans.py` and `never_worse.py`.)

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
    if asked.mesh and not of_all:
        return plan_stages(asked, None, faster_than_seconds=faster_than_seconds)
    whole = devices == 1 or (asked.mesh and len(of_all) == len(asked.mesh))
    if whole or not program.marked or program.host_inputs or program.host_outputs:
        return plan_one_stage(asked, faster_than_seconds=faster_than_seconds)
    one_first = not is_large(program) or fits_in_few(asked)

    def one(most_seconds: float, seconds: float) -> SearchResult:
        mine = replace(asked.within(seconds) if one_first else asked, mesh=of_all)
        return plan_one_stage(mine, faster_than_seconds=most_seconds, **({} if one_first else {"gap": WORTH}))

    def several(most_seconds: float, seconds: float) -> SearchResult:
        del seconds
        return plan_stages(replace(asked, several=one_first), None, faster_than_seconds=most_seconds)

    first = Part(words="one stage", search=one, share=_ONE_STAGE_SHARE if one_first else 1.0)
    second = Part(words="several stages", search=several)
    return best_of_parts(
        (first, second) if one_first else (second, first), left_seconds=lambda: asked.left_seconds,
        floor=lambda: asked.least_work_seconds, faster_than_seconds=faster_than_seconds,
    )  # fmt: skip


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
