"""Interleaved stages: several shorter stages on each rank, equal in number and on equal submeshes.

The search for stages gives every stage devices of its own. Interleaving (`schedule.interleaved`) gives each of n ranks
v stages, the s-th stage to rank s mod n, and divides the bubble by v. So it is made from what the search has learned:
for a number of ranks, the layers are cut into n v ranges whose slowest is as fast as can be (a dynamic program on the
costs of one stage, estimates where a range is not solved; a scan over the layers of a model is cut into n v equal
pieces), each is solved within the v-th part of a rank's memory, and the whole is simulated. Whether memory suffices is
checked on the sum over a rank's stages.

Known limit: ranges are balanced by their seconds alone, not by the schedule; all stages get the same share of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf

from ..program.equal_stages import equal_stages, main_scan
from ..program.staged import StagedProgram
from ..schedule import interleaved_one_f_one_b
from .inter_op_problem import PlacedStage
from .stage_costs import StageCosts
from .stage_request import INTERLEAVED, StageRequest
from .submeshes import Submesh

# Stages on each rank that are tried, and the most where a scan can be cut into any number of equal pieces.
_CHUNKS = (2, 4)
_MOST_CHUNKS = 8

# Numbers of microbatches and of ranks that are tried.
_MOST_INTERLEAVED = 3


def chunks_of(program: StagedProgram, ranks: int, devices: int) -> tuple[int, ...]:
    """How many stages each rank may have, ascending: of a program that is one scan over its layers as many as can all
    be of the same length.

    Args:
      program: to be cut.
      ranks: groups of devices.
      devices: of the cluster.
    """
    if ranks < 2 or devices % ranks or program.microbatches % ranks:
        return ()
    scan = main_scan(program.source)
    if scan is None:
        return _CHUNKS
    return tuple(chunks for chunks in range(2, _MOST_CHUNKS + 1) if scan[1] % (ranks * chunks) == 0)


class Interleaving:
    """Which interleavings are worth a look.

    Args:
      request: of the search.
      costs_of: makes the costs of a program.
    """

    def __init__(self, request: StageRequest, costs_of: Callable[[StagedProgram], StageCosts]) -> None:
        self._request, self._costs_of = request, costs_of
        self._cut: dict[tuple[int, int], StageCosts] = {}

    @property
    def costs(self) -> list[StageCosts]:
        """Of the programs that were cut anew."""
        return list(self._cut.values())

    def tries(
        self, finished: Mapping[tuple[int, tuple[PlacedStage, ...]], float], known: Sequence[StageCosts]
    ) -> Iterator[tuple[StageCosts, int, int]]:
        """Costs of a program, ranks, and stages of each rank, the most promising first.

        Args:
          finished: seconds of the plans so far, by their microbatches and stages.
          known: costs by number of microbatches.
        """
        request, devices = self._request, self._request.cluster.num_devices
        if INTERLEAVED not in request.schedules or request.submeshes is not None or request.layers is not None:
            return
        if request.stages is not None or set(request.schedules) == {INTERLEAVED}:
            pairs = [(costs, ranks) for costs in known for ranks in range(2, devices + 1)]
        else:
            of = {costs.program.microbatches: costs for costs in known}
            pairs = [(of[count], ranks) for count, ranks in self._suggested(finished, of)]
        for costs, ranks in pairs:
            for chunks in chunks_of(costs.program, ranks, devices):
                if request.stages in (None, ranks * chunks):
                    yield costs, ranks, chunks

    def _suggested(
        self, finished: Mapping[tuple[int, tuple[PlacedStage, ...]], float], of: Mapping[int, StageCosts]
    ) -> list[tuple[int, int]]:
        """Numbers of microbatches and ranks of the best few plans."""
        found: dict[tuple[int, int], None] = {}
        for (count, stages), _ in sorted(finished.items(), key=lambda one: one[1]):
            # Ranks are equal, and their number divides that of the devices; the stages found need not be so.
            length = len(stages).bit_length()
            for ranks in (len(stages), 1 << length, 1 << length - 1):
                if chunks_of(of[count].program, ranks, self._request.cluster.num_devices):
                    found[count, ranks] = None
        return list(found)[:_MOST_INTERLEAVED]

    def in_stages(self, costs: StageCosts, count: int) -> StageCosts:
        """Of the same program with that many equal stages as its layers, if it is one scan over its layers: these need
        not be the layers that it was clustered into."""
        program = costs.program
        if main_scan(program.source) is None:
            return costs
        key = program.microbatches, count
        if key not in self._cut:
            self._cut[key] = self._costs_of(equal_stages(program.source, count))
        return self._cut[key]


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
