"""What a search has considered, in a few lines: one for all numbers of microbatches of which the same can be said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import inf

from .table import format_seconds

# Lines of the searches (`search.pipelines.driver`, `search.one_stage.driver`): the outcome of one schedule in one
# number of microbatches, what is said of a whole number, and the bound that ruled a candidate out.
_SCHEDULE = re.compile(r"(?P<count>\d+) microbatches, (?P<schedule>\w+): (?P<outcome>.*)")
_PRICED = re.compile(r"(?P<seconds>[\d.e+-]+) s with .*")
_COUNT = re.compile(r"(?P<count>\d+) microbatches: (?P<words>.*)")
_RULED_OUT = re.compile(r"(?P<what>.*): (?P<how>not searched.*), (?P<seconds>[\d.e+-]+) s at the very least")


def considered_lines(considered: Iterable[str]) -> Iterator[str]:
    """The lines of a search put together.

    Of a schedule that was tried with several numbers of stages the fastest is told; where the stages lie is left to
    `meshwright plan --json`. What a search says in other words is passed on as it is.

    >>> for line in considered_lines([
    ...     "8 microbatches, gpipe: 2.5 s with layers x devices 1x4 1x4", "16 microbatches, gpipe: nothing that fits",
    ...     "32 microbatches, gpipe: nothing that fits", "4 microbatches: not searched, 3.1 s at the very least",
    ...     "2 microbatches: not searched, 4.2 s at the very least",
    ... ]):
    ...     print(line)
    8 microbatches: gpipe 2.5 s
    16, 32 microbatches: gpipe nothing that fits
    not searched, at least 3.1 s: 4, 2 microbatches

    Args:
      considered: by the search, a line each.
    """
    priced: dict[str, dict[str, float]] = {}
    failed: dict[str, dict[str, list[str]]] = {}
    said: dict[str, list[str]] = {}
    ruled_out: dict[str, dict[str, float]] = {}
    others: list[str] = []
    for line in considered:
        if found := _RULED_OUT.fullmatch(line):
            ruled_out.setdefault(found["how"], {})[found["what"]] = float(found["seconds"])
        elif found := _COUNT.fullmatch(line):
            said.setdefault(found["words"], []).append(found["count"])
        elif found := _SCHEDULE.fullmatch(line):
            count, schedule, outcome = found.groups()
            if seconds := _PRICED.fullmatch(outcome):
                known = priced.setdefault(count, {})
                known[schedule] = min(float(seconds["seconds"]), known.get(schedule, inf))
            else:
                failed.setdefault(count, {}).setdefault(outcome, []).append(schedule)
        else:
            others.append(line)
    schedules: dict[str, list[str]] = {}
    for count in dict.fromkeys((*priced, *failed)):
        schedules.setdefault(_schedules(priced.get(count, {}), failed.get(count, {})), []).append(count)
    for words, counts in (*schedules.items(), *said.items()):
        yield f"{', '.join(counts)} microbatches: {words}"
    for how, least in ruled_out.items():
        yield f"{how}, at least {format_seconds(min(least.values()))}: {_together(least)}"
    yield from others


def _together(candidates: Iterable[str]) -> str:
    """Candidates by name, those that are a number of microbatches first."""
    counts, others = [], []
    for what in candidates:
        count, _, noun = what.partition(" ")
        (counts if noun == "microbatches" else others).append(count if noun == "microbatches" else what)
    return "; ".join([*([f"{', '.join(counts)} microbatches"] if counts else []), *others])


def _schedules(priced: dict[str, float], failed: dict[str, list[str]]) -> str:
    """Of one number of microbatches: the schedules with a plan, the fastest first, and those without."""
    parts = []
    if priced:
        fastest = sorted(priced, key=lambda schedule: priced[schedule])
        parts.append(", ".join(f"{schedule} {format_seconds(priced[schedule])}" for schedule in fastest))
    for outcome, schedules in failed.items():
        without = [schedule for schedule in dict.fromkeys(schedules) if schedule not in priced]
        if without:
            parts.append(f"{', '.join(without)} {outcome}")
    return "; ".join(parts)
