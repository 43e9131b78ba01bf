"""Dynamic programming over layers, each in the layouts that are best for it alone.

Papers: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019 (stages by dynamic
programming over layers and workers, so that the slowest stage is as fast as can be); Jia, Lin, Qi, Aiken, "Exploring
hidden dimensions in parallelizing convolutional neural networks" (OptCNN), ICML 2018 (a configuration for each
layer). Method: every layer is solved alone on every kind of submesh, logical mesh and rematerialisation, whatever its
memory. The seconds and bytes of a stage are the sums of its layers'. A dynamic program from the last layer to the
first finds, for each number of microbatches, the stages whose slowest is the fastest and that fit by these sums; of
equal ones those whose sum is the least. In the plan every operator keeps the layout of its layer alone, and only
inputs, parameters and shared values are solved around them.

Cost: layers x kinds of submesh small problems; layers^2 x devices x stages steps. Limits: what a layer prefers alone
is charged no conversion from the layer before; the fill of the pipeline and transfers between stages are not seen; no
bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from math import inf
from typing import NamedTuple

import numpy as np

from ...solve import Infeasible
from ..inter.submeshes import Submesh
from ..space.choice import Choice, LayoutNumbers, StageChoice
from ..space.space import Space
from ..space.stages import Stages
from .protocol import Budget, Found, Incumbent

# Of each number of microbatches so many plans are priced: those with the fastest slowest stage, by number of stages.
_PRICED = 4


class _Stages(NamedTuple):
    """The best stages for the last layers on the last devices: seconds of the slowest, and of all."""

    slowest: float
    total: float
    stages: tuple[StageChoice, ...]


class DynamicProgramming:
    """See the module."""

    name, exact = "dynamic_programming", False
    paper = "Narayanan et al., PipeDream, SOSP 2019; Jia et al., Exploring Hidden Dimensions (OptCNN), ICML 2018"

    def run(self, space: Space, budget: Budget) -> Iterator[Found]:
        """As `Search.run`."""
        best = Incumbent(space.bound(Choice()))
        for count in space.counts:
            if space.work_bound(Choice(count)) >= best.seconds:
                continue
            for one in sorted(_balanced(space.stages, count, budget).values())[:_PRICED]:
                if budget.over:
                    return
                choice = Choice(count, one.stages)
                choice = choice.laid_out(partial(_as_alone, space.stages, choice))
                if choice is not None:
                    yield from best.offer(choice, budget.price(space, choice))


def _balanced(stages: Stages, count: int, budget: Budget) -> dict[int, _Stages]:
    """The best stages by their number."""
    layers, devices, costs = stages.layers(count), stages.cluster.num_devices, stages.costs_in(count, alone=False)
    counts = range(1, min(layers, devices) + 1) if stages.stage_counts is None else stages.stage_counts

    @cache
    def sums(kind: Submesh, mesh: int, share: float) -> np.ndarray:
        """Of all layers before each layer, on a kind of submesh, and of all: seconds, and bytes as of `_alone`."""
        choices = (_layer_choice(stages, count, layer, kind, mesh, share) for layer in range(layers))
        each = (_alone(stages, choice) if not budget.over else (inf, inf, inf) for choice in choices)
        return np.cumsum([(0.0, 0.0, 0.0), *each], axis=0)

    @cache
    def stage(first: int, last: int, submesh: Submesh, in_flight: int) -> tuple[float, StageChoice] | None:
        """The fastest way to run a stage by the sums of its layers."""
        best: tuple[float, StageChoice] | None = None
        for choice in stages.ways(count, first, last, submesh):
            if (beside := _mesh_beside(stages, count, choice)) is None:
                continue
            kind, ranges = stages.like(submesh), _levels(stages, count, choice)
            with np.errstate(invalid="ignore"):  # layers without layouts
                whole = sum(
                    np.subtract(*sums(kind, beside, n)[[end, start]]) for n, start, end in ranges if end > start
                )
            assert isinstance(whole, np.ndarray)  # a stage has layers
            if np.isfinite(whole[0]):
                seconds, once_bytes, kept_bytes = whole.tolist()
                fits = once_bytes + in_flight * kept_bytes <= stages.limit_of(costs, choice)
                if fits and (best is None or seconds < best[0]):
                    best = seconds, choice
        return best

    # Of so many stages from the end on, by first layer and first device.
    placed, found = {(layers, devices): _Stages(0.0, 0.0, ())}, {}
    for number in range(1, max(counts) + 1):
        before, placed = placed, {}
        for (last, device), after in before.items():
            for submesh in (one for one in stages.places if one.stop == device):
                for first in range(1, last) if submesh.first else [0]:
                    one = stage(first, last, submesh, min(count, number)) if not budget.over else None
                    if one is not None:
                        new = _Stages(max(one[0], after.slowest), one[0] + after.total, (one[1], *after.stages))
                        placed[first, submesh.first] = min(placed.get((first, submesh.first), new), new)
        if number in counts and (0, 0) in placed:
            found[number] = placed[0, 0]
    ends = stages.ends
    return {n: one for n, one in found.items() if ends is None or [stage.last for stage in one.stages] == list(ends)}


def _levels(stages: Stages, count: int, stage: StageChoice) -> list[tuple[float, int, int]]:
    """How far up its ladder of rematerialisation each range of a stage's layers is, as of `Ladder.share_of`, with its
    bounds: as large a share of the layers as of the segments."""
    ladder = stages.ladder(count, stage.first, stage.last)
    above, below, first = ladder.levels(stage.remat)
    bound = stage.first + round((stage.last - stage.first) * first / max(ladder.segments, 1))
    shares = [ladder.share_of(ladder.segments * rung) for rung in (above, below)]
    return [(shares[0], stage.first, bound), (shares[1], bound, stage.last)]


def _mesh_beside(stages: Stages, count: int, stage: StageChoice) -> int | None:
    """The number of a stage's logical mesh among those of one of several stages; None for one that only a stage that is
    alone may have."""
    meshes = stages.meshes(count, stage.first, stage.last, stage.submesh)
    beside = stages.meshes_beside(stage.submesh)
    return beside.index(meshes[stage.mesh]) if meshes[stage.mesh] in beside else None


def _layer_choice(stages: Stages, count: int, layer: int, submesh: Submesh, mesh: int, share: float) -> Choice:
    """A layer so far up its ladder."""
    # Beside another stage: a layer alone is no plan of one stage.
    ladder = stages.costs_in(count, alone=False).solver.ladder(layer, layer + 1)
    one = StageChoice(layer, layer + 1, submesh, mesh, ladder.number_at(share))
    return Choice(count, (one, one))


def _alone(stages: Stages, layer: Choice) -> tuple[float, float, float]:
    """Seconds of a step of a layer in the layouts that are fastest for it alone, and its bytes throughout and for each
    microbatch in flight; infinite where there are none."""
    of = stages.layouts(layer, 0)
    try:
        fastest = of.problem.fastest.choices
    except Infeasible:
        fastest = None
    if fastest is None:
        return inf, inf, inf
    seconds = of.problem.seconds(fastest)
    return of.seconds(fastest), seconds.constant_bytes, seconds.in_flight_bytes


def _as_alone(stages: Stages, choice: Choice, number: int) -> LayoutNumbers | None:
    """Layouts of a stage with each operator as in its layer alone; None where these cannot be together in memory."""
    of, stage = stages.layouts(choice, number), choice.stages[number]
    wanted: dict[tuple[int, ...], object] = {}
    mesh = _mesh_beside(stages, choice.microbatches, stage)
    if mesh is None:
        return None
    levels = _levels(stages, choice.microbatches, stage)
    for share, layer in ((share, layer) for share, first, last in levels for layer in range(first, last)):
        alone = _layer_choice(stages, choice.microbatches, layer, stage.submesh, mesh, share)
        fastest = stages.layouts(alone, 0).problem.fastest
        if fastest.choices is not None:
            wanted |= stages.operators(alone, 0, fastest.choices)
    votes: dict[int, Counter[int]] = {}
    for path, operator in stages.paths(choice, number).items():
        node, known = of.problem.operator_node.get(operator), of.problem.operator_prices.get(operator)
        if node is not None and known is not None and path in wanted and wanted[path] in known.choices:
            votes.setdefault(node, Counter())[known.choices.index(wanted[path])] += 1
    kept = {node: [counted.most_common(1)[0][0]] for node, counted in votes.items()}
    return of.complete(kept)
