"""When a method has to stop: one moment, handed down to everything that can take long.

A method asks before each piece of work, and says how long the piece will take where that can be more than a blink, so
that nothing is begun that cannot be finished. What was found until then is not lost: `solve` keeps it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from meshwright.solve.problem import OutOfTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment on the clock of `time.perf_counter`.

    >>> Deadline.after(3600.0).seconds_left > 3000
    True

    Args:
        moment: the moment, in seconds; `inf` for none.
    """

    moment: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment this many seconds from now."""
        return cls(moment=time.perf_counter() + seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds until then; negative when it has passed."""
        return self.moment - time.perf_counter()

    def check(self, what: str, *, needed_seconds: float = 0.0) -> None:
        """Go on only if there is time.

        Args:
            what: the work that is about to be done, for the error.
            needed_seconds: about how long it takes.

        Raises:
            OutOfTime: there is not.
        """
        left = self.seconds_left
        if left < needed_seconds:
            raise OutOfTime(
                f"refused {what}: got {max(left, 0.0):.3g} s left; needed {needed_seconds:.3g} s; "
                "try a longer time limit or fewer choices"
            )


NEVER = Deadline()
