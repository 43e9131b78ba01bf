"""Interleaved stages: several shorter stages on each rank, equally many on each, on equal submeshes.

The search for stages gives every stage its own devices. Interleaving (`schedule.interleaved`) gives each of n ranks v
stages, stage s to rank s mod n, and divides the bubble by v. It reuses the results of that search: for a number of
ranks, the layers are cut into n v ranges whose slowest is as fast as possible (a dynamic program over the costs of one
stage, estimates where a range is not solved; a scan over the layers of a model is cut into n v equal pieces), the
stages of each rank share its memory by one price (`interleaved_stages`), and the whole is simulated.

Known limit: ranges are balanced by their seconds alone, not by the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod

from ...errors import PlanError
from ...program.equal_stages import equal_stages, main_scan
from ...program.staged import StagedProgram
from ..considered import Considered
from ..stages.costs import StageCosts
from .candidate import Candidate
from .interleaved_stages import balanced, fastest, in_flight_of, interleaved, places_of
from .request import INTERLEAVED, StageRequest

# Stages on each rank that are tried, and the most where a scan can be cut into any number of equal pieces.
_CHUNKS = (2, 4)
_MOST_CHUNKS = 16

# Ranks with so many times the layers of the mean are about even.
_ABOUT_EVEN = 1.05

# Numbers of microbatches and of ranks that are tried.
_MOST_INTERLEAVED = 8

# More microbatches than so many times those that are known are estimated by themselves.
_FAR = 2

# Microbatches, ranks, and stages a rank.
_Key = tuple[int, int, int]

# Microbatches, ranks, and by how many stages these may have each the seconds that are expected.
_Try = tuple[int, int, dict[int, float]]


def chunks_of(program: StagedProgram, microbatches: int, ranks: int, devices: int) -> tuple[int, ...]:
    """The numbers of stages a rank to try, ascending: where a program is one scan over its layers those with stages of
    equal length, or else those that give ranks about the same number of layers.

    Args:
      program: to be cut.
      microbatches: in a step.
      ranks: groups of devices.
      devices: of the cluster.
    """
    if ranks < 2 or devices % ranks or microbatches % ranks:
        return ()
    scan = main_scan(program.alike)
    if scan is None:
        return _CHUNKS
    trips = scan[1]
    equal = tuple(chunks for chunks in range(2, _MOST_CHUNKS + 1) if trips % (ranks * chunks) == 0)
    if equal or -(-trips // ranks) * ranks > _ABOUT_EVEN * trips:
        return equal
    tries = sorted({*_CHUNKS, trips // ranks})
    return tuple(chunks for chunks in tries if 1 < chunks <= _MOST_CHUNKS and chunks * ranks <= trips)


class Interleaving:
    """The search over interleaved plans of a request.

    Args:
      request: of the search.
      costs_of: makes the costs of a program.
    """

    def __init__(self, request: StageRequest, costs_of: Callable[[StagedProgram], StageCosts]) -> None:
        self._request, self._costs_of = request, costs_of
        # The costs of the best candidate's cut. Those of all that are tried would be most of what a search holds.
        self._cut: dict[_Key, StageCosts] = {}
        # Seconds of what was tried in this run and earlier ones, which had more memory; infinite where it did not fit.
        self._before: dict[_Key, float] = {}
        self.reset()

    def reset(self) -> None:
        """Forget what has been tried: it was in more memory."""
        self._tried: dict[_Key, _Tried] = {}
        self._done = set[_Key]()  # these, and what has no estimate or does not fit

    @property
    def _asked(self) -> bool:
        """Whether only interleaved stages are asked for, or their number is given: then all combinations are tried."""
        return self._request.stages is not None or set(self._request.schedules) == {INTERLEAVED}

    def _tries(
        self, counts: Sequence[int], looked_at: Sequence[int], below_seconds: float,
        costs_in: Callable[[int], StageCosts],
    ) -> list[_Try]:  # fmt: skip
        """The combinations of microbatches and ranks, the most promising first; each with its numbers of stages a rank,
        ascending, and the estimated seconds of a step.

        Args:
          counts: as of `candidates`.
          looked_at: as of `candidates`.
          below_seconds: what takes longer is of no interest.
          costs_in: as of `candidates`.
        """
        request, devices = self._request, self._request.cluster.num_devices
        if INTERLEAVED not in request.schedules or request.submeshes is not None or request.layers is not None:
            return []
        if not looked_at:
            return []
        asked = self._asked
        found = []
        for count in counts:
            for ranks in range(2, devices + 1):
                if request.mesh and all(prod(sizes) * ranks != devices for _, sizes in request.mesh):
                    continue  # none of the logical meshes is of so many devices
                if request.stages is None:
                    chunks = chunks_of(costs_in(looked_at[0]).program, count, ranks, devices)
                else:
                    shared = request.stages > ranks and not any(n % ranks for n in (request.stages, count, devices))
                    chunks = (request.stages // ranks,) if shared else ()
                fewer = [one for one in looked_at if one <= count]
                ways: dict[int, float] = {}
                for n in chunks if fewer else ():
                    key = count, ranks, n
                    if (before := self._before.get(key, 0.0)) == inf:
                        break
                    if before < below_seconds:
                        most = below_seconds / _missed(self._tried.values(), *key)
                        near = fewer[-1:] if fewer[-1] == count else fewer[-2:]
                        ways[n] = 0.0 if asked else self._expected([*map(costs_in, near)], *key, most)
                least = min((self._scaled((count, ranks, n), one) for n, one in ways.items()), default=inf)
                if least < below_seconds:
                    found.append((least, (count, ranks, ways)))
        found.sort(key=lambda one: (one[0], *one[1][:2]))
        return [one for _, one in found]

    def _scaled(self, key: _Key, expected: float) -> float:
        """Estimated seconds by the error of the most similar candidate tried, and no less than in more memory."""
        return max(_missed(self._tried.values(), *key) * expected, self._before.get(key, 0.0))

    def _expected(
        self, known: Sequence[StageCosts], count: int, ranks: int, chunks: int, below_seconds: float
    ) -> float:
        """The estimated step of an even cut: too low by transfers between stages and by what runs once a step.
        Estimation stops once it exceeds `below_seconds`.

        Args:
          known: of fewer microbatches or as many. The least estimate counts: devices may not divide the samples of a
            microbatch in one of them.
          count: microbatches.
          ranks: as of `candidate`.
          chunks: the same.
          below_seconds: what takes longer is of no interest.
        """
        place, layers = places_of(known[0], ranks), len(known[0].program.layers)
        if place is None:
            return inf
        # Of the first rank, all its stages together.
        in_flight = -(-(2 * (ranks - 1) + (chunks - 1) * ranks + 1) // chunks)
        cuts = [round(layers * rank / ranks) for rank in range(ranks + 1)]
        mine = [(first, last) for first, last in pairwise(cuts) if first < last]
        periods, least = count + (ranks - 1) / chunks, inf
        for costs in known:
            share, seconds = costs.program.microbatches / count, 0.0
            for held in (1, in_flight):
                seconds = periods * max(costs.expected(mine, place[0], held, share, below_seconds / periods))
                if seconds >= below_seconds:
                    break
            least = min(least, seconds)
        return least

    def candidates(
        self, counts: Sequence[int] | None, looked_at: Sequence[int], *, below_seconds: float,
        costs_in: Callable[[int], StageCosts], scheduled: Callable[..., Candidate | None], late: Callable[[], bool],
    ) -> Iterator[Candidate]:  # fmt: skip
        """Candidates that have not been tried, and whose estimate, scaled by the error of the most similar one tried,
        beats the incumbent.

        Args:
          counts: numbers of microbatches; None for all.
          looked_at: numbers of microbatches of which more than bounds is known, the fewest first.
          below_seconds: of the best plan so far.
          costs_in: of the program in so many microbatches; raises `PlanError` where it cannot be cut so.
          scheduled: a candidate of costs and stages, `chunks` a rank; None if they do not fit.
          late: whether the time is over.
        """
        if counts is None:
            counts = looked_at if self._asked else list(self._request.by_microbatches)
        tries = self._tries(counts, looked_at, below_seconds, costs_in) if not late() else []
        cut_for: set[tuple[int, int]] = set()
        for count, ranks, ways in tries:
            if len(cut_for) == _MOST_INTERLEAVED and not self._asked:
                break
            # Far fewer microbatches say too little of what runs in each, like gathers of parameters: of 12 ones of
            # gpt3-1t on 384 A100 a single one says 94 s, they themselves that nothing fits, and stages take 487.
            far = _FAR * max((one for one in looked_at if one <= count), default=count) < count
            for chunks, expected in ways.items():
                key = count, ranks, chunks
                if key in self._done or late() or self._scaled(key, expected) >= below_seconds:
                    continue
                try:
                    if expected and far:
                        expected = max(expected, self._expected([costs_in(count)], *key, below_seconds))
                        if self._scaled(key, expected) >= below_seconds:
                            continue
                    cut_for.add((count, ranks))
                    self._done.add(key)
                    cut = self._in_stages(costs_in(count), ranks, chunks)
                    least = self._least(cut, ranks, chunks) if expected else 0.0
                    if least >= below_seconds:
                        self._tried[key] = _Tried(*key, least / expected)
                        continue
                    candidate = self.candidate(cut, ranks, chunks, scheduled)
                except PlanError:
                    break
                if candidate is None and self._asked:
                    continue
                self._before[key] = candidate.seconds if candidate is not None else inf
                if candidate is None:
                    break  # more stages a rank have more in flight: they seldom fit where fewer do not
                if candidate.seconds < below_seconds:
                    below_seconds, self._cut = candidate.seconds, {key: cut}
                if expected:
                    self._tried[key] = _Tried(*key, candidate.seconds / expected)
                yield candidate

    def candidate(
        self, cut: StageCosts, ranks: int, chunks: int, scheduled: Callable[..., Candidate | None]
    ) -> Candidate | None:
        """The candidate with so many ranks and stages a rank; None if none fits.

        Args:
          cut: the costs of the program cut into them.
          ranks: on equal submeshes.
          chunks: stages on each.
          scheduled: a candidate of costs and stages, `chunks` a rank; None if they do not fit.
        """
        found = (scheduled(cut, stages, chunks=chunks) for stages in interleaved(cut, ranks, chunks))
        return min((one for one in found if one is not None), key=lambda one: one.seconds, default=None)

    def _least(self, cut: StageCosts, ranks: int, chunks: int) -> float:
        """Estimated compute seconds of the busiest rank; 0 without an estimate, and for pieces of a scan, which are all
        equal."""
        places, count = places_of(cut, ranks), ranks * chunks
        if places is None or len(cut.program.layers) <= count:
            return 0.0
        own, mean = in_flight_of(cut, ranks, chunks)
        ranges = balanced(cut, places[0], count, max(mean)) or ()
        held = [min(pair) for pair in zip(own, mean, strict=True)]
        each = [fastest(cut, *one, places[0], held[number]) for number, one in enumerate(ranges)]
        return cut.program.microbatches * max((sum(each[rank::ranks]) for rank in range(ranks)), default=0.0)

    def _in_stages(self, costs: StageCosts, ranks: int, chunks: int) -> StageCosts:
        """The costs of the program cut into so many equal stages, if it is one scan over its layers; these may differ
        from the layers that it was clustered into. Its results are not shared with other cuts, so that they do not
        depend on the order of tries.

        Raises:
          PlanError: if the program cannot be cut into so many stages.
        """
        program = costs.program
        if main_scan(program.alike) is None:
            return costs
        key = program.microbatches, ranks, chunks
        cut = self._cut.get(key) or self._costs_of(equal_stages(program.source, ranks * chunks))
        cut.reserve(costs.reserved)
        return cut


def considered_interleaving(candidate: Candidate) -> Considered:
    """The record of an interleaved candidate."""
    ranks, stages = len(candidate.scheduled.schedule.ranks), len(candidate.stages)
    count, shape = candidate.costs.program.microbatches, f"with {ranks} ranks of {stages // ranks} stages"
    return Considered(count, shape, schedule="interleaved", seconds=candidate.seconds)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A tried candidate, and the ratio of its seconds to its estimate."""

    microbatches: int
    ranks: int
    chunks: int
    ratio: float


def _missed(tried: Collection[_Tried], microbatches: int, ranks: int, chunks: int) -> float:
    """The expected ratio of seconds to estimate: estimates leave out transfers between stages.

    It is taken from tries with as many ranks: the largest ratio of those with as many microbatches or stages a rank,
    the smallest of others. Smaller microbatches lose more, so their ratios do not count for larger ones.
    """
    same = [one for one in tried if one.ranks == ranks and one.microbatches <= microbatches]
    alike = [one.ratio for one in same if one.microbatches == microbatches or one.chunks == chunks]
    return max([min((one.ratio for one in same), default=1.0), *alike])
