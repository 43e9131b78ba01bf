"""Names of what the programs of a stage read and write."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What an array is to a stage.

    There once a step: `PARAMETER`, `INPUT` (of the program, all its microbatches), `SUM` (of a loss or an auxiliary
    result over microbatches) and `GRADIENT` (local sums, not synchronised). `INDEX` is the number of the microbatch.

    There for each microbatch: `RECEIVED` from another stage and `SENT` to others; `COTANGENT` of what was sent, from
    one of those stages, and `RETURNED`, that of what was received; `COLLECTED`, a part of an auxiliary result that
    grows with the batch; and `RESIDUAL`, from one program of the stage to the next.

    `SEED` is the cotangent of the loss: one.

    Around the core: `ARGUMENT` and `OUTPUT` of the step; `JOINED`, the parts collected of an auxiliary result put
    together; `SYNCHRONISED`, the gradient of a parameter as one stage has it; `BUNDLE`, small values of one dtype, or
    one large value, that a stage sends to others after a round; `DELIVERED`, an output of another stage.
    """

    PARAMETER = "parameter"
    INPUT = "input"
    INDEX = "index"
    SUM = "sum"
    GRADIENT = "gradient"
    RECEIVED = "received"
    SENT = "sent"
    COTANGENT = "cotangent"
    RETURNED = "returned"
    COLLECTED = "collected"
    RESIDUAL = "residual"
    SEED = "seed"
    ARGUMENT = "argument"
    OUTPUT = "output"
    JOINED = "joined"
    SYNCHRONISED = "synchronised"
    BUNDLE = "bundle"
    DELIVERED = "delivered"


# Each device holds a block of its own, of no sharding spec: they stand one after the other along the first dim. (A dim
# more would keep XLA from adding to a gradient in place.)
PACKED = frozenset({Role.GRADIENT, Role.RESIDUAL})
# Made anew for each microbatch.
PASSING = frozenset({Role.RECEIVED, Role.SENT, Role.COTANGENT, Role.RETURNED, Role.COLLECTED, Role.RESIDUAL})


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One array of a stage.

    >>> Slot(Role.SENT, 3).role.value
    'sent'

    Args:
      role: what it is.
      position: among the stage's parameters or inputs, the core's outputs (sums, collected results) or the whole
        graph's values (what is sent and received), the program's parameters (synchronised); of a residual its number,
        of a bundle its round.
      source: the stage that a cotangent, a synchronised gradient or a bundle comes from.
      content: of a bundle: the dtype of its values, or the number of the one large value that it is.
    """

    role: Role
    position: int = 0
    source: int = -1
    content: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a program of a stage reads and writes.

    Args:
      inputs: what it reads.
      outputs: what it writes.
    """

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
