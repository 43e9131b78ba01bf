"""Measuring cases on the devices at hand, within a time limit.

All cases are compiled first, and one run of each tells how many repetitions make a run long enough to time. Then all
are timed in turn, round after round, so that what else the machine does falls on all alike, until the time is over.
What else it does only ever takes longer, so a case's time is the lower quartile of its runs. That of the calls without
the case (that repeat nothing, or what is between collectives) is taken off.

Cost: the time limit; more only where two cases of each series and three rounds take longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .case import Case
from .programs import IN_A_ROW, Repeated
from .sample import Sample, sample_of

# A run should take so long; shorter ones drown in what the clock and the scheduler do.
_RUN_SECONDS = 0.02
_MOST_REPETITIONS = 4096
# A case of which one repetition takes longer is left out, with all larger ones of its kind.
_LONGEST_SECONDS = 0.2
_UNDISTURBED = Fraction(1, 4)  # of the runs
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 31
# Of the time limit, for compiling.
_COMPILING = 0.6
# Of each series so many are measured whatever the time: one tells what a start costs, two what a byte does.
_ALWAYS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How long one repetition of a case takes.

    Args:
      case: what was measured.
      sample: its seconds.
    """

    case: Case
    sample: Sample


def measure(
    cases: Sequence[Sequence[Case]],
    devices: Sequence[Any],
    *,
    time_limit_seconds: float,
    tell: Callable[[str, float], None] = lambda text, share: None,
    repeated: Callable[[Case, Sequence[Any]], Any] = Repeated,
) -> list[Measurement]:
    """Time cases on all devices.

    Args:
      cases: in series, each from small to large; the first two of each series are measured
        whatever the time, if they are not too long.
      devices: the `jax.Device`s, in the order of the cluster.
      time_limit_seconds: for all of it.
      tell: called with a few words and the share of the work that is done.
      repeated: makes a program of a case.

    Returns:
      What was measured; cases that take too long, or for which there was no time, are left out.
    """
    begun, limit = time.perf_counter(), max(time_limit_seconds, 1e-9)
    ready: list[tuple[Case, Any, int]] = []
    ended: set[int] = set()
    total, tried = sum(map(len, cases)), 0
    for place, number, case in _smallest_first(cases):
        used = time.perf_counter() - begun
        if number in ended or (used > _COMPILING * limit and place >= _ALWAYS):
            continue
        tried += 1
        tell(f"compiling {tried} of at most {total}", min(used / limit, _COMPILING))
        program = repeated(case, devices)
        times = _repetitions(program)
        if times is None and place:
            ended.add(number)
            continue
        ready.append((case, program, times or 1))
    many: list[list[float]] = [[] for _ in ready]
    none: list[list[float]] = [[] for _ in ready]
    for rounds in range(_MOST_ROUNDS):
        used = time.perf_counter() - begun
        if rounds >= _LEAST_ROUNDS and used > limit:
            break
        tell(f"round {rounds + 1}", max(_COMPILING, min(used / limit, 1.0)))
        # Nobody always runs right after the same neighbour.
        order = range(len(ready)) if rounds % 2 else reversed(range(len(ready)))
        for position in order:
            _, program, times = ready[position]
            none[position].append(program.without(times))
            many[position].append(program.seconds(times))
    found = []
    for (case, _, times), calls, runs in zip(ready, none, many, strict=True):
        call = sample_of(calls, _UNDISTURBED).seconds
        sample = sample_of([(run - call) / times for run in runs], _UNDISTURBED)
        found.append(Measurement(case=case, sample=sample))
    # What the calls' own differences swallow was too short to be seen.
    return [one for one in found if one.sample.seconds > 0]


def _smallest_first(cases: Sequence[Sequence[Case]]) -> Iterable[tuple[int, int, Case]]:
    """The first of every series, then the second of each, and so on: place in the series, its number, case."""
    for place in range(max(map(len, cases), default=0)):
        for number, series in enumerate(cases):
            if place < len(series):
                yield place, number, series[place]


def _repetitions(program: Any) -> int | None:
    """How many make a run of the length wanted; None if one is too long."""
    program.seconds(1)  # compiles
    times = 1
    while True:
        taken = program.seconds(times)
        if times == 1 and taken > _LONGEST_SECONDS:
            return None
        if taken >= _RUN_SECONDS / 2 or times == _MOST_REPETITIONS:
            return -(-times // IN_A_ROW) * IN_A_ROW if times > IN_A_ROW else times
        # Calling the program is part of what was seen, so the guess is low: it is made again.
        times = min(max(2 * times, int(times * _RUN_SECONDS / max(taken, 1e-6))), _MOST_REPETITIONS)
