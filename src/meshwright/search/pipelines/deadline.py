"""The time limit of one run of the stage search."""

from __future__ import annotations

import time
from math import inf

from ..stages.part_rows import OutOfTime


class Deadline:
    """When a run ends. What a search makes holds this and not the search, so that all of it is freed with the search:
    in a cycle it would stay until the garbage is collected, a third of the memory of what is planned next.

    Attributes:
      has_plan: whether a plan is known: until then a run goes on.
      may_stop: whether work may be broken off.
    """

    def __init__(self) -> None:
        self.begin(inf, has_plan=False)

    def begin(self, seconds: float, *, has_plan: bool) -> None:
        """Start a run of so many seconds."""
        self._start, self._seconds = time.perf_counter(), seconds
        self.has_plan, self.may_stop = has_plan, False

    @property
    def share(self) -> float:
        """Of its time, what is used."""
        return (time.perf_counter() - self._start) / self._seconds if self._seconds > 0 else inf

    @property
    def left_seconds(self) -> float:
        """Of its time; negative once that is over."""
        return self._seconds - (time.perf_counter() - self._start)

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return self.share > 1

    @property
    def over(self) -> bool:
        """Whether the time is over and there is a plan."""
        return self.has_plan and self.late

    def check(self) -> None:
        """Raise `OutOfTime` where the time is over and work may be broken off."""
        if self.may_stop and self.over:
            raise OutOfTime
