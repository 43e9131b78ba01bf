"""Interleaved stages: several shorter stages on each rank, equal in number and on equal submeshes.

The search for stages gives every stage devices of its own. Interleaving (`schedule.interleaved`) gives each of n ranks
v stages, the s-th stage to rank s mod n, and divides the bubble by v. So it is made from what the search has learned:
for a number of ranks, the layers are cut into n v ranges whose slowest is as fast as can be (a dynamic program on the
costs of one stage, estimates where a range is not solved), each is solved within the v-th part of a rank's memory, and
the whole is simulated. Whether memory suffices is checked on the sum over a rank's stages.

Known limit: ranges are balanced by their seconds alone, not by the schedule; all stages get the same share of memory.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf

from ..schedule import interleaved_one_f_one_b
from .inter_op import PlacedStage
from .stage_costs import StageCosts
from .submeshes import Submesh

# Stages on each rank that are tried.
CHUNKS = (2, 4)


def interleaved(costs: StageCosts, ranks: int, chunks: int) -> tuple[PlacedStage, ...] | None:
    """Stages for so many ranks with so many stages each; None if there are none.

    Args:
      costs: of a program.
      ranks: on equal submeshes that use all devices.
      chunks: stages on each rank.
    """
    program, devices = costs.program, costs.submeshes.cluster.num_devices
    count = ranks * chunks
    if ranks < 2 or devices % ranks or program.microbatches % ranks or count > len(program.layers):
        return None
    size = devices // ranks
    places = [Submesh(rank * size, (rank + 1) * size) for rank in range(ranks)]
    if not all(map(costs.submeshes.is_submesh, places)) or len({costs.solver.kind_of[place] for place in places}) > 1:
        return None
    in_flight = interleaved_one_f_one_b(count, program.microbatches, chunks=chunks).in_flight
    ranges = _balanced(costs, places[0], count, max(in_flight))
    if ranges is None:
        return None
    stages = []
    for number, (first, last) in enumerate(ranges):
        place = places[number % ranks]
        option = costs.solve_share(first, last, place, in_flight[number], chunks)
        if option is None:
            return None
        stages.append(PlacedStage(first, last, place, option))
    return tuple(stages)


def _balanced(costs: StageCosts, place: Submesh, count: int, in_flight: int) -> list[tuple[int, int]] | None:
    """The layers in `count` ranges, the slowest as fast as can be, and of those all together as fast as can be."""
    layers = len(costs.program.layers)
    seconds = {
        (first, last): min((o.seconds for o in costs.options(first, last, place, in_flight)), default=inf)
        for first in range(layers)
        for last in range(first + 1, layers + 1)
        if first + layers - last >= count - 1
    }
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for _ in range(count):
        found: dict[int, tuple[float, float, int]] = {}
        for first, (slowest, total, _) in best[-1].items():
            for last in range(first + 1, layers + 1):
                mine = seconds.get((first, last), inf)
                here = (max(slowest, mine), total + mine, first)
                if mine < inf and here < found.get(last, (inf, inf, 0)):
                    found[last] = here
        best.append(found)
    if layers not in best[count]:
        return None
    bounds = [layers]
    for row in range(count, 0, -1):
        bounds.append(best[row][bounds[-1]][2])
    bounds.reverse()
    return list(pairwise(bounds))
