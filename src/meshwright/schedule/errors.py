"""Refusals of schedules, and the checks of arguments that all schedules share."""

from __future__ import annotations

import operator

from ..errors import PlanError


class ScheduleError(PlanError):
    """A schedule, or a request for one, that cannot be honoured."""


def check_count(schedule: str, name: str, value: int) -> int:
    """The number as a plain int, refused when it is not a whole number of at least 1.

    Args:
      schedule: what is being built, for the error.
      name: of the argument.
      value: of the argument.

    Raises:
      ScheduleError: it is not.
    """
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1 or isinstance(value, bool):
        raise refusal(schedule, name, f"{value!r} {name}", "a whole number of at least 1", f"{name}=1 or more")
    return count


def refusal(schedule: str, where: str, got: str, needed: str, try_: str) -> ScheduleError:
    """The error for what stands at `where` of the schedule called `schedule`."""
    return ScheduleError(refused=f"the schedule {schedule}", got=got, needed=needed, where=where, try_=try_)
