"""The ways to run a step in one stage: rematerialised or not, on a logical mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ...cluster import LogicalMesh
from ...program.graph import Graph
from ...program.residuals import kept_in_one_program
from ...program.segments import Segments, layer_segments, rematerialise
from ..alternative import one_stage_words
from ..intra.limited import LimitedProblem
from ..intra.problem import trips_of
from ..intra.workspace import AS_BAD, Workspace, workspace_of
from ..prices.choices import values_of_parameters
from .plan import SearchRequest


class Variant:
    """A step in a number of microbatches, rematerialised or not.

    Args:
      request: the step.
      remat: "none" or "layer".
    """

    def __init__(self, request: SearchRequest, remat: str) -> None:
        self.request, self.remat = request, remat

    @cached_property
    def segments(self) -> Segments:
        """What is rematerialised."""
        return layer_segments(self.request.graph) if self.remat == "layer" else {}

    @cached_property
    def graph(self) -> Graph:
        """The program with that marked."""
        return rematerialise(self.request.graph, self.segments) if self.segments else self.request.graph

    @cached_property
    def workspace(self) -> Workspace:
        """What its backward pass makes beside what is kept."""
        return workspace_of(
            self.graph, microbatches=self.request.microbatches, is_one_program=True,
            platform=self.request.cluster.device.compiler,
        )  # fmt: skip

    def least_bytes(self, microbatches: int) -> float:
        """A lower bound on the bytes of a device in this number of microbatches or a larger one: the state, the
        activations kept and the workspace, all split over all devices. Activations and workspace at best halve with the
        microbatch."""
        return self._state_bytes + self._kept_bytes * self.request.microbatches / microbatches

    @cached_property
    def _state_bytes(self) -> float:
        graph, infos = self.graph, self.request.parameters
        values = [graph.values[graph.inputs[position]] for position in graph.parameters]
        held = sum(2 * value.bytes + info.optimizer_bytes for value, info in zip(values, infos, strict=True))
        return held / self.request.cluster.num_devices

    @cached_property
    def _kept_bytes(self) -> float:
        graph = self.graph
        kept = kept_in_one_program(graph, self.request.cluster.device.compiler)
        made = [v for v in kept - values_of_parameters(graph) if v in graph.producer]
        makers = [graph.operators[graph.producer[v][0]] for v in made]
        held = sum(graph.values[v].bytes * trips_of(maker, v) for v, maker in zip(made, makers, strict=True))
        return (held + AS_BAD * self.workspace.bytes) / self.request.cluster.num_devices


class Way:
    """A way to run the step: a variant of it on a logical mesh. Its problem is built on first use.

    Args:
      variant: the step.
      mesh: logical mesh.
    """

    def __init__(self, variant: Variant, mesh: LogicalMesh) -> None:
        self.variant, self.mesh = variant, mesh
        self._constraints = variant.request.constraints
        self._problem: LimitedProblem | None = None

    @property
    def request(self) -> SearchRequest:
        """The step in its number of microbatches."""
        return self.variant.request

    @property
    def words(self) -> str:
        """It in a few words."""
        axes = [(axis.name, axis.size) for axis in self.mesh.axes]
        return one_stage_words(self.request.microbatches, axes, rematerialised=self.variant.remat == "layer")

    @property
    def problem(self) -> LimitedProblem:
        """Its intra-operator problem."""
        if self._problem is None:
            request = self.request
            self._problem = LimitedProblem(
                self.variant.graph, self.mesh, request.cluster.device, parameters=request.parameters,
                microbatches=request.microbatches, constraints=self._constraints, carried=request.carried,
                split_dims=request.split_dims if request.microbatches > 1 else (), workspace=self.variant.workspace,
            )  # fmt: skip
        return self._problem

    def relax(self) -> bool:
        """Whether a ZeRO stage that no layout satisfies has a less strict form; from now on that is used."""
        if self._constraints.zero not in (1, 2) or not self._constraints.strict:
            return False
        self._constraints, self._problem = replace(self._constraints, strict=False), None
        return True
