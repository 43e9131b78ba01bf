"""The request of the one-stage search, and the plan of a solved problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ...cluster import Cluster
from ...plan import Plan, Prediction, Stage
from ...program.graph import Graph
from ...program.segments import Segments
from ...program.staged import StagedProgram
from ..intra.account import account
from ..intra.limited import LimitedProblem
from ..intra.parameters import parameter_infos
from ..intra.passes import Passes
from ..intra.problem import IntraOpSolution, ParameterInfo
from ..intra.solved_plan import counted_memory, input_plans, operator_plans, parameter_plans
from ..restrictions.constraints import Constraints


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """A step in a number of microbatches, to be planned as one stage.

    Args:
      graph: the program at the size of one microbatch.
      fingerprint: finds that of the program, which may take as long as tracing (`StagedProgram.fingerprint`).
      parameters: what belongs to each differentiated input.
      cluster: where it runs.
      microbatches: how many parts the batch is cut into.
      mesh: logical meshes to consider, as (names, sizes); empty for all factorisations of the devices.
      constraints: what is fixed.
      remat: "none", "layer", or None for the planner's choice.
      carried: how many leading outputs of the program are its next leading inputs (a step planned whole).
      split_dims: for the leading inputs, the dim that microbatches cut, or None.
    """

    graph: Graph
    fingerprint: Callable[[], str]
    parameters: Sequence[ParameterInfo]
    cluster: Cluster
    microbatches: int
    mesh: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]
    constraints: Constraints
    remat: str | None
    carried: int = 0
    split_dims: Sequence[int | None] = ()

    @property
    def words(self) -> str:
        """What is refused where there is no plan."""
        return f"a plan for {self.cluster.num_devices} x {self.cluster.device.kind}"

    @classmethod
    def of(
        cls, program: StagedProgram, *, cluster: Cluster, mesh: Sequence[tuple[tuple[str, ...], tuple[int, ...]]],
        constraints: Constraints, remat: str | None,
    ) -> SearchRequest:  # fmt: skip
        """A whole program (`whole_program`)."""
        alike = program.alike
        return cls(
            graph=program.graph, fingerprint=lambda: program.fingerprint, parameters=parameter_infos(alike),
            cluster=cluster, microbatches=program.microbatches, mesh=mesh, constraints=constraints, remat=remat,
            carried=0 if alike.marked else alike.state_inputs, split_dims=program.split_dims,
        )  # fmt: skip


class StepRequests(Mapping[int, SearchRequest]):
    """The step in each number of microbatches that may be considered, made each time it is asked for.

    Args:
      counts: the numbers.
      make: the request of a number.
    """

    def __init__(self, counts: Sequence[int], make: Callable[[int], SearchRequest]) -> None:
        self._counts, self._make = counts, make

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, count: int) -> SearchRequest:
        return self._make(count)


def one_stage_plan(
    request: SearchRequest, problem: LimitedProblem, chosen: IntraOpSolution, segments: Segments, *, gap: float
) -> Plan:
    """The plan of a solved problem.

    Args:
      request: that was searched for.
      problem: the step on a logical mesh.
      chosen: its solution.
      segments: what is rematerialised.
      gap: how much less any other plan can take, relative.
    """
    graph = problem.graph
    totals, solution = account(problem, chosen), chosen.solution
    passes = Passes(problem).seconds(solution.choices, solution.objective)
    infos = request.parameters
    num_devices = prod(problem.sizes.values())
    stage = Stage(
        layers=(0, 1),
        devices=tuple(range(num_devices)),
        mesh=tuple(problem.sizes.items()),
        operators=operator_plans(graph, chosen),
        settled=tuple(sorted(chosen.resharded_once.items())),
        parameters=parameter_plans(graph, chosen, infos, [None] * len(infos), problem),
        inputs=input_plans(graph, chosen),
        rematerialised=tuple(sorted((path, tuple(runs)) for path, runs in segments.items())),
        memory=counted_memory(graph, chosen, infos, problem, chosen.solution.memory),
        memory_limit_bytes=request.cluster.device.usable_memory_bytes,
        device_kind=request.cluster.device_kinds,
        communication=totals.collectives,
        flops=totals.flops,
        compute_seconds=totals.compute_seconds,
        communication_seconds=totals.communication_seconds,
        forward_seconds=passes.forward,
        backward_seconds=passes.backward,
        weight_seconds=passes.weight,
        synchronise_seconds=passes.synchronise,
        update_seconds=passes.update,
        gradient_exchange=problem.gradient_exchange,
    )
    seconds = chosen.solution.objective
    model_flops = request.graph.flops * request.microbatches * (3 if graph.parameters else 1)
    return Plan(
        program=request.fingerprint(),
        cluster=request.cluster.name,
        cluster_fingerprint=request.cluster.fingerprint(),
        microbatches=request.microbatches,
        schedule="none",
        stages=(stage,),
        predicted=Prediction(
            step_seconds=seconds,
            tflops_per_device=model_flops / max(seconds, 1e-30) / num_devices / 1e12,
            flops_per_device=totals.flops,
            optimality_gap=gap,
        ),
    )
