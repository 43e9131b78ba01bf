"""PipeDream: asynchronous 1F1B with weight stashing.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019): the order of 1F1B, but
each stage steps its optimizer after each microbatch and the pipeline is never drained between batches. A microbatch's
backward uses the weights its forward used, so stage i of n keeps n - i versions of its weights.

Gradients are delayed: stage i applies the gradient of weights n - i - 1 updates old. The numbers therefore differ from
those of one device, by design. Vertical sync (one version across stages) is not done.

To run without draining, ask for the microbatches of many batches at once; in the steady state a microbatch takes the
period of the slowest stage and there is no bubble.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import check_count
from .instruction import Edge
from .one_f_one_b import alternate
from .schedule import Mode, Schedule


def pipedream(stages: int, microbatches: int, *, edges: Sequence[Edge] | None = None) -> Schedule:
    """Asynchronous 1F1B: at most n - i microbatches in flight, and as many weight versions, on stage i of n.

    >>> schedule = pipedream(3, 8)
    >>> schedule.weight_versions
    (3, 2, 1)

    Args:
      stages: how many, one on each rank.
      microbatches: how many; the optimizer steps once for each.
      edges: of the stage graph; None for a chain.

    Raises:
      ScheduleError: fewer than one stage or microbatch, or an edge that is not of the stages.
    """
    stages = check_count("pipedream", "stages", stages)
    depths = tuple(range(stages, 0, -1))
    return alternate("pipedream", microbatches, depths=depths, edges=edges, mode=Mode.ASYNCHRONOUS)
