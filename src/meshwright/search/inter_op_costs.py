"""The inter-operator problem of a request, under the costs of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from .given_stages import of_layers
from .inter_op_problem import Crossing, InterOpProblem, Order
from .stage_costs import StageCosts
from .stage_request import StageRequest
from .submeshes import Submesh


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
    )
    return problem if request.layers is None else of_layers(problem, request.layers)


def least_share_split(stages: int, microbatches: int) -> float:
    """What a step takes with a split backward, of what it takes with a whole one: a third of the bubble of 1F1B.

    Args:
      stages: of the pipeline.
      microbatches: in a step.
    """
    return (microbatches + (stages - 1) / 3) / (microbatches + stages - 1)
