"""1F1B with a flush, and the one builder of all schedules that run a number of forwards ahead, then alternate.

PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021), the default of
Megatron-LM: stage i of n runs n - i forwards before its first backward, then one forward, one backward. Same time as
GPipe, (B + n - 1)(t_f + t_b) for B microbatches on equal stages without transfers, but at most n - i microbatches in
flight.

Known limit: a transfer that takes c seconds each way stretches the period from t_f + t_b towards t_f + t_b + 2c: the
warm-up leaves no slack to hide it in. `eager_one_f_one_b` and `adaptive` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .errors import check_count
from .instruction import Edge, Kind, for_each_microbatch
from .schedule import Mode, Schedule, stage_on_each_rank


def one_f_one_b(
    stages: int, microbatches: int, *, edges: Sequence[Edge] | None = None, split_backward: bool = False
) -> Schedule:
    """PipeDream-Flush: at most n - i microbatches in flight on stage i of n.

    >>> one_f_one_b(4, 8).in_flight
    (4, 3, 2, 1)

    Args:
      stages: how many, one on each rank.
      microbatches: how many.
      edges: of the stage graph; None for a chain.
      split_backward: run weight gradients as instructions of their own, right after the input gradients: cotangents
        leave earlier by the time of a weight gradient.

    Raises:
      ScheduleError: fewer than one stage or microbatch, or an edge that is not of the stages.
    """
    stages = check_count("one_f_one_b", "stages", stages)
    depths = tuple(range(stages, 0, -1))
    return alternate("one_f_one_b", microbatches, depths=depths, edges=edges, split_backward=split_backward)


def alternate(
    name: str,
    microbatches: int,
    *,
    depths: tuple[int, ...],
    edges: Sequence[Edge] | None = None,
    split_backward: bool = False,
    mode: Mode = Mode.SYNCHRONOUS,
) -> Schedule:
    """One stage on each rank: `depths[i]` forwards before the first backward of stage i, then one and one in turn.

    Args:
      name: of the schedule.
      microbatches: how many.
      depths: of each stage; not more at the target of an edge than at its source, or the schedule deadlocks.
      edges: of the stage graph; None for a chain.
      split_backward: whether weight gradients are instructions of their own.
      mode: when the optimizer steps.
    """
    microbatches = check_count(name, "microbatches", microbatches)
    gradients = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split_backward else (Kind.BACKWARD,)
    if mode is Mode.ASYNCHRONOUS:
        gradients += (Kind.UPDATE,)
    held = tuple(min(depth, microbatches) for depth in depths)
    ranks = []
    for stage, ahead in enumerate(held):
        forward = for_each_microbatch(Kind.FORWARD, stage, microbatches)
        backward = [for_each_microbatch(kind, stage, microbatches) for kind in gradients]
        # As long as there are forwards one comes before each backward.
        in_turn = chain.from_iterable(zip(forward[ahead - 1 :], *backward, strict=False))
        rest = chain.from_iterable(zip(*(row[microbatches - ahead + 1 :] for row in backward), strict=True))
        ranks.append([*forward[: ahead - 1], *in_turn, *rest])
    return stage_on_each_rank(name, microbatches, ranks, held=held, edges=edges, mode=mode)
