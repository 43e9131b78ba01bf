"""Schedules by the names that plans and command lines use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from .adaptive import adaptive
from .eager import eager_one_f_one_b
from .errors import refusal
from .gpipe import gpipe
from .inference import inference
from .interleaved import interleaved_one_f_one_b
from .one_f_one_b import one_f_one_b
from .pipedream import pipedream
from .replicas import replicas
from .schedule import Schedule
from .zero_bubble import zero_bubble

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    function.__name__: function
    for function in (
        gpipe,
        one_f_one_b,
        pipedream,
        eager_one_f_one_b,
        adaptive,
        interleaved_one_f_one_b,
        zero_bubble,
        inference,
        replicas,
    )
}


def make_schedule(name: str, stages: int, microbatches: int, **options: Any) -> Schedule:
    """The schedule called `name`.

    >>> make_schedule("gpipe", 2, 4).in_flight
    (4, 4)

    Args:
      name: one of `SCHEDULES`.
      stages: how many.
      microbatches: how many.
      options: those of the function of that name.

    Raises:
      ScheduleError: no schedule has this name, or it refuses its arguments.
    """
    function = SCHEDULES.get(name)
    if function is None:
        near = get_close_matches(name, SCHEDULES, n=1, cutoff=0.4)
        needed = f"one of {', '.join(SCHEDULES)}"
        raise refusal(repr(name), "schedule", f"the name {name!r}", needed, repr(near[0]) if near else "'one_f_one_b'")
    try:
        inspect.signature(function).bind(stages, microbatches, **options)
    except TypeError as error:
        known = [p for p in inspect.signature(function).parameters if p not in ("stages", "microbatches")]
        raise refusal(name, "options", str(error), f"of the options {', '.join(known)}", "only those") from None
    given = tuple((key, _frozen(value)) for key, value in sorted(options.items()))
    try:
        hash((stages, microbatches, given))
    except TypeError:  # for the function to refuse
        return function(stages, microbatches, **options)
    return _made(name, stages, microbatches, given, str(given))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


# Schedules do not change, and what follows from one is found once: a plan that is searched, written out and reported
# asks for its own a dozen times. The largest take some ten megabytes.
@lru_cache(maxsize=8, typed=True)
def _made(name: str, stages: int, microbatches: int, options: tuple[tuple[str, Any], ...], told: str) -> Schedule:
    del told  # 1 and True are the same option, and not the same text
    return SCHEDULES[name](stages, microbatches, **dict(options))
