"""The ways to run a step in one stage: rematerialised or not, on a logical mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ...cluster import LogicalMesh
from ...program.residuals import kept_in_one_program
from ...program.segments import Segments
from ...program.staged import StagedProgram
from ..alternative import one_stage_words
from ..inter.logical_meshes import Kinds, meshes_alone
from ..inter.submeshes import Submesh, Submeshes
from ..intra.problem import IntraOpSolution, trips_of
from ..intra.workspace import AS_BAD
from ..pipelines.request import StageRequest
from ..prices.choices import values_of_parameters
from ..stages.problem import StageProblem
from ..stages.solved import SolvedStage
from ..stages.solver import Place, StageSolver


def whole_solver(request: StageRequest, program: StagedProgram) -> StageSolver:
    """What solves a program as the only stage of a plan."""
    submeshes = Submeshes(request.cluster)
    meshes = meshes_alone(request.cluster, request.mesh, len(program.graph.operators))
    return StageSolver(
        program, parameters=request.parameters, submeshes=submeshes, constraints=request.constraints,
        kinds=Kinds(submeshes, meshes), alone=True,
    )  # fmt: skip


class Variant:
    """A step in a number of microbatches, rematerialised or not.

    Args:
      solver: of the step, as the only stage.
      remat: "none" or "layer".
    """

    def __init__(self, solver: StageSolver, remat: str) -> None:
        self.solver, self.remat = solver, remat

    @property
    def microbatches(self) -> int:
        """In a step."""
        return self.solver.program.microbatches

    @property
    def segments(self) -> Segments:
        """What is rematerialised."""
        return self.solver.segments(0, 1) if self.remat == "layer" else {}

    def least_bytes(self, microbatches: int) -> float:
        """A lower bound on the bytes of a device in this number of microbatches or a larger one: the state, the
        activations kept and the workspace, all split over all devices. Activations and workspace at best halve with the
        microbatch."""
        return self.solver.least_state_bytes + self._kept_bytes * self.microbatches / microbatches

    @cached_property
    def _kept_bytes(self) -> float:
        graph, workspace = self.solver.graph(0, 1, self.remat)
        kept = kept_in_one_program(graph, self.solver.platform)
        made = [v for v in kept - values_of_parameters(graph) if v in graph.producer]
        makers = [graph.operators[graph.producer[v][0]] for v in made]
        held = sum(graph.values[v].bytes * trips_of(maker, v) for v, maker in zip(made, makers, strict=True))
        return (held + AS_BAD * workspace.bytes) / self.solver.submeshes.cluster.num_devices


class Way:
    """A way to run the step: a variant of it on a logical mesh. Its problem is built on first use.

    Args:
      variant: the step.
      place: all of it, on all devices, on a logical mesh of these.
    """

    def __init__(self, variant: Variant, place: Place) -> None:
        self.variant, self.place, self._solver = variant, place, variant.solver

    @property
    def microbatches(self) -> int:
        """In a step."""
        return self.variant.microbatches

    @property
    def mesh(self) -> LogicalMesh:
        """Its logical mesh."""
        return self._solver.meshes[self.place.kind][self.place.mesh]

    @property
    def words(self) -> str:
        """It in a few words."""
        axes = [(axis.name, axis.size) for axis in self.mesh.axes]
        return one_stage_words(self.microbatches, axes, rematerialised=self.variant.remat == "layer")

    @property
    def problem(self) -> StageProblem:
        """Its intra-operator problem."""
        return self._solver.problem(self.place, self.variant.remat)[0]

    def solved(self, chosen: IntraOpSolution) -> SolvedStage:
        """A solution of the problem as it is now."""
        return self._solver.solved(self.place, self.variant.remat, chosen)

    def relax(self) -> bool:
        """Whether a ZeRO stage that no layout satisfies has a less strict form; from now on that is used."""
        return self._solver.relax(self.place)


def ways_of(solver: StageSolver, variants: Sequence[Variant]) -> tuple[Way, ...]:
    """On each logical mesh, the simplest first, each of these variants."""
    kind = solver.kind_of[Submesh(0, solver.submeshes.cluster.num_devices)]
    places = [Place(0, 1, kind, number) for number in range(len(solver.meshes[kind]))]
    return tuple(Way(one, place) for place in places for one in variants)
