"""The layers of a program: runs of top-level equations, cut where little crosses, of bounded work.

Stages are made of whole layers, so layers should be few, of like work, and cheap to cut between. As in Alpa (OSDI '22,
section 5.2, operator clustering) a dynamic program minimises the bytes over all cuts under a bound on the FLOPs of a
layer, for every number of layers up to the one allowed; among cuts of equal bytes the one with the most even FLOPs is
taken, then the earliest. Of these numbers the one that gives the most equal layers is taken, since what is equal is
solved once: a program of twelve equal blocks that may have sixteen layers gets one layer a block.

What crosses a cut: values computed before it and read after it, twice where their cotangents come back; parameters,
inputs, and values that depend on no input (every stage makes those for itself) do not count.

Cost: L steps of sorting n numbers, for n equations and L layers, and of all pairs of cuts of equal bytes that a layer
may lie between. Known limits: these are held, which are most of n squared over L where all equations are equal; an
equation is never cut; scans are, before, by `scan_split`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..errors import PlanError
from .graph import Graph

# Layers asked for where nobody says how many.
DEFAULT_LAYERS = 16

# A layer may have this share of the mean FLOPs.
_LARGEST_SHARE = 1.5

# Where that cannot be, it may have so many times as much, and so on.
_LESS_EVEN = 1.25

# And must have this share of them: a cut that is cheap because next to nothing lies behind it is no cut.
_SMALLEST_SHARE = 0.25

# An equation that exceeds the bound counts as this share of it.
_LARGE = 0.6

# Fewer equal layers than these are chance, and the most layers allowed are taken.
_MANY_EQUAL = 3


def cluster_layers(
    graph: Graph,
    equations: int,
    *,
    at_most: int = DEFAULT_LAYERS,
    cuts: Sequence[int] = (),
    exactly: bool = False,
) -> tuple[tuple[int, int], ...]:
    """The layers of a program, in order, each the first and one past the last of its top-level equations.

    Args:
      graph: the program.
      equations: how many top-level equations it has.
      at_most: how many layers there may be.
      cuts: positions of equations that begin a layer (`mw.layer_boundary`); if there are any, the layers are exactly
        those between them.
      exactly: whether there have to be `at_most` layers, however unlike.

    Raises:
      PlanError: no equation, fewer than one layer, cuts that do not ascend within the program, or a program that cannot
        be cut into exactly so many layers.
    """
    if equations < 1:
        raise _refusal("a program of no equations", "at least one equation", "a step that computes something")
    if cuts:
        bounds = [0, *cuts, equations]
        if any(a >= b for a, b in pairwise(bounds)):
            raise _refusal(
                f"layer boundaries before the equations {list(cuts)}",
                f"positions that ascend between 1 and {equations - 1}", "boundaries with equations between them",
            )  # fmt: skip
        return tuple(pairwise(bounds))
    if isinstance(at_most, bool) or not isinstance(at_most, int) or at_most < 1:
        raise _refusal(f"{at_most!r} layers", "a whole number of at least 1", f"layers={DEFAULT_LAYERS}")
    clusterings = _best_cuts(equation_flops(graph, equations), crossing_bytes(graph, equations), at_most)
    if exactly:
        bounds = next((bounds for bounds in clusterings if len(bounds) == at_most + 1), None)
        if bounds is None:
            most = len(clusterings[-1]) - 1
            raise _refusal(
                f"exactly {at_most} layers", f"at most {most}, or other bounds on their work", f"layers={most}"
            )
        return tuple(pairwise(bounds))
    signatures: list[list[tuple[str, float, int]]] = [[] for _ in range(equations)]
    for operator in graph.operators:
        signatures[operator.path[0]].append((operator.name, operator.flops, operator.repeats))

    def equal_layers(bounds: Sequence[int]) -> int:
        return max(Counter(repr(signatures[a:b]) for a, b in pairwise(bounds)).values())

    best = max(clusterings, key=lambda bounds: (equal_layers(bounds), -len(bounds)))
    return tuple(pairwise(best if equal_layers(best) >= _MANY_EQUAL else clusterings[-1]))


def equation_flops(graph: Graph, equations: int) -> np.ndarray:
    """FLOPs of one evaluation of each top-level equation, all trips of a scan included: `[equations]`."""
    work = np.zeros(equations)
    for operator in graph.operators:
        work[operator.path[0]] += operator.flops * operator.repeats
    return work


def crossing_bytes(graph: Graph, equations: int) -> np.ndarray:
    """Bytes that cross a cut before each top-level equation, cotangents included: `[equations + 1]`."""
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for operator in graph.operators:
        for value in operator.results:
            if value is not None:
                made[value] = operator.path[0]
        for value in operator.operands:
            if value in made:
                read[value] = max(read.get(value, 0), operator.path[0])
    steps = np.zeros(equations + 2)
    for value, last in read.items():
        array = graph.values[value]
        if not array.constant and last > made[value]:
            size = array.bytes * (2 if array.differentiated else 1)
            steps[made[value] + 1] += size
            steps[last + 1] -= size
    return np.cumsum(steps)[: equations + 1]


def _best_cuts(work: np.ndarray, crossing: np.ndarray, at_most: int) -> list[list[int]]:
    """For each possible number of layers their bounds, the program's ends included.

    Where no cut is as even as layers should be (17 equal equations in at most 16 layers), it may be less even.
    """
    share = _LARGEST_SHARE
    while share < at_most:
        if found := _cuts_within(share, work, crossing, at_most):
            return found
        share *= _LESS_EVEN
    return [[0, len(work)]]


def _cuts_within(share: float, work: np.ndarray, crossing: np.ndarray, at_most: int) -> list[list[int]]:
    """The same of layers that have at most this many times their share of the work; empty if there is no such cut."""
    count = len(work)
    done = np.concatenate([[0.0], np.cumsum(work)])
    bound = share * done[-1] / at_most
    # An equation over the bound may have small neighbours in its layer, but not another one like it.
    counted = np.concatenate([[0.0], np.cumsum(np.minimum(work, _LARGE * bound))])
    earliest = np.searchsorted(counted, counted - bound * (1 + 1e-9), side="left")
    least_work = _SMALLEST_SHARE * done[-1] / at_most
    latest = np.searchsorted(done, done - least_work * (1 - 1e-9), side="right")
    sizes = [np.full(count + 1, np.inf)]
    spread = [np.full(count + 1, np.inf)]
    sizes[0][0] = spread[0][0] = 0.0
    before: list[np.ndarray] = []
    stops = np.arange(1, count + 1)
    first, past = np.minimum(earliest[1:], stops - 1), np.minimum(latest[1:], stops)
    for _ in range(min(at_most, count)):
        size, uneven, start = np.full(count + 1, np.inf), np.full(count + 1, np.inf), np.zeros(count + 1, dtype=int)
        entering = sizes[-1] + np.where(np.arange(count + 1) > 0, crossing, 0.0)
        bytes_of, rank = np.unique(entering, return_inverse=True)
        least = _least_within(rank, first, past, none=len(bytes_of))
        reached = np.flatnonzero(np.isfinite(np.append(bytes_of, np.inf)[least]))
        # Where a layer that enters with the fewest bytes may begin: positions in order of bytes, and then of place.
        keys = np.sort(rank * (count + 1) + np.arange(count + 1))
        low, high = (np.searchsorted(keys, least[reached] * (count + 1) + ends[reached]) for ends in (first, past))
        begun, of = _ranges(low, high)
        starts = keys[begun] % (count + 1)
        here = stops[reached]
        squares = spread[-1][starts] + (done[here][of] - done[starts]) ** 2
        if len(reached):
            offsets = np.cumsum(high - low) - (high - low)
            fewest = np.minimum.reduceat(squares, offsets)
            ties = np.flatnonzero(squares == fewest[of])
            best = ties[np.searchsorted(ties, offsets)]
            size[here], uneven[here], start[here] = bytes_of[least[reached]], squares[best], starts[best]
        sizes.append(size)
        spread.append(uneven)
        before.append(start)
    found = []
    for layers in range(1, len(sizes)):
        if np.isfinite(sizes[layers][count]):
            bounds = [count]
            for n in range(layers, 0, -1):
                bounds.append(int(before[n - 1][bounds[-1]]))
            found.append(bounds[::-1])
    return found


def _least_within(ranks: np.ndarray, first: np.ndarray, past: np.ndarray, none: int) -> np.ndarray:
    """The least of these numbers in each window, from its first place to before the one past it; `none` for an empty
    window."""
    table = [ranks]  # of 1, 2, 4, ... numbers from each place on
    while 2 << (len(table) - 1) <= len(ranks):
        half = 1 << (len(table) - 1)
        table.append(np.minimum(table[-1][:-half], table[-1][half:]))
    found = np.full(len(first), none)
    widths = past - first
    for level, least in enumerate(table):
        at = np.flatnonzero((widths >= 1 << level) & (widths < 2 << level))
        found[at] = np.minimum(least[first[at]], least[past[at] - (1 << level)])
    return found


def _ranges(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of some ranges, one range after another, and of each which range it is of."""
    lengths = high - low
    of = np.repeat(np.arange(len(low)), lengths)
    return np.arange(len(of)) - (np.cumsum(lengths) - lengths - low)[of], of


def _refusal(got: str, needed: str, try_: str) -> PlanError:
    return PlanError(refused="to cut a program into layers", got=got, needed=needed, where="layers=", try_=try_)
