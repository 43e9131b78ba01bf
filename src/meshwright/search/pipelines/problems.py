"""The inter-operator problem of a request, under the costs of its stages."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The problem of one order in one number of microbatches.

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
        loose=costs.loose_ends,
        num_stages=request.stage_count,
        least=lambda submesh: costs.least(submesh, share),
        fastest=lambda submesh, in_flight: costs.fastest(submesh, in_flight, share),
        kind=costs.solver.kind_of.__getitem__,
    )
    return problem if request.layers is None else of_layers(problem, request.layers)


def in_every_number(problem: InterOpProblem) -> list[InterOpProblem]:
    """The problem with each possible number of stages, from two on.

    Args:
      problem: in any number of stages.
    """
    return [replace(problem, num_stages=count) for count in range(2, problem.most_places + 1)]
