"""The inter-operator problem as numbers (`dynamic_program` solves it), and its solutions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from .submeshes import Submesh

Order = Literal["one_f_one_b", "adaptive", "eager_one_f_one_b", "gpipe", "zero_bubble"]
ORDERS: tuple[Order, ...] = ("one_f_one_b", "adaptive", "eager_one_f_one_b", "gpipe", "zero_bubble")


class Option(NamedTuple):
    """One way to run a range of layers on a submesh.

    Args:
      forward_seconds: of one microbatch.
      backward_seconds: of one microbatch.
      weight_seconds: of that, the gradients of parameters, which a split backward puts off.
      per_step_seconds: gradient synchronisation and update.
      constant_bytes: on one device, however many microbatches are in flight.
      workspace_bytes: of that, what is there only while the backward pass runs.
      in_flight_bytes: on one device for each microbatch in flight.
      tag: whose it is; the search looks not at it.
    """

    forward_seconds: float
    backward_seconds: float
    per_step_seconds: float = 0.0
    constant_bytes: float = 0.0
    workspace_bytes: float = 0.0
    in_flight_bytes: float = 0.0
    weight_seconds: float = 0.0
    tag: Any = None

    @property
    def seconds(self) -> float:
        """Of one microbatch, both passes."""
        return self.forward_seconds + self.backward_seconds


def best_of(options: Sequence[Option]) -> tuple[Option, ...]:
    """The options that no other one dominates; of equal ones the first."""
    kept: list[Option] = []
    for option in sorted(options, key=_criteria):
        if not any(all(a <= b for a, b in zip(_criteria(other), _criteria(option), strict=True)) for other in kept):
            kept.append(option)
    return tuple(kept)


def _criteria(option: Option) -> tuple[float, ...]:
    """The numbers with which the objective of some order, or the memory of a stage, grows. A split backward grows with
    the seconds of input gradients, which earlier stages wait for."""
    input_seconds = option.backward_seconds - option.weight_seconds
    return (
        option.seconds, option.forward_seconds, option.backward_seconds, input_seconds, option.per_step_seconds,
        option.constant_bytes, option.in_flight_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value of one layer that later layers read, or a parameter of several layers.

    Args:
      layers: the layers that touch it, ascending; of a value the first makes it and the others read it.
      forward_bytes: moved for each microbatch; 0 for a parameter.
      backward_bytes: moved back for each microbatch.
      once_bytes: of the gradient that holders of a parameter exchange once a step; 0 for a value.
    """

    layers: tuple[int, ...]
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    once_bytes: float = 0.0


def loose_ends(crossings: Sequence[Crossing], layers: int) -> frozenset[int]:
    """Layers that read nothing of the layer before them: a stage that begins there may not wait for the one before it,
    as where branches of a program are computed one after the other.

    >>> loose_ends([Crossing(layers=(0, 1), forward_bytes=1.0), Crossing(layers=(0, 2), forward_bytes=1.0)], 3)
    frozenset({2})
    """
    read = {one.layers[0] + 1 for one in crossings if one.forward_bytes > 0 and one.layers[0] + 1 in one.layers}
    return frozenset(range(1, layers)) - read


class PlacedStage(NamedTuple):
    """A stage of a found plan: layers `first` to before `last`, on a submesh, run as `option` says."""

    first: int
    last: int
    submesh: Submesh
    option: Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A staged plan.

    Args:
      seconds: the objective.
      stages: in program order.
      lower_bound: no plan takes less under these numbers; seconds.
      others: the next best that the search has left, best first; not all there are.
    """

    seconds: float
    stages: tuple[PlacedStage, ...]
    lower_bound: float
    others: tuple[tuple[PlacedStage, ...], ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the plan is the optimum of the problem."""
        return self.lower_bound >= self.seconds


@dataclass(frozen=True, kw_only=True)
class InterOpProblem:
    """The problem: which layers run on which submesh, with which option.

    Args:
      layers: how many.
      devices: how many; every plan uses all of them.
      submeshes: what a stage may be placed on.
      options: for a range of layers (first, one past the last), a submesh and a number of microbatches in flight.
      crossings: what layers share.
      transfer_seconds: from one submesh to a later one, of so many bytes; what an edge carries is one transfer. Two
        holders of a parameter exchange its gradient in as many seconds, both ways at once.
      microbatches: in a step.
      limit_bytes: that may be counted on a device of a submesh, by whether the stage on it has the last layer.
      order: the schedule.
      num_stages: how many stages there are to be; None for any number. Without it zero bubble is a bound: a stage then
        keeps as many microbatches as there are stages from its place on, of which there may be more before it.
      loose: as of `loose_ends`, where transfers take no time or less than they do too.
      least: for a submesh the seconds of a microbatch, both passes and forward, that no option of a range of layers
        (first, one past the last) is below, each `[layers + 1, layers + 1]`, infinite where there is none; None to
        look at all options.
      fastest: the same of options that fit memory with so many microbatches in flight, for several such numbers: each
        `[in flight, layers + 1, layers + 1]`; None for `least` whatever is in flight.
      kind: equal for submeshes of which `least` and `fastest` say the same.
    """

    layers: int
    devices: int
    submeshes: Sequence[Submesh]
    options: Callable[[int, int, Submesh, int], Sequence[Option]]
    crossings: Sequence[Crossing]
    transfer_seconds: Callable[[Submesh, Submesh, float], float]
    microbatches: int
    limit_bytes: Callable[[Submesh, bool], float]
    order: Order = "one_f_one_b"
    num_stages: int | None = None
    loose: frozenset[int] = frozenset()
    least: Callable[[Submesh], tuple[np.ndarray, np.ndarray]] | None = None
    fastest: Callable[[Submesh, Sequence[int]], tuple[np.ndarray, np.ndarray]] | None = None
    kind: Callable[[Submesh], Hashable] = lambda submesh: submesh

    @property
    def most_places(self) -> int:
        """The most stages that a plan can have."""
        most = min(self.layers, self.devices)
        return most if self.num_stages is None else min(most, self.num_stages)

    def in_flight(self, from_end: int) -> int:
        """Microbatches that the stage at place `from_end` from the end (the last is 1) holds at once."""
        match self.order:
            case "gpipe":
                held = self.microbatches
            case "zero_bubble":
                held = self.num_stages or from_end
            case "adaptive" | "eager_one_f_one_b":
                held = 2 * from_end - 1
            case "one_f_one_b":
                held = from_end
        return min(self.microbatches, held)

    def room(self, option: Option, submesh: Submesh, from_end: int) -> int:
        """Microbatches that an option which fits at this place from the end has room for."""
        free = self.limit_bytes(submesh, from_end == 1) - option.constant_bytes
        if free >= self.microbatches * option.in_flight_bytes:
            return self.microbatches
        return max(int(free / option.in_flight_bytes), self.in_flight(from_end))

    def fits(self, option: Option, submesh: Submesh, from_end: int) -> bool:
        """Whether an option at this place from the end fits a device of a submesh."""
        held = option.constant_bytes + self.in_flight(from_end) * option.in_flight_bytes
        return held <= self.limit_bytes(submesh, from_end == 1) * (1 + 1e-12)
