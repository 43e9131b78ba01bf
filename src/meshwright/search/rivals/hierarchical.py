"""The default search, priced in the same space as the others.

Paper: Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI
2022. Method: a dynamic program over stages with the integer program of each stage inside (`search.pipelines`), and the
queue of one-stage plans (`search.one_stage`), compared by `search.driver`: the second only has to find something faster
than the first.

Cost: that of planning. Limits: neither search yields plans on the way, so its curve has few points. The dynamic program
proves its bound under its own objective, and it takes a split backward only if that gains two percent: its bound does
not hold for simulated steps in this space, where a few pipelines are faster. So a lower bound is given for plans of one
stage only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from ...errors import MemoryExceeded
from ..driver import Part, search_parts
from ..inter.submeshes import Submesh
from ..one_stage.driver import OneStageSearch
from ..one_stage.plan import SearchRequest
from ..pipelines.driver import StageSearch
from ..pipelines.request import SMALL_PROGRAM
from ..result import SearchResult
from ..space.choice import Choice, Partial, StageChoice
from ..space.space import Space
from ..stages.solved import SolvedStage
from .search import Budget, Found, Incumbent

# The first of the two searches may take this share of the time.
_FIRST_SHARE = 0.5


class Hierarchical:
    """See the module."""

    name, exact = "hierarchical", True
    paper = (
        "Zheng et al., Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning, OSDI 2022"
    )

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        best, counts = Incumbent(space.bound(Partial())), space.structures.stage_counts
        parts = []
        if counts is None or 1 in counts:
            parts.append(Part(words="one stage", search=partial(_one_stage, space), share=_FIRST_SHARE))
        if space.cluster.num_devices > 1 and (counts is None or counts != {1}):
            parts.append(Part(words="several stages", search=partial(_several_stages, space), share=_FIRST_SHARE))
        if space.program(space.structures.counts[0]).graph.runs > SMALL_PROGRAM:
            parts.reverse()
        parts[-1] = replace(parts[-1], share=1.0)
        try:
            for found in search_parts(parts, left_seconds=lambda: budget.left_seconds, floor=lambda: 0.0, worth=0.0):
                choice = _choice(space, found)
                yield from best.offer(choice, budget.price(space, choice))
                if len(parts) == 1 and not found.stages:
                    yield from best.prove(found.least_seconds)
        except MemoryExceeded:
            return


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
            cluster=request.cluster, microbatches=count, mesh=request.mesh, constraints=request.constraints,
            remat=request.remat,
            split_dims=program.split_dims,
        )  # fmt: skip


def _one_stage(space: Space, faster_than_seconds: float, seconds: float) -> SearchResult:
    search = OneStageSearch(_Requests(space), time_limit_seconds=seconds, gap=space.gap)
    usable = space.cluster.device.usable_memory_bytes
    return search.run(
        lambda count: space.reserve(count).limit(usable, last=True), faster_than_seconds=faster_than_seconds
    )


def _several_stages(space: Space, faster_than_seconds: float, seconds: float) -> SearchResult:
    request = replace(
        space.request, schedules=space.schedules, time_limit_seconds=seconds, faster_than_seconds=faster_than_seconds
    )
    return StageSearch(request).run(space.reserve)


def _choice(space: Space, found: SearchResult) -> Choice:
    """The choice that a plan is of."""
    count = found.plan.microbatches
    if not found.stages:
        (stage,) = found.plan.stages
        layers = space.structures.layers(count)
        mesh = _number(space, count, 0, layers, stage.mesh)
        remat = "layer" if stage.rematerialised else "none"
        return Choice(count, (StageChoice(0, layers, space.whole, mesh, remat),))
    stages = []
    for placed in found.stages:
        solved: SolvedStage = placed.option.tag
        axes = tuple((axis.name, axis.size) for axis in solved.mesh.axes)
        mesh = _number(space, count, placed.first, placed.last, axes, placed.submesh)
        remat = "layer" if solved.segments else "none"
        layouts = solved.chosen.solution.choices
        stages.append(StageChoice(placed.first, placed.last, placed.submesh, mesh, remat, layouts))
    choice = Choice(count, tuple(stages))
    # One stage alone has other costs than as a pipeline's: its layouts are solved again.
    return choice if len(stages) > 1 else choice.structure


def _number(
    space: Space, count: int, first: int, last: int, axes: tuple[tuple[str, int], ...], submesh: Submesh | None = None
) -> int:
    """Of a logical mesh among those that a stage may have."""
    meshes = space.meshes(count, first, last, submesh or space.whole)
    known = [tuple((axis.name, axis.size) for axis in mesh.axes) for mesh in meshes]
    return known.index(tuple(axes))
