"""The costs of stages for every number of microbatches that a search considers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import MemoryExceeded, PlanError
from ...program.staged import StagedProgram
from ..inter.submeshes import Submesh, Submeshes
from ..stages.costs import StageCosts
from ..stages.reserve import MemoryReserve, nothing_reserved
from .request import StageRequest, check_layers, nothing_fits


class MicrobatchCosts:
    """The costs of a request's stages in each number of microbatches, made on first use.

    Args:
      request: of the search.
      submeshes: of its cluster.
      places: those that stages can have.
      check: called before what can take long; raises `OutOfTime` where there is no time for it.

    Attributes:
      counts: numbers of microbatches, the fewest first.
      num_devices: of the cluster.
      searched: numbers in which stages have been searched: their estimates bound those of more.
      reserve: what the search may not count on a device in so many microbatches.
    """

    def __init__(
        self,
        request: StageRequest,
        submeshes: Submeshes,
        places: Sequence[Submesh],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.counts = sorted(request.by_microbatches)
        self.num_devices = request.cluster.num_devices
        self.searched: set[int] = set()
        self.reserve: Callable[[int], MemoryReserve] = nothing_reserved
        self._request, self._submeshes, self._places, self._check = request, submeshes, places, check
        self._made: dict[int, StageCosts | PlanError] = {}

    def __call__(self, count: int) -> StageCosts:
        """Of the program in so many microbatches.

        Raises:
          PlanError: if the step cannot be cut so, which only who traces it on demand finds out here.
        """
        if count not in self._made:
            coarser = self._coarser(count)
            try:
                program = self._request.by_microbatches[count]
                check_layers(self._request, program)
                self._made[count] = self.of_program(program, coarser)
            except PlanError as error:
                self._made[count] = error
        made = self._made[count]
        if isinstance(made, PlanError):
            raise made
        made.reserve(self.reserve(count))
        return made

    @property
    def base(self) -> StageCosts | None:
        """Of the fewest microbatches; None if the step cannot be cut so."""
        try:
            return self(self.counts[0])
        except PlanError:
            return None

    def nothing_fits(self) -> MemoryExceeded:
        """The error for a request of which no plan fits."""
        usable = self._request.cluster.device.usable_memory_bytes
        left = max(self.reserve(count).limit(usable, last=False) for count in self.counts)
        return nothing_fits(self._request, usable, left, min(costs.solver.least_state_bytes for costs in self.all))

    @property
    def all(self) -> list[StageCosts]:
        """All costs made so far, the fewest microbatches first."""
        return [made for _, made in sorted(self._made.items()) if isinstance(made, StageCosts)]

    def forget_estimates(self) -> None:
        """Drop all estimates, and with them the limits on which ranges are estimated."""
        for made in self.all:
            made.forget_estimates()

    def of_program(self, program: StagedProgram, coarser: StageCosts | None = None) -> StageCosts:
        """Of the request's program, cut in whatever way, in the memory that there is for its number of microbatches;
        bounds are known from a `coarser` number."""
        request = self._request
        own = dict(zip(self._places, ([mesh] for mesh in request.stage_meshes or ()), strict=False))
        made = StageCosts(
            program, parameters=request.parameters, submeshes=self._submeshes, constraints=request.constraints,
            remat=request.remat, meshes=request.mesh, own_meshes=own, coarser=coarser, check=self._check,
            most_layers=len(program.layers) + 1 - (request.stage_count or 1),
        )  # fmt: skip
        made.reserve(self.reserve(program.microbatches))
        return made

    def _coarser(self, count: int) -> StageCosts | None:
        """Of the most microbatches, fewer than these, in which stages have been searched; or of the fewest there
        are."""
        if count == self.counts[0]:
            return None
        searched = max((other for other in self.searched if other < count), default=None)
        return self(searched) if searched is not None else self.base
