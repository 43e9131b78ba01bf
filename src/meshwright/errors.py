"""Refusals of plans and of what is asked of the planner."""

from __future__ import annotations


def size_words(size_bytes: float) -> str:
    """Bytes for an error message, four digits of them.

    >>> size_words(10), size_words(800_000), size_words(36 * 2**30)
    ('10 B', '781.2 KiB', '36 GiB')
    """
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


def room_words(usable_bytes: float, counted_bytes: float) -> str:
    """What a device can hold, and what of it a search may count, for an error message.

    >>> room_words(2**30, 2**29), room_words(2**30, 2**30)
    ('1 GiB usable on a device, 512 MiB of it by the count of the search', '1 GiB usable on a device')
    """
    usable = f"{size_words(usable_bytes)} usable on a device"
    if counted_bytes >= usable_bytes:
        return usable
    return f"{usable}, {size_words(counted_bytes)} of it by the count of the search"


def smaller_words(remat: str | None) -> str:
    """What to try where a plan needs too much memory, by the rematerialisation that was asked for: one that is left to
    the search has been tried.

    >>> smaller_words("none"), smaller_words(None)
    ('more devices, a smaller batch, or remat="layer"', 'more devices, a smaller batch')
    """
    return "more devices, a smaller batch" + (', or remat="layer"' if remat in ("none", "selective") else "")


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


class StepError(PlanError, TypeError):
    """A step that cannot be traced: what it differentiates or returns is not what it must be."""


class MemoryExceeded(PlanError):
    """Nothing that was asked for fits a device's memory.

    Attributes:
      least_seconds: lower bound of a step of the plans that may fit all the same, where some were ruled out because
        others had turned out to be too large; infinite where no plan fits.
    """

    least_seconds = float("inf")

    def named(self, refused: str, try_: str) -> MemoryExceeded:
        """The same refusal of what it is to the user, with what to try instead."""
        error = MemoryExceeded(refused=refused, got=self.got, needed=self.needed, where=self.where, try_=try_)
        error.least_seconds = self.least_seconds
        return error

    def but(self, reason: str) -> MemoryExceeded:
        """The same refusal with what stands against the next thing to try."""
        return self.named(self.refused, f"{self.try_} ({reason})")
