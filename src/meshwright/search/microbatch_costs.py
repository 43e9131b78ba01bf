"""What stages cost, for every number of microbatches that a search looks at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..errors import MemoryExceeded, PlanError
from ..program.staged import StagedProgram
from .inter_op_problem import Order
from .memory_reserve import MemoryReserve, nothing_reserved
from .part_rows import KnownParts
from .stage_costs import StageCosts
from .stage_request import StageRequest, check_layers, nothing_fits
from .submeshes import Submesh, Submeshes


class MicrobatchCosts:
    """The costs of a request's stages in each number of microbatches, made when they are first asked for.

    Args:
      request: of the search.
      submeshes: of its cluster.
      places: those that stages can have.

    Attributes:
      counts: numbers of microbatches, the fewest first.
      num_devices: of the cluster.
      refined: numbers in which stages have been searched, not bounds alone: their estimates bound those of more.
      reserve: what the search may not count on a device in so many microbatches.
      late: whether estimating is to end with `OutOfTime`.
      check: raises `OutOfTime` where it is late; called by what finds out nothing of parts of the program, but can take
        long.
      hear: called before a bound is asked for, and before each kind of submeshes is looked at: what a copy of this
        process has found out is learned.
    """

    def __init__(self, request: StageRequest, submeshes: Submeshes, places: Sequence[Submesh]) -> None:
        self.counts = sorted(request.by_microbatches)
        self.num_devices = request.cluster.num_devices
        self.refined: set[int] = set()
        self.reserve: Callable[[int], MemoryReserve] = nothing_reserved
        self.late: Callable[[], bool] = lambda: False
        self.check: Callable[[], None] = lambda: None
        self.hear: Callable[[], None] = lambda: None
        self._request, self._submeshes, self._places = request, submeshes, places
        self._made: dict[int, StageCosts | PlanError] = {}
        self._lines: dict[int, tuple[int, ...]] = {}
        self._used: dict[int, dict[Order, frozenset[int]]] = {}
        self._told: dict[int, list[KnownParts]] = {}  # of numbers of microbatches that have not been asked for

    def __call__(self, count: int) -> StageCosts:
        """Of the program in so many microbatches.

        Raises:
          PlanError: if the step cannot be cut so, which only who traces it on demand finds out here.
        """
        if count not in self._made:
            coarser = [self(other) for other in self.line(count)[1:2]]
            try:
                program = self._request.by_microbatches[count]
                check_layers(self._request, program)
                made = self._made[count] = self.of_program(program, *coarser)
                made.used = self.used(count)
                for parts in self._told.pop(count, ()):
                    made.estimates.parts.learn(parts)
            except PlanError as error:
                self._made[count] = error
        made = self._made[count]
        if isinstance(made, PlanError):
            raise made
        if count == self.counts[0]:
            for place in self._places:
                made.solver.kind_of[place]  # numbered alike in every process
        made.reserve(self.reserve(count))
        return made

    @property
    def base(self) -> StageCosts | None:
        """Of the fewest microbatches; None if the step cannot be cut so."""
        try:
            return self(self.counts[0])
        except PlanError:
            return None

    @property
    def known_parts(self) -> dict[int, int]:
        """How much has been found out of parts, by microbatches."""
        return {made.program.microbatches: len(made.estimates.parts) for made in self.all}

    def known(self, since: Mapping[int, int]) -> dict[int, KnownParts]:
        """What has been found out of parts, by microbatches, for a copy of this process.

        Args:
          since: `known_parts` before.
        """
        counts = {made.program.microbatches: made.estimates.parts for made in self.all}
        found = {count: parts.known(since.get(count, 0)) for count, parts in counts.items()}
        return {count: parts for count, parts in found.items() if parts.rows}

    def learn(self, found: Mapping[int, KnownParts]) -> None:
        """Take over what a copy of this process has found out, also of numbers of microbatches that are asked for
        later.

        Args:
          found: by microbatches.
        """
        for count, parts in found.items():
            made = self._made.get(count)
            if made is None:
                self._told.setdefault(count, []).append(parts)
            elif isinstance(made, StageCosts):
                made.estimates.parts.learn(parts)

    def nothing_fits(self) -> MemoryExceeded:
        """What to say where no plan fits."""
        usable = self._request.cluster.device.usable_memory_bytes
        left = max(self.reserve(count).limit(usable, last=False) for count in self.counts)
        return nothing_fits(self._request, left, min(costs.least_bytes() for costs in self.all))

    @property
    def all(self) -> list[StageCosts]:
        """All that have been asked for, the fewest microbatches first."""
        return [made for _, made in sorted(self._made.items()) if isinstance(made, StageCosts)]

    def forget_estimates(self) -> None:
        """Estimate every range again in all numbers of microbatches, whatever it takes."""
        for made in self.all:
            made.forget_estimates()

    def of_program(self, program: StagedProgram, coarser: StageCosts | None = None) -> StageCosts:
        """Of any program in stages.

        Args:
          program: the request's, cut in whatever way.
          coarser: of fewer microbatches, from which bounds are known; None for nothing.
        """
        request = self._request
        own = dict(zip(self._places, ([mesh] for mesh in request.stage_meshes or ()), strict=False))
        made = StageCosts(
            program, parameters=request.parameters, submeshes=self._submeshes, pins=request.pins, remat=request.remat,
            meshes=request.mesh, own_meshes=own, coarser=coarser,
        )  # fmt: skip
        made.estimates.parts.late = lambda: self.late()
        made.hear, made.check = lambda: self.hear(), lambda: self.check()
        return made

    def used(self, count: int) -> dict[Order, frozenset[int]]:
        """Of a number of microbatches what `StageCosts.used` is, whether it has been asked for or not."""
        return self._used.setdefault(count, {})

    def is_made(self, count: int) -> bool:
        """Whether a number of microbatches has been asked for, and the step can be cut so."""
        return isinstance(self._made.get(count), StageCosts)

    def is_solved(self, count: int) -> bool:
        """Whether some range is solved in so many microbatches."""
        made = self._made.get(count)
        return isinstance(made, StageCosts) and made.has_solutions

    def line(self, count: int) -> tuple[int, ...]:
        """A number of microbatches, and those whose estimates bound its own, each by the next: as of when it is first
        asked for, whether its program is needed then or not."""
        if count not in self._lines:
            coarser = self._coarser(count)
            self._lines[count] = (count, *(self.line(coarser) if coarser is not None else ()))
        return self._lines[count]

    def _coarser(self, count: int) -> int | None:
        """The most microbatches, fewer than these, in which stages have been searched; or the fewest there are."""
        if count == self.counts[0]:
            return None
        fewest = self.counts[0] if self.base is not None else None
        return max((other for other in self.refined if other < count), default=fewest)
