"""The inter-operator problem of a request, under the costs of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..inter.problem import Crossing, InterOpProblem, Order
from ..inter.submeshes import Submesh
from ..stages.costs import StageCosts
from .given import of_layers
from .request import StageRequest


def problem_of(
    request: StageRequest,
    places: Sequence[Submesh],
    costs: StageCosts,
    order: Order,
    crossings: Sequence[Crossing],
    share: float = 1.0,
) -> InterOpProblem:
    """What to solve.

    Args:
      request: of the search.
      places: submeshes that stages may have.
      costs: of the stages in one number of microbatches.
      order: in which they run.
      crossings: what layers share.
      share: the microbatches are this share of those of the costs' program.
    """
    submeshes = costs.submeshes
    problem = InterOpProblem(
        layers=len(costs.program.layers),
        devices=request.cluster.num_devices,
        submeshes=places,
        options=costs.options if share == 1 else costs.shared_options(share),
        crossings=crossings,
        transfer_seconds=submeshes.transfer_seconds,
        microbatches=round(costs.program.microbatches / share),
        limit_bytes=costs.limit_bytes,
        order=order,
        num_stages=request.stage_count,
        least=lambda submesh: costs.least(submesh, share),
        fastest=lambda submesh, in_flight: costs.fastest(submesh, in_flight, share),
        kind=costs.solver.kind_of.__getitem__,
    )
    return problem if request.layers is None else of_layers(problem, request.layers)


def in_stages(problem: InterOpProblem, counts: Iterable[int]) -> list[InterOpProblem]:
    """The problem in each of these numbers of stages that there can be.

    Args:
      problem: in any number of stages.
      counts: numbers of stages.
    """
    most = min(problem.layers, problem.devices)
    return [replace(problem, num_stages=count) for count in sorted(counts) if 1 < count <= most]


def worth_splitting(finished: Iterable[tuple[int, float]], microbatches: int, most_seconds: float) -> set[int]:
    """Numbers of stages in which a split backward may be worth it: those of plans with a whole one that it would make
    fast enough, and twice as many, since smaller bubbles allow more.

    >>> sorted(worth_splitting([(4, 10.0), (8, 20.0)], 16, 10.0))
    [4, 8]

    Args:
      finished: how many stages plans with a whole backward have, and their seconds.
      microbatches: in a step.
      most_seconds: what takes longer is of no interest.
    """
    worth = {n for n, seconds in finished if seconds * _least_share_split(n, microbatches) <= most_seconds}
    return {times * count for count in worth for times in (1, 2)}


def _least_share_split(stages: int, microbatches: int) -> float:
    """What a step takes with a split backward, of what it takes with a whole one: a third of the bubble of 1F1B."""
    return (microbatches + (stages - 1) / 3) / (microbatches + stages - 1)
