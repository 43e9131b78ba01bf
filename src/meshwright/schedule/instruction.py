"""What a schedule is made of: instructions of ranks, and the transfers that follow from the edges between stages.

A transfer is not an instruction: it happens because a value exists on one rank and an instruction of another needs it.
Along an edge of the stage graph activations travel forward and their cotangents backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Kind(StrEnum):
    """What an instruction does.

    `BACKWARD` computes the gradients of inputs and weights together; a schedule that splits it uses `BACKWARD_INPUT`
    (what the stages before wait for) and `BACKWARD_WEIGHT` (what nobody waits for until the update) instead. `UPDATE`
    synchronises the gradients of a stage and steps its optimizer.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    UPDATE = "update"


class Direction(StrEnum):
    """Which way a value travels along an edge: activations forward, cotangents backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One thing a rank does.

    >>> print(Instruction(kind=Kind.FORWARD, stage=1, microbatch=3))
    forward of stage 1, microbatch 3

    Args:
      kind: what is done.
      stage: to which stage.
      microbatch: to which microbatch; None for the one update at the end of a synchronous step.
    """

    kind: Kind
    stage: int
    microbatch: int | None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        return f"{self.kind} of stage {self.stage}{microbatch}"


@lru_cache(maxsize=1 << 10)
def for_each_microbatch(kind: Kind, stage: int, microbatches: int) -> tuple[Instruction, ...]:
    """One thing done to a stage with each microbatch; a search looks at hundreds of schedules made of the same.

    >>> print(*for_each_microbatch(Kind.FORWARD, 1, 2), sep="; ")
    forward of stage 1, microbatch 0; forward of stage 1, microbatch 1
    """
    return tuple(Instruction(kind=kind, stage=stage, microbatch=m) for m in range(microbatches))


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """Two stages of which the second reads what the first computes; `source < target`.

    Neighbours usually; a skip connection of a U-Net jumps over stages.
    """

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The values of one microbatch that cross one edge, between two ranks.

    >>> transfer = Transfer(edge=Edge(0, 1), direction=Direction.BACKWARD, microbatch=2)
    >>> transfer.sender, transfer.receiver
    (1, 0)
    """

    edge: Edge
    direction: Direction
    microbatch: int

    @property
    def sender(self) -> int:
        """The stage the values come from."""
        return self.edge.source if self.direction is Direction.FORWARD else self.edge.target

    @property
    def receiver(self) -> int:
        """The stage the values go to."""
        return self.edge.target if self.direction is Direction.FORWARD else self.edge.source

    def __str__(self) -> str:
        what = "activations" if self.direction is Direction.FORWARD else "cotangents"
        return f"{what} of microbatch {self.microbatch} from stage {self.sender} to {self.receiver}"
