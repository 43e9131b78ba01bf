"""The default search, priced in the same space as the others.

Paper: Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI
2022. Method: a dynamic program over stages with the integer program of each stage inside (`pipeline`, `inter_op`),
and the queue of one-stage plans (`one_stage`). The one that is worth more is asked first, and the other only for
something faster.

Cost: as planning. Limits: neither search can be asked what it knows on the way, so there are few points in time. What
the dynamic program proves holds under its own objective, and a split backward has to gain two percent to be taken: it
is no bound of the simulated steps of this space, in which a few pipelines are faster than it says any can be. So a
lower bound is given for plans of one stage alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ...errors import MemoryExceeded
from ..inter.submeshes import Submesh
from ..one_stage.driver import OneStageSearch
from ..one_stage.plan import SearchRequest
from ..pipelines.driver import StageSearch
from ..pipelines.request import SMALL_PROGRAM
from ..result import NothingFaster
from ..space.choice import Choice, Partial, StageChoice
from ..space.space import Space
from ..stages.solved import SolvedStage
from .search import Budget, Found, Incumbent

# The first of the two searches may take this share of the time.
_FIRST_SHARE = 0.5

_Found = tuple[list[Choice], float]


class Hierarchical:
    """See the module."""

    name, exact = "hierarchical", True
    paper = (
        "Zheng et al., Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning, OSDI 2022"
    )

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        best, counts = Incumbent(space.bound(Partial())), space.structures.stage_counts
        searches: list[Callable[[Space, float, float], _Found]] = []
        if counts is None or 1 in counts:
            searches.append(_one_stage)
        if space.cluster.num_devices > 1 and (counts is None or counts != {1}):
            searches.append(_several_stages)
        if space.program(space.structures.counts[0]).graph.runs > SMALL_PROGRAM:
            searches.reverse()
        for number, search in enumerate(searches):
            left = budget.left_seconds * (_FIRST_SHARE if number + 1 < len(searches) else 1.0)
            if left <= 0 or budget.over:
                return
            try:
                choices, least = search(space, left, best.seconds)
            except NothingFaster as nothing:
                choices, least = [], nothing.least_seconds
            except MemoryExceeded:
                choices, least = [], 0.0
            for choice in choices:
                yield from best.offer(choice, budget.price(space, choice))
            if searches == [_one_stage]:
                yield from best.prove(least)


class _Requests(Mapping[int, SearchRequest]):
    """The step as one stage in each number of microbatches, made when it is asked for."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def __iter__(self) -> Iterator[int]:
        return iter(self._space.structures.counts)

    def __len__(self) -> int:
        return len(self._space.structures.counts)

    def __getitem__(self, count: int) -> SearchRequest:
        request, program = self._space.request, self._space.program(count).source
        return SearchRequest(
            graph=program.graph, fingerprint=program.fingerprint, parameters=request.parameters,
            cluster=request.cluster, microbatches=count, mesh=request.mesh, pins=request.pins, remat=request.remat,
            split_dims=program.split_dims,
        )  # fmt: skip


def _one_stage(space: Space, seconds: float, faster_than_seconds: float) -> _Found:
    search = OneStageSearch(_Requests(space), time_limit_seconds=seconds, gap=space.gap)
    usable = space.cluster.device.usable_memory_bytes
    plan = search.run(
        lambda count: space.reserve(count).limit(usable, last=True), faster_than_seconds=faster_than_seconds
    ).plan
    assert plan.predicted is not None  # the search prices what it finds
    (stage,), count = plan.stages, plan.microbatches
    layers, whole = space.structures.layers(count), space.whole
    mesh = _number(space, count, 0, layers, stage.mesh)
    remat = "layer" if stage.rematerialised else "none"
    choice = Choice(count, (StageChoice(0, layers, whole, mesh, remat),))
    return [choice], (1 - plan.predicted.optimality_gap) * plan.predicted.step_seconds


def _several_stages(space: Space, seconds: float, faster_than_seconds: float) -> _Found:
    request = replace(
        space.request, schedules=space.schedules, time_limit_seconds=seconds, faster_than_seconds=faster_than_seconds
    )
    found = StageSearch(request).run(space.reserve)
    count, stages = found.plan.microbatches, []
    for placed in found.stages:
        solved: SolvedStage = placed.option.tag
        axes = tuple((axis.name, axis.size) for axis in solved.mesh.axes)
        mesh = _number(space, count, placed.first, placed.last, axes, placed.submesh)
        remat = "layer" if solved.segments else "none"
        layouts = solved.chosen.solution.choices
        stages.append(StageChoice(placed.first, placed.last, placed.submesh, mesh, remat, layouts))
    choice = Choice(count, tuple(stages))
    # One stage alone has other costs than as a pipeline's: its layouts are solved again.
    choices = [choice] if len(stages) > 1 else [choice.structure]
    return choices, 0.0


def _number(
    space: Space, count: int, first: int, last: int, axes: tuple[tuple[str, int], ...], submesh: Submesh | None = None
) -> int:
    """Of a logical mesh among those that a stage may have."""
    meshes = space.meshes(count, first, last, submesh or space.whole)
    known = [tuple((axis.name, axis.size) for axis in mesh.axes) for mesh in meshes]
    return known.index(tuple(axes))
