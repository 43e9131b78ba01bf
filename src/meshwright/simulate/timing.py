"""What the simulator is told: seconds and bytes of each stage and each edge, per device, all numbers given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..errors import PlanError
from ..schedule import Edge, neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTiming:
    """One stage, per microbatch unless it says otherwise.

    Args:
      forward_seconds: of a forward.
      backward_seconds: of a backward, input and weight gradients together.
      backward_input_seconds: of an input gradient alone; None if the stage is not split.
      backward_weight_seconds: of a weight gradient alone; None if the stage is not split.
      synchronise_seconds: of the gradients' synchronisation, before each update.
      update_seconds: of each update.
      constant_bytes: on one device throughout: parameters, gradients, optimizer state.
      version_bytes: on one device, of each further version of the weights (weight stashing).
      in_flight_bytes: on one device, kept from the start of a forward to the end of its backward.
      delayed_bytes: on one device, kept from the input gradient to the end of the weight gradient; None for what is in
        flight and what is handed over.
      handed_bytes: of these, what the input gradient makes or is sent for the weight gradient.
      workspace_bytes: on one device, while an instruction runs.
      update_workspace_bytes: on one device, while an update runs; None for the same.

    Raises:
      PlanError: a number that is negative, infinite or not a number, or one half of a split backward without the other.
    """

    forward_seconds: float
    backward_seconds: float = 0.0
    backward_input_seconds: float | None = None
    backward_weight_seconds: float | None = None
    synchronise_seconds: float = 0.0
    update_seconds: float = 0.0
    constant_bytes: float = 0.0
    version_bytes: float = 0.0
    in_flight_bytes: float = 0.0
    delayed_bytes: float | None = None
    handed_bytes: float = 0.0
    workspace_bytes: float = 0.0
    update_workspace_bytes: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        if (self.backward_input_seconds is None) != (self.backward_weight_seconds is None):
            raise _refusal("StageTiming", "one half of a split backward", "both halves or none", "the other half too")
        most = self.in_flight_bytes + self.handed_bytes
        if self.delayed_bytes is not None and self.delayed_bytes > most:
            needed = f"at most the {most:.6g} bytes in flight and handed over"
            raise _refusal("StageTiming.delayed_bytes", f"{self.delayed_bytes:.6g} bytes", needed, "a part of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTiming:
    """One edge, per microbatch.

    Args:
      edge: which.
      forward_seconds: to move the activations.
      backward_seconds: to move the cotangents back.
      source_bytes: of the values on one device of the source stage, in either direction.
      target_bytes: the same for the target stage.
      source_workspace_bytes: on one device of the source stage, beside these, while they move in either direction.
      target_workspace_bytes: the same for the target stage.

    Raises:
      PlanError: a number that is negative, infinite or not a number.
    """

    edge: Edge
    forward_seconds: float
    backward_seconds: float
    source_bytes: float = 0.0
    target_bytes: float = 0.0
    source_workspace_bytes: float = 0.0
    target_workspace_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All stages and edges of a pipeline.

    >>> timing = Timing.uniform(stages=2, forward_seconds=1.0, backward_seconds=2.0, transfer_seconds=0.5)
    >>> timing.edges[0].forward_seconds
    0.5

    Args:
      stages: in order.
      edges: each once; those that connect stages of one rank may be left out, as their values stay where they are.
      updates_wait_for_all: whether no update starts before the gradients of every stage are synchronised, as clipping
        by the global norm demands.

    Raises:
      PlanError: no stage, or an edge twice.
    """

    stages: tuple[StageTiming, ...]
    edges: tuple[EdgeTiming, ...] = ()
    updates_wait_for_all: bool = False

    def __post_init__(self) -> None:
        if not self.stages:
            raise _refusal("Timing.stages", "no stage", "at least one", "a StageTiming for each stage")
        if len({e.edge for e in self.edges}) != len(self.edges):
            raise _refusal("Timing.edges", "an edge twice", "each edge once", "the sum of what they carry")

    @classmethod
    def uniform(
        cls,
        *,
        stages: int,
        forward_seconds: float,
        backward_seconds: float,
        weight_seconds: float | None = None,
        transfer_seconds: float | Sequence[float] = 0.0,
    ) -> Timing:
        """Equal stages in a chain, without memory.

        Args:
          stages: how many.
          forward_seconds: of each stage.
          backward_seconds: of each stage, input and weight gradients together.
          weight_seconds: the part of a backward that is a weight gradient; None if stages are not split.
          transfer_seconds: of each edge, one way: one number for all, or one for each.
        """
        edges = neighbours(stages)
        seconds = [transfer_seconds] * len(edges) if isinstance(transfer_seconds, (int, float)) else transfer_seconds
        if len(seconds) != len(edges):
            got = f"{len(seconds)} numbers of seconds"
            raise _refusal("transfer_seconds", got, f"{len(edges)}, one for each edge", "one number for all")
        stage = StageTiming(
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            backward_input_seconds=None if weight_seconds is None else backward_seconds - weight_seconds,
            backward_weight_seconds=weight_seconds,
        )
        return cls(
            stages=(stage,) * stages,
            edges=tuple(
                EdgeTiming(edge=edge, forward_seconds=c, backward_seconds=c)
                for edge, c in zip(edges, seconds, strict=True)
            ),
        )


def _check_numbers(timing: StageTiming | EdgeTiming) -> None:
    for field in fields(timing):
        value = getattr(timing, field.name)
        if field.name == "edge" or value is None:
            continue
        if not (math.isfinite(value) and value >= 0):
            unit = "seconds" if field.name.endswith("seconds") else "bytes"
            where = f"{type(timing).__name__}.{field.name}"
            raise _refusal(where, f"{value} {unit}", f"finite {unit} >= 0", "predicted or measured numbers")


def _refusal(where: str, got: str, needed: str, try_: str) -> PlanError:
    return PlanError(refused="this timing", got=got, needed=needed, where=where, try_=try_)
