"""Collectives of parameters: what of their seconds a step waits for.

A gather of a parameter is started ahead of its use, and the sum of its gradient is waited for late, where the compiler
schedules so. What runs beside them is compute of other operators; which, is decided after layouts are. Each collective
counts as if it ran beside as much as the products take that read its parameter, once forward and twice backward: what
layers need is then there for them, and prices of layouts stay sums. (In a transformer all weights have about the same
ratio of bytes to FLOPs, so that the sum is that of all collectives beside all products; attention is left over.)
Compilers also send small ones together, so that one of a few bytes pays for little of a start.

Collectives of activations are waited for: an operator before makes what they move, and one behind reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ...cluster import Device
from ...cost.efficiency import EfficiencyProfile
from ...program.graph import Graph, Path, once_for_each
from .choices import values_of_parameters

# Seconds: a number, or one for each pair of layouts.
_Seconds = TypeVar("_Seconds", float, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """What a step waits for of the collectives of one value.

    >>> half = Exposure(beside=2.0, gathers=0.5)
    >>> half.of_gather(1.0), half.of_gather(8.0), half.of_sum(1.0)
    (0.5, 7.0, 1.0)

    Args:
      beside: seconds of one forward run of the products that read it, on all devices.
      gathers: the share of a gather that runs beside compute where there is enough (`EfficiencyProfile`).
      sums: the same of a sum of its gradient.
      starts: the share of what starting a collective costs.
    """

    beside: float = 0.0
    gathers: float = 0.0
    sums: float = 0.0
    starts: float = 1.0

    def of_gather(self, seconds: _Seconds) -> _Seconds:
        """Of the seconds of a gather."""
        return _exposed(seconds, self.gathers, self.beside)

    def of_sum(self, seconds: _Seconds, *, backward_runs: float = 1) -> _Seconds:
        """Of the seconds of a sum of its gradient, in a backward pass with so many collectives of it: they share the
        two products of that pass."""
        return _exposed(seconds, self.sums, 2 * self.beside / max(backward_runs, 1))


def _exposed(seconds: _Seconds, share: float, beside: float) -> _Seconds:
    hidden: Any = share * np.minimum(seconds, beside) if share else 0.0
    return seconds - hidden


# What an array that is sent with others takes of a start at least, as a call of its own to the library. Chosen: of the
# 34 us of H100s it is 4.
_LEAST_START = 1 / 8

# Nothing runs beside the collectives of activations, and each is started by itself.
ALL = Exposure()


def exposure_of(graph: Graph, value: int, devices: int, device: Device, profile: EfficiencyProfile) -> Exposure:
    """What a step waits for of the collectives of a value.

    Args:
      graph: of one microbatch.
      value: of parameters, or any other.
      devices: that share the work.
      device: one of them.
      profile: of the software on it.
    """
    if value not in values_of_parameters(graph):
        return ALL
    array, loop = graph.values[value], loop_of(graph, value)
    starts, sums = 1.0, profile.hidden_gradients
    if profile.together_bytes:
        starts = min(max(array.bytes / profile.together_bytes, _LEAST_START), 1.0)
    if loop is not None:
        # What a loop's body moves is joined with the rest of it, and its sums, which XLA joins at its end, waited for.
        starts, sums = max(starts, 1 / rows_of_loops(graph)[loop]), 0.0
    beside = reading_flops(graph).get(value, 0.0) / devices / device.achievable_flops(array.dtype)
    return Exposure(beside=beside, gathers=profile.hidden_weights, sums=sums, starts=starts)


@once_for_each
def rows_of_loops(graph: Graph) -> Mapping[Path, int]:
    """Of each loop that takes rows of stacks of parameters, by its path, how many it takes a trip."""
    of_parameters = values_of_parameters(graph)
    slices = (operator for operator in graph.operators if operator.name == "scan_slice")
    return Counter(one.path[: one.path.index(-1)] for one in slices if of_parameters.intersection(one.operands))


def loop_of(graph: Graph, value: int) -> Path | None:
    """The innermost of these loops in which a value is made; None for none."""
    path = graph.operators[graph.producer[value][0]].path if value in graph.producer else ()
    loops = rows_of_loops(graph)
    return next((path[:depth] for depth in range(len(path) - 1, 0, -1) if path[:depth] in loops), None)


@once_for_each
def reading_flops(graph: Graph) -> Mapping[int, float]:
    """Of each value that is made of parameters the FLOPs of one forward run of the products that read it, or what is
    made of it, unsplit. Products in a loop do not run beside what is moved before it."""
    of_parameters = values_of_parameters(graph)
    found: dict[int, float] = {}
    for operator in reversed(graph.operators):
        if operator.is_link:
            continue
        results = [v for v in operator.results if v is not None]
        prepares = all(v in of_parameters for v in results)
        flops = sum(found.get(v, 0.0) for v in results) if prepares else operator.matmul * operator.flops
        for value in {v for v in operator.operands if v is not None and v in of_parameters} if flops else ():
            found[value] = found.get(value, 0.0) + flops
    return found
