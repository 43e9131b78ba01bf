"""Inference pipelines: forwards only, microbatch after microbatch.

A step takes sum(f_i) + sum of the transfers + (B - 1) max(f, c) seconds. Nothing is kept for a backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import check_count
from .instruction import Edge, Kind, for_each_microbatch
from .schedule import Mode, Schedule, stage_on_each_rank


def inference(stages: int, microbatches: int, *, edges: Sequence[Edge] | None = None) -> Schedule:
    """Forwards only.

    >>> inference(2, 3).in_flight
    (1, 1)

    Args:
      stages: how many, one on each rank.
      microbatches: how many.
      edges: of the stage graph; None for a chain.

    Raises:
      ScheduleError: fewer than one stage or microbatch, or an edge that is not of the stages.
    """
    stages = check_count("inference", "stages", stages)
    microbatches = check_count("inference", "microbatches", microbatches)
    ranks = [for_each_microbatch(Kind.FORWARD, stage, microbatches) for stage in range(stages)]
    return stage_on_each_rank("inference", microbatches, ranks, held=(1,) * stages, edges=edges, mode=Mode.INFERENCE)
