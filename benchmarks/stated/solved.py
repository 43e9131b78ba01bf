"""A stated plan with its layouts: each kind of stage cut out, its small problem solved, its work and memory listed.

Known limits: stages are equal in layers of one scan; one logical mesh for all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from meshwright._jax.jaxpr import open_jaxpr
from meshwright.cluster import Cluster, LogicalMesh
from meshwright.errors import PlanError
from meshwright.program.batch import batch_inputs
from meshwright.program.cut import Cut
from meshwright.program.graph import Graph
from meshwright.program.segments import Segments, rematerialise
from meshwright.program.staged import StagedProgram, staged_program
from meshwright.program.trace import Program
from meshwright.program.traces import Traces
from meshwright.schedule import Schedule, make_schedule
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.intra.problem import IntraOpSolution
from meshwright.search.prices.choices import ParameterChoice
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.stages.problem import StageProblem
from meshwright.solve import Infeasible

from .memory import KeptBytes, kept_bytes
from .plan import StatedPlan
from .recompute import recomputed_segments
from .roles import ROLE_OF, StatedRoles
from .work import StageWork, stage_work

# Microbatches for each rank after which a pipeline is steady.
_STEADY = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class StateElements:
    """Elements of parameters on one device.

    Args:
      used: in the layout that operators use.
      stored: in the layout of optimizer state.
      layer: of one layer, whole, where parameters are gathered for their use; else 0.
    """

    used: float
    stored: float
    layer: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SolvedKind:
    """A kind of stage, solved.

    Args:
      count: how many stages are of it.
      work: what it does for a microbatch.
      state: its parameters.
      kept: for each microbatch in flight, on one device.
      sent_bytes: to the next stage, of one microbatch, on all devices.
    """

    count: int
    work: StageWork
    state: StateElements
    kept: KeptBytes
    sent_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SolvedPlan:
    """A stated plan with its layouts; to be priced under any efficiency profile.

    Args:
      plan: as stated.
      mesh: of a stage.
      cluster: of a stage.
      kinds: of stages, by name: "first", "inner", "shorter", "last" (or "only").
      order: the kind of each stage.
      schedules: of them: one, or where there are very many microbatches two of fewer, since from some number on each
        further one adds the same.
    """

    plan: StatedPlan
    mesh: LogicalMesh
    cluster: Cluster
    kinds: Mapping[str, SolvedKind]
    order: tuple[str, ...]
    schedules: tuple[Schedule, ...]

    @property
    def schedule(self) -> Schedule:
        """The (first) schedule."""
        return self.schedules[0]


def solve_stated(plan: StatedPlan, traces: Traces, args: Sequence[Any], cluster: Cluster) -> SolvedPlan:
    """The layouts that a stated plan leaves, solved.

    Args:
      plan: as stated.
      traces: of the step.
      args: of the step, their batch that of one microbatch on all devices.
      cluster: of hosts as many as the plan needs, or of one, which is repeated.

    Raises:
      PlanError: if the sizes do not fit the model or the batch.
    """
    program = traces.program(args)
    stage_cluster = _part(cluster, plan.devices // plan.pipeline)
    names, sizes = zip(*plan.axes, strict=True)
    mesh = stage_cluster.logical_mesh(sizes, names)
    roles = StatedRoles(
        axes={name: ROLE_OF[name] for name in names},
        batch=batch_inputs(program, traces, args), sequence_parallel=plan.sequence_parallel, gathered=plan.zero == 3,
    )  # fmt: skip
    # Software that scatters gradients sums those of all microbatches once (torchtitan and Llama 3 under pipelines): the
    # collectives of ZeRO 1. What it holds is the layout's.
    zero = 1 if plan.zero == 2 else plan.zero
    constraints = Constraints() if plan.searched else Constraints(zero=zero, roles=roles)
    staged, order, place_of = _stages(program, plan)
    kinds = {
        kind: _solve_kind(staged, staged.layers[place], plan, mesh, stage_cluster, constraints, order.count(kind))
        for kind, place in place_of.items()
    }
    counts = (plan.microbatches,)
    if plan.microbatches > _STEADY * plan.pipeline + plan.pipeline:
        counts = (_STEADY * plan.pipeline, (_STEADY + 1) * plan.pipeline)
    schedules = tuple(schedule_of(plan, len(order), microbatches) for microbatches in counts)
    return SolvedPlan(plan=plan, mesh=mesh, cluster=stage_cluster, kinds=kinds, order=order, schedules=schedules)


def schedule_of(plan: StatedPlan, stages: int, microbatches: int) -> Schedule:
    """1F1B, interleaved where ranks have several stages."""
    if plan.chunks > 1:
        return make_schedule("interleaved_one_f_one_b", stages, microbatches, chunks=plan.chunks)
    return make_schedule("one_f_one_b", stages, microbatches)


def _part(cluster: Cluster, devices: int) -> Cluster:
    """So many neighbouring devices of hosts like the cluster's first."""
    host = cluster.hosts[0]
    whole, rest = divmod(devices, host.devices)
    hosts = (host,) * whole + ((replace(host, devices=rest),) if rest else ())
    return replace(cluster, hosts=hosts)


