"""The inter-operator problem of a request, and its restrictions to given stages and to plans that are found at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import numpy as np

from ...program.layers import equation_flops
from ...program.staged import StagedProgram
from ..inter.dynamic_program import solve_inter_op
from ..inter.problem import Crossing, Found, InterOpProblem, Order, PlacedStage
from ..inter.submeshes import Submesh
from ..stages.costs import StageCosts
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
    problem = InterOpProblem(
        layers=len(costs.program.layers),
        devices=request.cluster.num_devices,
        submeshes=places,
        options=costs.options if share == 1 else costs.shared_options(share),
        crossings=crossings,
        transfer_seconds=costs.submeshes.transfer_seconds,
        microbatches=round(costs.program.microbatches / share),
        limit_bytes=costs.limit_bytes,
        order=order,
        loose=costs.loose_ends,
        num_stages=request.stage_count,
        least=lambda submesh: costs.least(submesh, share),
        fastest=lambda submesh, in_flight: costs.fastest(submesh, in_flight, share),
        kind=costs.solver.kind_of.__getitem__,
    )
    if request.layers is None:
        return problem
    ranges = set(pairwise(accumulate(request.layers, initial=0)))
    return _only(problem, lambda first, last, place: (first, last) in ranges)


def restricted(problem: InterOpProblem, chain: set[tuple[int, int, Submesh]], count: int) -> InterOpProblem:
    """The problem restricted to the given stages, each with all its options."""
    return _only(problem, lambda *one: one in chain, submeshes=sorted({place for *_, place in chain}), num_stages=count)


def of_stages(problem: InterOpProblem, stages: Sequence[PlacedStage]) -> InterOpProblem:
    """The problem whose only plan is the given stages as they are."""
    options = {stage[:3]: (stage.option,) for stage in stages}
    return replace(
        problem, submeshes=[stage.submesh for stage in stages], num_stages=len(stages),
        options=lambda first, last, submesh, k: options.get((first, last, submesh), ()),
    )  # fmt: skip


def _only(problem: InterOpProblem, keep: Callable[[int, int, Submesh], bool], **changes: Any) -> InterOpProblem:
    inner = problem.options
    return replace(
        problem, options=lambda first, last, place, k: inner(first, last, place, k) if keep(first, last, place) else (),
        **changes,
    )  # fmt: skip


def first_seconds(easy: InterOpProblem, problem: InterOpProblem, program: StagedProgram) -> float:
    """The objective of a first plan by estimates; infinite if there is none.

    Args:
      easy: the problem of stages whose memory does not bind: the best of these, if there is any.
      problem: of all stages: else the best of those with equal work.
      program: that they are of.
    """
    found = solve_inter_op(easy, beam=1)
    if found is not None:
        return found.seconds
    plain = (stages_of_like_work(program, problem, 1 << power) for power in range(7))
    return min((found.seconds for found in plain if found is not None), default=inf)


def stages_of_like_work(program: StagedProgram, problem: InterOpProblem, count: int) -> Found | None:
    """The plan of `count` stages with about equal work on equal submeshes; None if there is none."""
    layers, devices = problem.layers, problem.devices
    if count > layers or devices % count or problem.num_stages not in (None, count):
        return None
    size = devices // count
    work = equation_flops(program.graph, program.equations)
    done = np.cumsum([work[first:last].sum() for first, last in program.layers])
    ends = np.searchsorted(done, done[-1] * np.arange(1, count) / count) + 1
    bounds = [0, *ends.tolist(), layers]
    chain = {(first, last, Submesh(n * size, (n + 1) * size)) for n, (first, last) in enumerate(pairwise(bounds))}
    if any(first >= last or submesh not in problem.submeshes for first, last, submesh in chain):
        return None
    return solve_inter_op(restricted(problem, chain, count))
