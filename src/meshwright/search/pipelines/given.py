"""Restrictions of the inter-operator problem: to given stages, to given layers, and to plans that are found at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from ...program.layers import equation_flops
from ...program.staged import StagedProgram
from ..inter.dynamic_program import solve_inter_op
from ..inter.problem import Found, InterOpProblem, PlacedStage
from ..inter.submeshes import Submesh
from ..stages.costs import StageCosts

POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64)


def restricted(problem: InterOpProblem, chain: set[tuple[int, int, Submesh]], count: int) -> InterOpProblem:
    """The problem restricted to the given stages, each with all its options."""
    inner = problem.options
    return replace(
        problem,
        submeshes=sorted({submesh for _, _, submesh in chain}),
        options=lambda first, last, submesh, k: (
            inner(first, last, submesh, k) if (first, last, submesh) in chain else ()
        ),
        num_stages=count,
    )


def of_stages(problem: InterOpProblem, stages: Sequence[PlacedStage]) -> InterOpProblem:
    """The problem whose only plan is the given stages as they are."""
    options = {stage[:3]: (stage.option,) for stage in stages}
    return replace(
        problem,
        submeshes=[stage.submesh for stage in stages],
        options=lambda first, last, submesh, k: options.get((first, last, submesh), ()),
        num_stages=len(stages),
    )


def of_layers(problem: InterOpProblem, layers: Sequence[int]) -> InterOpProblem:
    """The problem restricted to stages of so many layers each."""
    inner, ranges = problem.options, set(pairwise(accumulate(layers, initial=0)))
    return replace(
        problem, options=lambda first, last, place, k: inner(first, last, place, k) if (first, last) in ranges else ()
    )


def first_seconds(problem: InterOpProblem, costs: StageCosts) -> float:
    """The objective of a first plan by estimates: the best whose memory does not bind, or else the best of stages with
    equal work; infinite if there is none.

    Args:
      problem: of the costs.
      costs: of the stages.
    """
    costs.estimates.only_easy = True
    try:
        easy = solve_inter_op(problem, beam=1)
    finally:
        costs.estimates.only_easy = False
    if easy is not None:
        return easy.seconds
    plain = (stages_of_like_work(costs.program, problem, count) for count in POWERS_OF_TWO)
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
    bounds = [0, *(int(end) for end in ends), layers]
    chain = {(first, last, Submesh(n * size, (n + 1) * size)) for n, (first, last) in enumerate(pairwise(bounds))}
    if any(first >= last or submesh not in problem.submeshes for first, last, submesh in chain):
        return None
    return solve_inter_op(restricted(problem, chain, count))
