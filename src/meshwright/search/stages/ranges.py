"""Ranges of a program's layers as graphs, independent of constraints and meshes."""

from __future__ import annotations

from functools import partial

from ...program.cut import Cut, whole_cut
from ...program.graph import Graph
from ...program.ladder import Ladder, ladder_of
from ...program.residuals import kept_in_one_program, kept_values
from ...program.segments import Segments, layer_segments, rematerialise
from ...program.staged import StagedProgram
from ..intra.problem import trips_of
from ..intra.workspace import Workspace, workspace_of
from .segments import stage_segments


class Ranges:
    """The graphs of ranges, each made once for all problems built on it.

    Args:
      program: in layers, at the size of one microbatch.
      alone: whether each range is to be the only stage of its plan (`StageProblem`).
      platform: of the devices, as `Device.compiler`.
    """

    def __init__(self, program: StagedProgram, *, alone: bool = False, platform: str = "cpu") -> None:
        self.program, self._alone, self._platform = program, alone, platform
        self._cuts: dict[tuple[int, int], Cut] = {}
        self._ladders: dict[tuple[int, int], Ladder] = {}
        self._graphs: dict[tuple[int, int, int], tuple[Graph, Workspace]] = {}
        self._kept: dict[tuple[int, int, int], float] = {}

    def cut(self, first: int, last: int) -> Cut:
        """The layers `first` to before `last` as a graph."""
        if (first, last) not in self._cuts:
            program, layers = self.program, self.program.layers
            if self._alone and program.is_whole:
                found = whole_cut(program.graph, program.equations)
            else:
                found = program.folding_cutter.cut(layers[first][0], layers[last - 1][1])
            self._cuts[first, last] = found
        return self._cuts[first, last]

    def ladder(self, first: int, last: int) -> Ladder:
        """The ways to rematerialise a range."""
        if (first, last) not in self._ladders:
            cut = self.cut(first, last)
            self._ladders[first, last] = self.ladder_of(cut, first, last)
        return self._ladders[first, last]

    def segments(self, first: int, last: int, remat: int) -> Segments:
        """What a range rematerialises in one of the ways."""
        return self.ladder(first, last).at(remat)

    def ladder_of(self, cut: Cut, first: int, last: int) -> Ladder:
        """The same, by paths of a cut of its own. The only stage of a plan keeps one microbatch, a stage of several at
        least two."""
        if self._alone:
            kept = partial(kept_in_one_program, platform=self._platform)
            return ladder_of(cut.graph, layer_segments(cut.graph), kept=kept)
        return ladder_of(cut.graph, stage_segments(cut, self.program.layers[first:last]))

    def graph(self, first: int, last: int, remat: int) -> tuple[Graph, Workspace]:
        """A range with what is rematerialised in one of the ways marked, and its workspace."""
        key = first, last, remat
        if key not in self._graphs:
            graph = self.cut(first, last).graph
            graph = rematerialise(graph, self.segments(first, last, remat)) if remat else graph
            self._graphs[key] = (
                graph,
                workspace_of(
                    graph, microbatches=self.program.microbatches, is_one_program=self._alone, platform=self._platform
                ),
            )
        return self._graphs[key]

    def kept_bytes(self, first: int, last: int, remat: int) -> float:
        """What a range keeps for each microbatch, all devices together."""
        key = first, last, remat
        if key not in self._kept:
            graph, _ = self.graph(first, last, remat)
            makers = {v: graph.operators[graph.producer[v][0]] for v in kept_values(graph)}
            self._kept[key] = sum(graph.values[v].bytes * trips_of(operator, v) for v, operator in makers.items())
        return self._kept[key]
