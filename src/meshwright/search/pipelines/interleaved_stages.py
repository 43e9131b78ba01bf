"""The stages of an interleaved plan: equally many on each of several equal ranks, solved to share the rank's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf

from ...schedule import interleaved_one_f_one_b
from ..inter.problem import PlacedStage
from ..inter.submeshes import Submesh
from ..intra.workspace import held_together
from ..stages.costs import StageCosts, solved_in_turn
from .candidate import Candidate


def interleaved(
    costs: StageCosts, ranks: int, chunks: int, *, alike: bool = False
) -> Iterator[tuple[PlacedStage, ...]]:
    """Interleaved stages for so many ranks, the fastest first; the stages of a rank may not fit together.

    All stages get the same share of a device's memory. The first stage of a rank holds more microbatches than its last:
    each is solved for its own number in flight or, where that is less, the rank's mean; or for the mean; or for its own
    number.

    Args:
      costs: of a program.
      ranks: on equal submeshes that use all devices.
      chunks: stages on each rank.
      alike: whether all hold as much as any, in the memory of the least: of a scan's pieces few are solved then.
    """
    program, devices = costs.program, costs.submeshes.cluster.num_devices
    count = ranks * chunks
    if ranks < 2 or devices % ranks or program.microbatches % ranks or count > len(program.layers):
        return
    places = places_of(costs, ranks)
    if places is None:
        return
    own, mean = in_flight_of(costs, ranks, chunks)
    ranges = balanced(costs, places[0], count, max(mean))
    if ranges is None:
        return
    limits = [
        min(costs.limit_bytes(place, last, wish) for last in (False, number == ranks - 1) for wish in ("none", "layer"))
        for number, place in enumerate(places)
    ]
    ways = [[min(pair) for pair in zip(own, mean, strict=True)], mean, own]
    if alike:
        ways, limits = [[max(mean)] * count], [min(limits)] * ranks
    for in_flight in ways:
        stages: list[PlacedStage] = []
        for number, (first, last) in enumerate(ranges):
            place, limit = places[number % ranks], limits[number % ranks]
            option = solved_in_turn(costs, first, last, place, in_flight[number], chunks, limit)
            if option is None:
                break
            stages.append(PlacedStage(first, last, place, option))
        if len(stages) == count:
            for rank, limit in enumerate([] if alike else limits):
                mine = range(rank, count, ranks)
                if not _fit(stages, mine, in_flight, limit):
                    _share_evenly(costs, stages, mine, in_flight, limit)
                give_what_is_left(costs, stages, mine, own, limit)
            yield tuple(stages)


def _fit(stages: Sequence[PlacedStage], rank: Sequence[int], in_flight: Sequence[int], limit_bytes: float) -> bool:
    """Whether the stages of a rank fit its devices together."""
    held = [
        (o.constant_bytes - o.workspace_bytes + in_flight[n] * o.in_flight_bytes, o.workspace_bytes)
        for n in rank
        for o in [stages[n].option]
    ]
    return held_together(held) <= limit_bytes


def _share_evenly(
    costs: StageCosts, stages: list[PlacedStage], rank: Sequence[int], in_flight: Sequence[int], limit_bytes: float
) -> None:
    """Solve the stages of a rank in equal shares with a workspace each, where they need unlike ones."""
    for n in rank:
        one = stages[n]
        option = costs.solve_within(one.first, one.last, one.submesh, in_flight[n], limit_bytes / len(rank))
        if option is not None:
            stages[n] = one._replace(option=option)


def give_what_is_left(
    costs: StageCosts, stages: list[PlacedStage], rank: Sequence[int], in_flight: Sequence[int], limit_bytes: float
) -> None:
    """Solve the slowest stage of a rank again, in all memory that the other stages leave."""
    slowest = max(rank, key=lambda number: (stages[number].option.seconds, -number))
    stage = stages[slowest]
    options = {n: stages[n].option for n in rank if n != slowest}
    others = sum(o.constant_bytes - o.workspace_bytes + in_flight[n] * o.in_flight_bytes for n, o in options.items())
    option = costs.solve_within(stage.first, stage.last, stage.submesh, in_flight[slowest], limit_bytes - others)
    if option is not None and option.seconds < stage.option.seconds:
        stages[slowest] = PlacedStage(stage.first, stage.last, stage.submesh, option)
        if not _fit(stages, rank, in_flight, limit_bytes):
            stages[slowest] = stage  # another one of the rank needs a larger workspace


def places_of(costs: StageCosts, ranks: int) -> list[Submesh] | None:
    """Equal submeshes of one kind for so many ranks; None if there are none."""
    size = costs.submeshes.cluster.num_devices // ranks
    places = [Submesh(rank * size, (rank + 1) * size) for rank in range(ranks)]
    if not all(map(costs.submeshes.is_submesh, places)) or len({costs.solver.kind_of[place] for place in places}) > 1:
        return None
    return places


def in_flight_of(costs: StageCosts, ranks: int, chunks: int) -> tuple[Sequence[int], Sequence[int]]:
    """The microbatches in flight on each stage, and on average on the stages of its rank."""
    own = interleaved_one_f_one_b(ranks * chunks, costs.program.microbatches, chunks=chunks).in_flight
    return own, [-(-sum(own[number % ranks :: ranks]) // chunks) for number in range(ranks * chunks)]


def fastest(costs: StageCosts, first: int, last: int, place: Submesh, in_flight: int) -> float:
    """Seconds of a microbatch of a range, infinite where nothing fits."""
    return min((option.seconds for option in costs.options(first, last, place, in_flight)), default=inf)


def balanced(costs: StageCosts, place: Submesh, count: int, in_flight: int) -> list[tuple[int, int]] | None:
    """`count` ranges of layers whose slowest is as fast as possible; of those the ones with the least sum."""
    layers = len(costs.program.layers)
    if layers == count:
        return [(layer, layer + 1) for layer in range(layers)]
    seconds = {
        (first, last): fastest(costs, first, last, place, in_flight)
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


def all_alike(
    costs: StageCosts, ranks: int, chunks: int, scheduled: Callable[..., Candidate | None]
) -> Candidate | None:
    """The candidate whose stages are all solved for the same memory and microbatches in flight: found at once, and
    about as fast as the best."""
    alike = next(interleaved(costs, ranks, chunks, alike=True), None)
    return scheduled(costs, alike, chunks=chunks) if alike is not None else None
