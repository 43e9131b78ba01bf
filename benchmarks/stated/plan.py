"""A plan as papers state it: sizes of the axes, ZeRO stage, recomputation, microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "layer", "attention", "alternate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedPlan:
    """Sizes and choices as papers state them.

    >>> StatedPlan(tensor=8, pipeline=4, data=32, microbatches=28, chunks=3).devices
    1024

    Args:
      tensor: devices that share products.
      pipeline: ranks of stages.
      chunks: stages on each rank (interleaved); 1 for one.
      data: devices that share the batch, replicas included, experts' devices not.
      expert: devices that share the batch, and the experts.
      replicas: of these, groups that each hold all of the optimizer state (or parameters) among them.
      context: devices that share a sequence.
      zero: the ZeRO stage, 0 to 3.
      sequence_parallel: whether tensor devices share the sequence between products.
      microbatches: in a step.
      recompute: in the backward pass: nothing, each layer, the attention between queries, keys and values and their
        mixture, or everything but attention and every other product with parameters.
      recompute_share: of the layers.
      searched: whether layouts are searched freely on this mesh, held to no roles.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    data: int = 1
    expert: int = 1
    replicas: int = 1
    context: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    microbatches: int = 1
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    searched: bool = False

    @property
    def devices(self) -> int:
        """How many it is for."""
        return self.tensor * self.pipeline * self.data * self.expert * self.context

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes of a stage's mesh with their sizes, major first, without those of one device."""
        known = (
            ("replica", self.replicas), ("data", self.data // self.replicas), ("expert", self.expert),
            ("context", self.context), ("model", self.tensor),
        )  # fmt: skip
        return tuple(axis for axis in known if axis[1] > 1) or (("data", 1),)
