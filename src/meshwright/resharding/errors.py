"""The one error of the package: a move between meshes that cannot be planned."""

from __future__ import annotations

from ..errors import PlanError


class ReshardError(PlanError):
    """A description of a move, or of the machines it runs on, that cannot be accepted.

    Args:
      refused: what was refused, in the user's words.
      got: what was given.
      needed: what would have been accepted.
      where: the tensor, mesh, file or case.
      try_: real options.
    """

    def inside(self, outer: str) -> ReshardError:
        """The same error with `outer` (a file, a case of it, a tensor) put before the place it names."""
        where = f"{outer}, {self.where}" if self.where else outer
        return ReshardError(refused=self.refused, got=self.got, needed=self.needed, where=where, try_=self.try_)
