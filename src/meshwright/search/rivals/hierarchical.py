"""The default search, priced in the same space as the others.

Paper: Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI
2022. Method: a dynamic program over stages with the integer program of each stage inside (`search.pipelines`), once for
one stage, which runs as one program, and once for several, compared by `search.driver`: the second only has to find
something faster than the first.

Cost: that of planning. Limits: neither search yields plans on the way, so its curve has few points. What the dynamic
program proves holds as far as its estimates of ranges are lower bounds (docs/stages.md, *The gap*), and two percent
less where stages may be several: it takes a split backward only if that gains as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ...errors import MemoryExceeded
from ...program.staged import whole_program
from ...schedule import WORTH_SPLITTING
from ..driver import Part, search_parts
from ..inter.submeshes import Submesh
from ..pipelines.driver import StageSearch
from ..pipelines.request import SMALL_PROGRAM
from ..result import SearchResult
from ..space.choice import Choice, StageChoice
from ..space.space import Space
from ..stages.solved import SolvedStage
from .protocol import Budget, Found, Incumbent

# The first of the two searches may take this share of the time. Chosen, not measured.
_FIRST_SHARE = 0.5


class Hierarchical:
    """See the module."""

    name, exact = "hierarchical", True
    paper = (
        "Zheng et al., Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning, OSDI 2022"
    )

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        best, counts = Incumbent(space.bound(Choice())), space.stages.stage_counts
        parts = []
        if counts is None or 1 in counts:
            parts.append(Part(words="one stage", search=partial(_one_stage, space), share=_FIRST_SHARE))
        if space.cluster.num_devices > 1 and (counts is None or counts != {1}):
            parts.append(Part(words="several stages", search=partial(_several_stages, space), share=_FIRST_SHARE))
        if space.stages.program(space.counts[0]).graph.runs > SMALL_PROGRAM:
            parts.reverse()
        parts[-1], least = replace(parts[-1], share=1.0), 0.0
        try:
            for found in search_parts(parts, left_seconds=lambda: budget.left_seconds, floor=lambda: 0.0, worth=0.0):
                choice = _choice(space, found)
                yield from best.offer(choice, budget.price(space, choice))
                least = found.least_seconds
            # Where stages may be several, a plan that splits its backward counts for more than its seconds.
            yield from best.prove(least if counts == {1} else least / (1 + WORTH_SPLITTING))
        except MemoryExceeded:
            return


def _one_stage(space: Space, faster_than_seconds: float, seconds: float) -> SearchResult:
    request = replace(
        space.request, alone=True, programs=[whole_program(space.stages.program(n).source) for n in space.counts],
        time_limit_seconds=seconds, faster_than_seconds=faster_than_seconds, gap=space.gap,
    )  # fmt: skip
    found = StageSearch(request).run(space.stages.reserve)
    # Layers are not those of the space.
    (stage,) = found.stages
    return replace(found, stages=(stage._replace(first=0, last=space.stages.layers(found.plan.microbatches)),))


def _several_stages(space: Space, faster_than_seconds: float, seconds: float) -> SearchResult:
    # One stage has a part of its own, by the costs of one program: what fits as a pipeline of one stage may not there.
    counts = space.stages.stage_counts
    request = replace(
        space.request, schedules=space.schedules, time_limit_seconds=seconds, faster_than_seconds=faster_than_seconds,
        several=counts is None or 1 in counts,
    )  # fmt: skip
    return StageSearch(request).run(space.stages.reserve)


def _choice(space: Space, found: SearchResult) -> Choice:
    """The choice that a plan is of."""
    count = found.plan.microbatches

    def number(first: int, last: int, submesh: Submesh, axes: tuple[tuple[str, int], ...]) -> int:
        """Of a logical mesh among those that a stage may have."""
        meshes = space.stages.meshes(count, first, last, submesh)
        return [tuple((axis.name, axis.size) for axis in mesh.axes) for mesh in meshes].index(axes)

    stages = []
    for first, last, submesh, option in found.stages:
        solved: SolvedStage = option.tag
        mesh = number(first, last, submesh, tuple((axis.name, axis.size) for axis in solved.mesh.axes))
        stages.append(StageChoice(first, last, submesh, mesh, solved.remat, solved.chosen.solution.choices))
    choice = Choice(count, tuple(stages))
    # One stage alone has other costs than as a pipeline's: its layouts are solved again.
    return choice if len(stages) > 1 else choice.structure
