"""The candidates of a search, each with its outcome."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from ..plan.words import microbatches_words


@dataclass(frozen=True, slots=True)
class Considered:
    """A candidate and its outcome.

    >>> print(Considered(8, "with layers x devices 1x4 1x4", schedule="gpipe", seconds=2.5))
    8 microbatches, gpipe: 2.5 s with layers x devices 1x4 1x4

    Args:
      what: a number of microbatches, or another candidate in words.
      outcome: in words, after the seconds where there are any; of what was not searched why.
      schedule: of the microbatches; None for all.
      seconds: of a step of its plan; None without one.
      searched: whether it was looked at.
      least_seconds: of a step of all its plans; 0 where no bound is known.
      part: of the space of plans, which another part's plan was preferred to; "" for that of the plan.
    """

    what: int | str
    outcome: str = ""
    _: KW_ONLY
    schedule: str | None = None
    seconds: float | None = None
    searched: bool = True
    least_seconds: float = 0.0
    part: str = ""

    def within(self, part: str) -> Considered:
        """As a candidate of this part of the space."""
        return replace(self, part=", ".join(filter(None, [part, self.part])))

    @property
    def words(self) -> str:
        """Its outcome, without the bound."""
        seconds = "" if self.seconds is None else f"{self.seconds:.6g} s"
        return f"{seconds} {self.outcome}".strip() if self.searched else f"not searched, {self.outcome}".rstrip(", ")

    def __str__(self) -> str:
        name = microbatches_words(self.what) if isinstance(self.what, int) else self.what
        name = ", ".join(filter(None, [self.part, name, self.schedule]))
        least = f", {self.least_seconds:.6g} s at the very least" if self.least_seconds else ""
        return f"{name}: {self.words}{least}"
