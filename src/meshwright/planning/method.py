"""Plans by a search method of the literature (`search.rivals`), checked like any other plan before they are returned.

The method searches the space in the loop of every search (`refine`): the best choice that it finds is written out, and
where its programs hold too much, what was missed is reserved and the method searches again in the time that is left.
"""

from __future__ import annotations

from ..errors import MemoryExceeded, PlanError
from ..report.table import format_seconds
from ..search.alternative import one_stage_words, stages_words
from ..search.considered import Considered
from ..search.result import NothingFaster, SearchResult
from ..search.rivals import Budget, Found, Search, search_named
from ..search.space.choice import Choice
from ..search.space.space import Space
from ..search.stages.reserve import MissedMemory, nothing_reserved
from .microbatch_counts import microbatch_counts
from .programs import StepPrograms
from .refine import Missed, Refinement
from .request import DEFAULT_METHOD, PlanRequest
from .stages import stage_request

# What a search is given at least, of all time: some methods find nothing at once. Chosen, not measured.
_LEAST_SHARE = 0.1


def space_of(asked: PlanRequest, missed: MissedMemory | None = None) -> Space:
    """All plans of a request; of a device's memory what is `missed` may not be counted.

    Raises:
      PlanError: if the request makes no sense, or the step has no loss function that is marked.
    """
    counts = microbatch_counts(asked)
    program = asked.program(counts[0])
    if not program.marked:
        raise PlanError(
            refused="a search method for this step", got=program.marks.got,
            needed="a step whose loss function is marked: its forward program is what is cut into layers",
            where=asked.traces.name, try_=f"{program.marks.advice}; or method={DEFAULT_METHOD!r}",
        )  # fmt: skip
    return Space(stage_request(asked, StepPrograms(asked, counts)), reserve=missed or nothing_reserved)


def choice_words(space: Space, choice: Choice) -> str:
    """A choice of a space, one that fits, in a few words."""
    if len(choice.stages) > 1:
        sizes = [(stage.last - stage.first, stage.submesh.size) for stage in choice.stages]
        return stages_words(choice.microbatches, space.price(choice).schedule, sizes)
    (stage,) = choice.stages
    mesh = space.stages.meshes(choice.microbatches, stage.first, stage.last, stage.submesh)[stage.mesh]
    axes = [(axis.name, axis.size) for axis in mesh.axes]
    return one_stage_words(choice.microbatches, axes, rematerialised=stage.remat > 0)


def plan_by_method(asked: PlanRequest, method: str) -> SearchResult:
    """The best plan that a method finds in time.

    Raises:
      PlanError: if the method does not apply to the step, or finds nothing in time.
      MemoryExceeded: if nothing that it finds fits.
    """
    search = search_named(method)
    return asked.as_expected(lambda: _searched(asked, search))


def _searched(asked: PlanRequest, search: Search) -> SearchResult:
    refinement = Refinement(asked)
    space = space_of(asked, refinement.missed(""))

    def find(_: Missed, most: float, seconds: float) -> SearchResult:  # the space asks the refinement what is missed
        if most < asked.faster_than_seconds:
            raise NothingFaster(0.0, ())  # what a method finds is what it finds
        asked.tell(f"searching by {search.name}")
        space.reserve_again()
        budget = Budget(seconds=max(seconds, _LEAST_SHARE * asked.time_limit_seconds))
        best: Found | None = None
        considered = []
        for best in search.run(space, budget):
            spent = format_seconds(budget.spent_seconds)
            considered.append(Considered(choice_words(space, best.choice), f"{best.seconds:.6g} s, after {spent}"))
        made = space.plan(best.choice, gap=best.gap) if best is not None else None
        if made is None:
            kind = PlanError if budget.over else MemoryExceeded
            raise kind(
                refused=f"the search method {search.name}", got=f"no plan that fits in {budget.seconds:.3g} s",
                needed="more time, more memory, or another method", where="method=",
                try_=f"method={DEFAULT_METHOD!r}",
            )  # fmt: skip
        plan, program = made
        found = SearchResult(plan=plan, considered=tuple(considered), program=program)
        return found.noted(f"found by the search method {search.name}")

    return refinement.run(
        find, what=f"a plan for {asked.cluster.num_devices} x {asked.cluster.device.kind}", where="method=",
        try_=f"more devices, a smaller batch, or method={DEFAULT_METHOD!r}",
    )  # fmt: skip
