"""The costs of stages for every number of microbatches that a search considers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

from ...errors import PlanError
from ...program.staged import StagedProgram
from ..inter.logical_meshes import meshes_alone
from ..inter.submeshes import Submesh, Submeshes
from ..stages.costs import StageCosts
from ..stages.reserve import MemoryReserve
from ..stages.solver import GAP, RANGE_GAP
from .request import StageRequest, check_layers, no_layouts, nothing_fits, nothing_fits_alone, unsolved


class MicrobatchCosts:
    """The costs of a request's stages in each number of microbatches, made on first use.

    Args:
      request: of the search.
      submeshes: of its cluster.
      places: those that stages can have.
      check: called before what can take long; raises `OutOfTime` where there is no time for it.
      left_seconds: of the time limit.

    Attributes:
      counts: numbers of microbatches, the fewest first.
      num_devices: of the cluster.
      searched: numbers in which stages have been searched: their estimates bound those of more.
      reserved: what the search may not count on a device, by number of microbatches.
    """

    def __init__(
        self,
        request: StageRequest,
        submeshes: Submeshes,
        places: Sequence[Submesh],
        check: Callable[[], None] = lambda: None,
        left_seconds: Callable[[], float] = lambda: inf,
    ) -> None:
        self.counts = sorted(request.by_microbatches)
        self.num_devices = request.cluster.num_devices
        self.searched: set[int] = set()
        self.reserved: Mapping[int, MemoryReserve] = dict.fromkeys(self.counts, MemoryReserve())
        self._request, self._submeshes, self._places = request, submeshes, places
        self._check, self._left_seconds = check, left_seconds
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
        made.reserve(self.reserved[count])
        return made

    def reserve(self, reserved: Mapping[int, MemoryReserve]) -> bool:
        """From now on so much may not be counted. Returns whether that is less than before in some number of
        microbatches."""
        before, self.reserved = self.reserved, reserved
        return any(reserved[count].is_less_than(before[count]) for count in self.counts)

    @property
    def base(self) -> StageCosts | None:
        """Of the fewest microbatches; None if the step cannot be cut so."""
        try:
            return self(self.counts[0])
        except PlanError:
            return None

    def nothing_fits(self) -> PlanError:
        """The error for a request that has no plan: nothing fits, or no layouts satisfy what is fixed."""
        request, usable = self._request, self._request.cluster.device.usable_memory_bytes
        if not any(costs.has_layouts(place) for costs in self.all for place in self._places):
            return no_layouts(request)
        if isfinite(self.left_open):
            return unsolved(request)
        left = max(self.reserved[count].limit(usable, last=request.alone) for count in self.counts)
        if request.alone:
            least, costs = min(((one.least_bytes(self._places[0]), one) for one in self.all), key=lambda one: one[0])
            error = nothing_fits_alone(request, usable, left, least, costs.program)
        else:
            error = nothing_fits(request, usable, left, min(costs.solver.least_state_bytes for costs in self.all))
        refused = next((made for made in self._made.values() if isinstance(made, PlanError)), None)
        return error if refused is None else error.but(f"more microbatches are out of the question: {refused}")

    @property
    def all(self) -> list[StageCosts]:
        """All costs made so far, the fewest microbatches first."""
        return [made for _, made in sorted(self._made.items()) if isinstance(made, StageCosts)]

    @property
    def left_open(self) -> float:
        """Seconds of a step that plans take at least with stages for which there was no time; infinite for none."""
        return min((costs.left_open for costs in self.all), default=inf)

    def forget_estimates(self) -> None:
        """Drop all estimates, and with them the limits on which ranges are estimated."""
        for made in self.all:
            made.forget_estimates()

    def of_program(self, program: StagedProgram, coarser: StageCosts | None = None) -> StageCosts:
        """Of the request's program, cut in whatever way, in the memory that there is for its number of microbatches;
        bounds are known from a `coarser` number."""
        request = self._request
        own = dict(zip(self._places, ([mesh] for mesh in request.stage_meshes or ()), strict=False))
        alone, mesh = request.alone, request.mesh
        if alone:
            mesh = meshes_alone(request.cluster, mesh, len(program.graph.operators))
        made = StageCosts(
            program, parameters=request.parameters, submeshes=self._submeshes, constraints=request.constraints,
            remat=request.remat, meshes=mesh, own_meshes=own, coarser=coarser, check=self._check, alone=alone,
            most_layers=len(program.layers) + 1 - (request.stage_count or 1), gap=self._gap,
            left_seconds=self._left_seconds,
        )  # fmt: skip
        if alone and request.remat in ("selective", "layer") and not made.solver.segments(0, 1):
            raise PlanError(
                refused=f'remat="{request.remat}"', got="a program in which no cut into layers saves memory",
                needed="several layers whose results are kept for the backward pass", where="the loss function",
                try_='remat="none"',
            )  # fmt: skip
        made.reserve(self.reserved[program.microbatches])
        return made

    @property
    def _gap(self) -> float:
        if self._request.gap is not None:
            return self._request.gap
        return GAP if self._request.alone else RANGE_GAP

    def _coarser(self, count: int) -> StageCosts | None:
        """Of the most microbatches, fewer than these, in which stages have been searched; or of the fewest there
        are."""
        if count == self.counts[0]:
            return None
        searched = max((other for other in self.searched if other < count), default=None)
        return self(searched) if searched is not None else self.base
