"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (NeurIPS 2019). On stages
of f_i and b_i seconds with transfers of c seconds a step takes, exactly,
sum(f_i + b_i) + sum of all transfers + (B - 1)(max(f, c) + max(b, c)): on equal stages without transfers the bubble is
(n - 1) / (B + n - 1) of the step. Transfers hide well, because nothing waits for a value to come back until the last
forward; the price is all B microbatches in flight on every stage.

GPipe recomputes activations in the backward pass. That is a property of the stages, not of their order, and is left to
the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import check_count
from .instruction import Edge, Kind, for_each_microbatch
from .schedule import Schedule, stage_on_each_rank


def gpipe(stages: int, microbatches: int, *, edges: Sequence[Edge] | None = None) -> Schedule:
    """All forwards, then all backwards, the last microbatch first.

    >>> print(*(f"{one.kind[0]}{one.microbatch}" for one in gpipe(1, 3).ranks[0][:-1]))
    f0 f1 f2 b2 b1 b0

    Args:
      stages: how many, one on each rank.
      microbatches: how many; all are in flight on each stage.
      edges: of the stage graph; None for a chain.

    Raises:
      ScheduleError: fewer than one stage or microbatch, or an edge that is not of the stages.
    """
    stages = check_count("gpipe", "stages", stages)
    microbatches = check_count("gpipe", "microbatches", microbatches)
    ranks = [
        (
            *for_each_microbatch(Kind.FORWARD, stage, microbatches),
            *reversed(for_each_microbatch(Kind.BACKWARD, stage, microbatches)),
        )
        for stage in range(stages)
    ]
    return stage_on_each_rank("gpipe", microbatches, ranks, held=(microbatches,) * stages, edges=edges)