def _stages(program: Program, plan: StatedPlan) -> tuple[StagedProgram, tuple[str, ...], dict[str, int]]:
    """The program cut into one stage of each kind, the kind of every stage, and which layer is of which kind."""
    count = plan.pipeline * plan.chunks
    if count == 1:
        staged = staged_program(program, layers=1, scan_splits={})
        return staged, ("only",), {"only": 0}
    scans = [n for n, equation in enumerate(open_jaxpr(program.core).eqns) if equation.primitive.name == "scan"]
    if len(scans) != 1:
        raise PlanError(
            refused=f"a plan of {count} stages", got=f"a model of {len(scans)} scans",
            needed="one scan over its layers", where="the model", try_="the scanned form of the model",
        )  # fmt: skip
    (scan,) = scans
    trips = open_jaxpr(program.core).eqns[scan].params["length"]
    base, more = divmod(trips, count)
    if base == 0:
        raise PlanError(
            refused=f"a plan of {count} stages", got=f"a model of {trips} layers", needed="a layer for each stage",
            where="pipeline=", try_=f"pipeline={trips}",
        )  # fmt: skip
    # What is left over goes to inner stages: the first and the last have the embedding and the head.
    inner = count - 2
    longer = min(more, inner)
    first, last = base + (1 if more > inner else 0), base + (1 if more > inner + 1 else 0)
    shorter = inner - longer
    pieces, kinds = [first], ["first"]
    for kind, length, times in (("inner", base + 1, longer), ("shorter", base, shorter)):
        if times:
            pieces.append(length)
            kinds.append(kind)
    rest = trips - sum(pieces) - last
    if rest:
        pieces.append(rest)
        kinds.append("rest")
    pieces.append(last)
    kinds.append("last")
    split = staged_program(program, layers=1, scan_splits={scan: tuple(pieces)})
    cuts = [split.piece_starts[scan, n] for n in range(1, len(pieces))]
    staged = staged_program(program, layers=len(pieces), scan_splits={scan: tuple(pieces)}, cuts=cuts)
    order = ("first", *["inner"] * longer, *["shorter"] * shorter, "last")
    return staged, order, {kind: n for n, kind in enumerate(kinds) if kind != "rest"}


def _solve_kind(
    staged: StagedProgram, layer: tuple[int, int], plan: StatedPlan, mesh: LogicalMesh, cluster: Cluster,
    constraints: Constraints,
    count: int,
) -> SolvedKind:  # fmt: skip
    cut = staged.cutter.cut(*layer)
    segments = recomputed_segments(cut.graph, plan.recompute)
    graph = rematerialise(cut.graph, Segments(segments)) if segments else cut.graph

    def solved(graph: Graph) -> tuple[StageProblem, IntraOpSolution]:
        # What the roles contradict in the strict form of a ZeRO stage is asked for less strictly.
        for tried in (constraints, replace(constraints, strict=False), replace(constraints, strict=False, zero=None)):
            problem = StageProblem(
                cut, graph, mesh, cluster.device, parameters=_infos(staged, cut), microbatches=plan.microbatches,
                constraints=tried, split_dims=staged.split_dims,
            )  # fmt: skip
            try:
                return problem, problem.solve(inf, gap=1e-2, time_limit_seconds=20.0)
            except Infeasible as error:
                refused = error
        raise PlanError(
            refused="a stated plan", got=f"{plan}", needed="layouts that its roles allow", where="the first stage",
            try_="searched=True, which holds layouts to no roles",
        ) from refused  # fmt: skip

    # Regions that the model itself marks (`jax.checkpoint`) are there already.
    plain = replace(cut.graph, operators=tuple(replace(op, region=None) for op in cut.graph.operators))
    problem, chosen = solved(graph)
    kept = kept_bytes(problem, chosen, plain)
    share = plan.recompute_share
    if share < 1 and segments:
        every = kept_bytes(*solved(plain), plain)
        kept = replace(
            kept, fused=share * kept.fused + (1 - share) * every.fused,
            eager=share * kept.eager + (1 - share) * every.eager, masks=share * kept.masks + (1 - share) * every.masks,
        )  # fmt: skip
    sent = sum(graph.values[v].bytes for v in graph.outputs if v is not None and graph.values[v].shape)
    return SolvedKind(
        count=count,
        work=stage_work(problem, chosen),
        state=_state(problem, chosen, plan.zero),
        kept=kept,
        sent_bytes=sent,
    )


def _infos(staged: StagedProgram, cut: Cut) -> list[Any]:
    whole = parameter_infos(staged.source)
    found = []
    for held in cut.parameters:
        info = whole[held.parameter]
        if held.rows is not None:
            graph = staged.graph
            trips = graph.values[graph.inputs[graph.parameters[held.parameter]]].shape[held.rows.dim]
            share = (held.rows.last - held.rows.first) / trips
            info = replace(info, optimizer_bytes=info.optimizer_bytes * share)
        found.append(info)
    return found


def _state(problem: StageProblem, chosen: IntraOpSolution, zero: int) -> StateElements:
    graph, sizes = problem.graph, problem.sizes
    used = stored = layer = 0.0
    storing = {"data", "expert", "context"} if zero else set()
    for position, choice in zip(graph.parameters, chosen.parameters, strict=True):
        assert isinstance(choice, ParameterChoice)
        value = graph.values[graph.inputs[position]]
        elements = prod(value.shape)
        # What no dim of a parameter is a multiple of, frameworks split flattened.
        flat = prod(size for axis, size in sizes.items() if axis in storing and axis not in choice.storage.sharded_axes)
        used += elements / choice.use.shards(sizes) / (flat if zero == 3 else 1)
        stored += elements / choice.storage.shards(sizes) / flat
        gathered = prod(size for axis, size in sizes.items() if axis in choice.use.sharded_axes and axis != "model")
        if gathered > 1:
            users = graph.consumers.get(graph.inputs[position], ())
            scanned = any(graph.operators[user].repeats > 1 or graph.operators[user].is_link for user, _ in users)
            trips = value.shape[0] if scanned else 1
            if scanned:
                layer += elements * gathered / choice.use.shards(sizes) / trips
    return StateElements(used=used, stored=stored, layer=layer)
