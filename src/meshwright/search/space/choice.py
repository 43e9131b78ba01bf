"""What a plan decides, as data.

A *choice* is the number of microbatches and, for each stage in program order, its layers, submesh, logical mesh,
rematerialisation and layouts. Everything but the layouts is the *structure*. The schedule is not part of a choice: of
those that fit, pricing takes the one with the shortest simulated step. A choice of which some decisions are left is
*partial*; `structures` has the order in which they are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..inter.submeshes import Submesh

# For each node of a stage's intra-operator problem the number of its choice.
LayoutNumbers = tuple[int, ...]


class StageChoice(NamedTuple):
    """A stage.

    Args:
      first: its first layer.
      last: one past its last layer.
      submesh: its devices.
      mesh: number of its logical mesh among those of the submesh.
      remat: the way to rematerialise it (`program.ladder`).
      layouts: of each node of its intra-operator problem the number of the choice; None for those that the integer
        program finds within the memory of a device.
    """

    first: int
    last: int
    submesh: Submesh
    mesh: int
    remat: int
    layouts: LayoutNumbers | None = None


class Choice(NamedTuple):
    """A plan's decisions, or some of them.

    >>> stage = StageChoice(0, 4, Submesh(0, 8), mesh=0, remat=0)
    >>> Choice(2, (stage,)).structure == Choice(2, (stage._replace(layouts=(1, 0)),)).structure
    True

    Args:
      microbatches: in a step; 0 where not decided.
      stages: in program order, each on the submesh after the one before it.
      open: what is decided of the next stage, in order: its end (one past its last layer), submesh, logical mesh.
    """

    microbatches: int = 0
    stages: tuple[StageChoice, ...] = ()
    open: tuple[int | Submesh, ...] = ()

    @property
    def structure(self) -> Choice:
        """The same choice with its layouts left to the integer program."""
        return self._replace(stages=tuple(stage._replace(layouts=None) for stage in self.stages))

    @property
    def next_layer(self) -> int:
        """The first layer of the next stage."""
        return self.stages[-1].last if self.stages else 0

    @property
    def next_device(self) -> int:
        """The first device of the next stage."""
        return self.stages[-1].submesh.stop if self.stages else 0

    def laid_out(self, layouts: Callable[[int], LayoutNumbers | None]) -> Choice | None:
        """The same choice in the layouts that are found for each stage, by its number; None where one has none."""
        stages = []
        for number, stage in enumerate(self.stages):
            if (found := layouts(number)) is None:
                return None
            stages.append(stage._replace(layouts=found))
        return self._replace(stages=tuple(stages))

    def with_stages(self, number: int, *stages: StageChoice, instead_of: int = 1) -> Choice:
        """The same choice with these stages in the place of some, from one number on."""
        return self._replace(stages=(*self.stages[:number], *stages, *self.stages[number + instead_of :]))
