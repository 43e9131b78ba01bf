"""The values that stages send each other, and their layouts for the reshard planner.

The stage search prices an edge before it knows the layouts at its ends, from bytes and submeshes alone
(`Submeshes.transfer_seconds`): a lower bound. Once stages are solved, an edge takes the seconds that
`resharding.MoveCosts` gives for these values and layouts: more where devices need copies, or where blocks cut each
other so that NICs are loaded unevenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...program.cut import Cut
from ...program.staged import StagedProgram
from ...resharding import DeviceMesh, Layout
from ...sharding import Spec
from ..inter.problem import PlacedStage
from .solved import SolvedStage
from .solver import StageSolver


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A value that crosses an edge.

    Args:
      source: stage that computes it.
      target: stage that reads it.
      value: its index in the whole graph.
      bytes: of the whole value, for one microbatch.
      differentiated: whether its cotangent comes back.
    """

    source: int
    target: int
    value: int
    bytes: float
    differentiated: bool


def stage_crossings(program: StagedProgram, ranges: Sequence[tuple[int, int]]) -> tuple[Sent, ...]:
    """The values that stages of these layers send each other, an entry for each reader, sorted."""
    cutter, graph, layers = program.cutter, program.graph, program.layers
    stage_of: dict[int, int] = {}
    for number, (first, last) in enumerate(ranges):
        stage_of.update(dict.fromkeys(range(layers[first][0], layers[last - 1][1]), number))
    found = []
    for value, equations in cutter.read_at.items():
        if cutter.crosses(value):
            source = stage_of[cutter.made_at[value]]
            for target in sorted({stage_of[e] for e in equations} - {source}):
                array = graph.values[value]
                found.append((source, target, value, array.bytes, array.differentiated))
    return tuple(Sent(source=s, target=t, value=v, bytes=size, differentiated=d) for s, t, v, size, d in sorted(found))


def exchanged_bytes(program: StagedProgram, ranges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Bytes of gradients that a stage and the next one holding the same parameters sum once a step."""
    cutter, graph, layers = program.cutter, program.graph, program.layers
    found: dict[tuple[int, int], float] = {}
    for position in graph.parameters:
        value = graph.inputs[position]
        equations = [e for e in cutter.read_at.get(value, ()) if e not in program.rows]
        holders = [
            number
            for number, (first, last) in enumerate(ranges)
            if any(layers[first][0] <= e < layers[last - 1][1] for e in equations)
        ]
        for pair in pairwise(holders):
            found[pair] = found.get(pair, 0.0) + graph.values[value].bytes
    return found


def edge_bytes(sent: Sequence[Sent], source: int, target: int) -> tuple[float, float]:
    """Bytes that an edge carries for one microbatch, forward and back."""
    mine = [one for one in sent if (one.source, one.target) == (source, target)]
    return sum(one.bytes for one in mine), sum(one.bytes for one in mine if one.differentiated)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryLayouts:
    """The layouts of the values that cross a stage's ends, by their index in the whole graph.

    Args:
      received: what it reads and earlier stages compute.
      sent: what it computes and later stages read.
    """

    received: Mapping[int, Layout]
    sent: Mapping[int, Layout]


def boundary_layouts(stage: PlacedStage, cut: Cut) -> BoundaryLayouts:
    """The layouts at the ends of a solved stage.

    Args:
      stage: solved; the solution may be that of an equal range elsewhere.
      cut: its own range.
    """
    solved: SolvedStage = stage.option.tag
    chosen, graph, sizes = solved.chosen, cut.graph, solved.problem.sizes
    mesh = DeviceMesh(
        devices=tuple(range(stage.submesh.first, stage.submesh.stop)), shape=tuple(sizes.values()), axes=tuple(sizes)
    )
    spec_of = dict(zip(graph.inputs, chosen.inputs, strict=True))
    wanted = frozenset(cut.received)
    received = {
        cut.values[value]: Layout(mesh=mesh, spec=spec.dims)
        for value, spec in spec_of.items()
        if cut.values[value] in wanted
    }
    sent = {}
    for value, made in zip(cut.sent, cut.sent_values, strict=True):
        # Rows of a parameter are an input, and sent all the same.
        spec = chosen.resharded_once.get(made) or spec_of.get(made)
        if spec is None:
            operator, result = graph.producer[made]
            choice = chosen.operators[operator]
            spec = choice.algorithm.results[result] if choice is not None else Spec(())
        sent[value] = Layout(mesh=mesh, spec=spec.dims)
    return BoundaryLayouts(received=received, sent=sent)


def edge_seconds(
    solver: StageSolver, sent: Sequence[Sent], edge: tuple[int, int], layouts: Sequence[BoundaryLayouts]
) -> tuple[float, float]:
    """Seconds of an edge's values for one microbatch, all planned together: forward, and of their cotangents back.

    Args:
      solver: of the stages.
      sent: what crosses all edges.
      edge: its stages.
      layouts: of all stages.
    """
    values = solver.program.graph.values
    forward, backward = [], []
    for one in sent:
        if (one.source, one.target) == edge:
            here, there = layouts[one.source].sent[one.value], layouts[one.target].received[one.value]
            rank = len(values[one.value].shape)
            forward.append((one.bytes, here, there, rank))
            if one.differentiated:
                backward.append((one.bytes, there, here, rank))
    moves = solver.submeshes.moves
    return moves.seconds_together(forward), moves.seconds_together(backward)
