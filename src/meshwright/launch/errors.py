"""The one error of the package: processes that cannot be started or joined, or that failed."""

from __future__ import annotations

from ..errors import PlanError


class LaunchError(PlanError):
    """A run on several processes that cannot start, cannot be joined, or ended in failure.

    Args:
      refused: what was refused, in the user's words.
      got: what was given, or what happened.
      needed: what would have been accepted.
      where: the argument, address, process or log.
      try_: real options.
    """
