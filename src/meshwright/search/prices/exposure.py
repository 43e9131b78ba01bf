"""Exposed seconds of collectives of parameters: those that a step waits for.

A compiler that hides latency starts the gather of a parameter ahead of its use, and waits late for the sum of its
gradient. Which operators run in the meantime depends on its schedule, which is made after layouts are chosen. So each
collective counts as if it ran beside the product that reads its parameter: one run of it forward, its two products
backward. Different parameters share a product out, so that no more is hidden than there is compute, and the price of a
layout depends on one value alone. (Weights of a transformer have about the same ratio of bytes to FLOPs, so that the
sum of these is about all collectives beside all products.) Compilers also send small collectives together, which then
share the cost of a start.

In the body of a loop over layers sums that are scattered run beside the next trip, and gathers beside the trip's own
products, unless they are few bytes and joined into one.

Known limits: whether gathers are joined is said by the bytes of whole layers, also where another axis has split them,
so that fewer are sent. A parameter that is moved twice on its way to a product (between its storage and its use and
then for the reader, or before a cast and after it) has that product beside both moves.

Collectives of activations are exposed: the operator before makes what they move, and the one behind reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...cluster import Device
from ...cost.efficiency import EfficiencyProfile
from ...program.graph import Graph, Path, once_for_each
from ...program.parameter_values import values_of_parameters

# Seconds: a number, or one for each pair of layouts.
_Seconds = TypeVar("_Seconds", float, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """How the collectives of one value are exposed.

    >>> half = Exposure(beside=2.0, gathers=0.5)
    >>> half.of_gather(1.0), half.of_gather(8.0), half.of_sum(1.0)
    (0.5, 7.0, 1.0)

    Args:
      beside: seconds of one forward run of the product that reads the value, shared by all devices.
      gathers: the share of a gather that runs beside compute where there is enough (`EfficiencyProfile`).
      sums: the same of a sum of its gradient that is scattered.
      whole_sums: of one that is not.
      starts: how much of the cost of a start each collective pays.
    """

    beside: float = 0.0
    gathers: float = 0.0
    sums: float = 0.0
    whole_sums: float = 0.0
    starts: float = 1.0

    def of_gather(self, seconds: _Seconds) -> _Seconds:
        """Exposed seconds of a gather that takes `seconds`."""
        return _exposed(seconds, self.gathers, self.beside)

    def of_sum(self, seconds: _Seconds, *, is_scattered: Any = True, backward_runs: float = 1) -> _Seconds:
        """Exposed seconds of a sum of its gradient, in a backward pass with so many collectives of it: they share the
        two products of that pass."""
        share: Any = self.sums
        if self.whole_sums != self.sums:
            share = np.where(is_scattered, self.sums, self.whole_sums)
        return _exposed(seconds, share, 2 * self.beside / max(backward_runs, 1))


def _exposed(seconds: _Seconds, share: Any, beside: float) -> _Seconds:
    least: Any = np.minimum(seconds, beside) if isinstance(seconds, np.ndarray) else min(seconds, beside)
    return seconds - share * least


# What an array that is sent with others pays of a start at least, as a call of its own to the library. With an eighth
# the collectives of gpt3-350m's 292 parameters on 8 H100s are predicted to take 1.0 to 2.2 times what those take that
# XLA joins (`benchmarks/compiled_overlap.py`: ZeRO-3 11.8 and 6.5 ms), with whole starts 2.4 to 4.9 times.
_LEAST_START = 1 / 8

# All of it is exposed, and each collective pays its own start.
ALL = Exposure()


def exposure_of(graph: Graph, value: int, devices: int, device: Device, profile: EfficiencyProfile) -> Exposure:
    """How the collectives of a value are exposed.

    Args:
      graph: of one microbatch.
      value: of parameters, or any other.
      devices: that share the work.
      device: one of them.
      profile: of the software on it.
    """
    if value not in values_of_parameters(graph):
        return ALL
    loop, starts = loop_of(graph, value), 1.0
    gathers, sums, whole_sums = profile.hidden_weights, profile.hidden_gradients, profile.hidden_gradients
    if profile.together_bytes:
        starts = min(max(graph.values[value].bytes / profile.together_bytes, _LEAST_START), 1.0)
    if loop is not None:
        # What the body of a loop moves is joined within the body. Sums that are scattered and stacked run beside the
        # next trip (`_jax.liveness_pipelined`), those that stay whole or that trips add up do not. Gathers that are
        # joined into a single one run before all that reads them.
        count, elements = moved_in_loops(graph)[loop]
        starts = max(starts, 1 / max(count, 1))
        gathers = gathers if elements * graph.values[value].itemsize > profile.together_bytes else 0.0
        sums, whole_sums = 0.0 if value in same_in_all_trips(graph) else sums, 0.0
    read = reading_products(graph).get(value, Reading(0.0, "float32"))
    beside = read.flops / devices / device.achievable_flops(read.dtype)
    return Exposure(beside=beside, gathers=gathers, sums=sums, whole_sums=whole_sums, starts=starts)


@once_for_each
def moved_in_loops(graph: Graph) -> Mapping[Path, tuple[int, int]]:
    """Of each loop, by its path, how many values of parameters its body is given (rows of stacks, and what is the same
    in all trips), and their elements."""
    of_parameters, found = values_of_parameters(graph), dict[Path, tuple[int, int]]()
    for operator in graph.operators:
        if operator.is_link:
            path = operator.path[: operator.path.index(-1)]
            count, elements = found.get(path, (0, 0))
            if operator.name in ("scan_slice", "scan_const") and of_parameters.intersection(operator.operands):
                count += 1
                elements += sum(prod(graph.values[v].shape) for v in operator.results if v is not None)
            found[path] = count, elements
    return found


@once_for_each
def same_in_all_trips(graph: Graph) -> frozenset[int]:
    """Values in bodies of loops that are made of parameters which all trips read whole: their gradients are added up
    over trips."""
    of_parameters, found = values_of_parameters(graph), set[int]()
    for operator in graph.operators:
        is_one = operator.name == "scan_const" if operator.is_link else not found.isdisjoint(operator.operands)
        if is_one:
            found.update(v for v in operator.results if v is not None and v in of_parameters)
    return frozenset(found)


def loop_of(graph: Graph, value: int) -> Path | None:
    """The path of the innermost loop in whose body a value is made; None for none."""
    path = graph.operators[graph.producer[value][0]].path if value in graph.producer else ()
    loops = moved_in_loops(graph)
    return next((path[:depth] for depth in range(len(path) - 1, 0, -1) if path[:depth] in loops), None)


class Reading(NamedTuple):
    """A product that reads a value, or what is made of it: FLOPs of one run, unsplit, and the type it runs in."""

    flops: float
    dtype: str


@once_for_each
def reading_products(graph: Graph) -> Mapping[int, Reading]:
    """Of each value that is made of parameters the longest product that reads it. A product that reads what is made of
    several parameters is shared out among them by their bytes. One in a loop does not count for what is moved before
    the loop."""
    of_parameters = values_of_parameters(graph)
    found: dict[int, Reading] = {}
    for operator in reversed(graph.operators):
        if operator.is_link:
            continue
        read = {v for v in operator.operands if v is not None and v in of_parameters}
        results = [v for v in operator.results if v is not None]
        if not all(v in of_parameters for v in results):
            own = [Reading(operator.flops, operator.multiplied)] * len(read) if operator.matmul else []
            shares = dict(zip(read, own, strict=False))
        else:
            behind = max((found[v] for v in results if v in found), default=None)
            whole = sum(graph.values[v].bytes for v in read)
            shares = {
                v: Reading(behind.flops * graph.values[v].bytes / whole, behind.dtype) for v in read if behind and whole
            }
        for value, share in shares.items():
            found[value] = max(share, found.get(value, share))
    return found
