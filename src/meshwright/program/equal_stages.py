"""A program cut into a given number of like stages, as papers cut their models: so many layers each.

A program that is one scan over its layers is cut by trips; what is left over goes to the inner stages, since the first
and the last have the embedding and the head. Any other program is cut between its layers (`program.layers`) so that the
stage with the most FLOPs has as few as can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from .._jax.jaxpr import open_jaxpr
from ..errors import PlanError
from .layers import equation_flops
from .scan_split import split_with_starts
from .staged import StagedProgram, merge_scans, staged_program
from .trace import Program

# A scan with this share of the FLOPs is what stages are made of.
_MOST_OF_THE_WORK = 0.5


def equal_stages(program: Program, count: int, layered: StagedProgram | None = None) -> StagedProgram:
    """The program with `count` stages of like work as its layers.

    Args:
      program: traced at the size of a microbatch.
      count: of stages.
      layered: the program in layers, if that is known.

    Raises:
      PlanError: if there are fewer layers.
    """
    if count == 1:
        return staged_program(program, layers=1, scan_splits={})
    scan = main_scan(program)
    if scan is not None:
        return _cut_by_trips(program, scan[0], _even_trips(scan[1], count))
    layered = layered if layered is not None else staged_program(program)
    if len(layered.layers) < count:
        layered = staged_program(program, layers=count, exactly=True)
    work = equation_flops(layered.graph, layered.equations)
    bounds = even_bounds([float(work[first:last].sum()) for first, last in layered.layers], count)
    merged = merge_scans(layered, [layered.layers[bound][0] for bound in bounds[1:-1]]) if layered.scan_splits else None
    if merged is not None:
        return merged
    stages = tuple((layered.layers[a][0], layered.layers[b - 1][1]) for a, b in pairwise(bounds))
    return replace(layered, layers=stages, piece_starts={})


def main_scan(program: Program) -> tuple[int, int] | None:
    """Position and trips of the scan that is most of the program; None if there is none, or if its layers are ended by
    hand (`meshwright.layer_boundary`)."""
    if program.boundaries.before or program.boundaries.scans:
        return None
    equations = open_jaxpr(program.core).eqns
    work = equation_flops(program.graph, len(equations))
    place = int(work.argmax()) if len(work) else 0
    if not len(work) or equations[place].primitive.name != "scan" or work[place] < _MOST_OF_THE_WORK * work.sum():
        return None
    return place, int(equations[place].params["length"])


def _even_trips(trips: int, count: int) -> tuple[int, ...]:
    """The trips of each stage."""
    if count > trips:
        raise PlanError(
            refused=f"{count} equal stages", got=f"a model of {trips} layers", needed="a layer for each stage",
            where="the model", try_=f"at most {trips} stages",
        )  # fmt: skip
    base, more = divmod(trips, count)
    # Inner stages first, then the first, then the last.
    order = [*range(1, count - 1), 0, count - 1] if count > 2 else [0, 1]
    longer = set(order[:more])
    return tuple(base + (stage in longer) for stage in range(count))


def _cut_by_trips(program: Program, scan: int, pieces: tuple[int, ...]) -> StagedProgram:
    _, starts = split_with_starts(program.core, {scan: pieces})
    cuts = [starts[scan, number] for number in range(1, len(pieces))]
    return staged_program(program, layers=len(pieces), scan_splits={scan: pieces}, cuts=cuts)


def even_bounds(work: Sequence[float], count: int) -> list[int]:
    """The bounds of `count` runs of layers, of which the one with the most work has as little as can be; of equals the
    first stages are the shorter.

    >>> even_bounds([1.0, 1.0, 1.0, 3.0], 2)
    [0, 3, 4]

    Args:
      work: of each layer, in order.
      count: at most as many.
    """
    done = np.concatenate([[0.0], np.cumsum(work)])
    layers = len(work)
    most = np.full((count + 1, layers + 1), np.inf)
    start = np.zeros((count + 1, layers + 1), dtype=int)
    most[0, 0] = 0.0
    for stage in range(1, count + 1):
        for stop in range(stage, layers + 1):
            ways = np.maximum(most[stage - 1, :stop], done[stop] - done[:stop])
            start[stage, stop] = int(ways.argmin())
            most[stage, stop] = ways[start[stage, stop]]
    bounds = [layers]
    for stage in range(count, 0, -1):
        bounds.append(int(start[stage, bounds[-1]]))
    return bounds[::-1]
