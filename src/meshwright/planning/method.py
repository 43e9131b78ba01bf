"""Plans by a search method of the literature (`search.rivals`), checked like any other plan before they are returned.

The method searches the space in the loop of every search (`refine`): the best choice that it finds is written out, and
where its programs hold too much, what was missed is reserved and the method searches again in the time that is left.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import MemoryExceeded, PlanError
from ..program.expected import Unexpected
from ..report.table import format_seconds
from ..search.alternative import one_stage_words, stages_words
from ..search.considered import Considered
from ..search.pipelines.request import INTERLEAVED, SIMULATED
from ..search.result import SearchResult
from ..search.rivals import Budget, Found, Search, search_named
from ..search.space.choice import Choice
from ..search.space.space import Space
from ..search.stages.reserve import MissedMemory
from .microbatch_counts import microbatch_counts
from .programs import StepPrograms
from .refine import Refinement
from .request import DEFAULT_METHOD, PlanOptions, PlanRequest
from .stages import stage_request

# What a search is given at least, of all time: some methods find nothing at once.
_LEAST_SHARE = 0.1


def check_method(options: PlanOptions) -> None:
    """Refuse a method that does not exist, and what methods other than the default cannot do.

    Args:
      options: of a request.

    Raises:
      PlanError: saying what to leave out.
    """
    if options.method is None:
        return
    search = search_named(options.method)
    if search.name == DEFAULT_METHOD:
        return
    beside = {"preset=": options.preset, "refine=": options.refine}
    given = next((name for name, value in beside.items() if value is not None), None)
    if options.schedule is not None and (options.schedule not in SIMULATED or options.schedule == INTERLEAVED):
        given = f"schedule={options.schedule!r}"
    if given is not None:
        raise PlanError(
            refused=f"the search method {search.name}", got=f"{given} as well", needed="one or the other",
            where="method=", try_=f"leaving out {given}, or method={DEFAULT_METHOD!r}",
        )  # fmt: skip


def space_of(asked: PlanRequest, stages: int | None, missed: MissedMemory | None = None) -> Space:
    """All plans of a request.

    Args:
      asked: the request.
      stages: how many; None to choose.
      missed: what may not be counted on a device; None for nothing.

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
    request = stage_request(asked, stages, StepPrograms(asked, stages, counts))
    return Space(request) if missed is None else Space(request, reserve=missed)


def choice_words(space: Space, choice: Choice) -> str:
    """A choice in a few words.

    Args:
      space: of the choice.
      choice: that fits.
    """
    if len(choice.stages) > 1:
        sizes = [(stage.last - stage.first, stage.submesh.size) for stage in choice.stages]
        return stages_words(choice.microbatches, space.price(choice).schedule, sizes)
    (stage,) = choice.stages
    mesh = space.meshes(choice.microbatches, stage.first, stage.last, stage.submesh)[stage.mesh]
    axes = [(axis.name, axis.size) for axis in mesh.axes]
    return one_stage_words(choice.microbatches, axes, rematerialised=stage.remat == "layer")


def plan_by_method(asked: PlanRequest, stages: int | None, method: str) -> SearchResult:
    """The best plan that a method finds in time.

    Args:
      asked: the request.
      stages: how many; None to choose.
      method: its name.

    Raises:
      PlanError: if the method does not apply to the step, or finds nothing in time.
      MemoryExceeded: if nothing that it finds fits.
    """
    search = search_named(method)
    try:
        found = _searched(asked, stages, search)
        asked.expectations.check()
    except Unexpected:
        asked.expectations.give_up()
        found = _searched(asked, stages, search)
    return found


def _searched(asked: PlanRequest, stages: int | None, search: Search) -> SearchResult:
    refinement = Refinement(asked)
    space = space_of(asked, stages, refinement.missed)
    considered: list[Considered] = []

    def find(missed: MissedMemory, seconds: float) -> SearchResult:
        asked.tell(f"searching by {search.name}")
        considered.clear()
        space.reserve_again()
        seconds = max(seconds, _LEAST_SHARE * asked.time_limit_seconds)
        budget = Budget(seconds=seconds)
        best: Found | None = None
        for best in search.run(space, budget):
            spent = format_seconds(budget.spent_seconds)
            considered.append(Considered(choice_words(space, best.choice), f"{best.seconds:.6g} s, after {spent}"))
        made = space.plan(best.choice, gap=best.gap) if best is not None else None
        if made is None:
            kind = PlanError if budget.over else MemoryExceeded
            raise kind(
                refused=f"the search method {search.name}", got=f"no plan that fits in {seconds:.3g} s",
                needed="more time, more memory, or another method", where="method=",
                try_=f"method={DEFAULT_METHOD!r}",
            )  # fmt: skip
        plan, program = made
        notes = (*plan.notes, f"found by the search method {search.name}")
        return SearchResult(plan=replace(plan, notes=notes), considered=tuple(considered), program=program)

    return refinement.run(
        find, what=f"a plan for {asked.cluster.num_devices} x {asked.cluster.device.kind}", where="method=",
        try_=f"more devices, a smaller batch, or method={DEFAULT_METHOD!r}",
    )  # fmt: skip
