"""The default search: the optimal intra-operator plan for each logical mesh and rematerialisation; the best wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite, prod

from ..cluster import Cluster, LogicalMesh
from ..errors import MemoryExceeded, PlanError, size_words
from ..plan import Plan, Prediction, Stage
from ..program.graph import Graph
from ..program.segments import Segments, layer_segments, rematerialise
from ..solve import Infeasible
from .account import account
from .alternative import Alternative, nearest, one_stage_words
from .best_known import gap_of
from .intra_op import IntraOpProblem, IntraOpSolution, ParameterInfo
from .least_work import least_work_seconds
from .passes import Passes
from .pins import Pins
from .solved_plan import counted_memory, input_plans, operator_plans, parameter_plans

# Three-axis meshes are tried for programs of up to this many operators; a larger program's user names the ones to try.
_SMALL_PROGRAM = 150

# What a problem gets at least when the time is over, so that there is a plan at all.
_LEAST_SECONDS = 1.0

# Relative gain below which the simpler of two plans is taken: the cost model is not that exact.
_WORTHWHILE = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to plan.

    Args:
      graph: the program at the size of one microbatch.
      fingerprint: of the program.
      parameters: what belongs to each differentiated input.
      cluster: where it runs.
      microbatches: how many parts the batch is cut into.
      mesh: logical meshes to consider, as (names, sizes); empty for all factorisations of the devices.
      pins: what is fixed.
      remat: "none", "layer", or None for the planner's choice.
      carried: how many leading outputs of the program are its next leading inputs (a step planned whole).
      split_dims: for the leading inputs, the dim that microbatches cut, or None.
      gap: relative optimality gap at which to stop.
      time_limit_seconds: for all solving together.
    """

    graph: Graph
    fingerprint: str
    parameters: Sequence[ParameterInfo]
    cluster: Cluster
    microbatches: int
    mesh: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]
    pins: Pins
    remat: str | None
    carried: int = 0
    split_dims: Sequence[int | None] = ()
    gap: float = 1e-3
    time_limit_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A plan and what finding it took."""

    plan: Plan
    considered: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    problem: IntraOpProblem
    chosen: IntraOpSolution
    mesh: LogicalMesh
    segments: Segments
    remat: str

    @property
    def seconds(self) -> float:
        return self.chosen.solution.objective


class HierarchicalSearch:
    """The default search over one request. Problems are built once and solved for as many memory limits as are asked.

    Raises:
      PlanError: for a request that makes no sense.
    """

    def __init__(self, request: SearchRequest, tell: Callable[[str], None] = lambda text: None) -> None:
        if request.remat not in (None, "none", "layer"):
            raise PlanError(
                refused="the rematerialisation",
                got=repr(request.remat),
                needed='"none", "layer" or None',
                where="remat=",
                try_="remat=None",
            )
        self._request = request
        self._tell = tell
        self._deadline = time.perf_counter() + request.time_limit_seconds
        self._meshes = _meshes(request)
        self._pins = request.pins
        self._problems: dict[tuple[int, str], tuple[IntraOpProblem, Segments]] = {}

    def plan(self, memory_row_bytes: float) -> SearchResult:
        """The fastest plan for which the solver counts at most `memory_row_bytes` on a device.

        Raises:
          MemoryExceeded: if there is none, with the least memory that would do.
        """
        request = self._request
        best: _Candidate | None = None
        least = bound = float("inf")
        candidates: list[_Candidate] = []
        unsearched: list[str] = []
        for index in range(len(self._meshes)):
            if best is not None and time.perf_counter() > self._deadline:
                unsearched.append(f"mesh {_shape(self._meshes[index])}: not searched, out of time")
                continue
            found: list[_Candidate | float] = []
            if request.remat in (None, "none"):
                found.append(self._solve(index, "none", memory_row_bytes))
            if request.remat == "layer" or (request.remat is None and _binds(found[0], memory_row_bytes)):
                found.append(self._solve(index, "layer", memory_row_bytes))
            for candidate in found:
                if isinstance(candidate, float):
                    least = min(least, candidate)
                    continue
                candidates.append(candidate)
                bound = min(bound, candidate.seconds * (1 - candidate.chosen.solution.gap))
                # Meshes come with the fewest axes first; a further axis has to earn its keep.
                if best is None or candidate.seconds < best.seconds * (1 - _WORTHWHILE):
                    best = candidate
        if best is None:
            raise _nothing_fits(request, memory_row_bytes, least) if isfinite(least) else _contradiction(request)
        if unsearched:
            bound = min(bound, least_work_seconds(request.graph, request.microbatches, request.cluster))
        plan = _assemble(request, best, gap=gap_of(best.seconds, bound))
        considered = (*(_described(candidate, best) for candidate in candidates), *unsearched)
        seconds = {_words(candidate): candidate.seconds for candidate in candidates}
        return SearchResult(
            plan=plan, considered=considered, alternatives=nearest(seconds, but=_words(best))
        )  # fmt: skip

    def _solve(self, index: int, remat: str, limit: float) -> _Candidate | float:
        """The best choice on one mesh, or the least memory that would be enough."""
        self._tell(f"solving mesh {_shape(self._meshes[index])}" + (", rematerialised" if remat == "layer" else ""))
        problem, segments = self._problem(index, remat)
        request = self._request
        if remat == "layer" and not segments:
            if request.remat == "layer":
                raise PlanError(
                    refused='remat="layer"', got="a program in which no cut into layers saves memory",
                    needed="several layers whose results are kept for the backward pass", where="the loss function",
                    try_='remat="none"',
                )  # fmt: skip
            return float("inf")
        try:
            left = max(self._deadline - time.perf_counter(), _LEAST_SECONDS)
            chosen = problem.solve(limit, gap=request.gap, time_limit_seconds=left)
        except Infeasible as error:
            if error.least_memory is not None and isfinite(error.least_memory):
                return error.least_memory
            if self._pins.zero in (1, 2) and self._pins.strict:
                self._pins = replace(self._pins, strict=False)
                self._problems.clear()
                return self._solve(index, remat, limit)
            return float("inf")
        return _Candidate(problem, chosen, self._meshes[index], segments, remat)

    def _problem(self, index: int, remat: str) -> tuple[IntraOpProblem, Segments]:
        if (index, remat) not in self._problems:
            request = self._request
            segments: Segments = layer_segments(request.graph) if remat == "layer" else {}
            graph = rematerialise(request.graph, segments) if segments else request.graph
            problem = IntraOpProblem(
                graph,
                self._meshes[index],
                request.cluster.device,
                parameters=request.parameters,
                microbatches=request.microbatches,
                pins=self._pins,
                carried=request.carried,
                split_dims=request.split_dims if request.microbatches > 1 else (),
            )
            self._problems[index, remat] = (problem, segments)
        return self._problems[index, remat]


def search(request: SearchRequest) -> SearchResult:
    """The fastest plan that fits by the solver's count.

    Raises:
      PlanError: if the request makes no sense or nothing fits.
    """
    return HierarchicalSearch(request).plan(request.cluster.device.usable_memory_bytes)


def _meshes(request: SearchRequest) -> list[LogicalMesh]:
    cluster = request.cluster
    if request.mesh:
        return [cluster.logical_mesh(sizes, names) for names, sizes in request.mesh]
    meshes: list[LogicalMesh] = []
    seen: set[object] = set()
    for shape in cluster.logical_shapes(max_axes=3 if len(request.graph.operators) <= _SMALL_PROGRAM else 2):
        mesh = cluster.logical_mesh(shape)
        # Meshes whose axes differ only in their order give the same plans.
        key = tuple(sorted((a.size, a.latency_seconds, a.bandwidth_bytes_per_second) for a in mesh.axes))
        if key not in seen:
            seen.add(key)
            meshes.append(mesh)
    return meshes


def _binds(plain: _Candidate | float, limit: float) -> bool:
    """Whether memory, not time, decided: only then can rematerialisation pay."""
    return not isinstance(plain, _Candidate) or plain.chosen.solution.memory > 0.5 * limit


def _shape(mesh: LogicalMesh) -> str:
    return "x".join(str(axis.size) for axis in mesh.axes)


def _words(candidate: _Candidate) -> str:
    mesh = [(axis.name, axis.size) for axis in candidate.mesh.axes]
    return one_stage_words(candidate.problem.microbatches, mesh, rematerialised=candidate.remat == "layer")


def _described(candidate: _Candidate, best: _Candidate) -> str:
    text = f"{_shape(candidate.mesh)} remat={candidate.remat}: {candidate.seconds:.6g} s"
    if candidate is best:
        return f"{text} (chosen)"
    if candidate.seconds < best.seconds:
        return f"{text} (faster by less than {_WORTHWHILE:.0%}: the simpler mesh is taken)"
    return text


def _nothing_fits(request: SearchRequest, limit: float, least: float) -> MemoryExceeded:
    device = request.cluster.device
    graph = request.graph
    largest = max((graph.values[graph.inputs[p]] for p in graph.parameters), key=lambda v: v.bytes, default=None)
    what = f", largest parameter {largest.name} {largest.shape} of {size_words(largest.bytes)}" if largest else ""
    error = MemoryExceeded(
        refused=f"a plan for {request.cluster.num_devices} x {device.kind}",
        got=f"{size_words(limit)} usable on a device",
        needed=f"at least {size_words(least)} on a device, with {request.microbatches} microbatches{what}",
        where="stage 1 of 1",
        try_="more devices, a smaller batch" + (', or remat="layer"' if request.remat == "none" else ""),
    )
    # No layout needs less than in proportion to the microbatch.
    error.fewest_microbatches = ceil(request.microbatches * least / device.usable_memory_bytes)
    return error


def _contradiction(request: SearchRequest) -> PlanError:
    return PlanError(
        refused=f"a plan for {request.cluster.num_devices} x {request.cluster.device.kind}",
        got="pins or a ZeRO stage that no choice of layouts satisfies, whatever the memory",
        needed="wishes that some layouts satisfy",
        where="pins=, zero=",
        try_="leaving one of them out",
    )


def _assemble(request: SearchRequest, best: _Candidate, *, gap: float) -> Plan:
    problem, chosen, graph = best.problem, best.chosen, best.problem.graph
    totals, solution = account(problem, chosen), chosen.solution
    passes = Passes(problem).seconds(solution.choices, solution.objective)
    infos = request.parameters
    num_devices = prod(problem.sizes.values())
    stage = Stage(
        layers=(0, 1),
        devices=tuple(range(num_devices)),
        mesh=tuple(problem.sizes.items()),
        operators=operator_plans(graph, chosen),
        settled=tuple(sorted(chosen.settled.items())),
        parameters=parameter_plans(graph, chosen, infos, [None] * len(infos), problem),
        inputs=input_plans(graph, chosen),
        rematerialised=tuple(sorted((path, tuple(runs)) for path, runs in best.segments.items())),
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
        program=request.fingerprint,
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


def mesh_argument(mesh: object) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """A user's `mesh=`: None, a shape, a mapping of axis names to sizes, or a list of those."""
    if mesh is None:
        return []
    sizes = list(mesh.values()) if isinstance(mesh, Mapping) else []
    if sizes and all(isinstance(n, int) and not isinstance(n, bool) for n in sizes):
        assert isinstance(mesh, Mapping)
        return [(tuple(mesh), tuple(int(n) for n in mesh.values()))]
    if isinstance(mesh, Sequence) and mesh and all(isinstance(n, int) for n in mesh):
        names = ("x", "y", "z")
        return [(names[: len(mesh)], tuple(mesh))]
    if isinstance(mesh, Sequence) and not isinstance(mesh, str):
        return [entry for one in mesh for entry in mesh_argument(one)]
    raise PlanError(
        refused="the logical mesh",
        got=repr(mesh),
        needed="a shape, or axis names with sizes",
        where="mesh=",
        try_='mesh=(2, 4) or mesh={"data": 2, "model": 4}',
    )
