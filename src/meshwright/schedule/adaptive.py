"""Adaptive eager 1F1B: as many forwards ahead on each edge as its transfers need, and no more.

With warm-up d_e on an edge, its source runs d_e more forwards ahead than its target. In a steady state of period T
the source must have sent c seconds before the target's forward and waits c seconds after the target's backward, which
leaves w t_b early when weight gradients follow the input gradients as instructions of their own. Both fit exactly when
T + 2c - w t_b <= d_e T, so

    d_e = max(1, 1 + ceil((2 c_e - w t_b) / T)).

1F1B is d_e = 1, eager 1F1B is d_e = 2. A stage with several edges runs ahead as far as the neediest of them asks.

A stage that is slower than those after it waits only at the start, until the first cotangent is back: R - t_b after its
first forward, R being a round trip. It is busy until then with (R - t_b) / t_f forwards; `filling_warm_up` gives it as
many as its memory has room for. (13 stages of gpt3-39b on 64 V100, the first of which takes 4 % longer than most: 464.6
s instead of 472.0.)

The schedule takes the whole numbers d_e, not the seconds: a plan stores them, and every process gets the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .errors import check_count, refusal
from .instruction import Edge
from .one_f_one_b import alternate
from .schedule import Schedule, check_edges

# (2c - w t_b) / T that is a whole number but for its last bits must not cost a microbatch of memory.
_ROUNDING = 1e-9


def adaptive_warm_up(
    transfer_seconds: Sequence[float], *, period_seconds: float, weight_gradient_seconds: float = 0.0
) -> tuple[int, ...]:
    """The warm-up d_e of each edge.

    >>> adaptive_warm_up([0.2, 2.0, 0.0], period_seconds=3.0)
    (2, 3, 1)

    Args:
      transfer_seconds: of each edge, one way; the mean of both ways where they differ.
      period_seconds: T, of the slowest stage, forward and backward.
      weight_gradient_seconds: w t_b, the part of a backward that is a weight gradient, when it is split off.

    Raises:
      ScheduleError: a time that is negative, infinite or not a number, or a period of zero.
    """
    named = [(f"transfer_seconds[{i}]", c) for i, c in enumerate(transfer_seconds)]
    for name, value in (*named, ("weight_gradient_seconds", weight_gradient_seconds)):
        if not (math.isfinite(value) and value >= 0):
            raise refusal("adaptive", name, f"{value} s", "finite seconds >= 0", "predicted or measured times")
    if not (math.isfinite(period_seconds) and period_seconds > 0):
        needed = "finite seconds > 0"
        raise refusal("adaptive", "period_seconds", f"{period_seconds} s", needed, "forward plus backward of a stage")
    slack = ((2 * c - weight_gradient_seconds) / period_seconds for c in transfer_seconds)
    return tuple(max(1, 1 + math.ceil(periods - _ROUNDING)) for periods in slack)


def filling_warm_up(
    warm_up: Sequence[int],
    *,
    edges: Sequence[Edge],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    least_in_flight: Sequence[int],
    most_in_flight: Sequence[int],
) -> tuple[int, ...]:
    """The warm-up of each edge with which stages are busy until their first cotangent comes back.

    >>> chain = [Edge(0, 1), Edge(1, 2)]
    >>> given = {"forward_seconds": [1.0] * 3, "backward_seconds": [2.0] * 3, "transfer_seconds": [0.0] * 2}
    >>> filling_warm_up([1, 1], edges=chain, least_in_flight=[5, 3, 1], most_in_flight=[9, 9, 9], **given)
    (3, 3)
    >>> filling_warm_up([1, 1], edges=chain, least_in_flight=[5, 3, 1], most_in_flight=[6, 9, 9], **given)
    (2, 3)

    Args:
      warm_up: the least of each edge.
      edges: of the stage graph.
      forward_seconds: of each stage.
      backward_seconds: of each stage.
      transfer_seconds: of each edge, both ways together.
      least_in_flight: of each stage that has an edge.
      most_in_flight: of each stage, where the least is no more.
    """
    round_trip = [f + b for f, b in zip(forward_seconds, backward_seconds, strict=True)]
    depths, found, most = [1] * len(round_trip), list(warm_up), list(most_in_flight)
    for edge, ahead in sorted(zip(edges, warm_up, strict=True), key=lambda one: one[0].source):
        most[edge.target] = min(most[edge.target], most[edge.source] - ahead)
    for source in reversed(range(len(depths))):
        mine = [number for number, edge in enumerate(edges) if edge.source == source]
        if not mine:
            continue
        round_trip[source] += max(transfer_seconds[n] + round_trip[edges[n].target] for n in mine)
        least = max(warm_up[n] + depths[edges[n].target] for n in mine)
        waits, forward = round_trip[source] - backward_seconds[source], forward_seconds[source]
        wanted = most[source]
        if wanted * forward > waits:
            wanted = math.ceil(waits / forward - _ROUNDING)
        depths[source] = max(least, wanted, least_in_flight[source])
        if depths[source] > least:
            for n in mine:
                found[n] = max(warm_up[n], depths[source] - depths[edges[n].target])
    return tuple(found)


def adaptive(
    stages: int,
    microbatches: int,
    *,
    warm_up: Sequence[int],
    edges: Sequence[Edge] | None = None,
    split_backward: bool = False,
) -> Schedule:
    """1F1B whose warm-up is chosen for each edge.

    >>> adaptive(4, 8, warm_up=(2, 3, 1)).in_flight
    (7, 5, 2, 1)

    Args:
      stages: how many, one on each rank.
      microbatches: how many.
      warm_up: d_e of each edge, in the order of `edges`, of at least 1; `adaptive_warm_up` computes them.
      edges: of the stage graph; None for a chain.
      split_backward: run weight gradients as instructions of their own, right after the input gradients.

    Raises:
      ScheduleError: fewer than one stage or microbatch, a warm-up below 1 or not one for each edge, or an edge that is
        not of the stages.
    """
    stages = check_count("adaptive", "stages", stages)
    ordered = check_edges("adaptive", stages, edges)
    given = tuple(edges) if edges is not None else ordered
    if len(warm_up) != len(given):
        needed = f"{len(given)}, one for each edge"
        raise refusal("adaptive", "warm_up", f"{len(warm_up)} warm-ups", needed, "`adaptive_warm_up` of all edges")
    ahead = {edge: check_count("adaptive", "warm_up", d) for edge, d in zip(given, warm_up, strict=True)}
    depths = [1] * stages
    for edge in sorted(ordered, key=lambda e: -e.source):
        depths[edge.source] = max(depths[edge.source], depths[edge.target] + ahead[edge])
    return alternate("adaptive", microbatches, depths=tuple(depths), edges=ordered, split_backward=split_backward)
