"""The stages of an interleaved plan: equally many on each of several equal ranks, which share the rank's memory.

A rank runs all of its stages for every microbatch, so that the sum of their seconds counts. One price of memory for a
device minimises that sum (Everett, 1963): at each price each stage takes the best of its options, layouts that prices
of memory have found for it alone (`StageCosts.around`). The cheapest price at which all fit wins, and what memory
is left goes where it saves the most. Stages run in turn and share one workspace, whose size is tried too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from ..inter.problem import Option, PlacedStage
from ..inter.submeshes import Submesh
from ..stages.costs import StageCosts

# Prices of memory, in units of a rank's seconds over the limit; the last one finds what fits if anything does. Ten a
# factor of ten: chosen, not measured.
_PRICES = np.array([*np.logspace(-3, 2, 51), 1e9])


def interleaved(costs: StageCosts, ranks: int, chunks: int) -> Iterator[tuple[PlacedStage, ...]]:
    """Interleaved stages for so many ranks that fit together on each; none where none are found.

    Args:
      costs: of a program.
      ranks: on equal submeshes that use all devices.
      chunks: stages on each rank.
    """
    program, devices = costs.program, costs.submeshes.cluster.num_devices
    count = ranks * chunks
    if ranks < 2 or devices % ranks or program.microbatches % ranks or count > len(program.layers):
        return
    places = places_of(costs, ranks)
    if places is None:
        return
    own = in_flight_of(program.microbatches, ranks, chunks)
    if (ranges := balanced(costs, places[0], own, ranks)) is not None:
        yield from sharing(costs, ranges, places, own.tolist())


def sharing(
    costs: StageCosts, ranges: Sequence[tuple[int, int]], places: Sequence[Submesh], in_flight: Sequence[int]
) -> Iterator[tuple[PlacedStage, ...]]:
    """Stages that share the memory of their ranks: with the least seconds of each rank, then of all ranks together,
    where a stage that is faster than its neighbours has to wait for them; none if they do not fit.

    Args:
      costs: of their program.
      ranges: of layers, in program order.
      places: of the ranks; stages are dealt to them in turn.
      in_flight: microbatches of each stage.
    """
    ranks, chunks = len(places), len(ranges) // len(places)
    shared = []
    for rank, place in enumerate(places):
        mine = range(rank, len(ranges), ranks)
        most = costs.limit_bytes(place, False)
        # Neighbouring numbers in flight give neighbouring layouts; bytes are counted for the stage's own.
        about = [1 << (in_flight[n] - 1).bit_length() for n in mine]
        options = [costs.around(*ranges[n], place, i, most, chunks) for n, i in zip(mine, about, strict=True)]
        if not all(options):
            return
        shared.append(
            SharedMemory(
                [
                    [Sharing(option, in_flight[n], costs.limit_of(option, ranges[n][1], place)) for option in each]
                    for n, each in zip(mine, options, strict=True)
                ],
                periods=costs.program.microbatches + (ranks - 1) / chunks,
            )
        )
    seconds = np.zeros((ranks, chunks))
    for _ in range(2):
        found = []
        for rank, one in enumerate(shared):
            if (chosen := one.fastest(np.median(np.delete(seconds, rank, axis=0), axis=0))) is None:
                return
            found.append(chosen)
        seconds = np.array([[option.seconds for option in chosen] for chosen in found])
        yield tuple(PlacedStage(*one, places[n % ranks], found[n % ranks][n // ranks]) for n, one in enumerate(ranges))


class Sharing(NamedTuple):
    """A way to run one of several stages of a device.

    Args:
      option: the way.
      in_flight: microbatches of the stage.
      limit_bytes: what all stages of the device may be counted to hold with it.
    """

    option: Option
    in_flight: int
    limit_bytes: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """Seconds of a microbatch and once a step; bytes without and of the workspace; and the limit."""
        one = self.option
        own = one.constant_bytes - one.workspace_bytes + self.in_flight * one.in_flight_bytes
        return one.seconds, one.per_step_seconds, own, one.workspace_bytes, self.limit_bytes


class SharedMemory:
    """The stages of one rank, which share the memory of its devices.

    Args:
      options: of each stage.
      periods: in a step, with those in which the pipeline fills and drains.
    """

    def __init__(self, options: Sequence[Sequence[Sharing]], *, periods: float) -> None:
        self._options, self._periods = options, periods
        most = max(map(len, options))
        rows = [[one.numbers for one in (*each, *[each[0]] * (most - len(each)))] for each in options]
        self._each, self._once, self._own, self._workspace, self._limits = np.moveaxis(np.array(rows), 2, 0)
        self._stage = np.arange(len(options))

    def fastest(self, least_seconds: np.ndarray) -> list[Option] | None:
        """One option of each stage, with the least seconds of a step together; None if none are found that fit.

        Args:
          least_seconds: of a microbatch, for each stage: what is faster has to wait.
        """
        seconds = self._periods * np.maximum(self._each, least_seconds[:, None]) + self._once
        limits = np.unique(self._limits).tolist()
        found = [self._within(np.where(self._limits >= limit, seconds, inf), limit) for limit in limits]
        _, best = min((one for one in found if one is not None), key=lambda one: one[0], default=(inf, None))
        return None if best is None else [each[one].option for each, one in zip(self._options, best, strict=True)]

    def _within(self, seconds: np.ndarray, limit_bytes: float) -> tuple[float, np.ndarray] | None:
        """The least seconds together and the options that have them, that one price of memory finds to fit for each
        largest workspace."""
        own, workspace, stage = self._own, self._workspace, self._stage
        if not np.isfinite(least := seconds.min(axis=1).sum()):
            return None
        prices = least / limit_bytes * _PRICES
        weights = seconds[:, :, None] + own[:, :, None] * prices
        least, best = inf, None
        for largest in np.unique(workspace):
            picked = np.where(workspace[:, :, None] <= largest, weights, inf).argmin(axis=1)
            chosen = stage[:, None], picked
            fits = (own[chosen].sum(axis=0) + largest <= limit_bytes) & (workspace[chosen] <= largest).all(axis=0)
            total = np.where(fits, seconds[chosen].sum(axis=0), inf)
            if total.min() < least:
                least, best = total.min(), picked[:, total.argmin()]
        if best is None:
            return None
        while True:  # what is left goes where it saves the most
            mine = stage, best
            others = np.array([workspace[mine][stage != n].max(initial=0.0) for n in stage])
            held = own[mine].sum() - own[mine][:, None] + own + np.maximum(workspace, others[:, None])
            saved = np.where(held <= limit_bytes, seconds[mine][:, None] - seconds, 0.0)
            number, option = np.unravel_index(saved.argmax(), saved.shape)
            if saved[number, option] <= 0:
                return float(seconds[mine].sum()), best
            best[number] = option


def places_of(costs: StageCosts, ranks: int) -> list[Submesh] | None:
    """Equal submeshes of one kind for so many ranks; None if there are none."""
    size = costs.submeshes.cluster.num_devices // ranks
    places = [Submesh(rank * size, (rank + 1) * size) for rank in range(ranks)]
    if not all(map(costs.submeshes.is_submesh, places)) or len({costs.solver.kind_of[place] for place in places}) > 1:
        return None
    return places


@lru_cache
def in_flight_of(microbatches: int, ranks: int, chunks: int) -> np.ndarray:
    """The microbatches in flight on each stage, `[ranks * chunks]`, as `schedule.interleaved` has them.

    >>> in_flight_of(8, 2, 2).tolist()
    [4, 3, 2, 1]
    """
    total, turn = microbatches * chunks, ranks * chunks
    ahead = np.minimum(2 * np.arange(ranks - 1, -1, -1) + (chunks - 1) * ranks + 1, total)
    # A rank runs pairs of stage and microbatch, `ranks` of each of its stages in turn: forwards so many pairs ahead of
    # backwards, which begin with its last stage. All turns but the last ones are alike.
    backwards = np.arange(min(2 * turn, total))[:, None, None]
    forwards = np.minimum(backwards + ahead[:, None], total)
    stage = np.arange(chunks)

    def run(pairs: np.ndarray, before: np.ndarray) -> np.ndarray:
        return pairs // turn * ranks + np.clip(pairs % turn - before * ranks, 0, ranks)

    return (run(forwards, stage) - run(backwards, stage[::-1])).max(axis=0).T.ravel()


def balanced(costs: StageCosts, place: Submesh, own: np.ndarray, ranks: int) -> list[tuple[int, int]] | None:
    """As many ranges of layers as there are microbatches in flight in `own`: their slowest is as fast as possible, each
    with as many in flight as the first of the ranks has on average; of those the ones with the least sum."""
    layers, count, in_flight = len(costs.program.layers), len(own), -(-int(own[::ranks].sum()) // (len(own) // ranks))
    if layers == count:
        return [(layer, layer + 1) for layer in range(layers)]
    seconds = {
        (first, last): min((one.seconds for one in costs.options(first, last, place, in_flight)), default=inf)
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
