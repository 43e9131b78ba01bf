"""Interleaved stages: several shorter stages on each rank, equally many on each, on equal submeshes.

The search for stages gives every stage its own devices. Interleaving (`schedule.interleaved`) gives each of n ranks v
stages, stage s to rank s mod n, and divides the bubble by v. For each (microbatches, ranks, stages a rank) an even cut
is bounded by the estimates of the program's parts. The most promising are cut into n v ranges whose slowest is as fast
as possible (a scan over the layers of a model into n v equal pieces), the stages of each rank share its memory by one
price (`rank_sharing`), and the whole is simulated.

Known limits: ranges are balanced by their seconds alone, not by the schedule; what is tried bounds nothing else, so
that gaps say nothing of interleaved plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, prod

import numpy as np

from ...errors import PlanError
from ...program.equal_stages import equal_stages, main_scan
from ...program.staged import StagedProgram
from ..stages.costs import StageCosts
from .candidate import Candidate
from .microbatch_costs import MicrobatchCosts
from .rank_sharing import balanced, in_flight_of, interleaved, places_of
from .request import INTERLEAVED, StageRequest

# Stages on each rank that are tried, and the most where a scan can be cut into any number of equal pieces: as many as a
# program has layers (`program.layers.DEFAULT_LAYERS`). Chosen, not measured.
_CHUNKS = (2, 4)
_MOST_CHUNKS = 16

# Ranks with at most so many times the layers of the mean are about even. Chosen, not measured.
_ABOUT_EVEN = 1.05

# Candidates that are solved in a run. With 8 a step of gpt3-175b on 128 A100 takes 1 % more and its planning 0.6 of the
# CPU seconds; with 50, and each number of ranks tried in all its numbers of stages, 1 % less and twice the CPU seconds.
# (Measured when those that do not fit counted too.) In a number of microbatches that is searched there are two, and
# half of all at most: its incumbent may be far from the best still, and the rest are for the most promising of all.
# (llama3-70b on 16 DGX H100: 158.5 s a step in 30 s, where 12 tries in 32 and 64 microbatches found 159.3 in 34.)
_MOST_SOLVED, _FIRST_SOLVED = 12, 2

# More microbatches than so many times those that are known are estimated by themselves.
_FAR = 2

# Microbatches, ranks, and stages a rank.
_Key = tuple[int, int, int]

# Microbatches, ranks, and by how many stages these may have each the estimated seconds.
_Try = tuple[int, int, dict[int, float]]


def chunks_of(program: StagedProgram, microbatches: int, ranks: int, devices: int) -> tuple[int, ...]:
    """The numbers of stages a rank to try, ascending: where a program is one scan over its layers those with stages of
    equal length, or else those that give ranks about the same number of layers."""
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
      costs: of its stages.
      scheduled: a candidate of costs and stages, `chunks` a rank; None if they do not fit.
    """

    def __init__(
        self, request: StageRequest, costs: MicrobatchCosts, scheduled: Callable[..., Candidate | None]
    ) -> None:
        self._request, self._costs, self._scheduled = request, costs, scheduled
        # Only interleaved stages are asked for, or their number is given: then all combinations are tried.
        self._asked = request.stages is not None or set(request.schedules) == {INTERLEAVED}
        # The costs of the best candidate's cut. Those of all that are tried would be most of what a search holds.
        self._cut: dict[_Key, StageCosts] = {}
        # Seconds, or their lower bound, of what was tried in this run and earlier ones, which had more memory; infinite
        # where it did not fit.
        self._before: dict[_Key, float] = {}
        self.reset()

    def reset(self) -> None:
        """Forget what has been tried: it was in more memory."""
        self._ratios: dict[_Key, float] = {}  # of the seconds of what was tried to its estimate
        self._done = set[_Key]()  # these, and what has no estimate or does not fit
        self._solved = 0  # of these, those that no lower bound of their own excludes

    def forget(self) -> None:
        """Forget what was tried in earlier runs too: there is more memory now than in one of them."""
        self._before.clear()

    def _tries(self, counts: Sequence[int], looked_at: Sequence[int], below_seconds: float) -> list[_Try]:
        """The combinations of microbatches and ranks, the most promising first; each with its numbers of stages a rank,
        ascending, and the estimated seconds of a step. What takes longer than `below_seconds` is left out."""
        request, devices = self._request, self._request.cluster.num_devices
        given = request.alone or request.submeshes is not None or request.layers is not None
        if given or INTERLEAVED not in request.schedules:
            return []
        found = []
        for count in counts:
            # The nearest two: devices may not divide the samples of a microbatch in one of them.
            near = [one for one in looked_at if one <= count][-2:]
            if count in near:
                near = [count]
            for ranks in range(2, devices + 1) if near else ():
                if request.mesh and all(prod(sizes) * ranks != devices for _, sizes in request.mesh):
                    continue  # none of the logical meshes is of so many devices
                if request.stages is None:
                    chunks = chunks_of(self._costs(looked_at[0]).program, count, ranks, devices)
                else:
                    shared = request.stages > ranks and not any(n % ranks for n in (request.stages, count, devices))
                    chunks = (request.stages // ranks,) if shared else ()
                ways: dict[int, float] = {}
                for n in chunks:
                    key = count, ranks, n
                    before = self._before.get(key, 0.0)
                    if before < below_seconds:
                        most = below_seconds / _missed(self._ratios, key)
                        ways[n] = 0.0 if self._asked else min(self._expected(one, *key, most) for one in near)
                        if before and 0.0 < ways[n] < inf:  # it takes no less in less memory
                            self._ratios.setdefault(key, before / ways[n])
                least = min((self._scaled((count, ranks, n), one) for n, one in ways.items()), default=inf)
                if least < below_seconds:
                    # With other numbers of ranks estimates are off as well: that only says what to try first.
                    least = max(least, _missed(self._ratios, (count, None, max(ways))) * min(ways.values()))
                    found.append((least, (count, ranks, ways)))
        found.sort(key=lambda one: (one[0], *one[1][:2]))
        return [one for _, one in found]

    def _scaled(self, key: _Key, expected: float) -> float:
        """Estimated seconds by the error of the most similar candidate tried, and no less than in more memory."""
        return max(_missed(self._ratios, key) * expected, self._before.get(key, 0.0))

    def _expected(self, known: int, count: int, ranks: int, chunks: int, below_seconds: float) -> float:
        """A lower bound, as far as estimates are, on the step of an even cut. Left out are transfers between stages,
        and what microbatches lose that are smaller than those of a number that is known.

        Args:
          known: microbatches of which more than bounds is known.
          count: microbatches.
          ranks: groups of devices.
          chunks: stages on each.
          below_seconds: what takes longer is infinite.
        """
        costs, stages = self._costs(known), ranks * chunks
        if (places := places_of(costs, ranks)) is None:
            return inf
        cuts, in_flight = np.linspace(0.0, len(costs.program.layers), stages + 1), in_flight_of(count, ranks, chunks)
        each = costs.shared(cuts, in_flight, ranks, places[0], known / count, below_seconds / count)
        # Only a scan is cut evenly: the layers of other programs may be balanced better, but are no less together.
        return _step_seconds(each if main_scan(costs.program.alike) else np.full(ranks, each.mean()), count, chunks)

    def candidates(
        self, counts: Sequence[int] | None, looked_at: Sequence[int], *, below_seconds: float, late: Callable[[], bool]
    ) -> Iterator[Candidate]:
        """Candidates that have not been tried, and whose estimate, scaled by the error of the most similar one tried,
        beats the incumbent.

        Args:
          counts: numbers of microbatches; None for all.
          looked_at: numbers of microbatches of which more than bounds is known, the fewest first.
          below_seconds: of the best plan so far.
          late: whether the time is over.
        """
        every = counts is None
        if counts is None:
            counts = looked_at if self._asked else list(self._request.by_microbatches)
        tries = self._tries(counts, looked_at, below_seconds) if not late() else []
        most = _MOST_SOLVED if every else min(self._solved + _FIRST_SOLVED, _MOST_SOLVED // 2)
        for count, ranks, ways in tries:
            # Far fewer microbatches say too little of what runs in each, like gathers of parameters: of 12 ones of
            # gpt3-1t on 384 A100 a single one says 94 s, they themselves that nothing fits, and stages take 487.
            far = _FAR * max((one for one in looked_at if one <= count), default=count) < count
            for chunks, expected in sorted(ways.items(), key=lambda one: (one[1], one[0])):
                key = count, ranks, chunks
                if self._solved >= most and not self._asked:
                    return
                if key in self._done or late() or self._scaled(key, expected) >= below_seconds:
                    continue
                try:
                    costs = self._costs(count)
                    if expected and far:
                        expected = max(expected, self._expected(count, *key, below_seconds))
                        if self._scaled(key, expected) >= below_seconds:
                            continue
                    self._done.add(key)
                    cut = self._in_stages(costs, ranks, chunks)
                    least = self._least(cut, ranks, chunks) if expected else 0.0
                    if least >= below_seconds:
                        self._before[key] = least
                        if least < inf:
                            self._ratios[key] = least / expected
                        continue
                    self._solved += 1
                    candidate = self.candidate(cut, ranks, chunks)
                except PlanError:
                    break
                if candidate is not None or not self._asked:
                    self._before[key] = candidate.seconds if candidate is not None else inf
                is_best = candidate is not None and candidate.seconds < below_seconds
                if candidate is not None:
                    if is_best:
                        below_seconds, self._cut = candidate.seconds, {key: cut}
                    if expected:
                        self._ratios[key] = candidate.seconds / expected
                    yield candidate
                if not is_best and not self._asked:
                    break  # other numbers of stages a rank after other numbers of ranks

    def candidate(self, cut: StageCosts, ranks: int, chunks: int) -> Candidate | None:
        """The best candidate of a program cut for so many ranks and stages a rank; None if none fits."""
        found = (self._scheduled(cut, stages, chunks=chunks) for stages in interleaved(cut, ranks, chunks))
        return min((one for one in found if one is not None), key=lambda one: one.seconds, default=None)

    def _least(self, cut: StageCosts, ranks: int, chunks: int) -> float:
        """A lower bound, as far as estimates are, on the step of the cut that is tried."""
        if (places := places_of(cut, ranks)) is None:
            return inf
        own = in_flight_of(cut.program.microbatches, ranks, chunks)
        if (ranges := balanced(cut, places[0], own, ranks)) is None:
            return inf
        cuts = np.array([0, *(last for _, last in ranges)])
        return _step_seconds(cut.shared(cuts, own, ranks, places[0], 1.0), cut.program.microbatches, chunks)

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
        cut = self._cut.get((program.microbatches, ranks, chunks))
        cut = cut or self._costs.of_program(equal_stages(program.source, ranks * chunks))
        cut.reserve(costs.reserved)
        return cut


def _step_seconds(each: np.ndarray, microbatches: int, chunks: int) -> float:
    """What a step takes at least whose ranks run so many seconds a microbatch, in stages of equal length: the first
    stages of the ranks before one run before it, and their last backwards after it."""
    return float((microbatches * each + np.cumsum([0.0, *each[:-1]]) / chunks).max())


def _missed(ratios: Mapping[_Key, float], key: tuple[int, int | None, int]) -> float:
    """The least ratio of seconds to estimate of tries with as many ranks, or of all: estimates leave out transfers
    between stages, and that cuts are uneven. Smaller microbatches and more stages lose more, so that their ratios do
    not count for larger and fewer."""
    count, ranks, chunks = key
    known = (
        one for (microbatches, of, stages), one in ratios.items()
        if microbatches <= count and stages <= chunks and ranks in (of, None)
    )  # fmt: skip
    return min(known, default=1.0)
