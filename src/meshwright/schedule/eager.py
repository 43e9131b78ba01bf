"""Eager 1F1B: more forwards ahead, so that transfers hide behind compute.

Zhuang et al., "On Optimizing the Communication of Model Parallelism" (MLSys 2023): stage i of n runs 2(n - i) - 1
forwards before its first backward, one more per edge than 1F1B. Each edge then has one period of slack for its two
transfers: while 2c <= t_f + t_b on every edge, equal stages run at the period t_f + t_b. The price is activations,
almost twice those of 1F1B. Where transfers are longer than that, or shorter on some edges, `adaptive` fits better.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import check_count
from .instruction import Edge
from .one_f_one_b import alternate
from .schedule import Schedule


def eager_one_f_one_b(
    stages: int, microbatches: int, *, edges: Sequence[Edge] | None = None, split_backward: bool = False
) -> Schedule:
    """1F1B with twice the warm-up: at most 2(n - i) - 1 microbatches in flight on stage i of n.

    >>> eager_one_f_one_b(4, 8).in_flight
    (7, 5, 3, 1)

    Args:
      stages: how many, one on each rank.
      microbatches: how many.
      edges: of the stage graph; None for a chain.
      split_backward: run weight gradients as instructions of their own, right after the input gradients.

    Raises:
      ScheduleError: fewer than one stage or microbatch, or an edge that is not of the stages.
    """
    stages = check_count("eager_one_f_one_b", "stages", stages)
    depths = tuple(2 * (stages - stage) - 1 for stage in range(stages))
    return alternate("eager_one_f_one_b", microbatches, depths=depths, edges=edges, split_backward=split_backward)
