"""Zero-bubble pipelines: weight gradients split off and used to fill the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024; arXiv 2401.10241), the handcrafted schedule ZB-H1: input
gradients keep the order of 1F1B, so the stages before get their cotangents without waiting for weight gradients; those
of stage i start i microbatches late, so that the same n microbatches are in flight on every stage, as many as the first
stage of 1F1B has, and the ones left over fill the time in which the pipeline drains.

For equal stages with t_f = t_input = t_weight = t and B >= n microbatches a step takes (3B + n - 1) t: a third of the
bubble of 1F1B. With fewer microbatches than stages the way there and back dominates, (2n - 1 + 2B) t.

Known limit: the order is made for parts of about equal length. ZB-H2 (no bubble, twice the memory) and the paper's
automatic search are not here.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import check_count
from .instruction import Edge, Instruction, Kind, for_each_microbatch
from .schedule import Schedule, stage_on_each_rank


def zero_bubble(stages: int, microbatches: int, *, edges: Sequence[Edge] | None = None) -> Schedule:
    """ZB-H1: 1F1B of forwards and input gradients, with weight gradients delayed by i microbatches on stage i.

    >>> zero_bubble(4, 8).in_flight
    (4, 4, 4, 4)

    Args:
      stages: how many, one on each rank.
      microbatches: how many.
      edges: of the stage graph; None for a chain.

    Raises:
      ScheduleError: fewer than one stage or microbatch, or an edge that is not of the stages.
    """
    stages = check_count("zero_bubble", "stages", stages)
    microbatches = check_count("zero_bubble", "microbatches", microbatches)
    ranks = [_program(stage, stages, microbatches) for stage in range(stages)]
    held = (min(stages, microbatches),) * stages
    return stage_on_each_rank("zero_bubble", microbatches, ranks, held=held, edges=edges)


def _program(stage: int, stages: int, microbatches: int) -> list[Instruction]:
    ahead, delay = min(stages - stage, microbatches), stage
    forward, gradient, weight = (
        for_each_microbatch(kind, stage, microbatches)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    order = list(forward[: ahead - 1])
    for m in range(microbatches):
        order += forward[m + ahead - 1 : m + ahead]
        order.append(gradient[m])
        order += weight[m - delay : m - delay + 1] if m >= delay else ()
    return [*order, *weight[max(microbatches - delay, 0) :]]
