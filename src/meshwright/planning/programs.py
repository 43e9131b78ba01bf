"""The step in every number of microbatches that a search may look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations

from ..errors import PlanError
from ..program.batch import batch_extents
from ..program.equal_stages import equal_stages, main_scan
from ..program.layers import DEFAULT_LAYERS
from ..program.staged import StagedProgram, whole_program
from ..program.trace import Program
from .request import PlanRequest

# On more devices a program is cut into twice as many layers, since a stage may have a smaller share of them.
# (gpt3-1t on 3,072 A100: 96.6 s a step instead of 101.0, for 1.8 times the CPU seconds; gpt3-175b on 1,024 the same.)
_MANY_DEVICES = 2048


class StepPrograms(Mapping[int, StagedProgram]):
    """The step for every number of microbatches to be considered, in layers, made when it is first asked for: two that
    are made of the same equations are traced, and others extrapolated from them, as long as that comes true.

    Raises:
      PlanError: on asking, if the step cannot be cut so, or has no loss function that is marked.
    """

    def __init__(self, asked: PlanRequest, counts: Sequence[int]) -> None:
        self._asked, self._counts = asked, counts
        self._known: dict[int, StagedProgram] = {}
        # Those from which others are extrapolated: the fewest microbatches, in which a step may be made of other
        # equations (no statistics of the batch, say), and further ones.
        self._traced: list[StagedProgram] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, count: int) -> StagedProgram:
        if count == self.any.microbatches:
            return self.any
        if count not in self._known:
            self._known[count] = self._expected(count) or self._other(count)
        return self._known[count]

    def _expected(self, count: int) -> StagedProgram | None:
        """Extrapolated from two others; None where no two are alike, and where it is traced."""
        asked, traced = self._asked, self._asked.traced()
        if count in traced:
            return None
        for other in (one for one in self._counts if one in traced):
            self[other]  # of which there may be a pair already
        pairs = combinations(self._traced, 2)
        found = (asked.expectations.of(*pair, count, lambda: self._cut(count)) for pair in pairs)
        return next((one for one in found if one is not None), None)

    def _other(self, count: int) -> StagedProgram:
        """Cut like one that is made of the same equations, so that what a few microbatches take bounds what more of
        them do."""
        staged = self._cut(count)
        # Microbatches of one sample say nothing of others.
        if all(extent > count for extent in batch_extents(self._asked.args, self._asked.batch_axis)):
            self._traced.append(staged)
        return staged

    def _cut(self, count: int) -> StagedProgram:
        asked, preset = self._asked, self._asked.preset
        asked.tell(f"tracing {count} microbatches")
        program = _traced(asked, count)
        if not program.marked:
            raise PlanError(
                refused=f"a plan of {asked.stages or 'several'} stages", got=program.marks.got,
                needed="a step whose loss function is marked: its forward program is what is cut",
                where=asked.traces.name,
                try_=f"{program.marks.advice}; stages=1; or schedule='inference' for a step that computes no gradients",
            )  # fmt: skip
        if preset is not None:
            stages = preset.stages * preset.chunks
            scanned = stages == 1 or main_scan(program) is not None
            return equal_stages(program, stages, None if scanned else asked.traces.staged(program))
        layers = 2 * DEFAULT_LAYERS if asked.cluster.num_devices > _MANY_DEVICES else DEFAULT_LAYERS
        stages = asked.stages or 0
        found = asked.traces.staged(program, tuple(self._traced), max(layers, stages))
        more = 1
        while len(found.layers) < stages and more <= stages:  # equal layers may be fewer than there may be
            found = asked.traces.staged(program, tuple(self._traced), stages + more)
            more *= 2
        return found

    @cached_property
    def any(self) -> StagedProgram:
        """The one of the fewest microbatches that there is."""
        refused: PlanError | None = None
        for count in sorted(self._counts):
            try:
                found = self._cut(count)
                self._traced.append(found)
                return found
            except PlanError as error:
                # Some steps cannot be cut so finely: these numbers were our idea.
                refused = refused or error
        assert refused is not None
        raise refused


class WholePrograms(StepPrograms):
    """The same of programs that are not cut, marked or not."""

    def _cut(self, count: int) -> StagedProgram:
        self._asked.tell("tracing" if count == 1 else f"tracing {count} microbatches")
        return whole_program(self._asked.program(count))


def _traced(asked: PlanRequest, count: int) -> Program:
    """The step in so many microbatches; without gradients where it is to run forwards only.

    Raises:
      PlanError: if it cannot be cut so, or is to run forwards only and computes gradients.
    """
    if asked.schedule != "inference":
        return asked.program(count)
    whole = asked.program(1)
    if whole.marked or whole.state_inputs:
        raise PlanError(
            refused="the schedule inference", got="a step that computes gradients or returns its state",
            needed="one of forwards only: (weights, batch) -> results", where="schedule=",
            try_="one_f_one_b for training, or the forward function alone",
        )  # fmt: skip
    return asked.traces.inference(asked.args, microbatches=count, batch_axis=asked.batch_axis)
