"""Parts of the space of plans, each with a search of its own, in turn under one incumbent, one bound and one deadline.

A plan of one stage runs as one program, and the stages of a pipeline as several, so the two are searched in turn; so
are the orders of a cluster's hosts, replicas, and the hosts of one kind alone. Whatever the parts are, they are
compared here: a later part is asked only for something faster than the best of the earlier ones, and its lower bound
goes into the gap of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite

from ..errors import MemoryExceeded, PlanError
from .considered import Considered
from .result import NothingFaster, SearchResult

# A later part of the space has to be faster by this share, less than predictions are off by: the first is the simpler
# one. The gap covers it.
WORTH = 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the space of plans.

    Args:
      words: what it is.
      search: given the seconds that a step of a wanted plan counts for at most, and the seconds that the search may
        take, the best plan of the part. Raises `NothingFaster`, `MemoryExceeded` or another `PlanError`.
      share: of the time that is left, what the search may take.
      least_seconds: what it is given even when the time is over.
    """

    words: str
    search: Callable[[float, float], SearchResult]
    share: float = 1.0
    least_seconds: float = 0.0


def search_parts(
    parts: Iterable[Part], *, left_seconds: Callable[[], float], floor: Callable[[], float],
    faster_than_seconds: float = inf, worth: float = WORTH,
) -> Iterator[SearchResult]:  # fmt: skip
    """Better and better plans, each with a gap that covers all parts up to its own; the last one is the best of all
    parts, with the gap of all.

    Args:
      parts: the simplest first.
      left_seconds: of the time limit; negative once it is over.
      floor: a lower bound of the seconds of every plan there is.
      faster_than_seconds: a plan whose step counts for more is not wanted.
      worth: by which share a later part has to be faster.

    Raises:
      NothingFaster: if no part has a plan that is wanted, with their lower bound.
      PlanError: if no part has a plan, as the first of them says it.
    """
    best: SearchResult | None = None
    known = ""  # the part of the best plan
    others: dict[str, list[Considered]] = {}  # in each part without the best plan, and what came of it
    bounds: dict[str, float] = {}  # of each part that has no plan
    refused: PlanError | None = None
    slower = False  # whether a part has nothing that is faster
    for part in parts:
        most = faster_than_seconds if best is None else min(faster_than_seconds, (1 - worth) * best.counted_seconds)
        left, bound, mine = left_seconds(), inf, others.setdefault(part.words, [])
        if left < 0 and part.least_seconds == 0 and isfinite(most):
            bounds[part.words] = bound = floor()
            mine.append(Considered(part.words, "out of time", searched=False, least_seconds=bound))
            best = best.beside(bound) if best is not None else None
            continue
        try:
            found = part.search(most, max(part.share * left, part.least_seconds))
            if best is not None:
                found = found.preferred_to(best).beside(best.least_seconds)
                others[known] += [one.within(known) for one in best.considered]
                others[known].append(Considered(known, seconds=best.step_seconds))
            best, known = found.beside(min(bounds.values(), default=inf)), part.words
            yield best.beside_candidates(chain(*others.values()))
        except NothingFaster as nothing:
            slower, bound = True, nothing.least_seconds or floor()
            late = left_seconds() < 0 or any("out of time" in one.words for one in nothing.considered)
            mine += [one.within(part.words) for one in nothing.considered]
            if late:
                mine.append(Considered(part.words, "broken off, out of time", least_seconds=bound))
            elif best is not None:
                mine.append(Considered(part.words, "none that fits and is faster"))
        except PlanError as error:
            refused = refused or error
            mine.append(Considered(part.words, str(error)))
            if isinstance(error, MemoryExceeded):
                bound = floor() if left_seconds() < 0 else error.least_seconds
        bounds[part.words] = bound
        best = best.beside(bound) if best is not None else None
    least = min(bounds.values(), default=inf)
    if best is not None:
        yield best.beside_candidates(chain(*others.values()))
    elif refused is None or (isfinite(faster_than_seconds) and (slower or isfinite(least))):
        raise NothingFaster(least, tuple(chain(*others.values())))
    else:
        if isinstance(refused, MemoryExceeded):
            refused.least_seconds = least
        raise refused


def best_of_parts(
    parts: Iterable[Part], *, left_seconds: Callable[[], float], floor: Callable[[], float],
    faster_than_seconds: float = inf, worth: float = WORTH,
) -> SearchResult:  # fmt: skip
    """The best plan of all parts; everything as of `search_parts`."""
    *_, best = search_parts(
        parts, left_seconds=left_seconds, floor=floor, faster_than_seconds=faster_than_seconds, worth=worth
    )
    return best
