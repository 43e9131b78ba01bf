"""What a search has considered, in a few lines: one for all numbers of microbatches of which the same can be said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from ..plan.words import microbatches_words
from ..search.considered import Considered
from .table import format_seconds

# Of ways that were not searched so many are told, those with the least bounds; `meshwright plan --json` has all.
_MOST_TOLD = 4


def considered_lines(considered: Iterable[Considered]) -> Iterator[str]:
    """The candidates of a search put together, those of each part of the space apart.

    Of a schedule that was tried with several numbers of stages the fastest is told; where the stages lie is left to
    `meshwright plan --json`. Candidates that are no number of microbatches are told one by one.

    >>> for line in considered_lines([
    ...     Considered(8, "with layers x devices 1x4 1x4", schedule="gpipe", seconds=2.5),
    ...     Considered(16, "nothing that fits", schedule="gpipe"),
    ...     Considered(32, "nothing that fits", schedule="gpipe"),
    ...     Considered(4, searched=False, least_seconds=3.1), Considered(2, searched=False, least_seconds=4.2),
    ... ]):
    ...     print(line)
    8 microbatches: gpipe 2.5 s
    16, 32 microbatches: gpipe nothing that fits
    not searched, at least 3.1 s: 4, 2 microbatches

    Args:
      considered: by the search.
    """
    parts: dict[str, list[Considered]] = {}
    for one in considered:
        parts.setdefault(one.part, []).append(replace(one, part=""))
    for part, mine in parts.items():
        yield from (f"{part}, {line}" if part else line for line in _lines(mine))


def _lines(considered: Iterable[Considered]) -> Iterator[str]:
    priced: dict[int, dict[str, float]] = {}
    failed: dict[int, dict[str, list[str]]] = {}
    said: dict[str, list[int]] = {}
    ruled_out: dict[str, dict[int | str, float]] = {}
    others: list[str] = []
    for one in considered:
        if not one.searched and one.least_seconds:
            ruled_out.setdefault(one.words, {})[one.what] = one.least_seconds
        elif isinstance(one.what, str):
            others.append(str(one))
        elif one.schedule is None:
            # A refusal names the number that it refuses.
            said.setdefault(one.words.replace(f"refused microbatches={one.what}: ", "refused: "), []).append(one.what)
        elif one.seconds is not None:
            known = priced.setdefault(one.what, {})
            known[one.schedule] = min(one.seconds, known.get(one.schedule, inf))
        else:
            failed.setdefault(one.what, {}).setdefault(one.words, []).append(one.schedule)
    schedules: dict[str, list[int]] = {}
    for count in dict.fromkeys((*priced, *failed)):
        schedules.setdefault(_schedules(priced.get(count, {}), failed.get(count, {})), []).append(count)
    for words, counts in (*schedules.items(), *said.items()):
        yield f"{_microbatches(counts)}: {words}"
    for how, least in ruled_out.items():
        counts = [what for what in least if isinstance(what, int)]
        ways = sorted((what for what in least if isinstance(what, str)), key=least.__getitem__)
        more = [f"{len(ways) - _MOST_TOLD} more"] * (len(ways) > _MOST_TOLD)
        names = [_microbatches(counts)] * bool(counts) + ways[:_MOST_TOLD] + more
        yield f"{how}, at least {format_seconds(min(least.values()))}: {'; '.join(names)}"
    yield from others


def _microbatches(counts: Sequence[int]) -> str:
    """Several numbers of microbatches."""
    return microbatches_words(counts[0]) if len(counts) == 1 else f"{', '.join(map(str, counts))} microbatches"


def _schedules(priced: dict[str, float], failed: dict[str, list[str]]) -> str:
    """Of one number of microbatches: the schedules with a plan, the fastest first, and those without."""
    parts = []
    if priced:
        # Schedules that take the same up to rounding stay in the order of the search.
        fastest = sorted(priced, key=lambda schedule: float(f"{priced[schedule]:.6g}"))
        parts.append(", ".join(f"{schedule} {format_seconds(priced[schedule])}" for schedule in fastest))
    for outcome, schedules in failed.items():
        without = [schedule for schedule in dict.fromkeys(schedules) if schedule not in priced]
        if without:
            parts.append(f"{', '.join(without)} {outcome}")
    return "; ".join(parts)
