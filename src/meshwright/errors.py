"""Refusals of plans and of what is asked of the planner."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan, or a request for one, that cannot be honoured.

    Args:
      refused: what was refused, in the user's words.
      got: what was given.
      needed: what would have been accepted.
      where: file, line, input or stage.
      try_: real options.
    """

    def __init__(self, *, refused: str, got: str, needed: str, where: str, try_: str) -> None:
        super().__init__(f"refused {refused}: got {got}; needed {needed}; where: {where}; try {try_}")
        self.refused, self.got, self.needed, self.where, self.try_ = refused, got, needed, where, try_


class MemoryExceeded(PlanError):
    """Nothing that was asked for fits a device's memory."""

    def but(self, reason: str) -> MemoryExceeded:
        """The same refusal with what stands against the next thing to try."""
        return MemoryExceeded(
            refused=self.refused, got=self.got, needed=self.needed, where=self.where, try_=f"{self.try_} ({reason})"
        )
