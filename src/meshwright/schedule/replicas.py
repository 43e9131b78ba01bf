"""Replicas: every rank holds the whole program and runs microbatches of its own, a faster one more of them.

Data parallelism over groups of devices that are not alike. An array has equal shards, so one program over unlike
devices gives each the same work and waits for the slowest; replicas share a step's microbatches out instead. A step
takes max(a_i (f_i + b_i)) for shares a_i, then one exchange of gradients. Nobody waits for anybody before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from .errors import check_count, refusal
from .instruction import Edge, Instruction, Kind
from .schedule import Mode, Schedule


def replicas(stages: int, microbatches: int, *, shares: Sequence[int], edges: Sequence[Edge] | None = None) -> Schedule:
    """Each stage is a copy of the program with the next `shares[i]` microbatches, forward and backward in turn.

    >>> schedule = replicas(2, 3, shares=(2, 1))
    >>> print(*(str(one) for one in schedule.ranks[1]), sep="; ")
    forward of stage 1, microbatch 2; backward of stage 1, microbatch 2; update of stage 1

    Args:
      stages: how many copies, one on each rank.
      microbatches: how many in a step.
      shares: of each copy how many it runs.
      edges: none; copies send each other gradients only.

    Raises:
      ScheduleError: shares that are not those of the stages, or do not add up to the microbatches; edges.
    """
    stages = check_count("replicas", "stages", stages)
    microbatches = check_count("replicas", "microbatches", microbatches)
    shares = tuple(shares)
    if len(shares) != stages or min(shares) < 1 or sum(shares) != microbatches:
        got = f"the shares {', '.join(map(str, shares)) or 'of nobody'}"
        needed = f"{stages} numbers of at least 1 that add up to {microbatches} microbatches"
        raise refusal("replicas", "shares", got, needed, "more microbatches for the faster devices")
    if edges:
        raise refusal("replicas", "edges", f"the edge {edges[0]}", "none", "stages that are whole programs")
    bounds = list(pairwise(accumulate(shares, initial=0)))
    return Schedule(
        name="replicas",
        stages=stages,
        microbatches=microbatches,
        mode=Mode.SYNCHRONOUS,
        ranks=tuple(
            (
                *(
                    Instruction(kind=kind, stage=stage, microbatch=m)
                    for m in range(first, last)
                    for kind in (Kind.FORWARD, Kind.BACKWARD)
                ),
                Instruction(kind=Kind.UPDATE, stage=stage, microbatch=None),
            )
            for stage, (first, last) in enumerate(bounds)
        ),
        stage_ranks=tuple(range(stages)),
        edges=(),
        in_flight_limit=(1,) * stages,
        shares=shares,
    )
